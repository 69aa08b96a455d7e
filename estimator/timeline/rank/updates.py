"""Cost an optimizer's update, with what frameworks and recipes add: copies, clipping, casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array
from estimator.errors import ProfileError, StrategyError
from estimator.graph.costs.call_costs import features_of
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import GraphColumns, Parameter
from estimator.graph.memory.sizes import trained_tensors, update_call
from estimator.kernels.contention import Eviction, slowdown_curve, slowdown_ratio
from estimator.kernels.durations import columns_of, kernel_fits
from estimator.machines.catalogue import split_limit
from estimator.machines.profile import DeviceKind, MachineProfile, Provenance, UpdateCost
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.optimizers import (
    BESIDE_MUON,
    MEASURED,
    MUON_PASSES,
    RULES,
    UpdateForm,
    is_muon_matrix,
)
from estimator.workload.strategies import Strategy

_TABLE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_backward")
UPDATE_FORMS: dict[DeviceKind, UpdateForm] = {"cpu": "loop", "cuda": "foreach"}
_FP32_BYTES = 4
# An update that was not probed is off by more than one that was: kernels differ.
_SCALED_ERROR = 0.4
# By one operator of an update.
_MOVED_TENSORS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The parameters of a graph that get a gradient: how many, and how large.

    `words` are their bytes in units of 4. `idle` are elements of embedding tables in rows that a
    batch of uniformly drawn indices never picks. `dtensors` are the bytes of each DTensor of layers
    that ranks divide. `matrices` are those that Muon updates: sizes and how many have them.
    `parts` are what each optimizer updates, as often as it does so in a step; there are none where
    the graph's own one updates everything once.
    """

    tensors: int
    elements: int
    size_bytes: int
    words: int
    idle: float
    dtensors: tuple[int, ...] = ()
    matrices: tuple[tuple[tuple[int, int], int], ...] = ()
    parts: tuple[tuple[str, Trained], ...] = ()

    @classmethod
    def of(
        cls, bound: BoundGraph, columns: GraphColumns | None = None, *, sharded: bool = False
    ) -> Trained:
        """Those of a rank or, `sharded`, of all ranks that hold shards of one model together."""
        own = [p for p in bound.graph.parameters if p.gradient is not None]
        columns = columns or GraphColumns.of(bound.graph)
        common = cls._of(bound, columns, own, sharded=sharded)
        if all(p.optimizer is None and p.updates == 1 for p in own):
            return common
        by: dict[str, list[Parameter]] = {}
        for tensor in own:
            by.setdefault(tensor.optimizer or bound.graph.optimizer, []).extend(
                tensor.updates * [tensor]
            )
        parts = [
            (name, cls._of(bound, columns, some, sharded=sharded))
            for name, some in by.items()
            if some
        ]
        return replace(common, parts=tuple(parts))

    @classmethod
    def _of(
        cls, bound: BoundGraph, columns: GraphColumns, own: Sequence[Parameter], *, sharded: bool
    ) -> Trained:
        parts = [p.sharded_parts if sharded else 1 for p in own]
        by_muon = "muon" in (bound.graph.optimizer, *(p.optimizer for p in own))
        sizes = [p.spec.nbytes * count for p, count in zip(own, parts, strict=True)]
        return cls(
            tensors=len(own),
            elements=sum(p.spec.numel * count for p, count in zip(own, parts, strict=True)),
            size_bytes=sum(sizes),
            words=sum(size // 4 for size in sizes),
            idle=_idle_parameters(bound, columns, own),
            dtensors=tuple([p.spec.nbytes for p in own if p.is_dtensor]),
            matrices=_matrices(bound.graph, sharded=sharded) if by_muon else (),
        )

    @property
    def in_matrices(self) -> tuple[int, int]:
        """(how many matrices Muon updates, their elements)."""
        elements = sum(rows * columns * count for (rows, columns), count in self.matrices)
        return sum(count for _, count in self.matrices), elements


def trained_of(bound: BoundGraph, cache: Cache, *, sharded: bool = False) -> Trained:
    """The parameters of a graph, worked out once; see `Trained.of`."""

    def made() -> Trained:
        return Trained.of(bound, columns_of(bound.graph, cache), sharded=sharded)

    return cache.get("trained", (bound,), made, sharded)


def update_cost(
    trained: Trained,
    graph: OpGraph,
    profile: MachineProfile,
    devices_busy: int,
    sharding: bool,
    stored_ratio: int = 1,
    kind: DeviceKind | None = None,
) -> tuple[float, float, Provenance]:
    """(seconds, seconds that no sharding shortens, where they come from) of the optimizer step.

    What is updated takes `stored_ratio` times the bytes of what the graph computes with, on a
    `kind` of device, None: on that of the graph.
    """
    if trained.parts:
        parts = [
            update_cost(
                part,
                replace(graph, optimizer=name, timings={}),
                *(profile, devices_busy, sharding, stored_ratio, kind),
            )
            for name, part in trained.parts
        ]
        source = max(parts, key=lambda cost: cost[0])[2]
        return sum(cost[0] for cost in parts), sum(cost[1] for cost in parts), source
    kind = kind or graph.target
    cost = cost_of_update(profile, graph.optimizer, kind)
    tensors = _tensors(trained, graph)
    seconds = cost.update_time_s(
        tensors=tensors,
        parameters=_float32_elements(trained, graph, stored_ratio, kind),
        idle=trained.idle,
    )
    timing = graph.timings_on(profile.name).get(update_call(graph))
    if timing is not None and stored_ratio == 1 and kind == graph.target:
        seconds = timing.seconds
    slowdown = slowdown_ratio(profile, "update", devices_busy, float(trained.size_bytes))
    fixed_s = cost.launch_s
    hooks_s = profile.host.shard_update_tensor_s if profile.host else 0.0
    if not sharding:
        seconds += _dtensor_seconds(trained, profile)
    else:
        # Every rank updates a part of each tensor; under ZeRO-1 and 2 it updates whole tensors.
        fixed_s += trained.tensors * (cost.per_tensor_s + hooks_s)
        seconds += trained.tensors * hooks_s
    return seconds * slowdown, fixed_s * slowdown, cost.provenance


def _dtensor_seconds(trained: Trained, profile: MachineProfile) -> float:
    """What DTensor adds to an update: more where the operator before has evicted the host's code.

    Operators move two to three tensors each (Adam's eight: 20).
    """
    host, memory = profile.host, profile.memory
    if host is None or not trained.dtensors:
        return 0.0
    cached_s, cold_s = host.shard_update_tensor_s, host.dtensor_update_tensor_s
    private_bytes = memory.private_cache_bytes if memory else None
    if cold_s is None or not private_bytes:
        return len(trained.dtensors) * (cached_s if cold_s is None else cold_s)
    cold = Eviction.of_size(private_bytes).at(_MOVED_TENSORS * np.array(trained.dtensors))
    return float((cached_s + cold * max(cold_s - cached_s, 0.0)).sum())


def update_lanes(
    trained: Trained, graph: OpGraph, profile: MachineProfile, stored_ratio: int = 1
) -> tuple[float, float] | None:
    """Seconds of host and device in an update whose two lanes are known; None for others.

    They are where they were measured, and where a GPU's host loops over the tensors.
    """
    if trained.parts:
        return None
    cost = cost_of_update(profile, graph.optimizer, graph.target)
    loops = cost.form == "loop" and graph.target == "cuda"
    if graph.is_summary or not (cost.lanes or loops):
        return None
    host_s = cost.launch_s + _tensors(trained, graph) * cost.per_tensor_s
    idle_s = trained.idle * cost.per_idle_parameter_s
    elements = _float32_elements(trained, graph, stored_ratio, graph.target)
    return host_s, elements * cost.per_parameter_s + idle_s


def _float32_elements(
    trained: Trained, graph: OpGraph, stored_ratio: int, kind: DeviceKind
) -> float:
    """How many elements of the probe's float32 updates take as long.

    GPUs are bound by the bytes of an update; of other dtypes on CPUs nothing is known.
    """
    rule = RULES[graph.optimizer]
    item_bytes = float(_FP32_BYTES)
    if kind == "cuda" and trained.elements:
        item_bytes = trained.size_bytes * stored_ratio / trained.elements
    moved = rule.bytes_of(item_bytes) * trained.elements
    if graph.optimizer == "muon":
        others = trained.elements - trained.in_matrices[1]
        moved += others * (RULES[BESIDE_MUON].bytes_of(item_bytes) - rule.bytes_of(item_bytes))
    return moved / rule.bytes_of(_FP32_BYTES)


def _tensors(trained: Trained, graph: OpGraph) -> float:
    """How many tensors of the optimizer's own cost the host as much."""
    if graph.optimizer != "muon":
        return trained.tensors
    own, beside = RULES["muon"], RULES[BESIDE_MUON]
    matrices = trained.in_matrices[0]
    return matrices + (trained.tensors - matrices) * beside.tensor_s / own.tensor_s


def _matrices(graph: OpGraph, *, sharded: bool) -> tuple[tuple[tuple[int, int], int], ...]:
    tensors = trained_tensors(graph, sharded=sharded)
    sizes = Counter(t.shape for t in tensors if is_muon_matrix(t))
    return tuple(((shape[0], shape[1]), count) for shape, count in sizes.items())


def _idle_parameters(
    bound: BoundGraph, columns: GraphColumns, parameters: Sequence[Parameter]
) -> float:
    maker, idle = columns.maker.tolist(), 0.0
    for parameter in parameters:
        made_by = -1 if parameter.gradient is None else maker[parameter.gradient]
        if made_by < 0:
            continue
        call = bound.calls[made_by]
        if call.target.split(".")[1] not in _TABLE_GRADIENTS:
            continue
        rows, picks = parameter.spec.shape[0], call.inputs[1].numel
        idle += parameter.spec.numel * (1.0 - 1.0 / rows) ** picks
    return idle


def cost_of_update(profile: MachineProfile, optimizer: str, kind: DeviceKind) -> UpdateCost:
    """What an optimizer's update costs on a kind of device; raises ProfileError.

    One that was not probed takes as many times the nearest one that was as it moves bytes.
    """
    rule = RULES[optimizer]
    form = rule.form or UPDATE_FORMS[kind]
    own = [u for u in profile.updates if u.device == kind]
    same = [u for u in own if u.optimizer == rule.measured_as]
    exact = [u for u in same if u.form == form] or (same if rule.form is None else [])
    if exact:
        return exact[0]
    near = same or [u for u in own if u.optimizer == BESIDE_MUON] or own
    if rule.form is None or not near:
        raise ProfileError(
            f"profile '{profile.name}' has no update cost of {optimizer}; run 'estimator probe' "
            "with a larger --budget"
        )
    known = near[0]
    probed = RULES[f"{known.optimizer}-fused" if known.form == "fused" else known.optimizer]
    more = rule.bytes_of(_FP32_BYTES) / probed.bytes_of(_FP32_BYTES)
    return UpdateCost(
        optimizer=rule.measured_as,
        form=form,
        device=kind,
        launch_s=known.launch_s,
        per_tensor_s=known.per_tensor_s * rule.tensor_s / probed.tensor_s,
        per_parameter_s=known.per_parameter_s * more,
        provenance=Provenance(
            source="fitted",
            relative_error=_SCALED_ERROR,
            note=f"{known.optimizer}, {known.form}, by the bytes that each moves",
        ),
    )


# Scale the loss, find infinities, read that, update the scale, its tracker, the inverse scale.
_SCALER_OPS = 6
# An elementwise pass reads and writes each fp32 element.
FP32_PASS_BYTES = 8.0


def memory_bound_s(
    profile: MachineProfile, target: str, elements: Sequence[int], devices_busy: int, cache: Cache
) -> Array:
    """Seconds of elementwise passes over cold float32 memory, with `devices_busy` devices busy."""
    numbers: dict[int, int] = {}
    numbered = [numbers.setdefault(max(size, 1), len(numbers)) for size in elements]
    sizes = tuple(numbers)

    def alone() -> Array:
        specs = [TensorSpec((size,)) for size in sizes]
        calls = [OpCall(target, (spec, spec), (), (spec,)) for spec in specs]
        fits = kernel_fits(profile, cache=cache)
        found = fits.predict_each(calls, [features_of(call) for call in calls])
        return np.array([known.cold_s if known else 0.0 for known in found], dtype=np.float64)

    alone_s = cache.get("memory-bound", (profile,), alone, *(target, sizes))[numbered]
    moved_bytes = FP32_PASS_BYTES * np.array(elements, dtype=np.float64)
    return np.asarray(alone_s * slowdown_curve(profile, "memory", devices_busy).at(moved_bytes))


def copies_s(
    profile: MachineProfile, sizes_bytes: Sequence[int], devices_busy: int, cache: Cache
) -> Array:
    """DDP scales gradients by 1/world while it copies them into their buckets, one pass each."""
    elements = [size // 4 for size in sizes_bytes]
    return memory_bound_s(profile, "aten.copy_.default", elements, devices_busy, cache)


def accumulate_s(
    trained: Trained, profile: MachineProfile, devices_busy: int, cache: Cache
) -> float:
    """Adding one micro-batch's gradients to those of the ones before it, in place."""
    return float(sums_s(profile, [trained.words], devices_busy, cache)[0])


def sums_s(profile: MachineProfile, words: Sequence[int], devices_busy: int, cache: Cache) -> Array:
    """The same of each of some models with so many words of gradients."""
    seconds = memory_bound_s(profile, "aten.add_.Tensor", words, devices_busy, cache)
    return np.where(np.array(words) > 0, seconds, 0.0)


def unscale_s(
    trained: Trained, graph: OpGraph, profile: MachineProfile, devices_busy: int, cache: Cache
) -> float:
    """What a GradScaler adds: every gradient unscaled and checked in place, some small operators.

    torch/amp/grad_scaler.py: the loss and the scale are multiplied, the check is read by the host,
    which then has nothing issued ahead.
    """
    spec = TensorSpec((max(trained.elements, 1),))
    call = OpCall("aten.mul.Scalar", (spec, 1.0), (), (spec,))
    prediction = kernel_fits(profile, graph.precision, cache=cache).predict(call)
    if prediction is None or profile.host is None:
        return 0.0
    slowdown = slowdown_ratio(profile, "memory", devices_busy, FP32_PASS_BYTES * trained.elements)
    return prediction.cold_s * slowdown + _SCALER_OPS * profile.host.bare_op_s


# torch/nn/utils/clip_grad.py: norms of all gradients (read), then a product in place (read, write).
_CLIPPED_TENSORS = 3
# Stack of the norms, their norm, the coefficient and its clamp, and what groups the gradients.
_CLIP_OPS = 6
# Gradients cast from half to fp32 and updated weights cast back: 2 + 4 and 4 + 2 bytes.
_MASTER_BYTES = 12.0


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
        loops = strategy.updates_on_host or graph.target == "cpu"
        host_s = fixed_s = _clip_host_s(trained, loops, machine[0])
        if strategy.updates_on_host:
            device_s = moved_by_host_s(moved_bytes, graph, machine[0])
        else:
            device_s = _moved_s(moved_bytes, *machine)
        if strategy.keeps.state == "shard" and not strategy.cuts_tensors:
            # ZeroRedundancyOptimizer shards the update alone: every rank clips all gradients.
            fixed_s += device_s
    if strategy.master_ratio(graph.precision) > 1 and graph.optimizer != "adamw-bf16":
        device_s += _moved_s(_MASTER_BYTES * trained.elements, *machine)
    if graph.optimizer == "muon":
        if strategy.cuts_tensors:
            raise StrategyError(
                f"muon updates whole matrices, found '{strategy}', which shards them; use ddp or "
                "zero1"
            )
        device_s += _muon_products_s(trained, graph, *machine)
    return Added(host_s, device_s, fixed_s)


def recipe_assumptions(graph: OpGraph, own: Iterable[str], machine: str) -> Iterator[str]:
    """What the costs of a recipe take for granted, in words; `own` is what a strategy's do."""
    if graph.optimizer not in MEASURED:
        yield f"{graph.optimizer}'s update takes the bytes that its kernels move, at a known rate"
    if graph.clip_grad_norm:
        yield "gradients are clipped by one pass for their norms and one that scales them"
    yield from own
    if limit := split_limit(machine)[1]:
        yield (
            f"'{machine}' is limited: busy units hold a lower clock, its memory keeps its rate"
            if limit.endswith("W")
            else f"'{machine}' is limited: its peaks fall with the clock, its memory keeps its rate"
        )


def autocast_bytes(graph: OpGraph) -> int:
    """Bytes of the copies in half that autocast makes of weights and keeps for the backward pass.

    torch/aten/src/ATen/autocast_mode.cpp (torch 2.13): each weight is cast once, until the context
    is left; a product saves the copy for its gradient.
    """
    if not graph.precision.endswith("-amp"):
        return 0
    weights = {n for n, value in enumerate(graph.values) if value.kind == "parameter"}
    casts = (op for op in graph.ops if op.call.target.startswith("aten._to_copy"))
    return sum(op.call.outputs[0].nbytes for op in casts if not weights.isdisjoint(op.inputs))


def _moved_s(moved_bytes: float, profile: MachineProfile, devices_busy: int, cache: Cache) -> float:
    elements = int(moved_bytes / FP32_PASS_BYTES)
    return float(memory_bound_s(profile, "aten.add_.Tensor", [elements], devices_busy, cache)[0])


def moved_by_host_s(moved_bytes: float, graph: OpGraph, profile: MachineProfile) -> float:
    """Seconds to move bytes at the rate of an update on the host, which is bound by memory too."""
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
            prediction = fits.predict(_product(*sizes))
            seconds += count * MUON_PASSES * (prediction.warm_s if prediction else 0.0)
    return seconds


def _product(rows: int, inner: int, columns: int) -> OpCall:
    one, two, out = (
        TensorSpec(shape, "bfloat16")
        for shape in ((rows, inner), (inner, columns), (rows, columns))
    )
    return OpCall("aten.mm.default", (one, two), (), (out,))
