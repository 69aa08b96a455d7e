"""Cost an optimizer's update of a graph's parameters on one machine."""

from __future__ import annotations

from estimator.errors import ProfileError
from estimator.graph.ops import BoundGraph
from estimator.profile import MachineProfile, Provenance, UpdateCost
from estimator.timeline.durations import slowdown_ratio

_TABLE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_backward")
UPDATE_FORMS = {"cpu": "loop", "cuda": "foreach"}


def update_cost(
    bound: BoundGraph, profile: MachineProfile, busy: int, sharding: bool
) -> tuple[float, float, Provenance]:
    """(seconds, seconds that no sharding shortens, where they come from) of the optimizer step."""
    graph = bound.graph
    trained = [p for p in graph.parameters if p.gradient is not None]
    cost = _cost_of(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    seconds = cost.update_time_s(
        tensors=len(trained),
        parameters=sum(p.spec.numel for p in trained),
        idle=_idle_parameters(bound),
    )
    moved = sum(p.spec.nbytes for p in trained)
    slowdown = slowdown_ratio(profile, "update", busy, float(moved))
    fixed_s = cost.launch_s
    if sharding:
        # Every rank updates a part of each tensor; under ZeRO-1 and 2 it updates whole tensors.
        hooks_s = profile.host.shard_update_tensor_s if profile.host else 0.0
        fixed_s += len(trained) * (cost.per_tensor_s + hooks_s)
        seconds += len(trained) * hooks_s
    return seconds * slowdown, fixed_s * slowdown, cost.provenance


def update_lanes(bound: BoundGraph, profile: MachineProfile) -> tuple[float, float] | None:
    """Seconds of host and device in an update whose two lanes were measured; None for others."""
    graph = bound.graph
    cost = _cost_of(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    if not cost.lanes or graph.is_summary:
        return None
    trained = [p.spec.numel for p in graph.parameters if p.gradient is not None]
    host_s = cost.launch_s + len(trained) * cost.per_tensor_s
    idle_s = _idle_parameters(bound) * cost.per_idle_parameter_s
    return host_s, sum(trained) * cost.per_parameter_s + idle_s


def _idle_parameters(bound: BoundGraph) -> float:
    """Elements of embedding tables in rows that a batch of uniformly drawn indices never picks."""
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
