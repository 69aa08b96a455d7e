"""Hold a simulated step: what ran where and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["host", "compute", "network", "h2d", "d2h"]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step of every rank; a rank of a class shares the spans of its class."""

    step_time_s: float
    spans: tuple[Span, ...]
    ranks_like: tuple[int, ...]
    """For each rank, the rank whose spans are listed for it (itself, or its equal twin)."""
