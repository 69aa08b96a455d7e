"""Predict what happens on real clusters with shaped links, write it down, then measure it.

    python benchmarks/testbed_accuracy.py [steps | splits | strategies | orders | overlap]

as root builds each testbed of a subject, probes it with ``python -m estimator.probe``, predicts its
cases from that profile, and runs every case in fresh processes, round-robin. What is found is
appended to a file in --work, from which a second run continues. `steps` trains the cases of
`testbed_cases`; `splits` finds the best split of a batch over unlike nodes; `strategies` chooses
where gradients are reduced on a grid of links; `orders` finds the order of ranks for two
oversubscribed racks; `overlap` is the communication that DDP leaves exposed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import add_prediction, add_profile, add_repeats, add_work, parser_of, print_found
from records import Record, Records
from summary import summarise
from testbed_cases import CELLS, ORDERS, OVERLAPS, SPLITS, beds, cases
from testbed_runs import Bench, open_work
from testbed_subjects import orders, overlap, splits, steps, strategies

from estimator.machines.catalogue import load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A table of cases, the bench that predicts and measures them, and what is made of that.

    `folder` of ``build/`` keeps the results; `more` is said beside the cases under ``--json``.
    """

    cases: Sequence[Any]
    bench: type[Bench]
    assemble: Callable[[Sequence[Any], Records], list[Record]]
    report: Callable[[Sequence[Record]], Iterator[str]]
    folder: str
    repeats: int
    steps: int
    probe_budget_s: float = 45.0
    more: Callable[[Sequence[Record]], dict[str, Any]] = lambda _: {}


SUBJECTS = {
    "steps": Subject(
        cases=cases(),
        bench=steps.StepBench,
        assemble=steps.assemble,
        report=steps.report,
        folder="testbed_accuracy",
        repeats=7,
        steps=15,
        more=lambda found: {"summary": summarise(found, by=("method",), bounds=steps.BOUNDS)},
    ),
    "splits": Subject(
        cases=SPLITS,
        bench=splits.SplitBench,
        assemble=splits.assemble,
        report=splits.report,
        folder="balance_accuracy",
        repeats=7,
        steps=15,
        more=lambda found: {"balances": [*splits.balances(found)]},
    ),
    "strategies": Subject(
        cases=CELLS,
        bench=strategies.GridBench,
        assemble=strategies.assemble,
        report=strategies.report,
        folder="strategy_accuracy",
        repeats=1,
        steps=3,
    ),
    "orders": Subject(
        cases=ORDERS,
        bench=orders.OrderBench,
        assemble=orders.assemble,
        report=orders.report,
        folder="rank_order_accuracy",
        repeats=1,
        steps=6,
        probe_budget_s=60.0,
        more=lambda found: {"gains": orders.gains(found)},
    ),
    "overlap": Subject(
        cases=OVERLAPS,
        bench=overlap.OverlapBench,
        assemble=overlap.assemble,
        report=overlap.report,
        folder="testbed_accuracy",
        repeats=3,
        steps=15,
    ),
}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("subject", nargs="?", choices=SUBJECTS, default="steps", help="what is judged (steps)")
    add("--beds", help="names of testbeds, joined by commas")
    add("--only", choices=list(steps.BOUNDS), help="the cases judged together")
    add("--cases", nargs="+", default=[""], help="only cases whose names hold one of these texts")
    add_work(parser, None)
    add_profile(parser)
    add_repeats(parser, repeats=None, steps=None)
    add_prediction(parser)
    add("--probe-budget", type=float, help="seconds to probe a network")
    options = parser.parse_args(arguments)
    subject = SUBJECTS[options.subject]
    options.work = options.work or Path("build", subject.folder)
    options.repeats = options.repeats or subject.repeats
    options.steps = options.steps or subject.steps
    options.probe_budget = options.probe_budget or subject.probe_budget_s
    wanted = options.beds.split(",") if options.beds else list(beds())
    if unknown := sorted(set(wanted) - set(beds())):
        parser.error(f"there is no testbed '{unknown[0]}'; choose of {', '.join(beds())}")
    options.cases = [
        case
        for case in subject.cases
        if case.bed in wanted
        and options.only in (None, case.method)
        and any(text in case.key for text in options.cases)
    ]
    if not options.cases:
        parser.error("no case is left; they are " + ", ".join(case.key for case in subject.cases))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, write down, measure, report."""
    options = parse_options(arguments)
    subject = SUBJECTS[options.subject]
    records = open_work(options)
    for name in dict.fromkeys(case.bed for case in options.cases):
        subject.bench(name, options, records).run()
    found = subject.assemble(options.cases, records)
    machine = load_profile(options.profile).devices[0].name
    print_found(options, subject.report(found), machine=machine, cases=found, **subject.more(found))


if __name__ == "__main__":
    main()
