"""Compare stalls with what was put in, and predicted steps with data with what they take.

    python benchmarks/stall_accuracy.py [injected] [loaders] [cached] [workers] [exchange]

``injected``: costs put into a real script against the stalls reported of it; with root also reads
of a throttled disk and the link between two namespaces. ``loaders``: six kinds of data with 0, 1
and 2 workers, the step without data (measured) and the loader measured alone against the step with
data. ``cached``: shares of the data in the page cache, the rest on a throttled disk. ``workers``:
how many hide a sleeping preparation. ``exchange``: the interconnect stall of two gloo ranks for 10
to 200 tensors of equal bytes in all, and for equal tensors of 1 to 100 MB in all, bucketed or not,
predicted from the probed profile.

What is found is appended to a file in --work, from which a further run continues. Needs a quiet
machine; exit code 1 where a figure is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import correlation, median

from options import add_repeats, add_work, parser_of, print_found
from records import Record, Records, say
from stall_bench import Bench, Case
from stall_exchange import exchange
from stall_injected import injected, workers
from stall_loaders import cached, loaders

PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "injected": injected,
    "loaders": loaders,
    "cached": cached,
    "workers": workers,
    "exchange": exchange,
}
# The share by which the median of a part may be off, beside the bounds of its cases.
MEDIANS = {"loaders": 0.10}


def main() -> None:
    """Measure what was asked for, print; exit code 1 where a figure is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cases", nargs="+", default=[""], help="only those that hold such a text")
    add_work(parser, "stall_accuracy")
    add_repeats(parser, repeats=3, steps=30)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "records.jsonl")
    bench = Bench(steps=options.steps, repeats=options.repeats, folder=options.work.resolve())
    cases = []
    for part in options.parts:
        for case in PARTS[part](bench):
            if any(text in case.name for text in options.cases):
                cases.append(_measured(records, part, case))
    parts = {part: [c for c in cases if c["kind"] == part] for part in options.parts}
    lines = [f"{'part':9} {'case':34} {'expected':>10} {'found':>10} {'off':>8}"]
    lines += [_line(case) for case in cases]
    lines += [_summary(part, found) for part, found in parts.items() if found]
    print_found(options, lines, cases=cases)
    if not all(case["met"] for case in cases):
        sys.exit(1)


def _measured(records: Records, part: str, case: Case) -> Record:
    if not records.of(part, case.name):
        found = case.measure()
        off_s = abs(found["measured_s"] - found["predicted_s"])
        allowed = max(
            found["of_value"] * abs(found["predicted_s"]), found["of_step"] * found["step_s"]
        )
        records.add({"kind": part, "key": case.name, **found, "met": off_s <= allowed})
        say(f"{part}: {_line(records.found[-1])}")
    return records.of(part, case.name)[-1]


def _line(case: Record) -> str:
    off = case["measured_s"] / case["predicted_s"] - 1 if case["predicted_s"] else 0.0
    missed = "" if case["met"] else "  missed"
    return (
        f"{case['kind']:9} {case['key']:34} {1e3 * case['predicted_s']:7.2f} ms "
        f"{1e3 * case['measured_s']:7.2f} ms {off:8.1%}{missed}"
    )


def _summary(part: str, cases: list[Record]) -> str:
    off = [abs(c["measured_s"] / c["predicted_s"] - 1) for c in cases if c["predicted_s"]]
    met = sum(case["met"] for case in cases)
    said = f"{part}: {met} of {len(cases)} met"
    if off:
        said += f", median {median(off):.1%}, worst {max(off):.1%}"
    if part in MEDIANS:
        said += f" (median within {MEDIANS[part]:.0%})"
    if part == "exchange" and len(cases) > 1:
        for what, some in _groups(cases).items():
            both = [[case[name] for case in some] for name in ("predicted_s", "measured_s")]
            said += f"; {what}: R² {correlation(*both) ** 2:.3f} (goal 0.95)"
    return said


def _groups(cases: list[Record]) -> dict[str, list[Record]]:
    """Models of equal bytes, and models of equally many tensors."""
    found: dict[str, list[Record]] = {}
    for case in cases:
        found.setdefault(case["group"], []).append(case)
    return {what: some for what, some in found.items() if len(some) > 2}


if __name__ == "__main__":
    main()
