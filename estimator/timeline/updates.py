"""Cost an optimizer's update of a graph's parameters on one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from estimator.cache import Cache
from estimator.errors import ProfileError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import Parameter
from estimator.graph.optimizer_memory import trained_tensors, update_call
from estimator.machines.profile import DeviceKind, MachineProfile, Provenance, UpdateCost
from estimator.timeline.caches import Eviction
from estimator.timeline.contention import slowdown_ratio
from estimator.workload.optimizers import BESIDE_MUON, RULES, UpdateForm, is_muon_matrix

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
    that ranks divide. `matrices` are those that Muon would update: sizes and how many have them.
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
    def of(cls, bound: BoundGraph, *, sharded: bool = False) -> Trained:
        """Those of a rank or, `sharded`, of all ranks that hold shards of one model together."""
        own = [p for p in bound.graph.parameters if p.gradient is not None]
        whole = cls._of(bound, own, sharded=sharded)
        if all(p.optimizer is None and p.updates == 1 for p in own):
            return whole
        by: dict[str, list[Parameter]] = {}
        for each in own:
            by.setdefault(each.optimizer or bound.graph.optimizer, []).extend(each.updates * [each])
        parts = [(name, cls._of(bound, some, sharded=sharded)) for name, some in by.items() if some]
        return replace(whole, parts=tuple(parts))

    @classmethod
    def _of(cls, bound: BoundGraph, own: Sequence[Parameter], *, sharded: bool) -> Trained:
        parts = [p.sharded_parts if sharded else 1 for p in own]
        sizes = [p.spec.nbytes * count for p, count in zip(own, parts, strict=True)]
        return cls(
            tensors=len(own),
            elements=sum(p.spec.numel * count for p, count in zip(own, parts, strict=True)),
            size_bytes=sum(sizes),
            words=sum(size // 4 for size in sizes),
            idle=_idle_parameters(bound, own),
            dtensors=tuple([p.spec.nbytes for p in own if p.is_dtensor]),
            matrices=_matrices(bound.graph, sharded=sharded),
        )

    @property
    def in_matrices(self) -> tuple[int, int]:
        """(how many matrices Muon would update, their elements)."""
        elements = sum(rows * columns * count for (rows, columns), count in self.matrices)
        return sum(count for _, count in self.matrices), elements


def trained_of(bound: BoundGraph, cache: Cache, *, sharded: bool = False) -> Trained:
    """The parameters of a graph, worked out once; see `Trained.of`."""
    return cache.get("trained", (bound,), lambda: Trained.of(bound, sharded=sharded), sharded)


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
        each = [
            update_cost(
                part,
                replace(graph, optimizer=name, timings={}),
                *(profile, devices_busy, sharding, stored_ratio, kind),
            )
            for name, part in trained.parts
        ]
        source = max(each, key=lambda cost: cost[0])[2]
        return sum(cost[0] for cost in each), sum(cost[1] for cost in each), source
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


def _idle_parameters(bound: BoundGraph, parameters: Sequence[Parameter]) -> float:
    made_by = {value: index for index, op in enumerate(bound.graph.ops) for value in op.outputs}
    idle = 0.0
    for parameter in parameters:
        if parameter.gradient not in made_by:
            continue
        call = bound.calls[made_by[parameter.gradient]]
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
