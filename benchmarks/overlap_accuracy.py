"""Predict and measure the communication that DDP leaves exposed, for bucket caps of 1 to 100 MB.

``python benchmarks/overlap_accuracy.py`` (as root) probes one testbed of `testbed_cases`, predicts
the exposed communication of a paced model for every cap, then measures it as the step under DDP
minus that of the same ranks under ``no_sync``, fresh processes each, taking turns (TARGETS A17).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from records import Progress, Record, Records
from summary import format_table
from testbed.measure import measure
from testbed.network import testbed
from testbed_accuracy import Bench
from testbed_cases import Case
from testbed_runs import MACHINE, add_options, open_work

CAPS_MB = (1, 2, 5, 10, 25, 100)
# TARGETS A17: within the larger of 15 % of itself and 2 % of the step.
BOUND_RATIO, BOUND_OF_STEP_RATIO = 0.15, 0.02


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "testbed_accuracy")
    add = parser.add_argument
    add("--bed", default="even", help="the testbed of testbed_cases")
    add("--models", default="few_big,transformer", help="paced models, joined by commas")
    add("--on", default="n0[0]+n1[0]+n2[0]", help="the allocation")
    add("--repeats", type=int, default=3, help="fresh launches of each step")
    add("--steps", type=int, default=15, help="timed steps in each launch")
    options = parser.parse_args(arguments)
    options.repredict = options.predict_only = False
    options.cases = [
        Case(
            bed=options.bed,
            model=model,
            allocation=options.on,
            strategy=f"ddp:bucket={cap * 10**6},view",
        )
        for model in options.models.split(",")
        for cap in CAPS_MB
    ]
    return options


def run(options: argparse.Namespace, records: Records) -> list[Record]:
    """Probe, predict and measure every case."""
    bench = Bench(options.bed, options, records)
    bench.cluster_path.write_text(bench.description.cluster_toml(MACHINE))
    seconds: dict[tuple[str, bool], list[float]] = {}
    with testbed(bench.description) as bed:
        bench.prepare(bed)
        progress = Progress("trained", 2 * options.repeats * len(options.cases))
        for _ in range(options.repeats):
            for case in options.cases:
                for merges in (True, False):
                    found = measure(
                        bed,
                        f"paced:{case.model}",
                        case.allocation,
                        strategy=case.strategy,
                        merges_gradients=merges,
                        steps=options.steps,
                    )
                    seconds.setdefault((case.key, merges), []).append(found.step_s)
                    progress.advance(f"{case.key} {1e3 * found.step_s:.1f} ms")
    return [_row(case, records, seconds) for case in options.cases]


def _row(case: Case, records: Records, seconds: dict[tuple[str, bool], list[float]]) -> Record:
    prediction = records.of("prediction", case.key)[-1]
    step_s = statistics.median(seconds[case.key, True])
    exposed_s = step_s - statistics.median(seconds[case.key, False])
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, measure, report."""
    options = parse_options(arguments)
    rows = run(options, open_work(options))
    if options.json:
        print(json.dumps({"cases": rows}, allow_nan=False))
        return
    lines = [["case", "exposed: predicted", "measured", "step: predicted", "measured", "within"]]
    for row in rows:
        names = ("predicted_s", "measured_s", "predicted_step_s", "step_s")
        times = [f"{1e3 * row[name]:.1f} ms" for name in names]
        lines.append([row["id"], *times, "yes" if row["is_within"] else "no"])
    print(format_table(lines))
    print(
        f"{sum(row['is_within'] for row in rows)} of {len(rows)} within max(15 %, 2 % of the step)"
    )


if __name__ == "__main__":
    main()
