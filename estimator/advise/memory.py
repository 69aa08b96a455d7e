"""Say where the memory of an estimated step goes, and what holds it at the peak."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import WorkloadError
from estimator.estimates import Estimate
from estimator.graph.memory import PeakMemory
from estimator.graph.memory_curve import (
    LiveTensor,
    MemoryCurve,
    MemoryKind,
    by_module,
    live_tensors,
    tensors_of,
)
from estimator.graph.memory_curve import memory_curve as curve_of
from estimator.graph.op_graph import BoundGraph
from estimator.graph.shard_play import Reduction
from estimator.timeline.plan import StepPlan
from estimator.timeline.played import op_times_s, played_step
from estimator.timeline.ranks import RankKind

_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryReport:
    """The memory of the rank of an estimate that needs most: over its step, and at the peak.

    `every_tensor` are those of the step, `bound` its graph at its batch, `kind` the rank; `peak_op`
    and `peak_module` name the op at the peak ("update" for it).
    """

    answer: Estimate
    bound: BoundGraph
    curve: MemoryCurve
    kind: RankKind
    every_tensor: tuple[LiveTensor, ...]
    device_bytes: int

    @property
    def times_s(self) -> NDArray[np.float64]:
        """When each op of the last micro-batch begins, the update last, and when the step ends.

        On the axis of the step's timeline, so that an op begins when the one before has ended.
        """
        plan = _fullest(self.answer)
        step = played_step(plan)
        number = next(place for place, each in enumerate(step.kinds) if each is self.kind)
        *_, (starts_s, ends_s) = op_times_s(plan, step, number)
        is_only = self.answer.accumulation_steps == 1
        begin_s = [0.0] if is_only else starts_s[:1]
        return np.concatenate([begin_s, ends_s, [step.played.step_s]])

    @property
    def tensors(self) -> tuple[LiveTensor, ...]:
        """Those alive at the peak, the largest first."""
        return live_tensors(self.every_tensor, self.curve.peak_at)

    @property
    def peak_op(self) -> str:
        op = self._op
        return op.call.target if op else "update"

    @property
    def peak_module(self) -> str:
        op = self._op
        return op.module if op else ""

    @property
    def _op(self) -> Any:
        ops = self.bound.graph.ops
        place = self.curve.peak_at
        return ops[place] if place < len(ops) else None

    @property
    def modules(self) -> dict[str, int]:
        """Bytes alive at the peak by module, the most first."""
        return by_module(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "model": self.answer.model,
            "allocation": str(self.answer.allocation),
            "strategy": self.answer.strategy,
            "batch_per_gpu": self.answer.batch_per_gpu,
            "device_bytes": self.device_bytes,
            "fits": self.answer.fits,
            "peak_bytes": self.curve.peak_bytes,
            "peak_op": self.peak_op,
            "peak_module": self.peak_module,
            "at_peak_bytes": self.curve.at(self.curve.peak_at),
            "modules_bytes": self.modules,
            "tensors": [asdict(tensor) for tensor in self.tensors[:_MOST_LISTED]],
            "end_s": self.times_s[1:].tolist(),
            "levels_bytes": {kind: each.tolist() for kind, each in self.curve.levels.items()},
        }


def memory_of(answer: Estimate) -> MemoryReport:
    """The memory of an estimated step over time; raises WorkloadError for a summary.

    >>> # memory_of(est.estimate(graph, "1x1:rtx-2080-ti")).curve.peak_bytes
    """
    plan = _fullest(answer)
    if plan.members.table.graph.is_summary:
        raise WorkloadError(
            f"{answer.model} is a summary, whose tensors are not known; name the model itself"
        )
    kind = max(plan.kinds, key=lambda each: each.program.memory.peak(plan.shards).total_bytes)
    program = kind.program
    curve = curve_of(
        program.bound,
        optimizer=answer.optimizer,
        strategy=program.strategy,
        merging=program.merging,
        shards=plan.shards,
        buckets=[
            Reduction(after=bucket.ready_after, size_bytes=bucket.size_bytes)
            for bucket in program.buckets
        ],
        micro_batches=program.micro_batches,
        threads=program.profile.devices[0].threads,
    )
    if answer.pipeline:
        curve = _with_other_stages(curve, answer.memory, program.memory.peak(plan.shards))
    return MemoryReport(
        answer=answer,
        bound=program.bound,
        curve=curve,
        kind=kind,
        every_tensor=tensors_of(program.bound),
        device_bytes=kind.device.usable_bytes,
    )


def _fullest(answer: Estimate) -> StepPlan:
    """The plan of the ranks that hold most: of a pipeline, those of one stage."""
    return answer.pipeline.fullest if answer.pipeline else answer.plan


def _with_other_stages(curve: MemoryCurve, rank: PeakMemory, own: PeakMemory) -> MemoryCurve:
    """The curve of one stage with what its `rank` holds beside the stage's `own` peak.

    That is the other stages it has, and the activations of micro-batches that wait for their
    backward pass, which the rank's peak counts in the update too.
    """
    left_bytes = rank.total_bytes - own.total_bytes
    beside: dict[MemoryKind, int] = {
        "parameters": rank.parameters_bytes - own.parameters_bytes,
        "optimizer state": rank.optimizer_state_bytes - own.optimizer_state_bytes,
        "buffers and inputs": rank.buffers_bytes
        + rank.inputs_bytes
        - own.buffers_bytes
        - own.inputs_bytes,
        "activations": rank.activations_bytes - own.activations_bytes,
        "communication buffers": rank.bucket_bytes - own.bucket_bytes,
        "gradients": rank.gradients_bytes - own.gradients_bytes,
    }
    # Kinds have their peaks at different times: of the last ones no more is held than is left.
    levels = dict(curve.levels)
    for kind, size_bytes in beside.items():
        taken_bytes = min(size_bytes, left_bytes)
        left_bytes -= taken_bytes
        levels[kind] = levels[kind] + taken_bytes
    levels["temporaries"] = levels["temporaries"] + left_bytes
    return MemoryCurve(levels=levels)
