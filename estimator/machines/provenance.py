"""Say where a group of numbers comes from, and refuse numbers that cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from estimator.errors import quoted

Source = Literal["measured", "imported", "fitted", "datasheet"]


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
