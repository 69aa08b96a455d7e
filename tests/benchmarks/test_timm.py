"""timm's published steps, and the bank of graphs that they are read beside."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm_bank
import traced_models
from timm_bank import fill_bank
from timm_rows import TimmTable, read_timm_rows

from estimator.errors import ObservationError

VERSIONS = {"timm": "1.0", "torch": "2.13"}
HEADER = "model,gpu,precision,layout,batch,img_size,param_count_M,step_time_ms,torch"
# Traces without tracing: writes down whom it was asked for and which process it is.
WORKER = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    case = line.strip()
    with open(folder / "asked", "a") as asked:
        print(case, os.getpid(), file=asked)
    if case.startswith("deadly"):
        os._exit(3)
    answer = {"status": "failed", "reason": "it cannot be traced"}
    if not case.startswith("odd"):
        file = case + ".json.gz"
        (folder / file).touch()
        answer = {"status": "ok", "file": file, "family": "resnet", "architecture": "resnet50",
                  "parameters": 25_557_032, "batch_free": True, "ops": 489}
    print(json.dumps(answer), flush=True)
"""


def fill(folder: Path, *cases: str, **options: Any) -> Mapping[str, Any]:
    """The models of the index after a table with these cases."""
    lines = [HEADER]
    for case in cases:
        model, size = case.split("@")
        lines.append(f"{model},RTX 3090,amp fp16,nchw,256,{size},25.56,400.0,1.12")
    table = folder / "timm_train.csv"
    table.write_text("\n".join(lines))
    worker = [sys.executable, "-S", "-c", WORKER, str(folder)]
    settings = {"worker": worker, "versions": VERSIONS, **options}
    found: Mapping[str, Any] = fill_bank(table, folder, **settings)["models"]
    return found


def asked(folder: Path) -> list[str]:
    """The cases that workers were asked for, in order."""
    path = folder / "asked"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_case_of_several_rows_is_traced_once_and_read_for_each(tmp_path: Path) -> None:
    fill(tmp_path, "resnet50@224", "resnet50@176", "resnet50@224")
    assert asked(tmp_path) == ["resnet50@176", "resnet50@224"]
    table = read_timm_rows(tmp_path / "timm_train.csv", tmp_path)
    names = [row.graph_path.name.removesuffix(".json.gz") for row in table.rows]
    assert names == ["resnet50@224", "resnet50@176", "resnet50@224"]
    assert not table.refused


def test_what_has_no_graph_is_in_the_index_with_its_reason(tmp_path: Path) -> None:
    models = fill(tmp_path, "deadly@224", "resnet50@224", "cspdarknet53_iabn@256")
    # One that timm has removed is not traced; a worker that dies takes one model with it.
    assert asked(tmp_path) == ["deadly@224", "resnet50@224"]
    assert models["deadly@224"] == {"reason": "the process died (3)"}
    assert "in-place" in models["cspdarknet53_iabn@256"]["reason"]


def test_workers_are_started_anew_after_some_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_models, "MODELS_PER_WORKER", 2)
    fill(tmp_path, "a@1", "b@1", "c@1", "d@1", "e@1")
    processes = [line.split()[1] for line in (tmp_path / "asked").read_text().splitlines()]
    assert [processes.count(process) for process in dict.fromkeys(processes)] == [2, 2, 1]


def test_an_interrupted_run_leaves_no_index_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(
        command: Sequence[str], names: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        yield next(traced_models.ask_all(list(command), list(names)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(timm_bank, "ask_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path, "a@1", "b@1")
    assert not (tmp_path / "index.json").exists()
    assert set(fill(tmp_path, "a@1", "b@1")) == {"a@1", "b@1"}
    assert asked(tmp_path) == ["a@1", "b@1"]


def test_failures_and_lost_files_are_traced_again_when_wanted(tmp_path: Path) -> None:
    fill(tmp_path, "odd@1", "resnet50@224")
    fill(tmp_path, "odd@1", "resnet50@224")
    assert asked(tmp_path) == ["odd@1", "resnet50@224"]
    fill(tmp_path, "odd@1", "resnet50@224", retry=True)
    assert asked(tmp_path)[2:] == ["odd@1"]
    (tmp_path / "resnet50@224.json.gz").unlink()
    fill(tmp_path, "odd@1", "resnet50@224")
    assert asked(tmp_path)[3:] == ["resnet50@224"]


def test_another_version_of_timm_begins_anew(tmp_path: Path) -> None:
    fill(tmp_path, "a@1", "b@1")
    models = fill(tmp_path, "a@1", "b@1", versions={**VERSIONS, "timm": "1.1"}, only=["b"])
    assert asked(tmp_path) == ["a@1", "b@1", "b@1"]
    # The index names one version, so what the other traced is not in it.
    assert set(models) == {"b@1"}
    assert json.loads((tmp_path / "index.json").read_text())["versions"]["timm"] == "1.1"


def test_a_model_that_is_not_in_the_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="no row of model resnet5"):
        fill(tmp_path, "resnet50@224", only=["resnet5"])
    with pytest.raises(ObservationError, match="line 2"):
        fill(tmp_path, "resnet50@large")


class FakeTimm:
    """Models of 224 pixels; those called ``vit`` can be made for other sizes."""

    def __init__(self) -> None:
        self.built: list[tuple[str, dict[str, Any]]] = []

    def build(self, name: str, **settings: Any) -> SimpleNamespace:
        if "img_size" in settings and not name.startswith("vit"):
            raise TypeError("unexpected keyword argument 'img_size'")
        self.built.append((name, settings))
        return SimpleNamespace(default_cfg={"input_size": (3, 224, 224)})


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> FakeTimm:
    layers = SimpleNamespace(set_fused_attn=lambda enabled: None)
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(layers=layers))
    monkeypatch.setitem(sys.modules, "timm.layers", layers)
    fake = FakeTimm()
    monkeypatch.setattr(timm_bank, "build_timm", fake.build)
    return fake


def test_a_name_means_the_network_that_it_meant_when_it_was_timed(timm: FakeTimm) -> None:
    for name in ("resnet50", "vit_base2_patch32_256", "ig_resnext101_32x48d"):
        timm_bank.build(name, 224)
    assert timm.built == [
        ("resnet50", {}),
        ("vit_base_patch32_plus_256", {}),
        # 32 groups of 48: timm has none so wide, but its builder takes the width.
        ("resnext101_32x32d", {"base_width": 48}),
    ]


def test_only_models_that_depend_on_the_image_size_are_made_for_it(timm: FakeTimm) -> None:
    timm_bank.build("vit_base_patch16_224_sam", 384)
    timm_bank.build("resnet50", 288)
    assert timm.built[1:] == [("vit_base_patch16_224", {"img_size": 384}), ("resnet50", {})]


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


def test_another_table_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="line 2"):
        read(tmp_path, RESNET.replace("256", "many"), **{"resnet50@224": GRAPH})
