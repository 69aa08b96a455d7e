"""Say what a step is made of: pieces of work on lanes; and hold what ran where and when.

Work on the lane `COMPUTE` is done by every class of ranks for itself; every other lane is a
communicator, whose collectives begin when all ranks have come to them. A lane takes its tasks in
order; a communicator sends up to `slots` collectives at a time, which share its rate, and a
collective's latency passes before it is sent, beside the one before, at no cost to either.
While any collective is sent and any rank computes, each slows the other as `Overlap` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np

from estimator.elementwise import Array, Indices

Lane = Literal["host", "compute", "network", "h2d", "d2h"]
LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing on one lane of one rank, seconds from the start of the step."""

    name: str
    rank: int
    lane: Lane
    start_s: float
    duration_s: float
    module: str = ""
    phase: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class Label(NamedTuple):
    """What a span shows beside its place and time."""

    name: str
    module: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanColumns(Sequence[Span]):
    """Many spans as columns; a `Span` is made of one when it is looked at.

    `label` holds indices into `labels`, `lane` indices into `LANES`.
    """

    labels: Sequence[Label]
    label: Indices
    rank: Indices
    lane: Indices
    start_s: Array
    duration_s: Array

    def __len__(self) -> int:
        return len(self.label)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> SpanColumns: ...
    def __getitem__(self, index: int | slice) -> Span | SpanColumns:
        if isinstance(index, int):
            return next(iter(self[range(len(self))[index] :][:1]))
        return SpanColumns(
            labels=self.labels,
            label=self.label[index],
            rank=self.rank[index],
            lane=self.lane[index],
            start_s=self.start_s[index],
            duration_s=self.duration_s[index],
        )

    def __iter__(self) -> Iterator[Span]:
        columns = (self.label, self.rank, self.lane, self.start_s, self.duration_s)
        for label, rank, lane, start_s, duration_s in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            name, module, phase = self.labels[label]
            yield Span(
                name=name,
                rank=rank,
                lane=LANES[lane],
                start_s=start_s,
                duration_s=duration_s,
                module=module,
                phase=phase,
            )


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step of every rank; a rank of a class shares the spans of its class."""

    step_time_s: float
    spans: Sequence[Span]
    ranks_like: tuple[int, ...]
    """For each rank, the rank whose spans are listed for it (itself, or its equal twin)."""


def flat_tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few tracks as keep those of one track apart, to the nanosecond."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for track in tracks:
            if whole_ns(track[-1].end_s) <= whole_ns(span.start_s):
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def whole_ns(seconds: float) -> int:
    """Nanoseconds, as viewers keep them; rounding both ends of a span keeps neighbours apart."""
    return round(seconds * 1e9)


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
