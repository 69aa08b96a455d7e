"""Predict what happens on real clusters with shaped links, write it down, then measure it.

As root each testbed of a subject is built and probed with ``python -m estimator.probe``, its cases
are predicted from that profile, and every case runs in fresh processes, round-robin. What is found
is appended to a file, from which a further run continues. `steps` trains the cases of
`testbed_cases`; `splits` finds the best split of a batch over unlike nodes; `strategies` chooses
where gradients are reduced on a grid of links; `orders` finds the order of ranks for two
oversubscribed racks; `overlap` is the communication that DDP leaves exposed; `neighbours` are two
jobs on links in common.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from options import Options, local_machine
from records import Record, Records
from summary import summarise
from testbed.network import unavailable_reason
from testbed_cases import CELLS, NEIGHBOURS, ORDERS, OVERLAPS, SPLITS, Case, cases
from testbed_runs import MACHINE, Bench, RunPlan
from testbed_subjects import neighbours, orders, overlap, splits, steps, strategies

from estimator.errors import ProbeError

QUICK_CASES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A table of cases, the bench that predicts and measures them, and what is made of that."""

    cases: Sequence[Any]
    bench: type[Bench]
    assemble: Callable[[Sequence[Any], Records], list[Record]]
    figures: Callable[[Sequence[Record]], Iterator[Record]]
    repeats: int
    steps: int


def _subject(module: Any, bench: type[Bench], cases: Sequence[Any], **plan: Any) -> Subject:
    """The cases of a module of `testbed_subjects`, judged as it says."""
    return Subject(
        cases=cases, bench=bench, assemble=module.assemble, figures=module.figures, **plan
    )


SUBJECTS = {
    "steps": _subject(steps, steps.StepBench, cases(), repeats=7, steps=15),
    "splits": _subject(splits, splits.SplitBench, SPLITS, repeats=7, steps=15),
    "strategies": _subject(strategies, strategies.GridBench, CELLS, repeats=1, steps=3),
    "orders": _subject(orders, orders.OrderBench, ORDERS, repeats=1, steps=6),
    "overlap": _subject(overlap, overlap.OverlapBench, OVERLAPS, repeats=3, steps=15),
    "neighbours": _subject(neighbours, neighbours.NeighbourBench, NEIGHBOURS, repeats=3, steps=30),
}


def run(options: Options) -> Mapping[str, Any]:
    """Probe, predict, write down, measure; a quick run trains three paced cases once."""
    if reason := unavailable_reason():
        raise ProbeError(f"no testbed here: {reason}")
    home = options.work.resolve()
    os.environ["ESTIMATOR_HOME"] = str(home / "home")
    local_machine(home, name=MACHINE)
    answer: list[Record] = []
    for name, subject in SUBJECTS.items():
        chosen = [case for case in subject.cases if options.takes(f"{name} {case.key}")]
        if options.quick and not options.only:
            chosen = few(chosen)
        if not chosen:
            continue
        plan = RunPlan(
            cases=chosen,
            work=home / name,
            profile=home / f"{MACHINE}.json",
            repeats=1 if options.quick else subject.repeats,
            steps=subject.steps,
        )
        plan.work.mkdir(parents=True, exist_ok=True)
        records = Records(plan.work / "records.jsonl")
        for bed in dict.fromkeys(case.bed for case in chosen):
            subject.bench(bed, plan, records).run()
        rows = subject.assemble(chosen, records)
        answer += [{**row, "subject": name} for row in (*rows, *subject.figures(rows))]
    ours = [row for row in answer if row["subject"] == "steps" and "value" not in row]
    return {"cases": answer, "summary": summarise(ours, by=("method",), bounds=steps.BOUNDS)}


def few(chosen: Sequence[Any]) -> list[Case]:
    """A few paced cases of data parallelism on one testbed."""
    paced = [case for case in chosen if isinstance(case, Case) and case.method == "paced"]
    return [case for case in paced if case.bed == "even" and case in cases()][:QUICK_CASES]
