"""List the suites: what each asks, the modules that answer it, and what they can be given.

A part of a suite is a module of this folder whose ``run(options)`` finds its cases, each with an
``id`` (`results.py` says what else): a list of them, or a mapping of ``cases``, ``summary`` and
``report``, lines for people. The parts run one after the other, each in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module; one that is slow is left out of a quick run."""

    name: str
    is_slow: bool = False
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Parts that answer one question; `times` says whether figures depend on this machine."""

    question: str
    parts: tuple[Part, ...]
    times: bool = True
    needs: Literal["", "root", "gpu"] = ""

    @property
    def takes(self) -> frozenset[str]:
        """The options of other people's cases that any part knows."""
        return frozenset(name for part in self.parts for name in part.takes)


def _suite(*, parts: Mapping[str, Sequence[str]], **about: Any) -> Suite:
    """A suite of `suites.json`, whose parts say what they take and whether they are slow."""
    made = (
        Part(
            name=name,
            is_slow="slow" in words,
            takes=frozenset(word.removeprefix("--") for word in words if word.startswith("--")),
        )
        for name, words in parts.items()
    )
    return Suite(parts=tuple(made), **about)


SUITES: dict[str, Suite] = {
    name: _suite(**about)
    for name, about in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
