"""The communication that DDP leaves exposed, for bucket caps of 1 to 100 MB.

It is measured as the step under DDP minus that of the same ranks under ``no_sync``, fresh processes
each, taking turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from records import Record, Records
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
        # Of what it may be off by.
        "value": abs(predicted_s - exposed_s) / allowed_s,
        "bound": 1.0,
    }


def figures(rows: Sequence[Record]) -> Iterator[Record]:
    """How many are beyond max(15 %, 2 % of the step)."""
    beyond = sum(row["value"] > row["bound"] for row in rows)
    yield {"id": f"overlap: beyond, of {len(rows)}", "value": beyond, "bound": 0}
