"""Cost an optimizer's update of a graph's parameters on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.errors import ProfileError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.machines.profile import MachineProfile, Provenance, UpdateCost
from estimator.timeline.contention import slowdown_ratio

_TABLE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_backward")
UPDATE_FORMS = {"cpu": "loop", "cuda": "foreach"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The parameters of a graph that get a gradient: how many, and how large.

    `words` are their bytes in units of 4. `idle` are elements of embedding tables in rows that a
    batch of uniformly drawn indices never picks.
    """

    tensors: int
    elements: int
    size_bytes: int
    words: int
    idle: float

    @classmethod
    def of(cls, bound: BoundGraph) -> Trained:
        specs = [p.spec for p in bound.graph.parameters if p.gradient is not None]
        sizes = [spec.nbytes for spec in specs]
        return cls(
            tensors=len(specs),
            elements=sum(spec.numel for spec in specs),
            size_bytes=sum(sizes),
            words=sum(size // 4 for size in sizes),
            idle=_idle_parameters(bound),
        )


def update_cost(
    trained: Trained,
    graph: OpGraph,
    profile: MachineProfile,
    devices_busy: int,
    sharding: bool,
    stored_ratio: int = 1,
) -> tuple[float, float, Provenance]:
    """(seconds, seconds that no sharding shortens, where they come from) of the optimizer step.

    What is updated takes `stored_ratio` times the bytes of what the graph computes with.
    """
    cost = _cost_of(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    seconds = cost.update_time_s(
        tensors=trained.tensors,
        parameters=_float32_elements(trained, graph, stored_ratio),
        idle=trained.idle,
    )
    slowdown = slowdown_ratio(profile, "update", devices_busy, float(trained.size_bytes))
    fixed_s = cost.launch_s
    if sharding:
        # Every rank updates a part of each tensor; under ZeRO-1 and 2 it updates whole tensors.
        hooks_s = profile.host.shard_update_tensor_s if profile.host else 0.0
        fixed_s += trained.tensors * (cost.per_tensor_s + hooks_s)
        seconds += trained.tensors * hooks_s
    return seconds * slowdown, fixed_s * slowdown, cost.provenance


def update_lanes(
    trained: Trained, graph: OpGraph, profile: MachineProfile
) -> tuple[float, float] | None:
    """Seconds of host and device in an update whose two lanes were measured; None for others."""
    cost = _cost_of(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    if not cost.lanes or graph.is_summary:
        return None
    host_s = cost.launch_s + trained.tensors * cost.per_tensor_s
    idle_s = trained.idle * cost.per_idle_parameter_s
    elements = _float32_elements(trained, graph, 1)
    return host_s, elements * cost.per_parameter_s + idle_s


def _float32_elements(trained: Trained, graph: OpGraph, stored_ratio: int) -> float:
    """How many elements of the probe's float32 updates take as long.

    GPUs are bound by the bytes of an update; of other dtypes on CPUs nothing is known.
    """
    if graph.target != "cuda":
        return float(trained.elements)
    return trained.size_bytes * stored_ratio / 4


def _idle_parameters(bound: BoundGraph) -> float:
    made_by = {value: index for index, op in enumerate(bound.graph.ops) for value in op.outputs}
    idle = 0.0
    for parameter in bound.graph.parameters:
        if parameter.gradient not in made_by:
            continue
        call = bound.calls[made_by[parameter.gradient]]
        if call.target.split(".")[1] not in _TABLE_GRADIENTS:
            continue
        rows, picks = parameter.spec.shape[0], call.inputs[1].numel
        idle += parameter.spec.numel * (1.0 - 1.0 / rows) ** picks
    return idle


def _cost_of(profile: MachineProfile, optimizer: str, form: str, kind: str) -> UpdateCost:
    same = [u for u in profile.updates if u.optimizer == optimizer and u.device == kind]
    if not same:
        raise ProfileError(
            f"profile '{profile.name}' has no update cost of {optimizer}; run 'estimator probe' "
            "with a larger --budget"
        )
    return next((cost for cost in same if cost.form == form), same[0])
