"""Add the tasks of one micro-batch under FSDP2, in the order in which they are issued."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from estimator.timeline.shard_costs import ShardedPasses
from estimator.timeline.spans import Label
from estimator.timeline.tasks import COMPUTE, NETWORK, NO_LABEL, REPLICATES, TaskList

# Compute between passes through units, which a timeline lists operator by operator.
SEGMENTS = (Label("", phase="forward"), Label("", phase="backward"))


class UnitCosts(NamedTuple):
    """Seconds of each unit's collectives: (units,) of one step, (units, rows) of many."""

    gather_s: Any
    scatter_s: Any
    reduce_s: Any


class MicroBatch:
    """Adds the tasks of one micro-batch in the order in which FSDP issues them."""

    def __init__(
        self,
        tasks: TaskList,
        passes: ShardedPasses,
        segments_s: Any,
        costs: UnitCosts,
        *,
        blocks: bool,
        named: bool = False,
    ) -> None:
        self._tasks, self._passes, self._blocks = tasks, passes, blocks
        self._named = named
        self._costs = costs
        self._replicates = bool(np.any(costs.reduce_s))
        forward, backward = len(passes.forward_ends), len(passes.backward_ends)
        units = len(passes.gathered_bytes)
        self._forward_s = segments_s[:forward]
        self._backward_s = segments_s[forward : forward + backward]
        copies_s = segments_s[forward + backward :]
        self._out_s, self._in_s = copies_s[:units], copies_s[units : 2 * units]
        # The last task of all: all ranks had ended the micro-batch before.
        self._begun = len(tasks.tasks) - 1 if tasks.tasks else None
        self._gathered: dict[int, int] = {}
        self._copied: list[int] = []
        self._scattered: int | None = None
        self._reduced: int | None = None

    def _add(self, lane: str, cost_s: Any, *after: int | None, of: tuple[str, int]) -> int:
        """Add what is done to a unit; where collectives block, after the task before it."""
        label = Label(f"{of[0]} unit {of[1]}") if self._named else NO_LABEL
        return self._tasks.add(lane, cost_s, *after, self._before, label=label)

    def _gather(self, unit: int, *after: int | None) -> int | None:
        if not self._passes.gathered_bytes[unit]:
            return None
        cost_s = self._costs.gather_s[unit]
        return self._add(NETWORK, cost_s, *after, of=("all-gather", unit))

    def _copy_out(self, unit: int, gathered: int | None) -> None:
        copied = self._add(COMPUTE, self._out_s[unit], gathered, of=("copy out", unit))
        self._copied.append(copied)

    def add(self, *, reducing: bool) -> None:
        """Add all; gradients are reduced, or kept whole on every rank."""
        self._forward()
        self._backward(reducing=reducing)
        self._end()

    def _compute(self, segment: Label, cost_s: Any) -> None:
        self._tasks.add(COMPUTE, cost_s, self._before, label=segment)

    @property
    def _before(self) -> int | None:
        """The task before, where collectives block their rank."""
        return len(self._tasks.tasks) - 1 if self._blocks and self._tasks.tasks else None

    def _forward(self) -> None:
        """A gather may run beside the compute of two blocks: until the one before them is copied.

        The buffers of two gathers exist at a time (wait_for_unshard).
        """
        passes = self._passes
        self._copy_out(0, self._gather(0, self._begun))
        self._compute(SEGMENTS[0], self._forward_s[0])
        for place, unit in enumerate(passes.forward, start=1):
            room = self._copied[place - 2] if place > 1 else self._begun
            self._copy_out(unit, self._gather(unit, room))
            self._compute(SEGMENTS[0], self._forward_s[place])
        self._compute(SEGMENTS[0], self._forward_s[-1])

    def _backward(self, *, reducing: bool) -> None:
        """Beside a block's compute the next one is gathered and the one before scattered.

        A block's gradients are copied in when the block before has been scattered (post_backward).
        """
        passes = self._passes
        units, regathers = passes.backward, passes.regathers
        gathered = self._gather(units[0], self._copied[-1]) if units and regathers else None
        self._compute(SEGMENTS[1], self._backward_s[0])
        last_pass = {unit: place for place, unit in enumerate(units)}
        for place, unit in enumerate(units):
            if regathers:
                self._copy_out(unit, gathered)
            if regathers and place + 1 < len(units):
                gathered = self._gather(units[place + 1], self._copied[-1])
            self._compute(SEGMENTS[1], self._backward_s[place + 1])
            if reducing and last_pass[unit] == place:
                self._reduce(unit)
        self._compute(SEGMENTS[1], self._backward_s[-1])
        if reducing:
            self._reduce(0)

    def _reduce(self, unit: int) -> None:
        if not self._passes.reduced_bytes[unit]:
            return
        copied = self._add(COMPUTE, self._in_s[unit], self._scattered, of=("copy in", unit))
        scatter_s = self._costs.scatter_s[unit]
        self._scattered = self._add(NETWORK, scatter_s, copied, of=("reduce-scatter", unit))
        if self._replicates:
            reduce_s = self._costs.reduce_s[unit]
            reduced = self._add(REPLICATES, reduce_s, self._scattered, of=("all-reduce", unit))
            self._reduced = reduced

    def _end(self) -> None:
        """All ranks have computed, and all gradients are reduced."""
        computed = self._tasks.add(COMPUTE, 0.0, self._before)
        joined = self._tasks.add(NETWORK, 0.0, computed, self._scattered, self._reduced)
        self._tasks.add(COMPUTE, 0.0, joined)
