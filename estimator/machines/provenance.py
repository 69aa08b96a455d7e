"""Say where numbers come from and what disturbed them, and refuse numbers that cannot be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from estimator.errors import quoted
from estimator.units import format_ratio

Source = Literal["measured", "imported", "fitted", "datasheet"]


# Repeats of an undisturbed probe differ by less.
_MATTERS = 0.1
# Beyond any quantity of a machine, and few enough digits that products stay finite.
LEAST, MOST = 1e-30, 1e30


def check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not LEAST <= value <= MOST:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be positive, at most {MOST:g}, found "
                f"{quoted(value)}"
            )


def check_not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 <= value <= MOST:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be 0 or more, at most {MOST:g}, found "
                f"{quoted(value)}"
            )


def check_points(owner: object, points: Iterable[tuple[float, float]]) -> None:
    for size, seconds in points:
        if not (0 <= size <= MOST and LEAST <= seconds <= MOST):
            raise ValueError(
                f"{type(owner).__name__}.points must be (bytes >= 0, seconds > 0), "
                f"found ({size}, {seconds})"
            )


def check_rising_shares(owner: object, name: str) -> None:
    """Points of (bytes, share): larger and larger bytes, and shares of 0 to 1 that never fall."""
    points = ((0.0, 0.0), *getattr(owner, name), (MOST, 1.0))
    for (size, share), (next_size, next_share) in itertools.pairwise(points):
        if not (size < next_size <= MOST and share <= next_share <= 1):
            raise ValueError(
                f"{type(owner).__name__}.{name} must be (bytes, share), both rising, shares 0 to "
                f"1, found ({next_size}, {next_share}) after ({size}, {share})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a group of numbers comes from, and how far its fit or its repeats disagree."""

    source: Source
    at: str = ""
    samples: int = 0
    relative_error: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        check_not_negative(self, "samples", "relative_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What other programs did to the measurements of a profile.

    They used `others_ratio` of the cores' time meanwhile, and the canary took `canary_ratio` times
    as long as usual; `waited_s` went by in waiting for them and measuring `repeats` parts again.
    """

    others_ratio: float = 0.0
    canary_ratio: float = 1.0
    waited_s: float = 0.0
    repeats: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "canary_ratio")
        check_not_negative(self, "others_ratio", "waited_s", "repeats")

    @property
    def relative_error(self) -> float:
        """How far log times may be off: what shares cores for r of the time takes 1 / (1 − r)."""
        idle_ratio = 1 - min(self.others_ratio, 0.9)
        return max(-math.log(idle_ratio), math.log(self.canary_ratio))

    @property
    def matters(self) -> bool:
        """Whether estimates are to say so, and `check` is to fail."""
        return self.relative_error > _MATTERS

    def __str__(self) -> str:
        used = f"other programs used {format_ratio(self.others_ratio)} of the cores"
        if self.canary_ratio <= 1 + _MATTERS:
            return used
        slower = f"a fixed matmul took {self.canary_ratio:.2f} times as long as usual"
        return f"{used}, and {slower}" if self.others_ratio > _MATTERS else slower
