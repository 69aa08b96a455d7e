"""Gather the ranks, give them tasks in rounds, and notice which are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.board import Board, Pulse
from estimator.probe.members import Member

_LOOK_S = 0.02
# How long ranks may take to end a measurement that was called off.
CALLED_OFF_S = 4.0
_GOODBYE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function that some ranks run together in a process group, or one rank `alone`.

    The function is ``module:name``: ``(rank, world_size, arguments)`` in a group, rank by position
    in `ranks`; ``(arguments)`` alone, in the rank's own process. Arguments are JSON values.
    """

    ranks: tuple[int, ...]
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a task: reports and results by rank, and why ranks failed."""

    task: Task
    reports: dict[int, list[Any]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every rank came to the end."""
        return not self.failures

    def by_position(self) -> list[list[Any]]:
        """The reports of every rank, in the order of the task's ranks."""
        return [self.reports.get(rank, []) for rank in self.task.ranks]


class Leader:
    """Rank 0's side of the conversation."""

    def __init__(self, board: Board, world_size: int) -> None:
        self.board, self.world_size = board, world_size
        self.lost: dict[int, str] = {}
        self._rounds = 0
        self._members: tuple[int, ...] = ()
        self._watches: list[_Watch] = []
        self._pulse = Pulse(range(world_size))
        self._heard_at = time.monotonic()

    def gather_hellos(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """What each rank says of itself; ranks that have not come by then are lost."""
        found = self._collect("hello", range(self.world_size), timeout_s)
        for rank in range(self.world_size):
            if rank not in found:
                self.lost[rank] = f"rank {rank} did not start within {timeout_s:.0f} s"
        return found

    def welcome(
        self, welcomes: Mapping[int, Mapping[str, Any]], timeout_s: float
    ) -> tuple[Member, ...]:
        """Tell each rank its part; the members that are ready. Raises ProbeError if none is."""
        for rank, words in welcomes.items():
            self.board.post(f"welcome/{rank}", words)
        coming = [rank for rank, words in welcomes.items() if "turned_away" not in words]
        found = self._collect("member", coming, timeout_s)
        members = []
        for rank in coming:
            answer = found.get(rank, {"failure": f"rank {rank} fell silent at the start"})
            if "failure" in answer:
                self.lost[rank] = answer["failure"]
            else:
                members.append(Member.from_dict(answer))
        if not members:
            raise ProbeError(next(iter(self.lost.values()), "no rank is left; start them again"))
        self._members = tuple(member.rank for member in members)
        return tuple(members)

    def _collect(self, kind: str, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in found and self.board.has(f"{kind}/{rank}"):
                    found[rank] = self.board.read(f"{kind}/{rank}")
            time.sleep(_LOOK_S)
        return found

    def run(
        self,
        tasks: Sequence[Task],
        *,
        timeout_s: float,
        tell: Callable[[], None] | None = None,
    ) -> list[Outcome]:
        """Run tasks of unlike ranks at once; what came of each, at the latest after `timeout_s`.

        A task of which a rank fails or is lost is called off for its other ranks.
        """
        number = self._rounds
        self._rounds += 1
        self.board.post(
            f"round/{number}",
            [
                {
                    "ranks": list(task.ranks),
                    "function": task.function,
                    "arguments": dict(task.arguments),
                    "alone": task.alone,
                    "timeout_s": timeout_s,
                }
                for task in tasks
            ],
        )
        watches = [_Watch(self.board, f"{number}/{i}", task) for i, task in enumerate(tasks)]
        self._watches = watches
        deadline = time.monotonic() + timeout_s
        while any(watch.waiting for watch in watches):
            time.sleep(_LOOK_S)
            silent = self._silent({rank for watch in watches for rank in watch.waiting})
            for watch in watches:
                watch.look(silent, is_late=time.monotonic() > deadline)
            if tell is not None:
                tell()
        for watch in watches:
            for rank in watch.lost:
                self.lost.setdefault(rank, "stopped answering")
        self._watches = []
        return [watch.outcome for watch in watches]

    def _silent(self, ranks: set[int]) -> set[int]:
        now = time.monotonic()
        tick_s, self._heard_at = now - self._heard_at, now
        return {
            rank
            for rank in ranks
            if not self._pulse.listen(rank, self.board.read(f"beat/{rank}"), tick_s)
        }

    def finish(self) -> None:
        """Tell all ranks that it is over, and let them hear it before the store ends.

        What is under way, where an interruption ended the watch over it, is called off.
        """
        for watch in self._watches:
            watch.call_off()
        self.board.post(f"round/{self._rounds}", "over")
        living = [rank for rank in self._members if rank not in self.lost]
        self._collect("goodbye", living, _GOODBYE_S)


class _Watch:
    """A task under way: who has not ended yet, and since when it is called off."""

    def __init__(self, board: Board, key: str, task: Task) -> None:
        self.board, self.key = board, key
        self.outcome = Outcome(task=task)
        self.waiting = set(task.ranks)
        self.lost: set[int] = set()
        self._called_off_at: float | None = None

    def look(self, silent: set[int], *, is_late: bool) -> None:
        """Take the reports of ranks that have ended, and give up on those that are lost."""
        for rank in sorted(self.waiting):
            if self.board.has(f"done/{self.key}/{rank}"):
                self._take_end(rank)
            elif rank in silent:
                self._give_up(rank, "stopped answering")
        if self.waiting and (is_late or self.outcome.failures):
            self.call_off()
            if time.monotonic() - (self._called_off_at or 0.0) > CALLED_OFF_S:
                for rank in sorted(self.waiting):
                    self._give_up(rank, "did not end in time")

    def call_off(self) -> None:
        """Have the ranks that still measure end it."""
        if self._called_off_at is None:
            self._called_off_at = time.monotonic()
            self.board.post(f"cancel/{self.key}", True)

    def _take_end(self, rank: int) -> None:
        end = self.board.read(f"done/{self.key}/{rank}")
        self.waiting.discard(rank)
        self.outcome.reports[rank] = [
            self.board.read(f"report/{self.key}/{rank}/{count}") for count in range(end["reports"])
        ]
        self.outcome.results[rank] = end["result"]
        if end["failure"] is not None:
            self.outcome.failures[rank] = end["failure"]

    def _give_up(self, rank: int, why: str) -> None:
        """Keep what a rank reported before it was lost."""
        self.waiting.discard(rank)
        self.lost.add(rank)
        self.outcome.failures[rank] = why
        reports: list[Any] = []
        while self.board.has(f"report/{self.key}/{rank}/{len(reports)}"):
            reports.append(self.board.read(f"report/{self.key}/{rank}/{len(reports)}"))
        self.outcome.reports[rank] = reports
