"""Tables of others are read as they are, and what cannot be used is counted with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration.tables import Job, StepTable, read_steps
from calibration.worker_tables import is_worker_table, read_workers

from estimator.calibrate.observation_files import MeasuredStep
from estimator.errors import ObservationError

HEADER = "model,gpu,gpus,nodes,placement,local_batch,step_time_s"


def read(folder: Path, *rows: str, header: str = HEADER) -> StepTable[MeasuredStep]:
    path = folder / "table.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return read_steps([path])


def only_step(table: StepTable[MeasuredStep]) -> MeasuredStep:
    (job,) = table.jobs
    (step,) = job.steps
    return step


@pytest.mark.parametrize(
    ("row", "features"),
    [
        # ranks, nodes, batch per rank, micro-batches, most devices on one node
        ("m,T4,4,2,1+3,8,0.1", (4, 2, 8, 1, 3)),
        # 7 devices spread evenly over 3 nodes: 3 + 2 + 2.
        ("m,T4,7,3,,8,0.1", (7, 3, 8, 1, 3)),
        ("m,T4,,,2+2,8,0.1", (4, 2, 8, 1, 2)),
        ("m,T4,8.0,2.0,packed,8,0.1", (8, 2, 8, 1, 4)),
        ("m,T4,1,,,8,0.1", (1, 1, 8, 1, 1)),
    ],
)
def test_a_placement_is_read_or_spread_evenly(
    tmp_path: Path, row: str, features: tuple[float, ...]
) -> None:
    assert only_step(read(tmp_path, row)).features == features


def test_without_nodes_they_follow_from_the_size_of_a_node_or_are_assumed(tmp_path: Path) -> None:
    known = read(tmp_path, "m,10,4,8,1", header="model,gpus,gpus_per_node,local_batch,step_time_s")
    # 10 devices need 3 nodes of 4: 4 + 3 + 3.
    assert only_step(known).node_sizes == (4, 3, 3)
    assert not known.assumed
    unknown = read(tmp_path, "m,10,8,1", header="model,gpus,local_batch,step_time_s")
    assert only_step(unknown).node_sizes == (5, 5)
    assert list(unknown.assumed.values()) == [1]


@pytest.mark.parametrize(
    ("cells", "step_time_s"),
    [
        ("200,samples/s,64,", 64 / 200),
        ("4,steps/s,64,", 1 / 4),
        ("1000,tokens/s,64,100", 64 * 100 / 1000),
    ],
)
def test_a_step_time_follows_from_a_throughput(
    tmp_path: Path, cells: str, step_time_s: float
) -> None:
    header = "model,gpus,nodes,throughput,throughput_unit,global_batch,seq_len"
    step = only_step(read(tmp_path, f"m,4,1,{cells}", header=header))
    assert step.step_time_s == pytest.approx(step_time_s)
    assert step.batch_per_gpu == 16


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("4,1,4,8,nan,ddp,", "step time is not a positive number"),
        ("4,1,4,8,0,ddp,", "step time is not a positive number"),
        ("4,1,4,8,-0.1,ddp,", "step time is not a positive number"),
        ("4,1,4,8,inf,ddp,", "step time is not a positive number"),
        ("4,1,4,8,,ddp,", "neither step time nor throughput"),
        ("4,1,4,,0.1,ddp,", "no batch size"),
        ("4,1,4,-8,0.1,ddp,", "batch size is not a positive number"),
        ("2.5,1,,8,0.1,ddp,", "gpus is not a whole number"),
        ("many,1,,8,0.1,ddp,", "gpus is no number"),
        (",1,,8,0.1,ddp,", "how many GPUs"),
        ("2,4,,8,0.1,ddp,", "more nodes than GPUs"),
        ("4,1,1+3,8,0.1,ddp,", "placement contradicts"),
        ("4,1,4,8,0.1,tp2/dp2/pp1,", "not data parallel alone but tp2"),
        ("4,1,4,8,0.1,magic,", "not known to be data parallel"),
        ("4,1,4,8,0.1,ddp,suspect=243/61", "notes call it suspect"),
        ("4,1,4,8,0.1,ddp,step time DERIVED from TFLOPS", "notes call it derived"),
    ],
)
def test_a_row_that_cannot_be_used_is_left_out_with_its_reason(
    tmp_path: Path, cells: str, reason: str
) -> None:
    header = "gpus,nodes,placement,local_batch,step_time_s,parallelism,notes,model"
    table = read(tmp_path, f"{cells},m", "1,1,1,8,0.1,single,,m", f"{cells},m", header=header)
    assert only_step(table).ranks == 1
    ((told, count),) = table.refused.items()
    assert reason in told
    assert "table.csv line 2" in told
    assert count == 2


def test_jobs_are_told_apart_by_what_differs_between_them(tmp_path: Path) -> None:
    header = "model,gpu,precision,gpus,parallelism,local_batch,step_time_s,extra"
    rows = ["m,T4,fp32,1,single,8,1,x", "m,T4,fp32,2,ddp,8,1,y", "m,T4,fp16,1,single,8,1,x"]
    jobs = read(tmp_path, *rows, "n,T4,fp32,1,single,8,1,x", header=header).jobs
    assert [(job.label, len(job.steps)) for job in jobs] == [
        ("T4, m, fp32", 2), ("T4, m, fp16", 1), ("T4, n", 1)]  # fmt: skip


def test_repeated_measurements_stay_several_rows(tmp_path: Path) -> None:
    (job,) = read(tmp_path, "m,T4,1,1,1,8,0.10", "m,T4,1,1,1,8,0.12").jobs
    assert job.y().tolist() == [0.10, 0.12]


def test_semicolons_capital_letters_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("﻿Model;GPUs;Nodes;Local_Batch;Step_Time_s\nm;2;1;8;0.5\n", encoding="utf-8")
    assert only_step(read_steps([path])).features == (2, 1, 8, 1, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", HEADER.encode(), b"a,b\n1,2\n", b"\xff\xfe\x00", b"model,model\n1,2\n"],
)
def test_what_is_no_table_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ObservationError, match=str(path)):
        read_steps([path])


def test_a_table_of_workers_is_known_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    lines = ["gpu,parameter_servers,model,workers,steps_per_s", "K80,1,m,2,4.0", "K80,2,m,2,8.0"]
    path.write_text("\n".join([*lines, "K80,1,m,3,-1", "K80,1,m,1.5,3"]))
    assert is_worker_table(path)
    table = read_workers([path])
    jobs: tuple[Job[object], ...] = table.jobs  # type: ignore[assignment]
    assert [job.label for job in jobs] == ["K80, m, 1 server", "K80, m, 2 servers"]
    assert jobs[0].X().tolist() == [[2, 1]]
    # 4 updates a second are 0.25 s between two of them.
    assert jobs[0].y().tolist() == [0.25]
    assert sum(table.refused.values()) == 2


def test_notes_tell_jobs_of_one_model_apart_by_what_is_no_batch(tmp_path: Path) -> None:
    header = "model,gpus,local_batch,step_time_s,notes"
    rows = [
        "nnUNet,1,2,0.1,table=training;Dimension=2",
        "nnUNet,1,4,0.2,table=training;Dimension=2",
        "nnUNet,1,2,3.0,table=training;Dimension=3",
        "BERT,1,32,0.3,section=Batch size = 32 & with clip",
        "BERT,1,64,0.6,section=batch size=64(max) & with clip;median of several runs",
    ]
    jobs = read(tmp_path, *rows, header=header).jobs
    assert sorted(len(job.steps) for job in jobs) == [1, 2, 2]


def test_rows_of_two_networks_under_one_name_are_two_jobs(tmp_path: Path) -> None:
    # DLPerf's OneFlow rows: four times the samples cannot take half as long in one network.
    header = "model,gpu,gpus,local_batch,step_time_s,framework_version"
    rows = "InsightFace Y1,V100,1,64,0.261,OneFlow", "InsightFace Y1,V100,1,256,0.1304,OneFlow"
    jobs = read(tmp_path, *rows, "InsightFace Y1,V100,1,64,0.1,MxNet", header=header).jobs
    assert [(job.model, job.steps[0].batch_per_gpu) for job in jobs] == [
        ("InsightFace R100", 64), ("InsightFace Y1", 256), ("InsightFace Y1", 64),
    ]  # fmt: skip
