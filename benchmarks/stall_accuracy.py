"""Compare stalls with what was put in, and predicted steps with data with what they take.

``python benchmarks/stall_accuracy.py [injected] [loaders] [workers] [exchange] [--repeats N]
[--json]``. ``injected``: costs put into a real script against the stalls reported of it.
``loaders``: six kinds of data with 0, 1 and 2 workers, the step without data (measured) and the
loader measured alone against the step with data. ``workers``: how many hide a sleeping preparation.
``exchange``: the interconnect stall of two gloo ranks for 10 to 200 tensors of equal bytes in all,
and for equal tensors of 1 to 100 MB in all, bucketed or not, predicted from the probed profile.
Needs a quiet machine; exit code 1 where a figure is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import correlation, median
from typing import Any

from options import parser_of, print_found
from records import Record, say
from stall_exchange import exchange
from stall_scripts.loaders import BATCH, KINDS, write_data

from estimator.machines.catalogue import load_profile
from estimator.stalls.devices import cores_of
from estimator.stalls.measured import measure_stalls
from estimator.stalls.runs import Script, run
from estimator.timeline.inputs import input_costs
from estimator.workload.loader import Loader

SCRIPTS = Path(__file__).parent / "stall_scripts"


def main() -> None:
    """Measure what was asked for, print; exit code 1 where a figure is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=45, help="steps of each run, 5 not timed")
    options = parser.parse_args()
    cases: list[Record] = []
    for part in options.parts:
        for case in PARTS[part](options.steps, options.repeats):
            say(f"{part}: {case['case']}: {case['predicted_s']:.4f} s, {case['measured_s']:.4f} s")
            cases.append({"part": part, **case, "met": _is_met(case)})
    lines = [f"{'part':9} {'case':34} {'expected':>10} {'found':>10} {'off':>8}"]
    lines += [_line(case) for case in cases]
    lines += [_summary(part, [c for c in cases if c["part"] == part]) for part in options.parts]
    print_found(options, lines, cases=cases)
    if not all(case["met"] for case in cases):
        sys.exit(1)


def _is_met(case: Record) -> bool:
    off_s = abs(case["measured_s"] - case["predicted_s"])
    allowed = max(case["of_value"] * abs(case["predicted_s"]), case["of_step"] * case["step_s"])
    return bool(off_s <= allowed)


def _line(case: Record) -> str:
    off = case["measured_s"] / case["predicted_s"] - 1 if case["predicted_s"] else 0.0
    missed = "" if case["met"] else "  missed"
    return (
        f"{case['part']:9} {case['case']:34} {1e3 * case['predicted_s']:7.2f} ms "
        f"{1e3 * case['measured_s']:7.2f} ms {off:8.1%}{missed}"
    )


def _summary(part: str, cases: list[Record]) -> str:
    off = [abs(c["measured_s"] / c["predicted_s"] - 1) for c in cases if c["predicted_s"]]
    met = sum(case["met"] for case in cases)
    said = f"{part}: {met} of {len(cases)} met, median {median(off):.1%}, worst {max(off):.1%}"
    if part == "exchange":
        both = [[case[name] for case in cases] for name in ("predicted_s", "measured_s")]
        said += f", R² {correlation(*both) ** 2:.3f} (goal 0.95)"
    return said


def _script(name: str, arguments: list[str], devices: int, steps: int) -> Script:
    cores = cores_of(f"1x{devices}:local")
    return Script(path=SCRIPTS / name, arguments=tuple(arguments), cores=cores, steps=steps)


def injected(steps: int, repeats: int) -> Iterator[Record]:
    """Each cost against the stall reported: within 10 % of it or 2 % of the step."""
    for what, seconds, workers, stall, expected_s in (
        ("sleep", 0.002, 0, "prep", 0.016),
        ("sleep", 0.010, 0, "prep", 0.080),
        ("work", 0.002, 0, "prep", 0.016),
        ("work", 0.010, 0, "prep", 0.080),
        ("sleep", 0.004, 2, "prep", 0.0),
        ("wire", 0.010, 0, "interconnect", 0.010 * 4 * (512 * 512 + 512) * 4 / 1e6),
    ):
        devices = 2 if stall == "interconnect" else 1
        plain = _stall_s(_script("injected.py", ["none", "0", str(workers)], devices, steps), stall)
        asked = _script("injected.py", [what, str(seconds), str(workers)], devices, steps)
        found = measure_stalls(asked, repeats=repeats)
        yield {
            "case": f"{what} {seconds:g} s, {workers} workers",
            "predicted_s": expected_s,
            # What the script waits for without the cost is no part of it.
            "measured_s": found.stalls[stall].stall_s - plain,  # type: ignore[index]
            "step_s": found.runs["T3"].step_s,
            "of_value": 0.10,
            "of_step": 0.03 if workers else 0.02,
        }


def _stall_s(script: Script, stall: str) -> float:
    return measure_stalls(script, repeats=3).stalls[stall].stall_s  # type: ignore[index]


def loaders(steps: int, repeats: int) -> Iterator[Record]:
    """Steps with data: within 25 %, in the median 10 % (the summary says)."""
    profile = load_profile("local")
    with tempfile.TemporaryDirectory(prefix="loaders-") as folder:
        write_data(Path(folder))
        for kind in KINDS:
            for workers in (0, 1, 2):
                script = _script("loaders.py", [kind, str(workers), folder], 1, steps)
                loader = _loader(script)
                without = _median_s(script, repeats, is_synthetic=True)
                costs = input_costs(loader, profile, samples=BATCH, batches=1, ranks_per_node=1)
                measured_s = _median_s(script, repeats, is_synthetic=False)
                yield {
                    "case": f"{kind}, {workers} workers",
                    "predicted_s": without + costs.stall_s(without),
                    "measured_s": measured_s,
                    "without_s": without,
                    "loader": loader.to_dict(),
                    "step_s": measured_s,
                    "of_value": 0.25,
                    "of_step": 0.0,
                }


def _loader(script: Script) -> Loader:
    """The loader of a script, measured on its cores with as many threads as these."""
    (cores,) = script.cores
    command = [sys.executable, str(script.path), *script.arguments, "loader"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
    found = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return Loader(**json.loads(found.stdout))


def _median_s(script: Script, repeats: int, *, is_synthetic: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        devices = len(script.cores)
        runs = [
            run(script, Path(folder), devices=devices, is_synthetic=is_synthetic).step_s
            for _ in range(repeats)
        ]
    return median(runs)


def workers(steps: int, repeats: int) -> Iterator[Record]:
    """The fewest workers that hide a sleep, seconds standing for numbers: right within one."""
    for needed in (1, 2, 4, 8, 16):
        asked = ["sleep", "0", "0"]
        without = _median_s(_script("injected.py", asked, 1, steps), repeats, is_synthetic=True)
        sleep_s = (needed - 0.4) * without / 8
        found = next(
            count
            for count in range(max(needed - 2, 1), needed + 3)
            if _median_s(
                _script("injected.py", ["sleep", str(sleep_s), str(count)], 1, steps + 2 * needed),
                repeats,
                is_synthetic=False,
            )
            <= 1.03 * without
            or count == needed + 2
        )
        yield {
            "case": f"workers that hide {8 * sleep_s:.3f} s",
            "predicted_s": float(needed),
            "measured_s": float(found),
            "step_s": 1.0,
            "of_value": 0.0,
            "of_step": 1.0,
        }


PARTS: dict[str, Any] = {
    "injected": injected,
    "loaders": loaders,
    "workers": workers,
    "exchange": exchange,
}

if __name__ == "__main__":
    main()
