"""Published traces of each form are read: hand-made rows, worked out here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import WorkloadError
from estimator.estimates.table import EstimateTable, estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.replay import speeds
from estimator.replay.job_files import TracedJob, is_job_file, jobs_of_trace, read_jobs, read_trace
from estimator.replay.nodes import Nodes
from estimator.replay.speeds import EngineSpeeds
from tests.synthetic import perceptron

PHILLY = [
    {
        "jobid": "application_2",
        "vc": "a",
        "status": "Pass",
        "submitted_time": "2017-10-09 10:05:00",
        "attempts": [
            {
                "start_time": "2017-10-09 10:06:00",
                "end_time": "2017-10-09 10:07:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
            {
                "start_time": "2017-10-09 10:10:00",
                "end_time": "2017-10-09 11:10:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
        ],
    },
    {
        "jobid": "application_1",
        "vc": "a",
        "status": "Killed",
        "submitted_time": "2017-10-09 10:00:00",
        "attempts": [
            {
                "start_time": "2017-10-09 10:00:30",
                "end_time": "2017-10-09 10:01:30",
                "detail": [{"ip": "m3", "gpus": ["gpu7"]}],
            }
        ],
    },
    {
        "jobid": "application_3",
        "vc": "a",
        "status": "Killed",
        "submitted_time": "2017-10-09 09:00:00",
        "attempts": [{"start_time": None, "end_time": None, "detail": []}],
    },
]
# Columns as in the artifact's README; a job without GPUs is no job of ours.
HELIOS = """job_id,user,gpu_num,cpu_num,state,submit_time,start_time,end_time,duration,queue
1,u1,8,64,COMPLETED,2020-04-01 00:02:00,2020-04-01 00:02:10,2020-04-01 01:02:10,3600,10
2,u2,0,4,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:00,2020-04-01 00:01:00,60,0
3,u1,16,64,FAILED,2020-04-01 00:01:00,2020-04-01 00:02:10,2020-04-01 00:02:40,30,70
"""
PAI = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
a,worker,4,Terminated,1000,1600,600,29,50,T4
b,worker,1,Terminated,900,930,600,29,200,V100
c,ps,1,Running,800,,600,29,100,V100
"""
POLLUX = """name,time,application,num_replicas,batch_size
cifar10-0,107,cifar10,6,2048
ncf-2,135,ncf,1,32768
"""


def traced(name: str, arrival_s: float, devices: int, run_s: float | None) -> TracedJob:
    return TracedJob(name=name, arrival_s=arrival_s, devices=devices, run_s=run_s)


@pytest.mark.parametrize(
    ("name", "text", "jobs"),
    [
        (
            "philly.json",
            json.dumps(PHILLY),
            [traced("application_1", 0, 1, 60), traced("application_2", 300, 3, 3660)],
        ),
        ("helios.csv", HELIOS, [traced("3", 0, 16, 30), traced("1", 60, 8, 3600)]),
        ("pai.csv", PAI, [traced("b", 0, 2, 30), traced("a", 100, 4, 600)]),
        (
            "workload-1.csv",
            POLLUX,
            [traced("cifar10-0", 0, 6, None), traced("ncf-2", 28, 1, None)],
        ),
    ],
)
def test_a_trace_is_read(tmp_path: Path, name: str, text: str, jobs: list[TracedJob]) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_trace(path) == jobs


# Clocks there went forward that morning: 02:00 became 03:00.
HELIOS_IN_SPRING = """job_id,gpu_num,submit_time,duration
1,1,2020-03-08 01:30:00,10
2,1,2020-03-08 03:30:00,10
3,1,2020-03-08T04:00:00+00:00,10
"""


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Shanghai", "UTC"])
def test_time_stamps_mean_the_same_in_every_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HELIOS_IN_SPRING)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        arrivals_s = [job.arrival_s for job in read_trace(path)]
    time.tzset()
    # Two hours and two and a half, as the stamps say.
    assert arrivals_s == [0.0, 7200.0, 9000.0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", "a,b\n1,2\n", "is no trace that is known .its columns are a, b"),
        ("x.csv", "", "its columns are none"),
        ("x.json", "[1]", "is no trace that is known"),
        ("x.json", "{", "is no trace that is known"),
        ("x.json", "[]", "has no job with devices"),
        ("x.json", '[{"attempts": [3]}]', "is no trace that is known"),
        ("x.json", "[" * 99_999, "is no trace that is known .nested too deeply"),
        ("x.json", "9" * 5000, "is no trace that is known .a number of more than 4300 digits"),
        (
            "x.csv",
            "name,time,application,num_replicas\na,b" + 200_000 * "c" + ",d,1\n",
            "is no trace that is known .field larger",
        ),
        (
            "x.csv",
            "job_id,gpu_num,submit_time,duration\n1,inf,2020-01-01,3\n",
            "is no trace that is known .cannot convert float infinity",
        ),
        (
            "x.csv",
            "job_id,gpu_num,submit_time,duration\n1,many,2020-01-01,3\n",
            "is no trace that is known",
        ),
    ],
)
def test_another_file_is_refused_in_a_sentence(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        read_trace(path)


@pytest.mark.parametrize("name", ["jobs.json", "trace.csv"])
def test_a_pipe_is_no_file_of_jobs(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(WorkloadError, match="it is no regular file"):
        read_trace(path)
    if path.suffix == ".json":
        with pytest.raises(WorkloadError, match="it is no regular file"):
            is_job_file(path)


NODES = "2x4:gtx-1080-roce"
ON_CUDA = perceptron([64, 64], target="cuda")


def test_a_job_of_a_trace_runs_as_long_as_the_trace_says() -> None:
    nodes = Nodes.parse(NODES)
    graph = ON_CUDA
    (job,) = jobs_of_trace([traced("a", 5, 8, 1000)], [graph], nodes, seed=0)
    (step_s,) = EngineSpeeds().step_times_s(job, [nodes.packed("gtx-1080-roce", 8)])
    assert job.samples / job.global_batch * step_s == pytest.approx(1000)
    assert (job.arrival_s, job.devices) == (5, 8)


def test_jobs_that_ask_alike_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(graph: OpGraph, allocations: Sequence[str], **more: Any) -> EstimateTable:
        asked.append(len(allocations))
        return estimate_many(graph, allocations, **more)

    monkeypatch.setattr(speeds, "estimate_many", counted)
    rows = [traced(str(number), number, 8, 1000 + number) for number in range(10)]
    jobs = jobs_of_trace(rows, [ON_CUDA], Nodes.parse(NODES), seed=0)
    assert asked == [1]
    assert jobs[9].samples / jobs[0].samples == pytest.approx(1.009)


def test_a_trace_of_a_larger_cluster_is_refused() -> None:
    rows = [traced("wide", 0, 9, 10)]
    with pytest.raises(
        WorkloadError, match=r"'wide' asks for 9 devices on which .* has 8 gtx-1080-roce"
    ):
        jobs_of_trace(rows, [perceptron([8, 8])], Nodes.parse(NODES), seed=0)


def test_jobs_are_read_from_a_file(tmp_path: Path) -> None:
    graph = ON_CUDA
    jobs = jobs_of_trace([traced("a", 5, 8, 1000)], [graph], Nodes.parse(NODES), seed=0)
    path = tmp_path / "jobs.json"
    (job,) = jobs
    names = ("name", "arrival_s", "samples", "devices", "global_batch")
    entry = {name: getattr(job, name) for name in names} | {"model": "m.py:f"}
    path.write_text(json.dumps({"jobs": [entry]}))
    assert is_job_file(path)
    (again,) = read_jobs(path, {"m.py:f": graph}.__getitem__, allow_code=True)
    for name in (*names, "graph"):
        assert getattr(again, name) == getattr(job, name)


ENTRY = {"name": "a", "arrival_s": 0, "model": "m", "samples": 10, "devices": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 2}, "job 0: gpus: is unknown"),
        ({"devices": 2.5}, "devices: must be a whole number, found 2.5"),
        ({"devices": 0}, "job 'a' has devices 0; give more than 0"),
        ({"samples": "many"}, "samples: must be a number, found 'many'"),
        ({"samples": -1}, "has samples -1.0; give more than 0"),
        ({"samples": 10**400}, "job 0: samples: must be a .*number, found 1000"),
        ({"samples": float("nan")}, "job 'a' has samples nan; give a number up to 1e.15"),
        ({"devices": 10**20, "global_batch": 10**20}, "job 'a' has devices 10*; give a number up"),
        ({"gradient_noise_samples": -64}, "has gradient_noise_samples -64.0; give more than 0"),
        ({"arrival_s": -1}, "has arrival_s -1.0; give 0 or more"),
        ({"model": 3}, "model: must be a text, found 3"),
        ({"global_batch": 1}, "asks for 2 devices and can use 1 to 1"),
        ({"least_devices": 4}, "asks for 2 devices and can use 4 to 32"),
        ({"layout": "pp=4"}, "asks for 2 devices and its layout takes multiples of 4"),
        ({"strategy": "magic"}, "'magic'"),
        ({"loader": "prep"}, "prep"),
        ({"restart_s": -1}, "has restart_s -1.0; give 0 or more"),
    ],
)
def test_a_wrong_job_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": [ENTRY | change]}))
    with pytest.raises(WorkloadError, match=said):
        read_jobs(path, lambda model: perceptron([8, 8]), allow_code=True)
