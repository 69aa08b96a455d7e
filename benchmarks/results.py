"""Keep what a suite finds in one form, and lay two findings beside each other.

``benchmarks/results/SUITE/MACHINE.json`` holds one `Result`: when and where it ran, with which
versions, a canary before and after, its cases and their summary. A case is a mapping with an
``id``, and either what was predicted and measured (`summary.py` says which fields) or a figure:
``value``, ``unit``, and ``bound`` and ``least``, the most and the least that it may be, if any.
"""

from __future__ import annotations

import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from records import now
from summary import (
    Case,
    SummaryRow,
    describe,
    error_ratio,
    format_rows,
    format_table,
    percent,
    summarise,
)

FOLDER = Path(__file__).resolve().parent / "results"
# Files of more would be megabytes: their summary is kept, and ``run --json`` prints all.
MOST_CASES = 2000
# Of more, people are shown the summary.
MOST_SHOWN = 100
_VERSIONED = ("torch", "numpy", "scikit-learn", "transformers")


class ResultError(ValueError):
    """A file is no result of a suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run of a suite found; `canary` is a fixed matmul's seconds before and after.

    `report` is what the suite's scripts say of their cases to people. `converted_from` names the
    page that older figures were taken over from, whose `tables` (title, columns, rows of text)
    stand for cases until the suite runs again.
    """

    suite: str
    machine: str
    at: str
    quick: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    canary: Mapping[str, float] | None = None
    cases: Sequence[Case] = ()
    summary: Sequence[Mapping[str, Any]] = ()
    report: Sequence[str] = ()
    converted_from: str | None = None
    tables: Sequence[Mapping[str, Any]] = ()

    def save(self, folder: Path = FOLDER) -> Path:
        """Write it where results of its suite and machine stand."""
        path = folder / self.suite / f"{self.machine}{'.quick' * self.quick}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A case to a line: a later run changes the lines that it changes.
        parts = []
        kept = self if len(self.cases) <= MOST_CASES else replace(self, cases=())
        for name, value in asdict(kept).items():
            if name in ("cases", "summary", "report", "tables") and value:
                lines = ",\n".join("  " + json.dumps(item, allow_nan=False) for item in value)
                parts.append(f' "{name}": [\n{lines}\n ]')
            else:
                parts.append(f' "{name}": {json.dumps(value, allow_nan=False)}')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ResultError(f"{path} is no result of a suite: {error}") from error


def machine_here() -> str:
    """What this machine is called in the name of a file: its first GPU, or processor and cores."""
    import torch

    if torch.cuda.is_available():
        return _slug(torch.cuda.get_device_name(0))
    from estimator.probe.devices.inventory import read_cpu

    cpu = read_cpu()
    return _slug(f"{cpu.model or platform.machine()} {len(cpu.cores)} cores")


def _slug(text: str) -> str:
    plain = re.sub(r"\((r|tm)\)|\bcpu\b|@.*?hz|processor", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def versions_here() -> dict[str, str]:
    """The versions that answers depend on, with this checkout's commit where git tells it."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    command = ["git", "-C", str(FOLDER.parent), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    return {**found, **({"commit": head.stdout.strip()} if head.returncode == 0 else {})}


def canary_s() -> float:
    """Seconds of a fixed matmul on this machine's processor, now."""
    from estimator.probe.devices.backend import open_backend
    from estimator.probe.devices.jobs import canary_s as seconds_of

    return seconds_of(open_backend("cpu"))


def result_of(
    suite: str,
    answers: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    machine: str,
    quick: bool,
    canary: Mapping[str, float] | None,
) -> Result:
    """Join what the parts of a suite printed, each case with the name of its part."""
    cases: list[Case] = []
    summary: list[Mapping[str, Any]] = []
    for part, answer in answers:
        found = [{"part": part, **case} for case in answer.get("cases") or ()]
        cases += found
        told = answer.get("summary") or summarise(_timed(found), by=("source", "method"))
        rows = [asdict(row) if isinstance(row, SummaryRow) else row for row in told]
        summary += [{**row, "group": {"part": part, **row["group"]}} for row in rows]
    return Result(
        suite=suite,
        machine=machine,
        at=now(),
        quick=quick,
        versions=versions_here(),
        canary=canary,
        cases=cases,
        summary=summary,
        report=[line for _, answer in answers for line in answer.get("report") or ()],
        tables=[table for _, answer in answers for table in answer.get("tables") or ()],
    )


def _timed(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if "measured_s" in case and "value" not in case]


def text_of(result: Result) -> str:
    """A result for people: the figures, then what its scripts say or a summary of its cases."""
    figures = [[cell.strip() for cell in row] for row in figure_rows(result, 4)]
    blocks = [f"{result.suite} on {result.machine}, {result.at[:16]}"]
    if figures:
        blocks.append(format_table([["figure", "value", "bound", ""], *figures]))
    if result.report:
        blocks.append("\n".join(result.report))
    if timed := _timed(result.cases):
        if len(timed) <= MOST_SHOWN:
            blocks.append("\n".join(describe(timed)))
        else:
            blocks.append(format_rows(summarise(timed, by=("part", "source", "method"))))
    return "\n\n".join(blocks)


def figure_rows(result: Result, digits: int) -> list[list[str]]:
    """What each figure is called, its value with so many digits, its bounds, the verdict."""
    return [
        [
            str(case["id"]),
            f"{case['value']:.{digits}g} {case.get('unit') or ''}",
            bound_text(case),
            verdict(case),
        ]
        for case in result.cases
        if "value" in case
    ]


def bound_text(case: Case) -> str:
    """What a figure may be, for people; nothing where it is not judged."""
    unit = case.get("unit") or ""
    sides = [("≥", case.get("least")), ("≤", case.get("bound"))]
    return ", ".join(f"{sign} {side:g} {unit}".strip() for sign, side in sides if side is not None)


def verdict(case: Case) -> str:
    """Whether a figure keeps its bounds; nothing where it has none."""
    least, most = case.get("least"), case.get("bound")
    if least is None and most is None:
        return ""
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return "reached" if low <= case["value"] <= high else "missed"


def compare(before: Result, after: Result) -> str:
    """What changed between two results: case by case, then how far both were off."""
    if before.suite != after.suite:
        raise ResultError(f"one is of {before.suite}, the other of {after.suite}")
    old, new = ({_key(case): case for case in each.cases} for each in (before, after))
    lines = [["case", "before", "after", "change", "error before", "after"]]
    for key in (key for key in new if key in old):
        name = "value" if "value" in new[key] else "predicted_s"
        values = old[key].get(name), new[key].get(name)
        if None in values or values[0] == values[1]:
            continue
        change = percent(values[1] / values[0] - 1, "+") if values[0] else "-"
        errors = [
            percent(error_ratio(case)) if case.get("measured_s") else "-"
            for case in (old[key], new[key])
        ]
        lines.append([key, *(f"{value:.5g}" for value in values), change, *errors])
    told = [f"{len(lines) - 1} of {len(new)} cases differ"]
    told += [f"only before: {key}" for key in old if key not in new]
    told += [f"only after: {key}" for key in new if key not in old]
    rows = [
        row
        for label, each in (("before", before), ("after", after))
        for row in summarise(
            [{**case, "run": label} for case in _timed(each.cases)], by=("run", "part", "method")
        )
    ]
    blocks = [format_table(lines)] if len(lines) > 1 else []
    return "\n\n".join([*blocks, *([format_rows(rows)] if rows else []), "\n".join(told)])


def _key(case: Case) -> str:
    return f"{case.get('part', '')}/{case.get('id') or case.get('name')}"


def failed(text: str) -> NoReturn:
    """Say on stderr what went wrong, and end with code 2."""
    print(f"benchmarks: {text}", file=sys.stderr)
    raise SystemExit(2)
