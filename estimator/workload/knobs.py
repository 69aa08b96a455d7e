"""Read and write the options of a noun as people write them: ``2,link=10Gbit/s``, ``tp=8,sp``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

from estimator.errors import quoted
from estimator.units import parse_knobs

_KNOB = "knob"


class _Knob(NamedTuple):
    """An option in a text: a flag, where nothing reads a value, or ``name=value``.

    The value of one without a name stands alone. Options are written by `place`; `values` are those
    that it takes, as messages show them.
    """

    name: str
    read: Callable[[str], Any] | None
    written: Callable[[Any], str] = str
    place: int = 1
    values: str = ""

    @property
    def form(self) -> str:
        return f"{self.name}={self.values}" if self.name and self.read else self.name or self.values

    def takes(self, value: str) -> bool:
        return bool(value) == (self.read is not None)

    def text(self, value: Any) -> str:
        if self.read is None:
            return self.name
        return f"{self.name}={self.written(value)}" if self.name else self.written(value)


def option(
    name: str, read: Callable[[str], Any] | None = None, default: Any = False, **more: Any
) -> Any:
    """A dataclass field that stands in the noun's text; a flag sets the opposite of its default.

    `more` are further fields of `_Knob`.
    """
    return field(default=default, metadata={_KNOB: _Knob(name, read, **more)})


def choice(name: str, *values: str) -> Any:
    """An option that is one of some words, by default none of them."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"{quoted(text)} is unknown; choose one of {', '.join(values)}")
        return text

    return option(name, read, None, values="|".join(values))


@lru_cache(maxsize=64)
def _options(kind: Any) -> tuple[tuple[Field[Any], _Knob], ...]:
    known = [(item, item.metadata[_KNOB]) for item in fields(kind) if _KNOB in item.metadata]
    return tuple(sorted(known, key=lambda pair: pair[1].place))


def changed_options(noun: Any) -> list[str]:
    """The fields of a noun's text that are not their defaults, in its order."""
    own = _options(noun.__class__)
    return [item.name for item, _ in own if getattr(noun, item.name) != item.default]


def options_text(noun: Any, *, always: Iterable[str] = ()) -> str:
    """The text of a noun: what is not the default, and the fields that are `always` written."""
    shown = {*changed_options(noun), *always}
    own = _options(noun.__class__)
    return ",".join(knob.text(getattr(noun, item.name)) for item, knob in own if item.name in shown)


def read_options(kind: type, text: str, called: str) -> dict[str, Any]:
    """The fields of a dataclass that a text sets; messages say `called`. Raises ValueError."""
    options = {knob.name: (item, knob) for item, knob in _options(kind)}
    values: dict[str, Any] = {}
    for name, value in parse_knobs(text).items():
        stands_alone = "" in options and name[:1].isdigit() and not value
        known = options.get("" if stands_alone else name) if name else None
        if known is None or not known[1].takes(value or name * stands_alone):
            knobs = sorted((knob for _, knob in options.values()), key=_by_form)
            raise ValueError(
                f"{quoted(f'{name}={value}' if value else name)} is no knob of {called}; its knobs "
                f"are {', '.join(knob.form for knob in knobs)}"
            )
        item, knob = known
        if item.name in values:
            raise ValueError(f"{quoted(name)} says again what stands before it; leave one out")
        try:
            values[item.name] = knob.read(value or name) if knob.read else not item.default
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if value else str(error)) from None
    return values


def _by_form(knob: _Knob) -> int:
    """What stands alone, then those with a value, then flags."""
    return 0 if not knob.name else 1 if knob.read else 2
