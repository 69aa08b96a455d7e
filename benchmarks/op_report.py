"""Set the predicted seconds of each operator beside those seen in real steps of the same model.

``python benchmarks/op_report.py MODEL [--batch N]`` trains the model on one device with a clock
around every operator call, and lists operators by how far prediction and measurement are apart.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from summary import format_table

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

WARMUP_STEPS, TIMED_STEPS, CLOCKED_STEPS = 3, 15, 7
PHASES = ("forward", "backward", "update")

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, str, Shapes]


@dataclass(slots=True)
class Group:
    """Calls of one operator on the same shapes in the same phase, per step."""

    predicted_s: float = 0.0
    measured_s: float = 0.0
    calls: float = 0.0
    seen: float = 0.0
    sources: set[str] = field(default_factory=set)

    @property
    def difference_s(self) -> float:
        return self.predicted_s - self.measured_s

    def add(self, other: Group) -> None:
        self.predicted_s += other.predicted_s
        self.measured_s += other.measured_s
        self.calls += other.calls
        self.seen += other.seen
        self.sources |= other.sources


def profile_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train in a pinned process: plain steps for the clock and page faults, then clocked ones."""
    import resource

    from estimator.probe.devices.backend import keep_memory_resident

    keep_memory_resident()
    step = make_step(arguments["model"], arguments["batch"])
    gc.collect()
    for _ in range(WARMUP_STEPS):
        step(lambda _: None)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    timed = [step(lambda _: None) for _ in range(TIMED_STEPS)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    seen, clocked_s = clock_operators(step)
    return {
        "phases_s": [statistics.median(column) for column in zip(*timed, strict=True)],
        "clocked_s": clocked_s,
        "faults_per_step": faults / TIMED_STEPS,
        "groups": [
            [*key, statistics.median(map(sum, steps)), statistics.median(map(len, steps))]
            for key, steps in seen.items()
        ],
    }


def clock_operators(
    step: Callable[[Callable[[str], None]], tuple[float, ...]], *, steps: int = CLOCKED_STEPS
) -> tuple[dict[Key, list[list[float]]], float]:
    """Seconds of every operator call, by phase, operator and shapes, for each of some steps.

    The clock stands where the tracer stands, below autograd, so both see the same calls. Unlike
    torch.profiler it keeps almost nothing between calls: the profiler's records fragment the heap,
    and large tensors then get fresh memory, with its page faults, that a plain step does not.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[Key, list[list[float]]] = defaultdict(lambda: [[] for _ in range(steps)])
    place: dict[str, Any] = {"step": 0, "phase": ""}

    class Clock(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            begin = time.perf_counter()
            result = func(*args, **named)
            spent_s = time.perf_counter() - begin
            if func.namespace == "profiler":  # the marks that the optimizer leaves for a profiler
                return result
            key = (place["phase"], str(func), (*shapes_of(args), *shapes_of(list(named.values()))))
            seen[key][place["step"]].append(spent_s)
            return result

    def enter(phase: str) -> None:
        place["phase"] = phase

    totals = []
    with Clock():
        step(enter)
        seen.clear()
        for number in range(steps):
            place["step"] = number
            totals.append(sum(step(enter)))
    return seen, statistics.median(totals)


def make_step(
    model_text: str, batch: int | None
) -> Callable[[Callable[[str], None]], tuple[float, ...]]:
    """One training step with AdamW that says when a phase begins and returns their seconds."""
    import torch

    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.training_call import TrainingCall

    torch.manual_seed(0)
    model, inputs, loss, _ = load_model(model_text, batch=batch)
    call = TrainingCall.of(model, inputs, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(enter: Callable[[str], None]) -> tuple[float, ...]:
        marks = [time.perf_counter()]
        enter("forward")
        optimizer.zero_grad(set_to_none=True)
        total = call.run(model, call.batch)
        marks.append(time.perf_counter())
        enter("backward")
        total.backward()
        marks.append(time.perf_counter())
        enter("update")
        optimizer.step()
        marks.append(time.perf_counter())
        return tuple(end - begin for begin, end in itertools.pairwise(marks))

    return step


def shapes_of(tree: Any) -> Shapes:
    """The shapes of all tensors in nested lists, those without dimensions left out."""
    if isinstance(tree, (list, tuple)):
        return tuple(shape for item in tree for shape in shapes_of(item))
    shape = getattr(tree, "shape", None)
    return (tuple(shape),) if shape else ()


def predict_groups(model_text: str, batch: int | None, profile: MachineProfile) -> dict[Key, Group]:
    """Predicted device seconds of each group of calls."""
    import torch

    from estimator.api import trace_model
    from estimator.cache import Cache
    from estimator.graph.models.model_text import load_model
    from estimator.kernels.durations import op_durations

    torch.set_num_threads(1)
    model, inputs, loss, _ = load_model(model_text, batch=batch)
    bound = trace_model(model, inputs, loss=loss).at()
    durations = op_durations(bound, profile, cache=Cache(limit_bytes=0))
    groups: dict[Key, Group] = defaultdict(Group)
    for index, (op, call) in enumerate(zip(bound.graph.ops, bound.calls, strict=True)):
        shapes = tuple(spec.shape for spec in call.inputs if spec.shape)
        one = Group(
            predicted_s=float(durations.device_s[index]),
            calls=1,
            sources={durations.sources[index]},
        )
        groups[op.phase, call.target, shapes].add(one)
    host_s = float(durations.host_s.sum())
    groups["forward", "(host)", ()].add(Group(predicted_s=host_s))
    return groups


def predicted_update_s(model_text: str, batch: int | None, profile: MachineProfile) -> float:
    """The update's seconds as an estimate on one device has them."""
    from estimator.api import estimate, trace_model
    from estimator.graph.models.model_text import load_model

    model, inputs, loss, _ = load_model(model_text, batch=batch)
    graph = trace_model(model, inputs, loss=loss)
    return estimate(graph, f"1x1:{profile.name}", profile=profile).breakdown.update_s


def by_name(groups: Mapping[Key, Group]) -> dict[Key, Group]:
    """Groups joined over their shapes."""
    joined: dict[Key, Group] = defaultdict(Group)
    for (phase, name, _), group in groups.items():
        joined[phase, name, ()].add(group)
    return joined


def describe(groups: Mapping[Key, Group], most: int) -> str:
    """The groups that differ most, in microseconds per step."""
    lines = [["operator", "phase", "calls", "seen", "predicted µs", "measured µs", "diff", "from"]]
    ordered = sorted(groups.items(), key=lambda item: -abs(item[1].difference_s))
    for (phase, name, shapes), group in ordered[:most]:
        shown = " ".join("×".join(map(str, shape)) for shape in shapes)
        lines.append(
            [
                f"{name} {shown}".strip()[:90],
                phase,
                f"{group.calls:.0f}",
                f"{group.seen:.0f}",
                f"{1e6 * group.predicted_s:.0f}",
                f"{1e6 * group.measured_s:.0f}",
                f"{1e6 * group.difference_s:+.0f}",
                ",".join(sorted(group.sources)),
            ]
        )
    return format_table(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, train with the profiler, print the differences."""
    from estimator.probe.devices.ranks import run_on_devices

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="MODEL text, such as benchmarks/local_models.py:gpt2")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--profile", default="local", help="name or path of this machine's profile")
    parser.add_argument("--most", type=int, default=40, help="lines per table")
    options = parser.parse_args(arguments)
    profile = load_profile(options.profile)
    groups = predict_groups(options.model, options.batch, profile)
    update_s = predicted_update_s(options.model, options.batch, profile)
    (found,) = run_on_devices(
        profile.devices[:1],
        "op_report:profile_rank",
        {"model": options.model, "batch": options.batch},
        timeout_s=600.0,
    )
    for phase, name, shapes, seconds, calls in found["groups"]:
        key = (phase, name, tuple(map(tuple, shapes)))
        groups[key].add(Group(measured_s=seconds, seen=calls))
    print(describe_phases(groups, found, update_s))
    compared = {key: group for key, group in groups.items() if key[0] != "update"}
    print("\n" + describe(by_name(compared), options.most))
    print("\n" + describe(compared, options.most))


def describe_phases(groups: Mapping[Key, Group], found: Mapping[str, Any], update_s: float) -> str:
    """Kernel, host and wall milliseconds of each phase, and the page faults of a step."""
    lines = [["ms per step", "predicted kernels", "measured kernels", "measured wall"]]
    host_s = groups["forward", "(host)", ()].predicted_s
    for phase, wall_s in zip(PHASES, found["phases_s"], strict=True):
        of_phase = [group for key, group in groups.items() if key[0] == phase]
        kernels_s = sum(group.predicted_s for group in of_phase)
        kernels_s -= host_s if phase == "forward" else 0.0
        seen_s = sum(group.measured_s for group in of_phase)
        cells = (update_s if phase == "update" else kernels_s, seen_s, wall_s)
        lines.append([phase, *(f"{1e3 * seconds:.2f}" for seconds in cells)])
    wall_s = sum(found["phases_s"])
    total_s = sum(group.predicted_s for group in groups.values()) + update_s
    return "\n".join(
        [
            format_table(lines),
            f"predicted host {1e3 * host_s:.2f} ms; predicted step {1e3 * total_s:.2f} ms, "
            f"measured {1e3 * wall_s:.2f} ms ({100 * (total_s / wall_s - 1):+.1f} %), "
            f"clocked {1e3 * found['clocked_s']:.2f} ms",
            f"page faults per step: {found['faults_per_step']:.0f}",
        ]
    )


if __name__ == "__main__":
    main()
