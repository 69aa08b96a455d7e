"""Write a Slurm job script whose nodes, GPUs and time limit follow from an estimate."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from estimator.errors import AllocationError, ImportedFileError, quoted
from estimator.estimates.estimate import Estimate
from estimator.units import parse_whole

# What `sinfo` is asked for, so that its text can be read: man sinfo, -o.
SINFO_FORMAT = "%R|%l|%D|%G"
# Beyond letters and digits Slurm's names have these (src/common/read_config.c takes any word); one
# that begins with a dash would be an option of sbatch.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]{0,127}")
_MOST_NODES = 10**6
_GPUS = re.compile(r"gpu:(?:([A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}):)?([0-9]{1,4})")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,3}):([0-9]{2})(?::([0-9]{2}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nodes of a partition that are alike; `limit_s` is infinite without a time limit."""

    name: str
    limit_s: float
    nodes: int
    gpu: str
    gpus: int


def read_sinfo(text: str) -> list[Partition]:
    """The partitions of ``sinfo -h -o '%R|%l|%D|%G'``; raises ImportedFileError.

    >>> read_sinfo("gpu|1-00:00:00|4|gpu:a100:8(S:0-1)")[0].limit_s
    86400.0
    """
    partitions = []
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = line.split("|")
        if len(parts) != 4:
            raise ImportedFileError(
                f"{quoted(line)} is no line of sinfo -h -o '{SINFO_FORMAT}'; write the file with it"
            )
        name, limit, nodes, resources = parts
        gpus = _GPUS.search(resources)
        if not _NAME.fullmatch(name):
            raise ImportedFileError(
                f"{quoted(name)} is no name of a partition, which has letters, digits and _ . + -; "
                "correct the output of sinfo"
            )
        try:
            count = parse_whole(nodes, most=_MOST_NODES)
        except ValueError as error:
            raise ImportedFileError(f"nodes of partition '{name}': {error}") from None
        partitions.append(
            Partition(
                name=name,
                limit_s=_limit_s(limit),
                nodes=count,
                gpu=(gpus[1] or "") if gpus else "",
                gpus=int(gpus[2]) if gpus else 0,
            )
        )
    return partitions


def _limit_s(text: str) -> float:
    if text == "infinite":
        return math.inf
    match = _TIME.fullmatch(text)
    if match is None:
        raise ImportedFileError(f"{quoted(text)} is no time limit of Slurm, such as 1-00:00:00")
    days, first, second, third = (int(part or 0) for part in match.groups())
    # Two numbers are minutes and seconds, three begin with hours.
    if match[4] is None and match[1] is None:
        return float(60 * first + second)
    return float(86400 * days + 3600 * first + 60 * second + third)


def time_text(seconds: float) -> str:
    """A time limit as Slurm takes it, rounded up to minutes.

    >>> time_text(90061)
    '1-01:02:00'
    """
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def partition_for(
    partitions: Sequence[Partition], *, nodes: int, gpus: int, time_s: float
) -> Partition:
    """The first partition that a job may run in; raises AllocationError saying what each lacks."""
    lacks = []
    for partition in partitions:
        if partition.nodes < nodes:
            lacks.append(f"{partition.name} has {partition.nodes} nodes")
        elif partition.gpus < gpus:
            lacks.append(f"{partition.name} has {partition.gpus} GPUs a node")
        elif partition.limit_s < time_s:
            lacks.append(f"{partition.name} ends jobs after {time_text(partition.limit_s)}")
        else:
            return partition
    raise AllocationError(
        f"no partition takes {nodes} nodes of {gpus} GPUs for {time_text(time_s)} "
        f"({'; '.join(lacks) or 'there is none'}); ask for less"
    )


def job_script(
    answer: Estimate,
    *,
    time_s: float,
    command: Sequence[str],
    partition: Partition | None = None,
) -> str:
    """An sbatch script for what was estimated: one launcher a node, a rank for each of its devices.

    `time_s` is the limit. Raises AllocationError where nodes are unlike.
    """
    counts = {group.devices_per_node for group in answer.allocation.groups}
    machines = {kind.program.profile.name for kind in answer.plan.kinds}
    if len(counts) > 1 or len(machines) > 1:
        raise AllocationError(
            f"'{answer.allocation}' has unlike nodes; Slurm's --gres is one for all, so name "
            "nodes alike"
        )
    (devices,), nodes = counts, answer.allocation.nodes
    lines = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--time={time_text(time_s)}"]
    if answer.plan.kinds[0].program.profile.kind == "cuda":
        kind = f"{partition.gpu}:" if partition is not None and partition.gpu else ""
        lines.append(f"--gres=gpu:{kind}{devices}")
    if partition is not None:
        lines.insert(0, f"--partition={partition.name}")
    name = re.sub(r"[^\w.\-]+", "-", answer.model)[:60]
    launched = ["srun", "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={devices}"]
    if nodes > 1:
        launched += ["--rdzv-backend=c10d", "--rdzv-id=$SLURM_JOB_ID"]
        launched += ["--rdzv-endpoint=$(scontrol show hostnames $SLURM_NODELIST | head -n1)"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={name or 'training'}",
            *(f"#SBATCH {line}" for line in lines),
            f"# Estimated: {' '.join(repr(answer).split())}",
            f"{' '.join(launched)} {shlex.join(command)}",
            "",
        ]
    )
