"""Say in which keys the answers of two records differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_ABSENT = "absent"


class Difference(NamedTuple):
    """A key whose values differ; of two sentences with the same numbers only in their wording."""

    question: str
    key: str
    one: Any
    two: Any
    is_wording: bool = False


def differences(
    one: Mapping[str, Any], two: Mapping[str, Any], *, tolerance: float
) -> Iterator[Difference]:
    """Every key of every question whose answers differ, or that only one of them has."""
    for question in sorted({*one, *two}):
        pair = one.get(question, _ABSENT), two.get(question, _ABSENT)
        for key, first, second in _unequal("", *pair, tolerance, 0.0):
            yield Difference(question, key, first, second, _is_wording(first, second, tolerance))


def _unequal(
    key: str, one: Any, two: Any, tolerance: float, scale: float
) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; parts are compared against the largest of their kind beside them."""
    if isinstance(one, dict) and isinstance(two, dict):
        parts = {name: (one.get(name, _ABSENT), two.get(name, _ABSENT)) for name in {**one, **two}}
        largest: dict[str, float] = {}
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            largest[unit] = max(largest.get(unit, 0.0), *map(_size, pair))
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            yield from _unequal(f"{key}.{name}".lstrip("."), *pair, tolerance, largest[unit])
    elif isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            yield f"{key}.length", len(one), len(two)
        for number, pair in enumerate(zip(one, two, strict=False)):
            yield from _unequal(f"{key}.{number}", *pair, tolerance, scale)
    elif isinstance(one, float) and isinstance(two, int | float) and not isinstance(two, bool):
        if not abs(one - two) <= tolerance * max(scale, abs(one), abs(two)) and one == one:
            yield key, one, two
    elif one != two and not (one != one and two != two):
        yield key, one, two


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, float) and abs(value) < float("inf") else 0.0


def _is_wording(one: Any, two: Any, tolerance: float) -> bool:
    if not (isinstance(one, str) and isinstance(two, str) and " " in one and " " in two):
        return False
    numbers = [[float(text) for text in _NUMBER.findall(each)] for each in (one, two)]
    return not [*_unequal("", *numbers, tolerance, 0.0)]


def report(found: list[Difference], *, most: int = 40) -> str:
    """The differences for people: the first of each kind of key, and how many there are."""
    lines = []
    for what, chosen in (
        ("answers", [each for each in found if not each.is_wording]),
        ("wordings", [each for each in found if each.is_wording]),
    ):
        kinds: dict[str, list[Difference]] = {}
        for each in chosen:
            kinds.setdefault(re.sub(r"\.\d+\b", ".*", each.key), []).append(each)
        questions = len({each.question for each in chosen})
        lines.append(f"{len(chosen)} {what} of {questions} questions differ")
        for kind, same in sorted(kinds.items(), key=lambda item: -len(item[1]))[:most]:
            first = same[0]
            lines.append(f"  {kind or 'answer'}: {len(same)}, such as {first.question}")
            lines.append(f"    {first.key}: {str(first.one)[:200]} → {str(first.two)[:200]}")
        if len(kinds) > most:
            lines.append(f"  and {len(kinds) - most} more keys")
    return "\n".join(lines)
