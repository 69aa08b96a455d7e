"""Read numbers of the command line, each within the bounds that make sense of it."""

from __future__ import annotations

from typing import Any

import click

from estimator.errors import quoted

# As many digits as any number that is asked for has; Python reads no more than 4,300.
_MOST_DIGITS = 30


class Count(click.ParamType[int]):
    """A whole number from `least` to `most`."""

    name = "count"

    def __init__(self, least: int = 1, most: int = 10**15) -> None:
        self.least, self.most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        """The number that a text says; fails for any other text."""
        text = str(value).strip()
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
            self.fail(f"{quoted(text)} is no whole number; write one such as {self.least}")
        if not self.least <= int(text) <= self.most:
            self.fail(f"{text} is not from {self.least} to {self.most:g}; write one that is")
        return int(text)


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
            number = float(value)
        except ValueError:
            self.fail(f"{quoted(value)} is no number; write one such as {self.least:g}")
        if not self.least <= number <= self.most:
            self.fail(f"{number:g} is not from {self.least:g} to {self.most:g}; write one that is")
        return number
