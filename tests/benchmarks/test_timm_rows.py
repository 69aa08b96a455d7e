"""timm's training table is read beside the graphs of its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from timm_rows import TimmTable, read_timm_rows

from estimator.errors import GraphFileError, ObservationError

HEADER = "model,gpu,precision,layout,batch,img_size,param_count_M,step_time_ms,torch"
RESNET = "resnet50,RTX 3090,amp fp16,nchw,256,224,25.56,400.0,1.12"
GRAPH = {"file": "r.json.gz", "family": "resnet", "parameters": 25_557_032, "batch_free": True}


def read(folder: Path, *lines: str, **index: object) -> TimmTable:
    (folder / "index.json").write_text(json.dumps({"models": index}))
    table = folder / "timm_train.csv"
    table.write_text("\n".join((HEADER, *lines)))
    return read_timm_rows(table, folder)


def test_a_row_has_its_graph_its_machine_and_its_step_in_seconds(tmp_path: Path) -> None:
    (row,) = read(tmp_path, RESNET, **{"resnet50@224": GRAPH}).rows
    assert (row.graph_path, row.family) == (tmp_path / "r.json.gz", "resnet")
    assert (row.machine, row.precision, row.batch_per_gpu) == ("rtx-3090", "fp16-amp", 256)
    assert row.step_time_s == 0.4


def test_rows_of_one_model_in_either_layout_are_all_kept(tmp_path: Path) -> None:
    found = read(tmp_path, RESNET, RESNET.replace("nchw", "nhwc"), **{"resnet50@224": GRAPH})
    assert [(row.line, row.layout) for row in found.rows] == [(2, "nchw"), (3, "nhwc")]
    assert not found.refused


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({}, "not in the bank"),
        ({"resnet50@224": {"reason": "removed from timm"}}, "removed from timm"),
        ({"resnet50@224": {**GRAPH, "parameters": 23_500_000}}, "had 2.556e+07 parameters"),
        ({"resnet50@224": {**GRAPH, "batch_free": False}}, "traced batch only"),
    ],
)
def test_a_row_without_a_graph_of_its_model_is_refused(
    tmp_path: Path, entry: dict[str, object], reason: str
) -> None:
    found = read(tmp_path, RESNET, RESNET, **entry)
    assert found.rows == ()
    ((text, count),) = found.refused.items()
    assert reason in text
    assert count == 2


def test_a_folder_without_graphs_is_an_error(tmp_path: Path) -> None:
    table = tmp_path / "timm_train.csv"
    table.write_text(f"{HEADER}\n{RESNET}")
    with pytest.raises(GraphFileError, match="trace timm's models"):
        read_timm_rows(table, tmp_path)


def test_another_table_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="line 2"):
        read(tmp_path, RESNET.replace("256", "many"), **{"resnet50@224": GRAPH})
