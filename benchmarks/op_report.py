"""Set the predicted seconds of each operator beside those seen in real steps of the same model.

``python benchmarks/op_report.py MODEL [--batch N]`` trains the model on one device, profiles some
steps with torch.profiler, and lists operators by how far prediction and measurement are apart. An
operator's measured time includes what it calls; operators inside the optimizer count as update.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from summary import format_table

from estimator.profile import MachineProfile, load_profile

WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 15, 5
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
    """Train in a pinned process: plain steps for the clock and page faults, then profiled ones."""
    import resource

    from torch.profiler import ProfilerActivity, profile

    step = make_step(arguments["model"], arguments["batch"])
    for _ in range(WARMUP_STEPS):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    timed = [step() for _ in range(TIMED_STEPS)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        profiled = [step() for _ in range(PROFILED_STEPS)]
    names = set(arguments["names"])
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for phase, event in outermost(profiler.events(), names):
        group = groups[phase, event.name, repr(shapes_of(event.input_shapes))]
        group[0] += event.cpu_time_total * 1e-6 / PROFILED_STEPS
        group[1] += 1 / PROFILED_STEPS
    return {
        "phases_s": [statistics.median(column) for column in zip(*timed, strict=True)],
        "profiled_s": statistics.median(sum(parts) for parts in profiled),
        "faults_per_step": faults / TIMED_STEPS,
        "groups": [[*key, *value] for key, value in groups.items()],
    }


def make_step(model_text: str, batch: int | None) -> Callable[[], tuple[float, ...]]:
    """One training step with AdamW, which returns the seconds of its phases."""
    import torch
    from torch.profiler import record_function

    from estimator.graph.models import load_model
    from estimator.graph.trace import loss_of

    torch.manual_seed(0)
    model, inputs, loss, _ = load_model(model_text, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> tuple[float, ...]:
        marks = [time.perf_counter()]
        with record_function("phase: forward"):
            optimizer.zero_grad(set_to_none=True)
            if isinstance(inputs, dict):
                output = model(**inputs)
            else:
                output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
            total = (loss or loss_of)(output, inputs)
        marks.append(time.perf_counter())
        with record_function("phase: backward"):
            total.backward()
        marks.append(time.perf_counter())
        with record_function("phase: update"):
            optimizer.step()
        marks.append(time.perf_counter())
        return tuple(end - begin for begin, end in itertools.pairwise(marks))

    return step


def outermost(events: Sequence[Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    """(phase, event) of every event so named that no other such event contains."""
    for event in events:
        if event.name not in names:
            continue
        parent, phase = event.cpu_parent, None
        while parent is not None and parent.name not in names:
            if parent.name.startswith("phase: "):
                phase = parent.name.removeprefix("phase: ")
            parent = parent.cpu_parent
        if parent is None and phase is not None:
            yield phase, event


def shapes_of(tree: Any) -> Shapes:
    """The shapes in the profiler's nested lists; scalars, which look like 0-d tensors, left out."""
    if not isinstance(tree, (list, tuple)) or not tree:
        return ()
    if all(isinstance(item, int) for item in tree):
        return (tuple(tree),)
    return tuple(shape for item in tree for shape in shapes_of(item))


def predict_groups(model_text: str, batch: int | None, profile: MachineProfile) -> dict[Key, Group]:
    """Predicted device seconds of each group of calls."""
    import torch

    from estimator.api import trace_model
    from estimator.graph.models import load_model
    from estimator.timeline.durations import op_durations

    torch.set_num_threads(1)
    model, inputs, loss, _ = load_model(model_text, batch=batch)
    bound = trace_model(model, inputs, loss=loss).at()
    durations = op_durations(bound, profile)
    groups: dict[Key, Group] = defaultdict(Group)
    for index, (op, call) in enumerate(zip(bound.graph.ops, bound.calls, strict=True)):
        shapes = tuple(spec.shape for spec in call.inputs if spec.shape)
        one = Group(
            predicted_s=float(durations.device_s[index]),
            calls=1,
            sources={durations.sources[index]},
        )
        groups[op.phase, event_name(call.target), shapes].add(one)
    host_s = float(durations.host_s.sum())
    groups["forward", "(host)", ()].add(Group(predicted_s=host_s))
    return groups


def event_name(target: str) -> str:
    """How the profiler calls an operator: ``aten.add.Tensor`` is ``aten::add`` there."""
    namespace, name = target.split(".")[:2]
    return f"{namespace}::{name}"


def predicted_update_s(model_text: str, batch: int | None, profile: MachineProfile) -> float:
    """The update's seconds as an estimate on one device has them."""
    from estimator.api import estimate, trace_model
    from estimator.graph.models import load_model

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
    from estimator.probe.ranks import run_on_devices

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="MODEL text, such as benchmarks/local_models.py:gpt2")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--profile", default="local", help="name or path of this machine's profile")
    parser.add_argument("--most", type=int, default=40, help="lines per table")
    options = parser.parse_args(arguments)
    profile = load_profile(options.profile)
    groups = predict_groups(options.model, options.batch, profile)
    update_s = predicted_update_s(options.model, options.batch, profile)
    names = sorted({name for _, name, _ in groups})
    (found,) = run_on_devices(
        profile.devices[:1],
        "op_report:profile_rank",
        {"model": options.model, "batch": options.batch, "names": names},
        timeout_s=600.0,
    )
    for phase, name, shapes, seconds, calls in found["groups"]:
        if phase != "update":
            groups[phase, name, parse_shapes(shapes)].add(Group(measured_s=seconds, seen=calls))
    print(describe_phases(groups, found, update_s))
    print("\n" + describe(by_name(groups), options.most))
    print("\n" + describe(groups, options.most))


def parse_shapes(text: str) -> Shapes:
    """The inverse of repr, for the shapes that came back as text."""
    import ast

    shapes: Shapes = ast.literal_eval(text)
    return shapes


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
            f"profiled {1e3 * found['profiled_s']:.2f} ms",
            f"page faults per step: {found['faults_per_step']:.0f}",
        ]
    )


if __name__ == "__main__":
    main()
