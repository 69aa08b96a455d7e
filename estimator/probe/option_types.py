"""Read numbers of the command line, each within the bounds that make sense of it."""

from __future__ import annotations

from typing import Any

import click

from estimator.units import parse_number, parse_whole


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
            number = parse_number(str(value))
        except ValueError as error:
            self.fail(str(error))
        if not self.least <= number <= self.most:
            self.fail(f"{number:g} is not from {self.least:g} to {self.most:g}; write one that is")
        return number
