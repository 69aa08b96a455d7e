"""Time the operator calls of a graph by replaying the whole step with real tensors."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from estimator.errors import ProbeError, StoreError, cause
from estimator.files import home, parse_json, read_text, write_text_atomically
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.graph.memory.sizes import update_call
from estimator.machines.profile import MachineProfile
from estimator.probe.devices.backend import Backend, software_versions
from estimator.probe.devices.calls import (
    find_operator,
    output_tensors,
    real_arguments,
    shaped,
    span_elements,
    torch_dtype,
    whole_numbers,
)
from estimator.probe.devices.interference import SHARED_GPU_RATIO
from estimator.probe.devices.inventory import read_cpu, torch_sees_cuda
from estimator.probe.devices.jobs import Emit, canary_s, has_cores_of, run_job
from estimator.probe.devices.ranks import DeviceProcesses
from estimator.probe.devices.updates import TORCH_OPTIMIZERS, optimizer_of
from estimator.probe.grid.kernels import float32_matmuls, noise_ratio
from estimator.tensors import OpCall, TensorSpec, decode_tree, encode_tree
from estimator.workload.optimizers import RULES


def read_timings(machine: str) -> dict[str, OpTiming]:
    """What was timed on a machine before, by `_key` of its call; raises StoreError."""
    path = _timings_path(machine)
    try:
        return {
            key: OpTiming(seconds=float(seconds), noise_ratio=float(noise))
            for key, (seconds, noise) in parse_json(read_text(path)).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"cannot read the timings in {path} ({cause(error)}); delete the file"
        ) from None


def keep_timings(machine: str, timings: Mapping[str, OpTiming]) -> None:
    """Keep timings beside what others have kept meanwhile; raises StoreError."""
    kept = read_timings(machine) | dict(timings)
    rows = {key: (timing.seconds, timing.noise_ratio) for key, timing in kept.items()}
    write_text_atomically(_timings_path(machine), json.dumps(rows))


def _timings_path(machine: str) -> Path:
    return home() / "timings" / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _key(call: OpCall) -> str:
    return json.dumps(call.encode(), sort_keys=True, separators=(",", ":"))


_Arguments = tuple[list[Any], dict[str, Any]]
_WARM_UPS, _LEAST_PASSES, _MOST_PASSES = 2, 5, 15
# Once there are enough passes, more are made until this share of the time is left.
_SPARED_SHARE = 0.5
# A pass counts as disturbed by others where the canary beside it takes this much longer than the
# quickest; passes beyond the most wanted are then made for this share of the time at most.
_DISTURBED_RATIO = 1.15
_WAITING_SHARE = 0.25
_CANARY_REPEATS = {"cpu": 21, "cuda": 5}
_REASON_LENGTH = 160


def replay(
    backend: Backend,
    emit: Emit,
    *,
    budget_s: float,
    plan: Mapping[str, Any],
    usual_canary_s: float | None = None,
) -> None:
    """Emit ``timings`` rows [call, seconds, spread], ``skipped`` rows [call, reason], ``canary_s``.

    Passes beside which the canary ran slow, by the quickest seen here or the profile's
    `usual_canary_s`, are left out where enough others are made within the time; the median of the
    canary beside those that count tells in what state of the machine they were made.
    """
    import torch

    begin = time.monotonic()
    torch.manual_seed(0)
    step = TimedStep(backend, plan, begin + budget_s)
    canaries: list[float] = []
    disturbed_ratio = SHARED_GPU_RATIO if backend.kind == "cuda" else _DISTURBED_RATIO
    # Grad mode on and nothing requiring gradients: what runs below autograd in a training step.
    with torch.enable_grad(), float32_matmuls(on_tensor_cores=plan.get("tf32", False)):
        last_s = 0.0
        while True:
            started = time.monotonic()
            spent_s = started - begin
            quiet = quiet_passes(canaries[_WARM_UPS:], usual_canary_s, disturbed_ratio)
            if _is_enough(len(canaries) - _WARM_UPS, len(quiet), spent_s / budget_s):
                break
            # The first pass loads kernels and asks libraries for algorithms: seconds, on a GPU.
            if len(canaries) > 1 and budget_s - spent_s < last_s:
                break
            if not step.run():
                break
            canaries.append(canary_s(backend, repeats=_CANARY_REPEATS[backend.kind]))
            last_s = time.monotonic() - started
            emit({"fraction": min(len(canaries) / (_WARM_UPS + _MOST_PASSES), 1.0)})
    steady = canaries[_WARM_UPS:] or canaries
    answer: dict[str, Any] = {"timings": step.summary(quiet), "skipped": step.skipped()}
    if steady:
        counted = [steady[number] for number in quiet] if len(quiet) >= _LEAST_PASSES else steady
        answer["canary_s"] = statistics.median(counted)
    emit(answer)


def quiet_passes(
    canaries_s: Sequence[float], usual_s: float | None, disturbed_ratio: float = _DISTURBED_RATIO
) -> list[int]:
    """Numbers of the passes beside which the canary took no longer than it should."""
    if not canaries_s:
        return []
    quickest_s = min(*canaries_s, usual_s or canaries_s[0])
    return [n for n, canary_s in enumerate(canaries_s) if canary_s <= disturbed_ratio * quickest_s]


def _is_enough(passes: int, quiet: int, spent_share: float) -> bool:
    if passes < _LEAST_PASSES:
        return False
    if spent_share >= _SPARED_SHARE or quiet >= _MOST_PASSES:
        return True
    return passes >= _MOST_PASSES and spent_share >= _WAITING_SHARE


class TimedStep:
    """The tensors and calls of a step, and how long each call took in each pass."""

    def __init__(self, backend: Backend, plan: Mapping[str, Any], end: float) -> None:
        self.backend, self.end = backend, end
        self.calls = [OpCall.decode(call) for call in plan["calls"]]
        self.ops: Sequence[Sequence[Any]] = plan["ops"]
        self.made = {
            value: make_tensor(decode_tree(spec), kind, low, high, backend.device)
            for value, spec, kind, low, high in plan["made"]
        }
        self.samples: list[list[float]] = [[] for _ in self.ops]
        self.update = _Update(plan["update"], backend.device) if "update" in plan else None
        self.failed: dict[int, str] = {}
        self._operators: list[Callable[..., Any] | None] = []
        for index, call in enumerate(self.calls):
            try:
                self._operators.append(find_operator(call.target))
            except ProbeError as error:
                self._operators.append(None)
                self.failed[index] = str(error)

    def run(self) -> bool:
        """One pass; False if the time was over before its end."""
        live: dict[int, Any] = dict(self.made)
        position, ready, made = 0, self._arguments(0, live), None

        def call(_: int) -> None:
            nonlocal made
            made = self._call(self.ops[position][0], ready)

        def after(_: int) -> None:
            nonlocal position, ready, made
            outputs, made, ready = output_tensors(made), None, None
            self._settle(self.ops[position], live, outputs)
            position += 1
            ready = self._arguments(position, live)

        while position < len(self.ops):
            if time.monotonic() >= self.end:
                return False
            # Between two looks at the clock; a flight of a CUDA device holds no more calls anyway.
            first, count = position, min(64, len(self.ops) - position)
            seconds = self.backend.time_calls(call, repeats=count, after=after, once=True)
            for samples, second in zip(self.samples[first:position], seconds, strict=True):
                samples.append(second)
        if self.update is not None:
            self.update.run(live)
        return True

    def _arguments(self, position: int, live: dict[int, Any]) -> _Arguments | None:
        """Of the op at a position, put together outside the clock; None past the last one."""
        if position >= len(self.ops):
            return None
        index, _, inputs, _, _ = self.ops[position]
        tensors = iter([live[value] for value in inputs])
        return real_arguments(self.calls[index], tensors, device=self.backend.device)

    def _call(self, index: int, ready: _Arguments | None) -> Any:
        if index in self.failed or ready is None:
            return None
        operator = self._operators[index]
        assert operator is not None
        positional, keywords = ready
        try:
            return operator(*positional, **keywords)
        # Values that no real batch would hold, or an operator that this device lacks.
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            self.failed[index] = str(error).splitlines()[0][:_REASON_LENGTH]
            return None

    def _settle(self, row: Sequence[Any], live: dict[int, Any], made: Sequence[Any]) -> None:
        """Name the outputs, make those that did not come, let go what is not read again."""
        index, _, _, outputs, freed = row
        specs = self.calls[index].outputs
        for place, value in enumerate(outputs):
            if place < len(made):
                live[value] = made[place]
            else:
                live[value] = make_tensor(specs[place], "activation", 0, 0, self.backend.device)
        for value in freed:
            live.pop(value, None)

    def summary(self, quiet: Sequence[int]) -> list[list[float]]:
        """[call, mean over occurrences of the median over the quiet passes, mean spread].

        With less than the least number of quiet passes, all count.
        """
        medians: dict[int, list[float]] = {}
        spreads: dict[int, list[float]] = {}
        rows = [
            (index, timed, s) for (index, timed, *_), s in zip(self.ops, self.samples, strict=True)
        ]
        if self.update is not None:
            rows.append((-1, self.update.timed, self.update.samples))
        for index, timed, samples in rows:
            steady = samples[_WARM_UPS:] or samples[-1:]
            if len(quiet) >= _LEAST_PASSES:
                steady = [steady[number] for number in quiet]
            if timed < 0 or index in self.failed or not steady:
                continue
            medians.setdefault(timed, []).append(statistics.median(steady))
            spreads.setdefault(timed, []).append(noise_ratio(steady))
        return [
            [timed, statistics.fmean(values), statistics.fmean(spreads[timed])]
            for timed, values in medians.items()
        ]

    def skipped(self) -> list[list[Any]]:
        """[call, reason] of those that failed or were not reached."""
        reasons: dict[int, str] = {}
        for (index, timed, *_), samples in zip(self.ops, self.samples, strict=True):
            if timed >= 0 and index in self.failed:
                reasons[timed] = self.failed[index]
            elif timed >= 0 and not samples:
                reasons.setdefault(timed, "the time was over before it was reached")
        return [[timed, reason] for timed, reason in reasons.items()]


class _Update:
    """The optimizer's step with the gradients that a replayed step has left."""

    def __init__(self, plan: Mapping[str, Any], device: Any) -> None:
        import torch

        self.timed = int(plan["timed"])
        self.samples: list[float] = []
        self._trained = [
            (
                torch.nn.Parameter(make_tensor(decode_tree(spec), "parameter", 0, 0, device)),
                gradient,
            )
            for spec, gradient in plan["trained"]
        ]
        self._optimizer = optimizer_of(plan["optimizer"], [trained for trained, _ in self._trained])

    def run(self, live: Mapping[int, Any]) -> None:
        for parameter, gradient in self._trained:
            parameter.grad = live[gradient]
        begin = time.perf_counter()
        self._optimizer.step()
        self.samples.append(time.perf_counter() - begin)
        self._optimizer.zero_grad()


def make_tensor(spec: TensorSpec, kind: str, low: int | None, high: int | None, device: Any) -> Any:
    """A tensor with values such as training has: the time of some operators depends on them.

    Weights are scaled by their fan-in, so that a deep model's activations neither vanish into
    denormal numbers, which are slow, nor overflow. Buffers are positive, as variances must be.
    """
    import torch

    span = max(1, span_elements(spec))
    dtype = torch_dtype(spec.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        # Where nothing is known of an integer, 1 is valid as a divisor and as most indices.
        low, high = (1, 1) if high is None or low is None else (low, high)
        return whole_numbers(spec, low, high, device)
    if kind == "parameter":
        flat = _weights(spec, span, device).to(dtype)
    elif kind == "buffer":
        flat = torch.rand(span, device=device).add_(0.5).to(dtype)
    elif kind == "constant":
        flat = torch.ones(span, device=device, dtype=dtype)
    else:
        flat = torch.randn(span, device=device).to(dtype)
    return shaped(flat, spec)


def _weights(spec: TensorSpec, span: int, device: Any) -> Any:
    import torch

    if len(spec.shape) < 2:  # a bias, or the scale of a normalisation
        return torch.rand(span, device=device).add_(0.5)
    fan_in = max(1, spec.numel // max(1, spec.shape[0]))
    return torch.randn(span, device=device).mul_(fan_in**-0.5)


# Of the device's memory, what parameters, buffers and inputs may take before anything runs.
_MOST_OF_MEMORY = 0.8
# Parameters, two moments and what the optimizer makes on its way.
_COPIES_TO_UPDATE = 4


def measure_ops(
    graph: OpGraph,
    profile: MachineProfile,
    *,
    budget_s: float = 60.0,
    report: Callable[[str, float], None] | None = None,
    on_canary: Callable[[float], None] | None = None,
) -> dict[OpCall, OpTiming]:
    """Seconds of each distinct call of the graph on this machine, which `profile` describes.

    The step runs op by op with real tensors in a process pinned to device 0, memory resident;
    a call's time is the mean over its occurrences of the median over passes. On a CPU the optimizer
    follows, and its step is one more call, `update_call`. Timings are kept in the user's store, and
    where all are there nothing runs. Calls that cannot be replayed are missing from the answer and
    named through `report`; `on_canary` gets the seconds of a fixed matmul beside the passes that
    count. Raises ProbeError, StoreError.
    """
    say = report or (lambda _part, _fraction: None)
    _check_machine(graph, profile)
    bound = graph.at()
    wanted = distinct_calls(bound)
    if _has_update(graph, profile):
        wanted.append(update_call(graph))
    # The same call takes another time on tensor cores.
    machine = fingerprint(profile) + (" | tf32" if graph.precision == "tf32" else "")
    kept = read_timings(machine)
    known = {call: kept[key] for call in wanted if (key := _key(call)) in kept}
    if len(known) == len(wanted):
        return known
    say("timing the model's operators", 0.0)
    timings, skipped = _replay(bound, profile, wanted, budget_s, say, on_canary)
    keep_timings(machine, {_key(call): timing for call, timing in timings.items()})
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
            versions["allocator"],
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
    if device.kind == "cpu" and not has_cores_of(profile):
        raise ProbeError(
            f"{profile.name} describes a machine with {profile.hardware.get('cpu')}, and this one "
            f"has {read_cpu().model}; operators can only be timed on the machine at hand"
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

    def take(message: dict[str, Any]) -> None:
        if "failed" in message:
            failures.append(message["failed"])
        if "fraction" in message:
            say("timing the model's operators", message["fraction"])
        for number, seconds, spread in message.get("timings", ()):
            timings[wanted[number]] = OpTiming(seconds=seconds, noise_ratio=spread)
        if on_canary and "canary_s" in message:
            on_canary(message["canary_s"])
        skipped.extend((wanted[n].target, reason) for n, reason in message.get("skipped", ()))

    with DeviceProcesses([device]) as processes:
        run_job(
            processes,
            f"{__name__}:replay",
            take,
            budget_s=budget_s,
            arguments={"plan": plan, "usual_canary_s": profile.canary_s},
        )
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
    batch_ranges = {given.value: (given.low, given.high) for given in graph.inputs}
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
        [encode_tree(parameter.spec), parameter.gradient]
        for parameter in graph.parameters
        if parameter.gradient is not None
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
