"""Compare two records column by column, and say which kinds of cases differ."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from summary import format_table

from .cases import Case, ranks_of

Values = Mapping[str, Any]
# Shares of a step: a difference counts against the whole step, however small the part.
_OF_STEP = "breakdown."
_OF_ONE = ("provenance.shares", "provenance.errors")
# Texts that are answers; other texts may be worded anew.
_ANSWERS = ("fits",)
REFUSED = "refused"
_MOST_NAMED = 3
_COUNTED = re.compile(r"(\d+)x\d+:([\w.\-]+)")


@dataclass(slots=True)
class Tally:
    """How many of the compared cases differ, and the one that differs most."""

    compared: int = 0
    differing: int = 0
    largest: float = 0.0
    case: str = ""

    def add(self, name: str, difference: float, *, differs: bool) -> None:
        """Count one case."""
        self.compared += 1
        self.differing += differs
        if differs and (difference > self.largest or not self.case):
            self.largest, self.case = difference, name


@dataclass(slots=True, kw_only=True)
class Comparison:
    """How the answers of B differ from those of A.

    `columns` and `texts` are by column, `kinds` by (feature, strategy); `lacking` are the cases of
    which only the other record knows a column, by (column, "A" or "B").
    """

    compared: int = 0
    columns: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    texts: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    kinds: dict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    lacking: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    only: dict[str, list[str]] = field(default_factory=lambda: {"A": [], "B": []})
    refused: dict[str, list[str]] = field(default_factory=lambda: {"A": [], "B": []})
    refused_by_both: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether every case of either record is answered alike by the other."""
        return (
            self.compared > 0
            and not any(self.only.values())
            and not any(self.refused.values())
            and not any(tally.differing for tally in self.columns.values())
        )


def compare(
    one: Mapping[str, Values],
    two: Mapping[str, Values],
    *,
    rel: float = 1e-9,
    is_wanted: Callable[[str], bool] = lambda name: True,
    is_wanted_column: Callable[[str], bool] = lambda name: True,
) -> Comparison:
    """Compare the wanted cases of two records, A and B."""
    found = Comparison()
    for name in filter(is_wanted, one):
        if name not in two:
            found.only["A"].append(name)
            continue
        found.compared += 1
        _compare_case(found, name, one[name], two[name], rel, is_wanted_column)
    found.only["B"] = [name for name in two if is_wanted(name) and name not in one]
    return found


def _compare_case(
    found: Comparison,
    name: str,
    one: Values,
    two: Values,
    rel: float,
    is_wanted_column: Callable[[str], bool],
) -> None:
    refusals = one.get(REFUSED), two.get(REFUSED)
    worst, has_changed = 0.0, False
    if any(refusals):
        if all(refusals):
            found.refused_by_both += 1
            found.texts[REFUSED].add(name, 0.0, differs=refusals[0] != refusals[1])
        else:
            found.refused["A" if refusals[0] else "B"].append(name)
            worst, has_changed = math.inf, True
    else:
        for column in filter(is_wanted_column, sorted({*one, *two} - {REFUSED})):
            values = one.get(column), two.get(column)
            if None in values:
                if values != (None, None):
                    found.lacking[column, "A" if values[0] is None else "B"] += 1
                continue
            apart = difference(column, *values, step_s=one["step_time_s"])
            if apart is None:
                found.texts[column].add(name, 0.0, differs=values[0] != values[1])
                continue
            found.columns[column].add(name, apart, differs=apart > rel)
            worst, has_changed = max(worst, apart), has_changed or apart > rel
    for feature in features(name):
        found.kinds[feature, strategy_kind(name)].add(name, worst, differs=has_changed)


def difference(column: str, one: Any, two: Any, *, step_s: float) -> float | None:
    """How far two values are apart, relative to them, or to the step of which they are parts.

    None for words, which are alike or not.
    """
    if isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            return math.inf
        pairs = zip(one, two, strict=True)
        return max([difference(column, a, b, step_s=step_s) or 0.0 for a, b in pairs], default=0.0)
    if isinstance(one, str) or isinstance(two, str):
        if isinstance(one, str) and isinstance(two, str) and column not in _ANSWERS:
            return None
        return 0.0 if one == two else math.inf
    if one == two:
        return 0.0
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    scale = 1.0 if column in _OF_ONE else max(abs(one), abs(two))
    return abs(one - two) / (step_s if column.startswith(_OF_STEP) else scale)


def strategy_kind(name: str) -> str:
    """The strategy of a case without its knobs, but for what changes who waits for whom."""
    text = Case.named(name).strategy
    kind = text.partition(":")[0]
    if "shard=" in text:
        return "hsdp"
    return f"{kind} async" if "async" in text else kind


def features(name: str) -> Iterator[str]:
    """What a case has in common with others that may change together."""
    case = Case.named(name)
    hosts, counted = re.findall(r"(\w+)\[", case.allocation), re.findall(_COUNTED, case.allocation)
    yield "all"
    yield f"asked as {case.form}"
    yield f"graph {case.graph}"
    yield f"strategy {case.strategy}"
    yield "accumulation" if case.accumulation > 1 else "no accumulation"
    kinds = {"-": "as traced", "g": "global"}
    how = kinds.get(case.batch[0], "per group" if "/" in case.batch else "per device")
    yield f"batch {how}"
    yield "no cluster" if case.cluster == "-" else f"cluster {case.cluster}"
    yield "no calibration" if case.calibration == "-" else f"calibration {case.calibration}"
    nodes = len(set(hosts)) + sum(int(count) for count, _ in counted)
    alike = len({machine for _, machine in counted}) == 1 and not hosts
    if ranks_of(case.allocation) == 1:
        yield "1 rank"
    elif nodes == 1:
        yield "1 node"
    else:
        yield "nodes of one machine" if alike else "hosts by name" if hosts else "unlike machines"
    for machine in dict.fromkeys(machine for _, machine in counted):
        yield f"machine {machine}"


def report(found: Comparison) -> str:
    """The comparison for people: columns, kinds of cases, texts, what cannot be compared."""
    pieces = [
        f"{found.compared} cases in both, {found.refused_by_both} of them refused by both",
        *_one_sided(found),
        _columns(found),
        _kinds(found),
        _texts(found),
        "equal" if found.is_equal else "NOT EQUAL",
    ]
    return "\n\n".join(filter(None, pieces))


def _one_sided(found: Comparison) -> Iterator[str]:
    for what, sides in (("in", found.only), ("refused by", found.refused)):
        for side, names in sides.items():
            if names:
                named = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
                yield f"{len(names)} cases only {what} {side}, such as{named}"
    for (column, side), cases in sorted(found.lacking.items()):
        yield f"{column} is not known to {side} in {cases} cases: not compared there"


def _columns(found: Comparison) -> str:
    lines = [["column", "compared", "differ", "largest", ""]]
    for column, tally in sorted(found.columns.items()):
        largest = f"{tally.largest:.2e}" if tally.differing else "-"
        lines.append([column, str(tally.compared), str(tally.differing), largest, tally.case])
    return format_table(lines)


def _kinds(found: Comparison) -> str:
    """Changed / compared cases by feature and strategy, of the features that have changes."""
    strategies = sorted({strategy for _, strategy in found.kinds})
    features = dict.fromkeys(feature for feature, _ in found.kinds)
    changed, unchanged = [], []
    for feature in sorted(features, key=lambda text: (text != "all", text)):
        tallies = [found.kinds.get((feature, strategy), Tally()) for strategy in strategies]
        worst = max(tallies, key=lambda tally: (tally.differing > 0, tally.largest))
        if not worst.differing:
            unchanged.append(feature)
            continue
        cells = [f"{t.differing}/{t.compared}" if t.differing else "." for t in tallies]
        changed.append([feature, *cells, f"{worst.largest:.2e}", worst.case])
    if not changed:
        return ""
    table = format_table([["cases that differ", *strategies, "largest", ""], *changed])
    return f"{table}\nno case differs: {', '.join(unchanged) or '-'}"


def _texts(found: Comparison) -> str:
    lines = [
        f"{column}: {tally.differing} of {tally.compared} texts differ, such as {tally.case}"
        for column, tally in sorted(found.texts.items())
        if tally.differing
    ]
    return "\n".join(lines)
