"""Submit a training to Slurm on as many nodes as it uses well, with the time that it takes.

``python examples/slurm_job.py MACHINE | sbatch`` reads the partitions from ``sinfo``. MACHINE is
the type of the cluster's nodes, by default t4-g4dn.
"""

from __future__ import annotations

import subprocess
import sys

from demo_models import resnet18

import estimator as est
from estimator.integrations.schedulers.launchers import (
    SINFO_FORMAT,
    job_script,
    partition_for,
    read_sinfo,
    sizes,
)

# On the upper end of the interval: where a job is at its limit, Slurm ends it.
MARGIN = 1.25


def script(graph: est.OpGraph, machine: str, *, samples: float) -> str:
    """A job script for the most nodes of the largest partition that a training uses well."""
    asked = ["sinfo", "-h", "-o", SINFO_FORMAT]
    partitions = read_sinfo(
        subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    )
    answer = sizes(graph, machine, max_nodes=max(each.nodes for each in partitions)).most
    slowest_ratio = answer.high_s / answer.step_time_s
    time_s = MARGIN * slowest_ratio * answer.duration_s(samples=samples)
    devices = answer.ranks // answer.allocation.nodes
    partition = partition_for(
        partitions, nodes=answer.allocation.nodes, gpus=devices, time_s=time_s
    )
    return job_script(answer, time_s=time_s, command=["train.py"], partition=partition)


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else "t4-g4dn"
    print(script(est.trace_model(*resnet18(64), target="cuda"), wanted, samples=1e8), end="")
