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
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from options import Options, local_machine
from records import Record, Records
from summary import summarise
from testbed.network import unavailable_reason
from testbed_cases import CELLS, NEIGHBOURS, ORDERS, OVERLAPS, SPLITS, Case, cases
from testbed_runs import MACHINE, Bench, RunPlan
from testbed_subjects import neighbours, orders, overlap, splits, steps, strategies

from estimator.errors import ProbeError

QUICK_CASES = 3


class Subject(NamedTuple):
    """A bench, the module that assembles and judges what it finds, cases, and how much is run."""

    bench: type[Bench]
    module: ModuleType
    cases: Sequence[Any]
    repeats: int
    steps: int


SUBJECTS = {
    "steps": Subject(steps.StepBench, steps, cases(), repeats=7, steps=15),
    "splits": Subject(splits.SplitBench, splits, SPLITS, repeats=7, steps=15),
    "strategies": Subject(strategies.GridBench, strategies, CELLS, repeats=1, steps=3),
    "orders": Subject(orders.OrderBench, orders, ORDERS, repeats=1, steps=6),
    "overlap": Subject(overlap.OverlapBench, overlap, OVERLAPS, repeats=3, steps=15),
    "neighbours": Subject(neighbours.NeighbourBench, neighbours, NEIGHBOURS, repeats=3, steps=30),
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
        rows = subject.module.assemble(chosen, records)
        answer += [{**row, "subject": name} for row in (*rows, *subject.module.figures(rows))]
    ours = [row for row in answer if row["subject"] == "steps" and "value" not in row]
    return {"cases": answer, "summary": summarise(ours, by=("method",), bounds=steps.BOUNDS)}


def few(chosen: Sequence[Any]) -> list[Case]:
    """A few paced cases of data parallelism on one testbed."""
    paced = [case for case in chosen if isinstance(case, Case) and case.method == "paced"]
    return [case for case in paced if case.bed == "even" and case in cases()][:QUICK_CASES]
