"""Two jobs on the same nodes: the step of one while the other sends over the same links."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from records import Record, Records, prediction_of
from testbed.launch import MASTER_PORT
from testbed.network import Testbed
from testbed_cases import Together
from testbed_runs import Trial

from estimator.errors import TrainingError

from .steps import StepBench, assembled

BOUND_RATIO = 0.10
# So long before the job that is timed the other begins: both start Python and torch on few cores.
AHEAD_S = 15.0


class NeighbourBench(StepBench):
    """One testbed: each job predicted beside the other, and trained beside it."""

    def predict(self, case: Together) -> Record:  # type: ignore[override]
        job, other = case.job, case.other
        beside = self.estimate(other, other.allocation)
        answer = self.estimate(job, job.allocation, neighbours=[beside])
        return {
            **prediction_of(answer),
            "alone_s": self.estimate(job, job.allocation).step_time_s,
            "other_s": beside.step_time_s,
        }

    def trials(self, case: Together, prediction: Record) -> Iterator[Trial]:  # type: ignore[override]
        yield Trial(key=case.key, run=partial(self._train_both, case, prediction))

    def _train_both(self, case: Together, prediction: Record, bed: Testbed) -> Record:
        """The job's step while the other trains all along; raises TrainingError if it did not."""
        # Twice as long as the job takes to begin and to train, at their own speeds.
        wanted_s = 2 * (AHEAD_S + 2 * self.plan.steps * prediction["predicted_s"])
        steps = math.ceil(wanted_s / prediction["other_s"])
        with ThreadPoolExecutor(max_workers=1) as pool:
            beside = pool.submit(self.train, bed, case.other, steps=steps, port=MASTER_PORT + 1)
            time.sleep(AHEAD_S)
            found = self.train(bed, case.job)
            was_beside = not beside.done()
            beside.result()
        if not was_beside:
            raise TrainingError(f"{case.other.key} ended before {case.job.key}")
        return found


def assemble(cases: Sequence[Together], records: Records) -> list[Record]:
    """One row a case."""
    return [
        {**assembled(case.job, records, key=case.key), "id": case.key, "method": "beside another"}
        for case in cases
    ]


def figures(rows: Sequence[Record]) -> Iterator[Record]:
    """How far each is off, and how far off it would be without the neighbour."""
    for row in rows:
        if row["status"] == "ok":
            error, unaware = (
                abs(row[name] / row["measured_s"] - 1) for name in ("predicted_s", "alone_s")
            )
            yield {"id": f"neighbours: {row['id']}", "value": error, "bound": BOUND_RATIO}
            yield {"id": f"neighbours: {row['id']}, were it alone", "value": unaware}
