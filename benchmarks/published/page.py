"""Fill the tables of a Markdown page, each between its markers, from the cases of a run.

A table stands between ``<!-- table:NAME -->`` and ``<!-- /table -->``, a line each; whatever is
between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from summary import SummaryRow, summarise

from published.goals import goals
from published.mapping import Outcome, Verdict
from published.report import SPLITS, Case, constant_score_ratio, percent

_TABLE = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
# A table of the page that `known_answers` fills.
KNOWN_ANSWERS = "known-answers"


class PageError(ValueError):
    """A page, or a file of an earlier run, is not what it is taken for."""


def filled(page: str, found: Sequence[Verdict], cases: Sequence[Case]) -> str:
    """The page with its tables drawn anew; raises PageError for a table that is not known."""

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name == KNOWN_ANSWERS:
            return match[0]
        if name not in TABLES:
            raise PageError(f"the page has a table '{name}'; known are {', '.join(TABLES)}")
        return f"{start}\n{_markdown(TABLES[name](found, cases))}\n\n{end}"

    return _TABLE.sub(table, page)


def with_known_answers(page: str, lines: Sequence[Sequence[str]]) -> str:
    """The page with its table of known answers drawn anew."""

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}\n{_markdown(lines)}\n\n{end}" if name == KNOWN_ANSWERS else match[0]

    return _TABLE.sub(table, page)


def read_runs(paths: Sequence[Path]) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """What became of every row and the cases, as earlier runs printed them with ``--json``.

    Raises PageError for a file that is none of those.
    """
    found: list[Verdict] = []
    cases: list[dict[str, Any]] = []
    for path in paths:
        run = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(run, dict) or not {"cases", "refused"} <= run.keys():
            raise PageError(f"{path} holds no cases of an earlier run; write it with --json")
        cases += run["cases"]
        found += [_mapped(case) for case in run["cases"] if case["method"] == "cold"]
        found += [_refused(row) for row in run["refused"]]
    return found, cases


def _mapped(case: Case) -> Verdict:
    table, _, line = case["id"].partition("/")[0].rpartition(":")
    return Verdict(table=table, source=case["source"], line=int(line), outcome="mapped")


def _refused(row: Mapping[str, str]) -> Verdict:
    table, _, line = row["id"].rpartition(":")
    outcome = cast(Outcome, row["outcome"])
    return Verdict(
        table=table, source=row["source"], line=int(line), outcome=outcome, reason=row["reason"]
    )


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def _rows(found: Sequence[Verdict], cases: Sequence[Case]) -> list[list[str]]:
    lines = [["source", "table", "rows", "qualify", "mapped"]]
    outcomes = Counter((each.table, each.source, each.outcome) for each in found)
    for table, source in sorted({(each.table, each.source) for each in found}):
        kinds: tuple[Outcome, ...] = ("mapped", "unmapped", "not_qualified")
        mapped, unmapped, others = (outcomes[table, source, kind] for kind in kinds)
        qualified = mapped + unmapped
        share = f"{mapped} ({100 * mapped / qualified:.0f} %)" if qualified else "0"
        lines.append([source, table, str(qualified + others), str(qualified), share])
    return lines


def _errors_of(split: str) -> Callable[[Sequence[Verdict], Sequence[Case]], list[list[str]]]:
    """A table of the errors of one split, by its name in SPLITS."""
    belongs = dict(SPLITS)[split]

    def errors(found: Sequence[Verdict], cases: Sequence[Case]) -> list[list[str]]:
        head = ["source", "cases", "cold: MAPE", "median", "p90", "worst", "bias", "rank corr"]
        lines = [[*head, "naive: median", "after 8: median", "MAPE"]]
        members = [case for case in cases if belongs(case)]
        for source, methods in _summaries(members).items():
            cold, naive = methods["cold"], methods["naive"]
            later = methods.get("calibrated")
            ratios = (cold.mean_ratio, cold.median_ratio, cold.p90_ratio, cold.worst_ratio)
            rank = cold.rank_correlation
            learnt = (later.median_ratio, later.mean_ratio) if later else (None, None)
            line = [source, str(cold.cases), *map(percent, (*ratios, cold.bias_ratio))]
            line += ["-" if rank is None else f"{rank:.3f}"]
            lines.append(line + [percent(ratio) for ratio in (naive.median_ratio, *learnt)])
        return lines

    return errors


def _summaries(cases: Sequence[Case]) -> dict[str, dict[str, SummaryRow]]:
    """Source → method → summary, sources in the order of their names."""
    found: dict[str, dict[str, SummaryRow]] = {}
    for row in summarise(cases, by=("source", "method")):
        found.setdefault(str(row.group["source"]), {})[str(row.group["method"])] = row
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _intervals(found: Sequence[Verdict], cases: Sequence[Case]) -> list[list[str]]:
    one = ["coverage", "score", "constant width"]
    lines = [["source", *(f"{when}{word}" for when in ("cold: ", "after 8: ") for word in one)]]
    for source, methods in _summaries(cases).items():
        line = [source]
        for method in ("cold", "calibrated"):
            row = methods.get(method)
            of = [case for case in cases if (case["source"], case["method"]) == (source, method)]
            line.append(percent(row.coverage_ratio if row else None))
            line.append(percent(row.interval_score_ratio if row else None))
            line.append(percent(constant_score_ratio(of)))
        lines.append(line)
    return lines


def _goals(found: Sequence[Verdict], cases: Sequence[Case]) -> list[list[str]]:
    lines = [["goal", "found", ""]]
    for goal in goals(cases):
        lines.append([goal.text, goal.found, "reached" if goal.reached else "missed"])
    return lines


def _neusight_training(found: Sequence[Verdict], cases: Sequence[Case]) -> list[list[str]]:
    """The training steps among NeuSight's rows, the others of which are forward passes."""
    lines = [["model", "GPU", "batch", "measured", "cold", "off by"]]
    for case in cases:
        is_training = case["parts_s"].get("backward", 0.0) > 0
        if case["table"] != "neusight_e2e" or case["method"] != "cold" or not is_training:
            continue
        measured_s, predicted_s = case["measured_s"], case["predicted_s"]
        off = f"{100 * (predicted_s / measured_s - 1):+.1f} %"
        times = (f"{1e3 * measured_s:.0f} ms", f"{1e3 * predicted_s:.0f} ms")
        lines.append([case["model"], case["gpu"], f"{case['batch_per_gpu']:g}", *times, off])
    return lines


TABLES: Mapping[str, Callable[[Sequence[Verdict], Sequence[Case]], list[list[str]]]] = {
    "goals": _goals,
    "neusight-training": _neusight_training,
    "rows": _rows,
    "all": _errors_of("all"),
    "one-gpu": _errors_of("one GPU"),
    "one-node": _errors_of("one node, several GPUs"),
    "several-nodes": _errors_of("several nodes"),
    "intervals": _intervals,
}
