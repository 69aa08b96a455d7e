"""Fill the tables of docs/accuracy.md and docs/speed.md from the results that are kept.

Between ``<!-- results:SUITE/MACHINE -->`` and ``<!-- /results -->`` a page holds what that file
says: when and where, then its summary, its figures, or the tables taken over from an older page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from results import FOLDER, Result, figure_rows
from summary import percent

PAGES = ("docs/accuracy.md", "docs/speed.md")
_MARKED = re.compile(r"<!-- results:(\S+) -->\n.*?<!-- /results -->", re.DOTALL)
# What older pages list case by case is in the file; a page shows what fits a screen.
MOST_ROWS, MOST_TABLES = 45, 2


def fill_pages(root: Path) -> list[str]:
    """Write the pages again; the names of those that changed."""
    changed = []
    for name in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        written = filled(text)
        if written != text:
            (root / name).write_text(written, encoding="utf-8")
            changed.append(name)
    return changed


def filled(text: str) -> str:
    """The page with each marked part as its result says."""

    def part(found: re.Match[str]) -> str:
        name = found.group(1)
        lines = "\n".join(lines_of(Result.load(FOLDER / f"{name}.json"), name))
        return f"<!-- results:{name} -->\n{lines}\n<!-- /results -->"

    return _MARKED.sub(part, text)


def lines_of(result: Result, name: str) -> Iterator[str]:
    """When, where, and the tables that fit."""
    where = "" if result.machine == "any-machine" else f" on {result.machine.replace('-', ' ')}"
    told = f"from an older page of {result.at[:10]}" if result.converted_from else result.at[:10]
    file = f"[all of it](../benchmarks/results/{name}.json)"
    command = f"python -m benchmarks run {result.suite}{' --quick' * result.quick}"
    yield f"\n`{command}`{where}, {told}; {file}."
    if result.summary:
        yield from _table(*_summary(result.summary))
    if figures := figure_rows(result, 3):
        yield from _table(["figure", "value", "asked", ""], figures)
    short = [table for table in result.tables if len(table["rows"]) <= MOST_ROWS]
    for table in [] if result.summary and result.converted_from else short[:MOST_TABLES]:
        yield f"\n{table['title']}:"
        yield from _table(table["columns"], table["rows"])
    yield ""


def _summary(rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each group, by its first method; medians of other methods stand beside."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        names = {**row["group"]}
        method = str(names.pop("method", None) or "")
        group = tuple(str(name) for name in names.values() if name is not None)
        groups.setdefault(group, {})[method] = row
    others = list(dict.fromkeys(name for methods in groups.values() for name in list(methods)[1:]))
    head = ["what", "cases", "mean", "median", "p90", "worst", "bias", "rank corr", "inside 80 %"]
    lines = []
    for group, methods in groups.items():
        first, row = next(iter(methods.items()))
        rank = row["rank_correlation"]
        errors = [row[f"{name}_ratio"] for name in ("mean", "median", "p90", "worst", "bias")]
        beside = [
            percent(methods[name]["median_ratio"]) if name in methods else "-" for name in others
        ]
        lines.append(
            [
                ", ".join(filter(None, (*group, first))),
                str(row["cases"]),
                *map(percent, errors),
                "-" if rank is None else f"{rank:.3f}",
                percent(row["coverage_ratio"]),
                *beside,
            ]
        )
    return head + [f"{name}: median" for name in others], lines


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
