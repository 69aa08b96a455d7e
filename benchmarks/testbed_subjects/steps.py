"""Steps of models on testbeds: ours beside linear scaling and the forms of Optimus and Pollux.

Each form is fitted to the measured steps of all *other* cases of the same model on that testbed and
to its step on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from calibration.rivals import FORMS
from records import Record, Records, judged_case, prediction_of
from summary import Bound, summarise
from testbed_cases import Case
from testbed_runs import MACHINE, ModelBench, Trial

BOUNDS = {
    "computing": Bound(median_ratio=0.08, worst_ratio=0.25),
    "paced": Bound(median_ratio=0.03, worst_ratio=0.10),
    "paced fsdp": Bound(median_ratio=0.03, worst_ratio=0.10),
    "paced pipelines": Bound(median_ratio=0.03, worst_ratio=0.10),
    "paced layouts": Bound(median_ratio=0.03, worst_ratio=0.10),
}
RIVALS = ("linear", "optimus", "pollux")
LONG_STEP_S = 1.0


class StepBench(ModelBench):
    """One testbed: each case predicted, and trained as often as asked for."""

    def predict(self, case: Case) -> Record:
        answer = self.estimate(case, case.allocation)
        # One rank has nobody to share with.
        first = case.allocation.split("[")[0] + "[0]"
        of_one = {"strategy": case.strategy.partition(":")[0], "layout": None}
        alone = self.estimate(case, first, **of_one)
        return {**prediction_of(answer), "alone_s": alone.step_time_s}

    def trials(self, case: Case, prediction: Record) -> Iterator[Trial]:
        is_long = prediction["predicted_s"] >= LONG_STEP_S
        steps = max(5, self.plan.steps // 2) if is_long else self.plan.steps
        yield Trial(key=case.key, run=partial(self.train, case=case, steps=steps))


def assemble(cases: Sequence[Case], records: Records) -> list[Record]:
    """The cases of DESIGN, ours and the scaling forms', failed ones included."""
    ours = [assembled(case, records) for case in cases]
    return [*ours, *_forms(ours)]


def assembled(case: Case, records: Records, *, key: str | None = None) -> Record:
    """One case, what was predicted and measured of it; `key` is its name among the records."""
    key = key or case.key
    kept = ("predicted_s", "low_s", "high_s", "alone_s", "batch_per_gpu", "global_batch")
    return {
        **case.fields(MACHINE),
        "accumulation_steps": case.accumulation_steps,
        **judged_case(records, key, (*kept, "breakdown")),
    }


def _forms(ours: Sequence[Record]) -> Iterator[Record]:
    """Each form's prediction of each measured case from the other cases of its model and bed.

    Of pipelines the forms know nothing.
    """
    whole = [case for case in ours if case["status"] == "ok" and not case["layout"]]
    for case in whole:
        others = [
            other
            for other in whole
            if other is not case and (other["bed"], other["model"]) == (case["bed"], case["model"])
        ]
        rows = [_row(other) for other in others]
        rows += [(1, 1, case["batch_per_gpu"], case["accumulation_steps"])]
        times = [other["measured_s"] for other in others] + [case["alone_s"]]
        for name in RIVALS:
            predicted_s = float(FORMS[name]().fit(rows, times).predict([_row(case)])[0])
            kind = "" if case["method"] == "paced" else f" ({case['method']})"
            yield {
                **case,
                "method": f"{name}{kind}",
                "predicted_s": predicted_s,
                "low_s": None,
                "high_s": None,
            }


def _row(case: Record) -> tuple[int, int, int, int]:
    return case["ranks"], case["nodes"], case["batch_per_gpu"], case["accumulation_steps"]


def figures(cases: Sequence[Record]) -> Iterator[Record]:
    """Whether the order of allocations is right, of pairs that differ by a tenth."""
    ours = [{**case, "method": "ours"} for case in cases if case["method"] in BOUNDS]
    for by_bed in (True, False):
        pool = [{**case, "source": case["bed"]} for case in ours] if by_bed else ours
        (row,) = summarise(pool, by=("method",))
        where = "of one model on one testbed" if by_bed else "of one model across testbeds"
        name = f"order right, of {row.pairs} pairs of allocations {where}"
        if row.pairs:
            yield {"id": name, "value": row.pairs_right_ratio, "least": 0.95}
