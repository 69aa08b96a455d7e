"""Hold what a part of a probe of several nodes is given, and run its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from estimator.probe.leader import Leader, Outcome, Task
from estimator.probe.members import Crew

# A task of so many planned seconds also starts and ends; that much of them is for measuring.
MEASURING_RATIO = 0.85
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Who measures a part, how long it should take, when it is called off, whom to keep informed.

    `ends_at` is by `time.monotonic`.
    """

    crew: Crew
    planned_s: float
    ends_at: float
    tell: Callable[[], None]

    @property
    def backend(self) -> str:
        """What the members' devices communicate with."""
        return "nccl" if self.crew.members[0].device.kind == "cuda" else "gloo"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the probe, its share of the time, and how to measure it.

    `measure` returns why it failed, or "".
    """

    name: str
    share: float
    measure: Callable[[Slot], str]


def run_task(leader: Leader, task: Task, slot: Slot) -> Outcome:
    """Run one task within the slot."""
    timeout_s = max(_LEAST_TIMEOUT_S, slot.ends_at - time.monotonic())
    (outcome,) = leader.run([task], timeout_s=timeout_s, tell=slot.tell)
    return outcome


def why_failed(outcome: Outcome) -> str:
    """The failure that made the others fail, or "": a lost peer is a consequence, not a cause."""
    consequences = ("Connection closed", "Connection reset", "died without a result", "Timed out")
    reasons = list(outcome.failures.values())
    causes = [why for why in reasons if not any(words in why for words in consequences)]
    return (causes or reasons or [""])[0]
