"""Time the distinct operator calls of a graph by replaying the whole step on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from estimator.errors import ProbeError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import OpTiming
from estimator.graph.optimizer_memory import update_call
from estimator.machines.files import home
from estimator.machines.profile import MachineProfile
from estimator.probe.backend import allocator_text
from estimator.probe.inventory import read_cpu
from estimator.probe.jobs import Job, run_jobs
from estimator.probe.machine import torch_sees_cuda
from estimator.probe.software import software_versions
from estimator.probe.timing_store import TimingStore
from estimator.probe.updates import TORCH_OPTIMIZERS
from estimator.tensors import OpCall, TensorSpec, encode_tree
from estimator.workload.optimizers import RULES

# Of the device's memory, what parameters, buffers and inputs may take before anything runs.
_MOST_OF_MEMORY = 0.8
# Parameters, two moments and what the optimizer makes on its way.
_COPIES_TO_UPDATE = 4


def measure_ops(
    graph: OpGraph,
    profile: MachineProfile,
    *,
    batch: int | None = None,
    budget_s: float = 60.0,
    store: Path | None = None,
    report: Callable[[str, float], None] | None = None,
    on_canary: Callable[[float], None] | None = None,
) -> dict[OpCall, OpTiming]:
    """Seconds of each distinct call of the graph on this machine, which `profile` describes.

    The step runs op by op with real tensors in a process pinned to device 0, memory resident;
    a call's time is the mean over its occurrences of the median over passes. On a CPU the optimizer
    follows, and its step is one more call, `update_call`. Timings are kept in
    `store` (a file; by default in the user's store), and where all are there nothing runs. Calls
    that cannot be replayed are missing from the answer and named through `report`; `on_canary` gets
    the seconds of a fixed matmul beside the passes that count. Raises ProbeError, StoreError.
    """
    say = report or (lambda _part, _fraction: None)
    _check_machine(graph, profile)
    bound = graph.at(batch)
    wanted = distinct_calls(bound)
    if _has_update(graph, profile):
        wanted.append(update_call(graph))
    # The same call takes another time on tensor cores.
    machine = fingerprint(profile) + (" | tf32" if graph.precision == "tf32" else "")
    kept = TimingStore(store or home() / "timings" / "ops.sqlite", machine)
    known = kept.read(wanted)
    if len(known) == len(wanted):
        return known
    say("timing the model's operators", 0.0)
    timings, skipped = _replay(bound, profile, wanted, budget_s, say, on_canary)
    kept.write(timings)
    for target, reason in skipped:
        say(f"could not time {target}: {reason}", 1.0)
    # Known calls that were timed again take the new figure: it was taken in this very step.
    return {call: timing for call in wanted if (timing := timings.get(call) or known.get(call))}


def _has_update(graph: OpGraph, profile: MachineProfile) -> bool:
    """Whether the optimizer can follow: on a GPU its two lanes take times of their own."""
    needed = _COPIES_TO_UPDATE * graph.parameter_bytes
    room = (1.0 - _MOST_OF_MEMORY) * profile.devices[0].memory_bytes
    known = RULES[graph.optimizer].measured_as in TORCH_OPTIMIZERS
    return graph.target == "cpu" and known and 0 < needed <= room


def distinct_calls(bound: BoundGraph) -> list[OpCall]:
    """The calls that compute something, once each, in order."""
    pairs = zip(bound.graph.ops, bound.calls, strict=True)
    return list(dict.fromkeys(call for op, call in pairs if not op.is_view))


def fingerprint(profile: MachineProfile) -> str:
    """What a timing holds for: the device, its threads, torch, the allocator and its settings."""
    device = profile.devices[0]
    versions = software_versions(device)
    return " | ".join(
        [
            device.kind,
            str(profile.hardware.get("cpu") if device.kind == "cpu" else device.name),
            f"{len(device.cores)} cores",
            f"torch {versions.get('torch', 'unknown')}",
            allocator_text(),
        ]
    )


def _check_machine(graph: OpGraph, profile: MachineProfile) -> None:
    device = profile.devices[0]
    if graph.target != device.kind:
        raise ProbeError(
            f"{graph.name} was traced for {graph.target}, and {profile.name} has {device.kind} "
            f"devices; trace it with target='{device.kind}'"
        )
    if device.kind == "cuda" and not torch_sees_cuda():
        raise ProbeError(
            f"{profile.name} describes a {device.name}, and torch finds no GPU here; operators can "
            "only be timed on the machine at hand"
        )
    here = read_cpu()
    described = profile.hardware.get("cpu")
    if device.kind == "cpu" and (
        described != here.model or not set(device.cores) <= set(here.cores)
    ):
        raise ProbeError(
            f"{profile.name} describes a machine with {described}, and this one has {here.model}; "
            "operators can only be timed on the machine at hand"
        )


def _replay(
    bound: BoundGraph,
    profile: MachineProfile,
    wanted: list[OpCall],
    budget_s: float,
    say: Callable[[str, float], None],
    on_canary: Callable[[float], None] | None,
) -> tuple[dict[OpCall, OpTiming], list[tuple[str, str]]]:
    plan = replay_plan(bound)
    if wanted[-1] == update_call(bound.graph):
        plan["update"] = update_plan(bound.graph, len(wanted) - 1)
    device = profile.devices[0]
    needed = sum(spec.storage_bytes for spec in _made_before(bound).values())
    if needed > _MOST_OF_MEMORY * device.memory_bytes:
        raise ProbeError(
            f"{bound.graph.name} needs {needed} bytes for parameters and inputs, too much to "
            f"replay on {device.name}; estimate it without measure"
        )
    timings: dict[OpCall, OpTiming] = {}
    skipped: list[tuple[str, str]] = []
    failures: list[str] = []

    def take(part: str, message: dict[str, Any]) -> None:
        if "failed" in message:
            failures.append(f"{part}: {message['failed']}")
        if "fraction" in message:
            say("timing the model's operators", message["fraction"])
        for number, seconds, noise_ratio in message.get("timings", ()):
            timings[wanted[number]] = OpTiming(seconds=seconds, noise_ratio=noise_ratio)
        if on_canary and part == "replay" and "canary_s" in message:
            on_canary(message["canary_s"])
        skipped.extend((wanted[n].target, reason) for n, reason in message.get("skipped", ()))

    jobs = [
        Job(part="preparing", function="estimator.probe.kernels:prepare", budget_s=3.0),
        Job(
            part="replay",
            function="estimator.probe.replay:replay",
            budget_s=budget_s,
            arguments={"plan": plan, "usual_canary_s": profile.canary_s},
        ),
    ]
    run_jobs(device, jobs, take)
    if failures:
        raise ProbeError(f"{bound.graph.name} could not be replayed ({'; '.join(failures)})")
    return timings, skipped


def replay_plan(bound: BoundGraph) -> dict[str, Any]:
    """The step as plain JSON: what to make, what to call on it, what to let go after each call.

    ``ops`` rows are [call, timed as (-1: not timed), inputs, outputs, values freed after it].
    """
    graph = bound.graph
    calls: dict[OpCall, int] = {}
    timed: dict[OpCall, int] = {call: number for number, call in enumerate(distinct_calls(bound))}
    before = _made_before(bound)
    freed = _freed_after(graph, before)
    bounds = index_bounds(bound)
    batch_ranges = {each.value: (each.low, each.high) for each in graph.inputs}
    rows = []
    for number, (op, call) in enumerate(zip(graph.ops, bound.calls, strict=True)):
        index = calls.setdefault(call, len(calls))
        row = [index, -1 if op.is_view else timed[call], list(op.inputs), list(op.outputs)]
        rows.append([*row, freed.get(number, [])])
    made = []
    for value, spec in before.items():
        low, high = batch_ranges.get(value, (None, None))
        if high is None and value in bounds:
            low, high = 0, bounds[value] - 1
        made.append([value, encode_tree(spec), graph.values[value].kind, low, high])
    coded = [call.encode() for call in calls]
    return {"calls": coded, "ops": rows, "made": made, "tf32": graph.precision == "tf32"}


def update_plan(graph: OpGraph, number: int) -> dict[str, Any]:
    """The optimizer's step, timed as `number`: the trained parameters and their gradients."""
    trained = [
        [encode_tree(each.spec), each.gradient]
        for each in graph.parameters
        if each.gradient is not None
    ]
    return {"optimizer": graph.optimizer, "timed": number, "trained": trained}


def _made_before(bound: BoundGraph) -> dict[int, TensorSpec]:
    """Values that some op reads and none makes: parameters, buffers, inputs, constants."""
    produced: set[int] = set()
    before: dict[int, TensorSpec] = {}
    for op in bound.graph.ops:
        for value in op.inputs:
            if value not in produced:
                before[value] = bound.specs[value]
        produced.update(op.outputs)
    return before


def _freed_after(graph: OpGraph, before: Mapping[int, TensorSpec]) -> dict[int, list[int]]:
    """Values that eager execution lets go after each op; gradients stay until the step's end."""
    gradients = {parameter.gradient for parameter in graph.parameters}
    last: dict[int, int] = {}
    for number, op in enumerate(graph.ops):
        for value in (*op.inputs, *op.outputs):
            last[value] = number
    freed: dict[int, list[int]] = {}
    for value, number in last.items():
        if value not in before and value not in gradients:
            freed.setdefault(number, []).append(value)
    return freed


_INDEXED_BY = {
    "aten.embedding.default",
    "aten.index.Tensor",
    "aten.index_select.default",
    "aten.gather.default",
    "aten._embedding_bag.default",
}


def index_bounds(bound: BoundGraph) -> dict[int, int]:
    """For integer tensors of the model that index others: a bound that every use allows.

    Buffers of positions reach a look-up through views and copies; those are followed.
    """
    source: dict[int, int] = {}
    bounds: dict[int, int] = {}

    def lower(values: Iterable[int], most: int) -> None:
        for value in values:
            root = source.get(value, value)
            bounds[root] = min(most, bounds.get(root, most))

    for op, call in zip(bound.graph.ops, bound.calls, strict=True):
        if call.target in _INDEXED_BY and op.inputs:
            table = call.inputs[0]
            rows_only = "embedding" in call.target
            most = table.shape[0] if rows_only else min(table.shape, default=1)
            lower([v for v in op.inputs[1:] if bound.specs[v].dtype == "int64"], max(1, most))
        if op.inputs and op.outputs and _is_integer(bound.specs[op.inputs[0]]):
            same = op.is_view or bound.specs[op.inputs[0]].numel == bound.specs[op.outputs[0]].numel
            if same and len(op.inputs) == 1:
                first = op.inputs[0]
                source.update(dict.fromkeys(op.outputs, source.get(first, first)))
    return bounds


def _is_integer(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("int", "uint"))
