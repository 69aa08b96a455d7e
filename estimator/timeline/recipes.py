"""Cost what a training recipe adds to an update: clipping, master weights, Muon's products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from estimator.cache import Cache
from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.machines.limits import split_limit
from estimator.machines.profile import MachineProfile
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.durations import kernel_fits
from estimator.timeline.passes import FP32_PASS_BYTES, memory_bound_s
from estimator.timeline.updates import Trained, cost_of_update
from estimator.workload import Strategy
from estimator.workload.optimizers import MEASURED, MUON_PASSES, RULES

# torch/nn/utils/clip_grad.py: norms of all gradients (read), then a product in place (read, write).
_CLIPPED_TENSORS = 3
# Stack of the norms, their norm, the coefficient and its clamp, and what groups the gradients.
_CLIP_OPS = 6
# Gradients cast from half to fp32 and updated weights cast back: 2 + 4 and 4 + 2 bytes.
_MASTER_BYTES = 12.0
_FP32_BYTES = 4


class Added(NamedTuple):
    """Seconds of host and device that a recipe adds to an update; no sharding shortens `fixed_s`.

    The device waits for the host, unless a loop of steps lets that run ahead.
    """

    host_s: float
    device_s: float
    fixed_s: float

    @property
    def seconds(self) -> float:
        return self.host_s + self.device_s


def added_to_update(
    trained: Trained,
    graph: OpGraph,
    strategy: Strategy,
    machine: tuple[MachineProfile, int, Cache],
) -> Added:
    """What an update takes beyond the optimizer's own; raises StrategyError."""
    host_s = device_s = fixed_s = 0.0
    if graph.clip_grad_norm:
        ratio = strategy.shard_dtypes(graph.precision).stored_ratio
        moved_bytes = _CLIPPED_TENSORS * trained.size_bytes * ratio
        loops = strategy.offload or graph.target == "cpu"
        host_s = fixed_s = _clip_host_s(trained, loops, machine[0])
        if strategy.offload:
            device_s = _moved_by_host_s(moved_bytes, graph, machine[0])
        else:
            device_s = _moved_s(moved_bytes, *machine)
        if strategy.kind == "zero1":
            # ZeroRedundancyOptimizer shards the update alone: every rank clips all gradients.
            fixed_s += device_s
    if strategy.master_ratio(graph.precision) > 1:
        device_s += _moved_s(_MASTER_BYTES * trained.elements, *machine)
    if graph.optimizer == "muon":
        if strategy.kind not in ("ddp", "zero1", "ps"):
            raise StrategyError(
                f"muon updates whole matrices, found '{strategy}', which shards them; use ddp or "
                "zero1"
            )
        device_s += _muon_products_s(trained, graph, *machine)
    return Added(host_s, device_s, fixed_s)


def recipe_assumptions(graph: OpGraph, strategy: Strategy, machine: str) -> Iterator[str]:
    """What the costs of a recipe take for granted, in words."""
    if graph.optimizer not in MEASURED:
        yield f"{graph.optimizer}'s update takes the bytes that its kernels move, at a known rate"
    if graph.clip_grad_norm:
        yield "gradients are clipped by one pass for their norms and one that scales them"
    if strategy.master:
        yield "master weights: gradients are cast to fp32 and updated weights back, 12 bytes each"
    if strategy.offload:
        yield (
            "shards are kept and updated on the host, whose memory is not counted; each unit's is "
            "copied before its gather and after its reduction, not beside others"
        )
    if limit := split_limit(machine)[1]:
        yield (
            f"'{machine}' is limited: busy units hold a lower clock, its memory keeps its rate"
            if limit.endswith("W")
            else f"'{machine}' is limited: its peaks fall with the clock, its memory keeps its rate"
        )


def cast_passes(strategy: Strategy, precision: str) -> float:
    """What casting a bucket to the dtype of its reduction moves, in copies of the bucket.

    torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: a bucket is cast, divided by the
    number of ranks as such, and copied back; reading and writing it once is one copy. Megatron's
    buffer has the dtype of its reduction: gradients are cast as they are copied there.
    """
    ratio = strategy.shard_dtypes(precision).reduced_ratio
    if strategy.kind == "distributed-optimizer":
        return (ratio - 1) / 2
    return 0.0 if ratio == 1 else (1 + ratio + 2 * ratio + ratio + 1) / 2


def _moved_s(moved_bytes: float, profile: MachineProfile, devices_busy: int, cache: Cache) -> float:
    elements = int(moved_bytes / FP32_PASS_BYTES)
    return float(memory_bound_s(profile, "aten.add_.Tensor", [elements], devices_busy, cache)[0])


def _moved_by_host_s(moved_bytes: float, graph: OpGraph, profile: MachineProfile) -> float:
    """At the rate of an update on the host, which is bound by memory too."""
    element_s = cost_of_update(profile, graph.optimizer, "cpu").per_parameter_s
    return moved_bytes * element_s / RULES[graph.optimizer].bytes_of(_FP32_BYTES)


def _clip_host_s(trained: Trained, loops: bool, profile: MachineProfile) -> float:
    """On CPUs each gradient has a norm and a product of its own; on GPUs foreach has them all."""
    if profile.host is None:
        return 0.0
    own = 2 * trained.tensors if loops else 2
    return (_CLIP_OPS + own) * profile.host.bare_op_s


def _muon_products_s(
    trained: Trained, graph: OpGraph, profile: MachineProfile, devices_busy: int, cache: Cache
) -> float:
    """Newton and Schulz' iteration in bf16: X Xᵀ, its square and their product with X."""
    fits = kernel_fits(profile, graph.precision, cache=cache)
    seconds = 0.0
    for (rows, columns), count in trained.matrices:
        short, long = sorted((rows, columns))
        for sizes in ((short, long, short), (short, short, short), (short, short, long)):
            found = fits.predict(_product(*sizes))
            seconds += count * MUON_PASSES * (found.warm_s if found else 0.0)
    return seconds


def _product(rows: int, inner: int, columns: int) -> OpCall:
    one, two, out = (
        TensorSpec(shape, "bfloat16")
        for shape in ((rows, inner), (inner, columns), (rows, columns))
    )
    return OpCall("aten.mm.default", (one, two), (), (out,))
