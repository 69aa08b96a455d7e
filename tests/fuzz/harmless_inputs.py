"""Whole files of every kind that the package reads, and commands that work on them."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from estimator.calibrate.store import Observation, ObservationStore
from estimator.machines.profile import Link, MachineProfile, PairMatrix
from tests.conftest import MEASURED, make_small_profile
from tests.fuzz.hostile_models import MODELS
from tests.synthetic import perceptron

JOB = {
    "name": "bert",
    "parameter_bytes": 438_000_000,
    "tensors": 199,
    "flops_per_sample": 2.5e11,
    "step_times": [[8, 0.4], [16, 0.7]],
    "machine": "local",
    "activation_bytes_per_sample": 10_000_000,
    "batch": 8,
    "optimizer": "adamw",
    "precision": "fp32",
}
SIZED_JOB = {
    "tensor_bytes": [4096, 400, 8192],
    "ready_ratios": [0.3, 0.5, 1.0],
    "flops_per_sample": 1e9,
}
CLUSTER = """transport = "roce"
[switches.r1]
parent = "spine"
uplink = "100 Gbit/s"
[switches.spine]
[nodes."a[1-4]"]
machine = "local"
switch = "r1"
uplink = "25 Gbit/s"
slowdown = 1.2
[nodes.b1]
machine = "local"
"""
OBSERVED = {
    "workload": "bert",
    "allocation": "1x2:local",
    "local_batch": 8,
    "grad_accum": 2,
    "step_time_s": 0.4,
    "strategy": "ddp",
    "steps": 20,
    "at": "2026-01-02T03:04:05+00:00",
    "source": "log",
    "parameter_bytes": 438_000_000,
}
REPLAYED = {
    "name": "j",
    "arrival_s": 0.0,
    "model": "net.graph",
    "samples": 1e6,
    "devices": 2,
    "global_batch": 64,
    "most_devices": 4,
    "most_batch_per_gpu": 32,
    "most_global_batch": 128,
    "gradient_noise_samples": 500.0,
    "epoch_samples": 1e4,
}
PHILLY = {
    "jobid": "application_1",
    "submitted_time": "2017-10-09 10:33:15",
    "attempts": [
        {
            "start_time": "2017-10-09 10:34:00",
            "end_time": "2017-10-09 11:34:00",
            "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
        }
    ],
}
TRACES = (
    "job_id,gpu_num,submit_time,duration\n"
    "1,1,2020-04-01 00:01:01,600\n2,2,2020-04-01 00:09:01,1200.5\n",
    "job_name,plan_gpu,inst_num,start_time,end_time\na,50,2,100.0,900.0\nb,200,1,150,1000\n",
    "name,time,application,num_replicas,batch_size\ncifar10-1,10,cifar10,2,128\nbert-2,60,bert,1,8\n",
)
PRICES = (
    "Machine,AcceleratorCount,Price,SpotPrice,BilledS,LeastBilledS,Region,At,Source\n"
    "local,2,1.5,0.5,60,0,here,2026-01-01,me\nlocal,1,1,,,,,,\n"
)
SINFO = "debug|30:00|2|gpu:t4:4\ncpu|infinite|64|(null)\nlong|7-00:00:00|16|gpu:t4:4(S:0-1)\n"
# Commands that do what they are asked, one of each sort.
HARMLESS = (
    "estimate model.py:mlp --on 1x2:local",
    "memory model.py:mlp --on 1x1:local --picture p.svg",
    "sweep job.json --on 1x1..2:local",
    "stalls job.json --on 1x2:local --loader sample=1kB,prep=1ms",
    "estimate model.py:mlp --verbose --on 1x1:local",
    "machines compare local h100-sxm",
    "calibrate observe steps.jsonl --store seen.db",
    "calibrate show --store seen.db",
    "replay jobs.json --on 2x2:local --policy gavel",
    "estimate net.graph --on 2x2:local --layout pp=2,schedule=gpipe --accumulation 4",
    "estimate net.graph --on 1x2:local --layout tp=2",
    "rent net.graph --machines local --samples 1e9 --max-nodes 1 --prices prices.csv",
    "slurm job.json --on 1x2:local --samples 1000 --sinfo sinfo.txt",
    "report net.graph --on 1x2:local --out out.html",
    "--help",
)


@lru_cache(maxsize=1)
def whole_profile() -> MachineProfile:
    """A machine with an entry in every group of a profile."""
    small = make_small_profile()
    link = Link(
        kind="tcp", locality="rack", latency_s=2e-5, bandwidth_bytes_per_s=1e9, provenance=MEASURED,
        points=((1e3, 3e-5), (1e6, 1e-3)),
    )  # fmt: skip
    pairs = PairMatrix(
        hosts=("a1", "a2"),
        latency_s=((None, 2e-5), (2e-5, None)),
        bandwidth_bytes_per_s=((None, 1e9), (1e9, None)),
        provenance=MEASURED,
    )
    return replace(
        small,
        network=(link,),
        pairs=pairs,
        hardware={"cpu": "one core", "cores": 2},
        software={"torch": "2.13.0"},
        canary_s=1e-4,
    )


def harmless_files() -> dict[str, bytes]:
    steps = "\n".join(json.dumps(dict(OBSERVED, step_time_s=0.4 + 0.01 * n)) for n in range(6))
    return {
        **job_file(),
        "model.py": MODELS.encode(),
        "net.graph": graph_file(graph_values()),
        "jobs.json": json.dumps({"jobs": [REPLAYED]}).encode(),
        "steps.jsonl": steps.encode(),
        "prices.csv": PRICES.encode(),
        "sinfo.txt": SINFO.encode(),
    }


def job_file() -> dict[str, bytes]:
    return {"job.json": json.dumps(JOB).encode()}


@lru_cache(maxsize=1)
def graph_values() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.graph"
        perceptron([64] * 4, batch=8).save(path)
        values: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return values


def graph_file(values: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(values).encode(), mtime=0)


@lru_cache(maxsize=1)
def store_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.db"
        with ObservationStore(path) as seen:
            seen.add_many(
                Observation(
                    workload="bert",
                    allocation=allocation_text,
                    batch_per_gpu=8,
                    step_time_s=0.4 + 0.01 * number,
                    identity=f"{number}",
                )
                for number, allocation_text in enumerate(["1x1:local", "1x2:local"] * 4)
            )
        return path.read_bytes()
