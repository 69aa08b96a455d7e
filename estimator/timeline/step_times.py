"""Carry the step times of a summary to a machine and batch; say what that takes for granted."""

from __future__ import annotations

import math

import numpy as np

from estimator.errors import ProfileError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.step_parts import StepPart, known_peak
from estimator.graph.summary import BLOCK_TENSORS
from estimator.machines.profile import MachineProfile
from estimator.tensors import OpCall
from estimator.timeline.contention import slowdown_ratio
from estimator.timeline.durations import Durations
from estimator.workload import Strategy

# Forward passes of BERT, GPT-2 and OPT on P4, P100, T4, V100 and A100, carried from one to another
# by their fp32 peaks (43 pairs; NeuSight, ASPLOS 2025, artifact), are off by 36 % (median).
_OTHER_MACHINE_ERROR = 0.36


def part_durations(
    bound: BoundGraph, profile: MachineProfile, *, devices_busy: int, update_s: float
) -> Durations:
    """Seconds of the parts of a step that was timed as a whole, its host's work included.

    `update_s` is what the update takes on one device alone: the rest of the step is the parts'. On
    another machine than the one it was timed on a step takes as much less time as the peak is
    higher. Raises ProfileError where a peak is not known.
    """
    parts = [StepPart.of(call) for call in bound.calls]
    line, batch = parts[0].line, parts[0].batch
    step_s = line.step_s(batch) * _peak_ratio(bound.graph, profile)
    error, source = line.error_at(batch), "fitted"
    if profile.name != bound.graph.timed_on:
        error, source = math.hypot(error, _OTHER_MACHINE_ERROR), "datasheet"
    elif line.low_batch <= batch <= line.high_batch:
        source = "measured"
    shares = np.array([part.share_ratio for part in parts])
    slowdown = np.array([_slowdown_ratio(call, profile, devices_busy) for call in bound.calls])
    return Durations(
        host_s=np.zeros(len(parts)),
        device_s=shares * slowdown * max(step_s - update_s, 0.0),
        sources=(source,) * len(parts),
        relative_errors=np.full(len(parts), error),
        in_grid=np.zeros(len(parts), dtype=bool),
    )


def _peak_ratio(graph: OpGraph, profile: MachineProfile) -> float:
    """Seconds on a machine over seconds on the one where the steps were timed."""
    if profile.name == graph.timed_on:
        return 1.0
    timed = StepPart.of(graph.ops[0].call).line.peak_flops_per_s
    own = known_peak(profile.devices[0], graph.precision)
    if timed is None or own is None:
        unknown = graph.timed_on if timed is None else profile.name
        raise ProfileError(
            f"step times of {graph.name} were measured on '{graph.timed_on}' and cannot be carried "
            f"to '{profile.name}', since the peak of '{unknown}' is not known; give step times of "
            f"'{profile.name}', or flops_per_sample alone"
        )
    return timed / own


def _slowdown_ratio(call: OpCall, profile: MachineProfile, devices_busy: int) -> float:
    """How much longer a part takes beside busy neighbours: half of it arithmetic, half memory."""
    moved_bytes = float(sum(spec.storage_bytes for spec in (*call.inputs, *call.outputs)))
    compute, memory = (
        slowdown_ratio(profile, bound_by, devices_busy, moved_bytes)
        for bound_by in ("compute", "memory")
    )
    return (compute + memory) / 2


def summary_assumptions(
    bound: BoundGraph, profile: MachineProfile, strategy: Strategy
) -> list[str]:
    """What a summary's graph takes for granted on this machine, batch and strategy."""
    graph, batch = bound.graph, bound.batch
    found = []
    if strategy.kind == "fsdp":
        found.append(f"FSDP gathers {BLOCK_TENSORS} parameter tensors at a time")
    if not graph.has_step_times or batch is None:
        return found
    line = StepPart.of(graph.ops[0].call).line
    if not line.low_batch <= batch <= line.high_batch:
        timed = dict.fromkeys((line.low_batch, line.high_batch))
        found.append(
            f"steps were timed at batch {' to '.join(map(str, timed))} and are taken to follow the "
            f"same line at batch {batch}"
        )
    if profile.name != graph.timed_on:
        found.append(
            f"steps were timed on '{graph.timed_on}' and take {_peak_ratio(graph, profile):.3g} "
            f"times as long on '{profile.name}', by the ratio of the devices' peaks"
        )
    return found
