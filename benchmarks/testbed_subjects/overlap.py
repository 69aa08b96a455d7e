"""The communication that DDP leaves exposed, for bucket caps of 1 to 100 MB.

It is measured as the step under DDP minus that of the same ranks under ``no_sync``, fresh processes
each, taking turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from records import Record, Records
from summary import format_table, milliseconds
from testbed_cases import Case
from testbed_runs import Trial

from .steps import StepBench

# Within the larger of 15 % of itself and 2 % of the step.
BOUND_RATIO, BOUND_OF_STEP_RATIO = 0.15, 0.02


class OverlapBench(StepBench):
    """One testbed: each case trained with and without its communication."""

    def trials(self, case: Case, prediction: Record) -> Iterator[Trial]:
        for syncs in (True, False):
            yield Trial(
                key=_key(case, syncs), run=partial(self.train, case=case, merges_gradients=syncs)
            )


def _key(case: Case, syncs: bool) -> str:
    return f"{case.key} {'with' if syncs else 'without'} gradient sync"


def assemble(cases: Sequence[Case], records: Records) -> list[Record]:
    """One row a measured case."""
    rows = []
    for case in cases:
        predictions = records.of("prediction", case.key)
        runs = [records.of("measurement", _key(case, syncs)) for syncs in (True, False)]
        if predictions and all(runs):
            step_s, without_s = (statistics.median(run["step_s"] for run in each) for each in runs)
            rows.append(_row(case, predictions[-1], step_s, step_s - without_s))
    return rows


def _row(case: Case, prediction: Record, step_s: float, exposed_s: float) -> Record:
    predicted_s = prediction["breakdown"]["communication_exposed_s"]
    allowed_s = max(BOUND_RATIO * exposed_s, BOUND_OF_STEP_RATIO * step_s)
    return {
        "id": case.key,
        "predicted_s": predicted_s,
        "measured_s": exposed_s,
        "step_s": step_s,
        "predicted_step_s": prediction["predicted_s"],
        "is_within": abs(predicted_s - exposed_s) <= allowed_s,
    }


def report(rows: Sequence[Record]) -> Iterator[str]:
    """A line a case, and how many are within the bound."""
    lines = [["case", "exposed: predicted", "measured", "step: predicted", "measured", "within"]]
    for row in rows:
        names = ("predicted_s", "measured_s", "predicted_step_s", "step_s")
        times = [milliseconds(row[name]) for name in names]
        lines.append([row["id"], *times, "yes" if row["is_within"] else "no"])
    yield format_table(lines)
    within = sum(row["is_within"] for row in rows)
    yield f"{within} of {len(rows)} within max(15 %, 2 % of the step)"
