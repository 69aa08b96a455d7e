"""Say what a step is made of: pieces of work on lanes, each in order and after others.

Work on the lane `COMPUTE` is done by every class of ranks for itself; every other lane is a
communicator, whose collectives begin when all ranks have come to them. A lane takes its tasks in
order; a communicator sends up to `slots` collectives at a time, which share its rate, and a
collective's latency passes before it is sent, beside the one before, at no cost to either.
While any collective is sent and any rank computes, each slows the other as `Overlap` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.timeline.spans import Label

Array = NDArray[np.float64]

NO_LABEL = Label("")
COMPUTE = "compute"
# Lanes of communicators: the data-parallel group, or FSDP's two.
NETWORK = "network"
REPLICATES = "network between replicates"


class Task(NamedTuple):
    """One piece of work; it starts once its lane is free and every task of `after` has ended.

    `cost_s` is what it takes alone: of a collective a number, or a row for each of many steps; of
    compute that as well, with one more axis in front where there are several kinds of ranks.
    Of a collective, `latency_s` of that pass without work for the link, in the time of compute.
    """

    lane: str
    cost_s: Any
    after: tuple[int, ...] = ()
    latency_s: Any = 0.0
    label: Label = NO_LABEL


class TaskList:
    """Tasks in an order in which every one comes after all that it waits for."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self,
        lane: str,
        cost_s: Any,
        *after: int | None,
        latency_s: Any = 0.0,
        label: Label = NO_LABEL,
    ) -> int:
        """Add a task and return its number; None among `after` stands for no task."""
        waits = tuple(each for each in after if each is not None)
        self.tasks.append(Task(lane, cost_s, waits, latency_s, label))
        return len(self.tasks) - 1


def kinds_of(tasks: Sequence[Task]) -> int:
    """How many kinds of ranks compute in tasks of one step."""
    return max((np.size(task.cost_s) for task in tasks if task.lane == COMPUTE), default=1)
