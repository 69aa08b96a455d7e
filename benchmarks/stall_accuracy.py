"""Compare stalls with what was put in, and predicted steps with data with what they take.

``injected``: costs put into a real script against the stalls reported of it; with root also reads
of a throttled disk and the link between two namespaces. ``loaders``: six kinds of data with 0, 1
and 2 workers, the step without data (measured) and the loader measured alone against the step with
data. ``cached``: shares of the data in the page cache, the rest on a throttled disk. ``workers``:
how many hide a sleeping preparation. ``exchange``: the interconnect stall of two gloo ranks for 10
to 200 tensors of equal bytes in all, and for equal tensors of 1 to 100 MB in all, bucketed or not,
predicted from the probed profile.

What is found is appended to a file, from which a further run continues. Needs a quiet machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import correlation

from options import Options, local_machine
from records import Record, Records, say
from stall_bench import Bench, Case
from stall_exchange import exchange
from stall_injected import injected, workers
from stall_loaders import cached, loaders
from summary import milliseconds

PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "injected": injected,
    "loaders": loaders,
    "cached": cached,
    "workers": workers,
    "exchange": exchange,
}


def run(options: Options) -> Iterator[Record]:
    """Every case of every part, within its bounds or not; then what parts show together."""
    records = Records(options.work / "records.jsonl")
    os.environ["ESTIMATOR_HOME"] = str(options.work.resolve() / "home")
    local_machine(options.work.resolve() / "home" / "machines")
    bench = Bench(steps=30, repeats=3, folder=options.work.resolve())
    for part, cases_of in PARTS.items():
        cases = [_measured(records, part, c) for c in cases_of(bench) if options.takes(c.name)]
        yield from cases
        if cases:
            missed = sum(not case["met"] for case in cases)
            yield {
                "id": f"{part}: beyond their bounds, of {len(cases)}",
                "value": missed,
                "bound": 0,
            }
        for what, members in _groups(cases).items() if part == "exchange" else ():
            both = [[case[name] for case in members] for name in ("predicted_s", "measured_s")]
            yield {"id": f"{part}, {what}: R²", "value": correlation(*both) ** 2, "least": 0.95}


def _measured(records: Records, part: str, case: Case) -> Record:
    if not records.of(part, case.name):
        found = case.measure()
        off_s = abs(found["measured_s"] - found["predicted_s"])
        allowed = max(
            found["of_value"] * abs(found["predicted_s"]), found["of_step"] * found["step_s"]
        )
        about = {"kind": part, "key": case.name, "id": f"{part}: {case.name}", "method": part}
        records.add({**about, **found, "met": off_s <= allowed})
        say(f"{about['id']}: {milliseconds(off_s)} off, {milliseconds(allowed)} allowed")
    return records.of(part, case.name)[-1]


def _groups(cases: list[Record]) -> dict[str, list[Record]]:
    """Models of equal bytes, and models of equally many tensors."""
    found: dict[str, list[Record]] = {}
    for case in cases:
        found.setdefault(case["group"], []).append(case)
    return {what: some for what, some in found.items() if len(some) > 2}
