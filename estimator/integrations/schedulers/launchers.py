"""Tell launchers what they ask: torchrun and Ray Train sizes of elastic jobs, SkyPilot how long a
task takes (``task.set_time_estimator(…)``), Slurm a job script whose nodes, GPUs and time limit
follow from an estimate; and take Ray's workers as any executor's.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from estimator.api import estimate
from estimator.errors import (
    AllocationError,
    ImportedFileError,
    ModelError,
    UnknownMachineError,
    WorkloadError,
    quoted,
)
from estimator.estimates.estimate import Estimate
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import known_machines, load_profile, named_profile
from estimator.machines.prices import PriceList
from estimator.units import parse_whole

# The usual target when a network is sized (Goyal et al. 2017 report about 90 %).
WANTED_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fewest and the most nodes of a machine type, each with all of `devices`."""

    machine: str
    devices: int
    least: Estimate
    most: Estimate

    @property
    def least_nodes(self) -> int:
        return self.least.allocation.nodes

    @property
    def most_nodes(self) -> int:
        return self.most.allocation.nodes


def sizes(
    graph: OpGraph,
    machine: str,
    *,
    max_nodes: int,
    devices: int | None = None,
    wanted_ratio: float = WANTED_RATIO,
    **options: Any,
) -> Sizes:
    """The fewest nodes on which a step fits, and the most with `wanted_ratio` of linear speed.

    Linear is the throughput per node of the fewest. `options` go to `estimate_many`, as `strategy`
    and `calibration` do. Raises WorkloadError where it fits on no number of nodes, or why none has
    an answer.
    """
    on_node = devices or len(named_profile(machine).devices)
    nodes = range(1, max_nodes + 1)
    table = estimate_many(graph, [f"{count}x{on_node}:{machine}" for count in nodes], **options)
    if not table.answered.any():
        raise WorkloadError(next(iter(table.errors.values())))
    fitting = [row for row in range(len(table)) if table.answered[row] and table.fits_code[row]]
    if not fitting:
        raise WorkloadError(
            f"{graph.name} fits on none of 1 to {max_nodes} nodes of {on_node} devices of "
            f"'{machine}'; shard it (strategy fsdp) or give more nodes"
        )
    per_node = table.samples_per_s / table.nodes
    linear = per_node[fitting[0]]
    used = [row for row in fitting if per_node[row] >= wanted_ratio * linear]
    return Sizes(machine=machine, devices=on_node, least=table[fitting[0]], most=table[max(used)])


def nnodes(elastic: Sizes) -> str:
    """What ``torchrun --nnodes`` takes: MIN:MAX, or one number where both are the same."""
    if elastic.least_nodes == elastic.most_nodes:
        return str(elastic.least_nodes)
    return f"{elastic.least_nodes}:{elastic.most_nodes}"


def torchrun(elastic: Sizes) -> list[str]:
    """The words of ``torchrun`` that say the size of a job."""
    return ["torchrun", f"--nnodes={nnodes(elastic)}", f"--nproc-per-node={elastic.devices}"]


def scaling_config(elastic: Sizes, **more: Any) -> Any:
    """The ``ray.train.ScalingConfig`` of the most nodes: one worker a device.

    `more` goes to ScalingConfig, as ``placement_strategy`` does. Raises ModelError without ray.
    """
    try:
        from ray.train import ScalingConfig
    except ImportError:
        raise ModelError("a ScalingConfig needs Ray Train; install 'ray[train]'") from None
    is_gpu = elastic.most.plan.kinds[0].program.profile.kind == "cuda"
    return ScalingConfig(num_workers=elastic.most.ranks, use_gpu=is_gpu, **more)


def time_estimator(
    graph: OpGraph, *, samples: float, nodes: int = 1, **options: Any
) -> Callable[[Any], int]:
    """A function of ``sky.Resources`` that gives the seconds of training on so many nodes.

    The machine is that of the resources' instance type, else the cheapest of their cloud with such
    accelerators, by the names of SkyPilot's catalogue. `options` go to `estimate`. The function
    raises UnknownMachineError for what has no profile.
    """

    def seconds(resources: Any) -> int:
        cloud = str(getattr(resources, "cloud", None) or "")
        machine, devices = machine_of(resources.instance_type, resources.accelerators, cloud)
        answer = estimate(graph, f"{nodes}x{devices}:{machine}", **options)
        return round(answer.duration_s(samples=samples))

    return seconds


def machine_of(
    instance_type: str | None, accelerators: dict[str, Any] | None, cloud: str = ""
) -> tuple[str, int]:
    """The machine type of an instance, and how many of its devices; raises UnknownMachineError.

    >>> machine_of("p4d.24xlarge", {"A100": 8}), machine_of(None, {"V100": 8})
    (('a100-p4d', 8), ('v100-p3', 8))
    """
    name, count = next(iter((accelerators or {}).items()), ("", 0))
    if instance_type:
        for machine in known_machines():
            profile = load_profile(machine)
            if profile.hardware.get("instance_type") == instance_type:
                return profile.name, int(count or len(profile.devices))
    sold = [
        price
        for price in PriceList.load().prices
        if price.accelerator.upper() == name.upper() != ""
        and price.devices >= count
        and cloud.lower() in ("", price.cloud)
        and (not instance_type or price.instance_type == instance_type)
    ]
    if not sold:
        raise UnknownMachineError(
            f"no machine profile is known of {instance_type or accelerators}; see 'estimator "
            "machines list', or probe one"
        )
    # SkyPilot too takes the cheapest, where the instance is left open.
    cheapest = min(sold, key=lambda price: price.usd_per_hour or float("inf"))
    return cheapest.machine, int(count)


class RayExecutor(Executor):
    """Submits calls as Ray tasks: ``estimate_chunks(..., executor=RayExecutor())``.

    Ray is started by its user (``ray.init``). Raises WorkloadError where it is not installed.
    """

    def __init__(self) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ModuleNotFoundError:
            raise WorkloadError("RayExecutor needs Ray; install ray") from None

    def submit(self, call: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        """The future of a call on one of Ray's workers."""
        future: Future[Any] = self._ray.remote(call).remote(*words, **more).future()
        return future


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
