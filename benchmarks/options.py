"""What every suite can be told, and where what it needs is found."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_data import shipped_tables
from records import say

from estimator.machines.profile import MachineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a suite is run; `work` is where a stopped run continues and traced models are kept."""

    quick: bool = False
    only: Sequence[str] = ()
    data: Path = field(default_factory=shipped_tables)
    models: Path | None = None
    work: Path = Path("build")

    def takes(self, name: str) -> bool:
        """Whether a case is to run: all, or those whose names hold one of the texts of `only`."""
        return not self.only or any(text in name for text in self.only)


def answer_of(module: str, options: Options) -> Mapping[str, Any]:
    """The ``cases`` that ``run(options)`` of a module finds, with ``summary`` and ``report``."""
    answer = importlib.import_module(module).run(options)
    return answer if isinstance(answer, Mapping) else {"cases": list(answer)}


def local_machine(work: Path, given: Path | None = None, *, name: str = "local") -> MachineProfile:
    """The profile of this machine in the folder `work`: given, kept from before, or probed."""
    from estimator.machines.catalogue import load_profile

    kept = work / f"{name}.json"
    if given:
        load_profile(str(given.resolve())).save(kept)
    elif not kept.exists():
        from estimator.probe.machine import probe_machine

        say("probing this machine")
        probe_machine(name=name, strict=True).save(kept)
    profile = load_profile(kept)
    if profile.missing:
        say(f"the profile lacks {', '.join(profile.missing)}")
    return profile


def add_data(parser: argparse.ArgumentParser) -> None:
    """``--data``: a folder of tables instead of those that ship."""
    parser.add_argument(
        "--data",
        type=Path,
        default=shipped_tables(),
        help="a folder of tables in the same columns, instead of data/published",
    )
