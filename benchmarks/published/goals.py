"""Hold the errors on published step times against the goals that were set for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from summary import SummaryRow, summarise

from published.report import Case, percent

_NEUSIGHT_MEAN_RATIO = 0.10
_LLM_FOUNDRY_MEDIAN_RATIO, _LLM_FOUNDRY_LEARNT_RATIO = 0.15, 0.09
_NODE_MEDIAN_RATIO = 0.15
_NODE_TABLES = ("nvidia_dle", "lambda_bench", "mlperf_train", "dlperf", "pollux_t4", "sia_hetero")
_RANK_CORRELATION = 0.95
_COVERAGE_RATIOS = (0.65, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound, what was found, and whether that is within it."""

    text: str
    found: str
    reached: bool


def goals(cases: Sequence[Case]) -> Iterator[Goal]:
    """Every goal whose rows are among the cases."""
    cold = [case for case in cases if case["method"] == "cold"]
    yield from _of_tables(cases)
    yield from _of_nodes(cold)
    yield from _of_ranks(cold)
    for name, method in (("cold", "cold"), ("after 8", "calibrated")):
        members = [case for case in cases if case["method"] == method]
        yield from _of_intervals(members, name)


def _of_tables(cases: Sequence[Case]) -> Iterator[Goal]:
    for table, method, what, bound in (
        ("neusight_e2e", "cold", "mean", _NEUSIGHT_MEAN_RATIO),
        ("llm_foundry", "cold", "median", _LLM_FOUNDRY_MEDIAN_RATIO),
        ("llm_foundry", "calibrated", "median", _LLM_FOUNDRY_LEARNT_RATIO),
    ):
        members = [case for case in cases if (case["table"], case["method"]) == (table, method)]
        for row in summarise(members, by=("table",)):
            error = row.mean_ratio if what == "mean" else row.median_ratio
            when = "cold" if method == "cold" else "after 8"
            yield _at_most(f"{table}, {when}: {what} error", error, bound)


def _of_nodes(cold: Sequence[Case]) -> Iterator[Goal]:
    inside = [case for case in cold if case["nodes"] == 1 and case["ranks"] > 1]
    for table, row in _by("table", inside).items():
        if table in _NODE_TABLES:
            text = f"{table}, several GPUs of one node, cold: median error"
            yield _at_most(text, row.median_ratio, _NODE_MEDIAN_RATIO)


def _of_ranks(cold: Sequence[Case]) -> Iterator[Goal]:
    found = {table: row.rank_correlation for table, row in _by("table", cold).items()}
    known = {table: rank for table, rank in found.items() if rank is not None}
    if known:
        missed = {name: rank for name, rank in known.items() if rank < _RANK_CORRELATION}
        yield Goal(
            text=f"rank correlation of every table, cold ≥ {_RANK_CORRELATION}",
            found=_count(len(known), {name: f"{rank:.3f}" for name, rank in missed.items()}),
            reached=not missed,
        )


def _of_intervals(members: Sequence[Case], when: str) -> Iterator[Goal]:
    found = {source: row.coverage_ratio for source, row in _by("source", members).items()}
    known = {source: ratio for source, ratio in found.items() if ratio is not None}
    if known:
        low, high = _COVERAGE_RATIOS
        missed = {name: ratio for name, ratio in known.items() if not low <= ratio <= high}
        yield Goal(
            text=f"80 % intervals of every source, {when}: cover {_whole(low)} to {_whole(high)}",
            found=_count(len(known), {name: _whole(ratio) for name, ratio in missed.items()}),
            reached=not missed,
        )


def _at_most(text: str, error: float | None, bound: float) -> Goal:
    return Goal(
        text=f"{text} ≤ {_whole(bound)}",
        found=percent(error),
        reached=error is not None and error <= bound,
    )


def _count(known: int, missed: dict[str, str]) -> str:
    within = f"{known - len(missed)} of {known}"
    return within + "".join(f"; {name} {value}" for name, value in missed.items())


def _whole(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _by(field: str, cases: Sequence[Case]) -> dict[str, SummaryRow]:
    rows = summarise(cases, by=(field,))
    return dict(sorted((str(row.group[field]), row) for row in rows))
