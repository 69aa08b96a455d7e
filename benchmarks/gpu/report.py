"""Assemble the cases of a run on a GPU from its records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from records import Record, Records
from summary import Bound, noise_ratio

from estimator.machines.profile import MachineProfile
from gpu.cases import Case

# The largest errors with which each method passes: of step times, then of memory peaks.
BOUNDS = {
    "probe": Bound(median_ratio=0.08, worst_ratio=0.25),
    "measured": Bound(median_ratio=0.04, worst_ratio=0.12),
}
MEMORY_BOUND_RATIO = 0.05
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


def figures(cases: Sequence[Record]) -> Iterator[Record]:
    """How far predicted peaks of memory are off, in the median."""
    errors = [
        abs(case["peak_memory_bytes"] / case["peak_measured_bytes"] - 1)
        for case in cases
        if case["method"] == "probe" and case["peak_measured_bytes"] and case["peak_memory_bytes"]
    ]
    if errors:
        median = {"value": statistics.median(errors), "bound": MEMORY_BOUND_RATIO}
        yield {"id": f"peak memory of {len(errors)} cases: median error", **median}
