"""Say where a group of numbers comes from, and refuse numbers that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "imported", "fitted", "datasheet"]


def check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{type(owner).__name__}.{name} must be positive, found {value}")


def check_not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{type(owner).__name__}.{name} must not be negative, found {value}")


def check_points(owner: object, points: Iterable[tuple[float, float]]) -> None:
    for size, seconds in points:
        if not (math.isfinite(size) and size >= 0 and math.isfinite(seconds) and seconds > 0):
            raise ValueError(
                f"{type(owner).__name__}.points must be (bytes >= 0, seconds > 0), "
                f"found ({size}, {seconds})"
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
