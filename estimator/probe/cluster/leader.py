"""Gather the ranks, give them tasks in rounds, and notice which are lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from estimator.errors import ProbeError
from estimator.probe.cluster.findings import Member, WorkerGroup
from estimator.probe.cluster.messages import (
    Assignment,
    End,
    HeartbeatMonitor,
    MemberMessage,
    MessageStore,
    NotReady,
    Rendezvous,
    Round,
    TaskMessage,
    checked,
    checked_answers,
)
from estimator.probe.cluster.worker import FUNCTIONS, FunctionName

_POLL_S = 0.02
# How long ranks may take to end what was called off; the dead are noticed before that.
CALLED_OFF_S = HeartbeatMonitor.PATIENCE_S + 1.0
# How long they may take to hear that it is over; launchers that end a job (Open MPI: SIGTERM, then
# SIGKILL after 1 s) leave less.
_LEAVE_S, _SHORT_LEAVE_S = 3.0, 0.3
# A task of so many planned seconds also starts and ends; that much of them is for measuring.
_MEASURING_RATIO = 0.85
_LEAST_TIMEOUT_S = 1.0
# What a rank says when a peer of its group is lost.
_CONSEQUENCES = ("Connection closed", "Connection reset", "died without a result", "Timed out")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One of the listed functions that some ranks run in a process group, or one rank alone.

    Its rank in a group is the position in `ranks`. Arguments are JSON values.
    """

    ranks: tuple[int, ...]
    function: FunctionName
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether it runs in a rank's own process, without a group."""
        return FUNCTIONS[self.function].alone


@dataclass(slots=True, kw_only=True)
class TaskOutcome:
    """What came of a task: reports and results by rank, and why ranks failed."""

    task: RankTask
    reports: dict[int, list[Any]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """The failure that made the others fail, or "": a lost peer is no cause."""
        reasons = list(self.failures.values())
        causes = [why for why in reasons if not any(words in why for words in _CONSEQUENCES)]
        return (causes or reasons or [""])[0]

    def by_position(self) -> list[list[Any]]:
        """The reports of every rank, in the order of the task's ranks."""
        return [self.reports.get(rank, []) for rank in self.task.ranks]


class Leader:
    """Rank 0's side of the conversation; `stop` calls off what is under way."""

    def __init__(self, store: MessageStore, world_size: int, stop: threading.Event) -> None:
        self.store, self.world_size, self.stop = store, world_size, stop
        self.lost: dict[int, str] = {}
        self._rounds = 0
        self._members: tuple[int, ...] = ()
        self._heartbeats = HeartbeatMonitor(range(world_size))
        self._heard_at = time.monotonic()

    def gather_ranks(self, timeout_s: float) -> dict[int, Rendezvous]:
        """What each rank says of itself; ranks that have not come by then are lost."""
        found: dict[int, Rendezvous] = {}
        for rank, value in self._collect("rendezvous", range(self.world_size), timeout_s).items():
            try:
                found[rank] = checked(Rendezvous, value, f"rank {rank}")
            except ProbeError as error:
                self.lost[rank] = str(error)
        for rank in range(self.world_size):
            if rank not in found:
                self.lost.setdefault(rank, f"rank {rank} did not start within {timeout_s:.0f} s")
        return found

    def assign(self, assignments: Mapping[int, Assignment], timeout_s: float) -> tuple[Member, ...]:
        """Tell each rank its part; the members that are ready. Raises ProbeError if none is."""
        for rank, assignment in assignments.items():
            self.store.post(f"assignment/{rank}", assignment.model_dump())
        coming = [rank for rank, assignment in assignments.items() if not assignment.refused]
        found = self._collect("member", coming, timeout_s)
        members = []
        for rank in coming:
            try:
                members.append(_member_from(found.get(rank), rank))
            except ProbeError as error:
                self.lost[rank] = str(error)
        if not members:
            raise ProbeError(next(iter(self.lost.values()), "no rank is left; start them again"))
        self._members = tuple(member.rank for member in members)
        return tuple(members)

    def _collect(self, kind: str, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(ranks) and time.monotonic() < deadline:
            if self.stop.is_set():
                raise KeyboardInterrupt
            for rank in ranks:
                if rank not in found:
                    value = self.store.read(f"{kind}/{rank}")
                    if value is not None:
                        found[rank] = value
            time.sleep(_POLL_S)
        return found

    def run(
        self,
        tasks: Sequence[RankTask],
        *,
        timeout_s: float,
        tell: Callable[[], None],
    ) -> list[TaskOutcome]:
        """Run tasks of unlike ranks at once; what came of each, at the latest after `timeout_s`.

        A task of which a rank fails or is lost is called off for its other ranks. What is called
        off may take another CALLED_OFF_S to end.
        """
        number = self._rounds
        self._rounds += 1
        messages = [
            TaskMessage(
                ranks=list(task.ranks),
                function=task.function,
                arguments=dict(task.arguments),
                timeout_s=max(_LEAST_TIMEOUT_S, timeout_s),
            )
            for task in tasks
        ]
        self.store.post(f"round/{number}", Round(tasks=messages).model_dump())
        running = [_RunningTask(self.store, f"{number}/{i}", task) for i, task in enumerate(tasks)]
        deadline = time.monotonic() + timeout_s
        while any(one.waiting for one in running):
            time.sleep(_POLL_S)
            silent = self._silent({rank for one in running for rank in one.waiting})
            is_late = time.monotonic() > deadline
            for one in running:
                one.poll(silent, is_late=is_late, is_stopped=self.stop.is_set())
            tell()
        for one in running:
            for rank, why in one.lost.items():
                self.lost.setdefault(rank, why)
        return [one.outcome for one in running]

    def _silent(self, ranks: set[int]) -> set[int]:
        now = time.monotonic()
        tick_s, self._heard_at = now - self._heard_at, now
        return {
            rank
            for rank in ranks
            if not self._heartbeats.listen(rank, self.store.read(f"beat/{rank}"), tick_s)
        }

    def finish(self) -> None:
        """Tell all ranks that it is over, and let them hear it before the store ends."""
        self.store.post(f"round/{self._rounds}", Round(tasks=[]).model_dump())
        patience_s = _SHORT_LEAVE_S if self.stop.is_set() else _LEAVE_S
        deadline = time.monotonic() + patience_s
        living = [rank for rank in self._members if rank not in self.lost]
        while living and time.monotonic() < deadline:
            living = [rank for rank in living if self.store.read(f"leave/{rank}") is None]
            time.sleep(_POLL_S)


class _RunningTask:
    """A task under way: who has not ended yet, and since when it is called off."""

    def __init__(self, store: MessageStore, key: str, task: RankTask) -> None:
        self.store, self.key = store, key
        self.outcome = TaskOutcome(task=task)
        self.waiting = set(task.ranks)
        self.lost: dict[int, str] = {}
        self._called_off_at: float | None = None

    def poll(self, silent: set[int], *, is_late: bool, is_stopped: bool) -> None:
        """Take the reports of ranks that have ended, and give up on those that are lost.

        Stopped, it takes the reports that are there; what runs alone reports once it has ended.
        """
        for rank in sorted(self.waiting):
            end = self.store.read(f"done/{self.key}/{rank}")
            if end is not None:
                self._take_end(rank, end)
            elif rank in silent:
                self._give_up(rank, "stopped answering")
        if self.waiting and (is_late or is_stopped or self.outcome.failures):
            now = time.monotonic()
            if self._called_off_at is None:
                self._called_off_at = now
                self.store.post(f"cancel/{self.key}", True)
            patience_s = 0.0 if is_stopped and not self.outcome.task.alone else CALLED_OFF_S
            if now - self._called_off_at >= patience_s:
                for rank in sorted(self.waiting):
                    self._give_up(rank, "did not end in time")

    def _take_end(self, rank: int, message: Any) -> None:
        self.waiting.discard(rank)
        try:
            end = checked(End, message, f"rank {rank}")
            self.outcome.reports[rank] = self._reports(rank, end.reports)
            if end.result is not None:
                checked_answers(self._answer, [end.result], f"rank {rank}")
                self.outcome.results[rank] = end.result
            if end.failure is not None:
                self.outcome.failures[rank] = end.failure
        except ProbeError as error:
            self.outcome.failures[rank] = str(error)

    def _give_up(self, rank: int, why: str) -> None:
        """Keep what a rank reported before it was lost."""
        self.waiting.discard(rank)
        self.lost[rank] = self.outcome.failures[rank] = why
        with contextlib.suppress(ProbeError):
            self.outcome.reports[rank] = self._reports(rank, None)

    @property
    def _answer(self) -> TypeAdapter[Any]:
        return FUNCTIONS[self.outcome.task.function].answer

    def _reports(self, rank: int, count: int | None) -> list[Any]:
        """So many reports of a rank, or as many as there are; raises ProbeError."""
        reports: list[Any] = []
        while count is None or len(reports) < count:
            report = self.store.read(f"report/{self.key}/{rank}/{len(reports)}")
            if report is None:
                break
            reports.append(report)
        checked_answers(self._answer, reports, f"rank {rank}")
        if count is not None and len(reports) < count:
            raise ProbeError(f"rank {rank} sent {count} reports, {len(reports)} of them signed")
        return reports


def _member_from(answer: Any, rank: int) -> Member:
    """The member that a rank has become; raises ProbeError saying why it has not."""
    if answer is None:
        raise ProbeError(f"rank {rank} fell silent at the start")
    if isinstance(answer, dict) and "failure" in answer:
        raise ProbeError(checked(NotReady, answer, f"rank {rank}").failure)
    message = checked(MemberMessage, answer, f"rank {rank}")
    if message.rank != rank:
        raise ProbeError(f"rank {rank} calls itself rank {message.rank}; start every rank once")
    return Member.from_dict(message.model_dump())


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Who measures a part, how long that should take, when it is called off.

    `ends_at` is by `time.monotonic`; `tell` is called all the time.
    """

    leader: Leader
    workers: WorkerGroup
    planned_s: float
    ends_at: float
    tell: Callable[[], None]

    @property
    def measuring_s(self) -> float:
        """Of the planned seconds, what is left for measuring."""
        return _MEASURING_RATIO * self.planned_s

    @property
    def backend(self) -> str:
        """What the members' devices communicate with."""
        return "nccl" if self.workers.members[0].device.kind == "cuda" else "gloo"

    def run(self, task: RankTask) -> TaskOutcome:
        """Run one task within the slot."""
        timeout_s = max(_LEAST_TIMEOUT_S, self.ends_at - time.monotonic())
        (outcome,) = self.leader.run([task], timeout_s=timeout_s, tell=self.tell)
        return outcome
