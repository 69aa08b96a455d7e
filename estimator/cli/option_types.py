"""Read numbers and times of the command line, each within the bounds that make sense of it."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from estimator.errors import quoted
from estimator.units import format_seconds, parse_number, parse_seconds, parse_whole


class Count(click.ParamType[int]):
    """A whole number from `least` to `most`."""

    name = "count"

    def __init__(self, least: int = 1, most: int = 10**15) -> None:
        self.least, self.most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        """The number that a text says; fails for any other text."""
        try:
            return parse_whole(str(value).strip(), least=self.least, most=self.most)
        except ValueError as error:
            self.fail(str(error))


class Amount(click.ParamType[float]):
    """A number from `least` to `most`."""

    name = "number"

    def __init__(self, least: float = 1.0, most: float = 1e18) -> None:
        self.least, self.most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        """The number that a text says; fails for any other text."""
        try:
            number = self._read(str(value))
        except ValueError as error:
            self.fail(str(error))
        if not self.least <= number <= self.most:
            self.fail(self._bounds(str(value), number))
        return number

    def _read(self, text: str) -> float:
        return parse_number(text)

    def _bounds(self, _text: str, number: float) -> str:
        return f"{number:g} is not from {self.least:g} to {self.most:g}; write one that is"


class Duration(Amount):
    """A time such as 90s, 30min, 12h, 14d or 2w from `least_s` to `most_s`, in seconds.

    Where the option `counts_seconds`, a plain number is as many seconds.
    """

    name = "time"

    def __init__(
        self, least_s: float = 1e-6, most_s: float = 1e12, *, counts_seconds: bool = False
    ) -> None:
        super().__init__(least_s, most_s)
        self.counts_seconds = counts_seconds

    def _read(self, text: str) -> float:
        if self.counts_seconds:
            with contextlib.suppress(ValueError):
                return parse_number(text)
        return parse_seconds(text)

    def _bounds(self, text: str, _number: float) -> str:
        least, most = format_seconds(self.least), format_seconds(self.most)
        return f"{quoted(text)} is not from {least} to {most}; write a time that is"
