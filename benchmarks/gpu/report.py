"""Assemble the cases of a run on a GPU from its records, and lay them out as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from records import Record, Records
from summary import (
    Bound,
    format_rows,
    format_table,
    is_beyond,
    milliseconds,
    noise_ratio,
    off,
    percent,
    summarise,
)

from estimator.machines.profile import MachineProfile
from gpu.cases import Case

# The largest errors with which each method passes: of step times, then of memory peaks.
BOUNDS = {
    "probe": Bound(median_ratio=0.08, worst_ratio=0.25),
    "measured": Bound(median_ratio=0.04, worst_ratio=0.12),
}
MEMORY_BOUND_RATIO = 0.05
# A step whose issuing takes this share of it waits for the host.
HOST_BOUND_RATIO = 0.9
UNREACHED = "not reached in the time"
_KEPT = (
    *("predicted_s", "low_s", "high_s", "breakdown", "bottleneck", "op_time_in_grid_ratio"),
    *("peak_memory_bytes", "assumptions", "device_s", "ops_skipped"),
)


def assemble(cases: Sequence[Case], profile: MachineProfile, records: Records) -> list[Record]:
    """One entry per case and method, failed ones included."""
    return [_assembled(case, method, profile, records) for case in cases for method in BOUNDS]


def _assembled(case: Case, method: str, profile: MachineProfile, records: Records) -> Record:
    predictions = records.of("prediction", case.key, method=method)
    prediction = predictions[-1] if predictions else {"reason": UNREACHED}
    runs = records.of("measurement", case.key)
    run: Record = runs[-1] if runs else {}
    failures = records.of("failure", case.key)
    status, reason = "ok", None
    if not runs:
        status = "not_measured"
        reason = failures[-1]["reason"] if failures else UNREACHED
    elif prediction.get("predicted_s") is None:
        status, reason = "no_prediction", prediction.get("reason")
    steps_s = run.get("steps_s")
    return {
        "id": f"{case.key}-{method}",
        "source": "gpu_accuracy",
        "model": case.workload,
        "machine": profile.name,
        "allocation": f"1x1:{profile.name}",
        "ranks": 1,
        "nodes": 1,
        "strategy": "ddp",
        "precision": case.precision,
        "execution": case.execution,
        "batch_per_gpu": case.batch,
        "global_batch": case.batch,
        "method": method,
        "k": 0,
        "draw": 0,
        **{name: prediction.get(name) for name in _KEPT},
        **{name: run.get(name) for name in ("measured_s", "wall_s", "host_s", "awaited_s")},
        # Of the steps of one process: others are not started, minutes on a GPU are scarce.
        "noise_ratio": noise_ratio(steps_s) if steps_s else None,
        "peak_measured_bytes": _peak_bytes(run),
        "predicted_at": prediction.get("at"),
        "measured_at": run.get("at"),
        "predicted_beforehand": not run or prediction.get("at", "") < run["at"],
        "status": status,
        "reason": reason,
    }


def _peak_bytes(run: Record) -> int | None:
    """The most that torch held for the case itself."""
    if run.get("peak_bytes") is None:
        return None
    return int(run["peak_bytes"] - run["allocated_before_bytes"])


def report(found: Sequence[Record]) -> Iterator[str]:
    """What people read: cases, summaries, memory, who waits for the host."""
    yield _cases_table(found)
    for by in (("method",), ("method", "precision"), ("method", "execution")):
        yield "\n" + format_rows(summarise(found, by=by, bounds=BOUNDS))
    yield from _memory_lines(found)


def _cases_table(found: Sequence[Record]) -> str:
    header = ["case", "predicted", "measured", "error", "noise", "host", "in 80 %", "in grid", ""]
    return format_table([header, *(_case_line(case) for case in found)])


def _case_line(case: Record) -> list[str]:
    predicted, measured = case["predicted_s"], case["measured_s"]
    cells = [case["id"], milliseconds(predicted, 2), milliseconds(measured, 2)]
    if predicted is None or measured is None:
        return [
            *cells,
            "-",
            "-",
            milliseconds(case["host_s"], 2),
            "-",
            "-",
            f"{case['status']}: {case['reason']}",
        ]
    remarks = ["BEYOND"] if is_beyond(case, BOUNDS[case["method"]].worst_ratio) else []
    if case["host_s"] >= HOST_BOUND_RATIO * measured:
        remarks.append("host-bound")
    if "host" in (case["bottleneck"] or ""):
        remarks.append("said to be host-bound")
    return [
        *cells,
        off(predicted, measured),
        percent(case["noise_ratio"]),
        milliseconds(case["host_s"], 2),
        "yes" if case["low_s"] <= measured <= case["high_s"] else "no",
        f"{100 * case['op_time_in_grid_ratio']:.0f} %",
        ", ".join(remarks),
    ]


def _memory_lines(found: Sequence[Record]) -> Iterator[str]:
    rows = [
        case
        for case in found
        if case["method"] == "probe" and case["peak_measured_bytes"] and case["peak_memory_bytes"]
    ]
    if not rows:
        yield "\nno peak memory was measured"
        return
    errors = [case["peak_memory_bytes"] / case["peak_measured_bytes"] - 1 for case in rows]
    lines = [["peak memory", "predicted", "measured", "error"]]
    for case, error in zip(rows, errors, strict=True):
        sizes = (case["peak_memory_bytes"], case["peak_measured_bytes"])
        gib = [f"{size / 2**30:.2f} GiB" for size in sizes]
        lines.append([case["id"].removesuffix("-probe"), *gib, f"{100 * error:+.1f} %"])
    yield "\n" + format_table(lines)
    sizes = [abs(error) for error in errors]
    yield (
        f"peak memory: median {100 * statistics.median(sizes):.1f} %, "
        f"worst {100 * max(sizes):.1f} % (bound {100 * MEMORY_BOUND_RATIO:.0f} % median)"
    )
