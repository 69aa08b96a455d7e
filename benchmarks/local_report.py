"""Lay out accuracy cases as text: each case, what it spends its time on, the summaries."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaries import LEAST_QUIET_STEPS, MOST_DRIFT_RATIO, judged
from summary import (
    PAIR_GAP_RATIO,
    Bound,
    error_ratio,
    format_rows,
    format_table,
    is_beyond,
    milliseconds,
    off,
    percent,
    summarise,
)

# The largest errors with which each method passes.
BOUNDS = {
    "probe": Bound(median_ratio=0.08, worst_ratio=0.25),
    "measured": Bound(median_ratio=0.05, worst_ratio=0.12),
}
IN_GRID_BOUND_RATIO = 0.1

Case = Mapping[str, Any]


def report(cases: Sequence[Case], canary: Mapping[str, float | None]) -> Iterator[str]:
    """What people read: cases, phases, summaries, canary, share of op time in the probe's grid."""
    yield describe_cases(cases)
    if any(case["phases_s"] for case in cases):
        yield "\n" + describe_phases(cases)
    yield "\n" + format_rows(summarise(cases, bounds=BOUNDS))
    yield "\n" + format_rows(summarise(cases, by=("method",), bounds=BOUNDS))
    asked = (
        f"{method}: median {100 * bound.median_ratio:.0f} %, worst {100 * bound.worst_ratio:.0f} %"
        for method, bound in BOUNDS.items()
    )
    yield f"\nbounds: {'; '.join(asked)}; beyond: error > max(worst, 2 × noise)"
    yield f"pairs: same model, throughput differing by at least {100 * PAIR_GAP_RATIO:.0f} %"
    yield describe_canary(canary)
    yield from describe_grid_share(cases)


# Of models drawn at random: each method is to show this much, and timed operators are to be
# closer than the probe alone on this share of the models.
DRAWN_BOUNDS = {
    "probe": Bound(median_ratio=0.05, worst_ratio=0.20),
    "measured": Bound(median_ratio=0.03, worst_ratio=0.12),
}
CLOSER_RATIO = 0.8
_HEADINGS = {"probe": "probe", "measured": "operators timed"}


def report_drawn(cases: Sequence[Case], canary: Mapping[str, float | None]) -> Iterator[str]:
    """What people read of models drawn at random: each by both methods, then both methods.

    The summaries are of all models, then of those whose canary lets them be judged.
    """
    by_model: dict[str, dict[str, Case]] = {}
    for case in cases:
        by_model.setdefault(case["model"], {})[case["method"]] = case
    methods = list(dict.fromkeys(case["method"] for case in cases))
    header = [
        "model",
        "measured",
        "noise",
        *(cell for name in methods for cell in (_HEADINGS[name], "error")),
        *(f"canary: {stage.removesuffix('_s')}" for stage in cases[0]["canaries"]),
        "quiet steps",
        "their median",
    ]
    lines = [[*header, ""]]
    for model, found in by_model.items():
        first = found[methods[0]]
        cells = [milliseconds(first["measured_s"], unit=""), percent(first["noise_ratio"])]
        for name in methods:
            predicted_s = found[name]["predicted_s"]
            cells += [milliseconds(predicted_s, unit=""), off(predicted_s, first["measured_s"])]
        cells += [milliseconds(seconds, 2, unit="") for seconds in first["canaries"].values()]
        cells.append(f"{first['quiet_steps']} of {first['steps']}")
        cells.append(milliseconds(first["quiet_step_s"], unit=""))
        bad = next((each for each in found.values() if each["status"] != "ok"), None)
        lines.append([model, *cells, _complaint(bad) if bad else _drifted(found)])
    yield format_table(lines)
    yield "\n" + format_rows(summarise(cases, by=("method",), bounds=DRAWN_BOUNDS))
    yield (
        f"\njudged by the median of at least {LEAST_QUIET_STEPS} quiet steps, the canary around "
        f"each being within {percent(MOST_DRIFT_RATIO)} of the probe's:"
    )
    yield format_rows(summarise(judged(cases), by=("method",), bounds=DRAWN_BOUNDS))
    if {"probe", "measured"} <= set(methods):
        closer = sum(
            error_ratio(found["measured"]) < error_ratio(found["probe"])
            for found in by_model.values()
        )
        yield (
            f"\noperators timed are closer than the probe alone on {closer} of {len(by_model)} "
            f"models (asked: {percent(CLOSER_RATIO)})"
        )
    for name, bound in DRAWN_BOUNDS.items():
        asked = f"median {percent(bound.median_ratio)}, worst {percent(bound.worst_ratio)}"
        yield f"asked of {name}: {asked}"
    yield describe_canary(canary)
    yield from describe_grid_share(cases)


def _drifted(found: Mapping[str, Case]) -> str:
    """By which methods a model is not judged."""
    beyond = [_HEADINGS[name] for name, case in found.items() if case["quiet_step_s"] is None]
    return f"not judged: {', '.join(beyond)}" if beyond else ""


def describe_cases(cases: Sequence[Case]) -> str:
    """One line per case: predicted, measured, error, noise, and the predicted parts in ms."""
    header = ["case", "predicted", "measured", "error", "noise", "in 80 %", "forward", "backward"]
    return format_table(
        [
            [*header, "update", "comm", "other", "in grid", ""],
            *(_case_line(case) for case in cases),
        ]
    )


def _case_line(case: Case) -> list[str]:
    if case["predicted_s"] is None:
        return [
            case["id"],
            "-",
            milliseconds(case["measured_s"], unit=""),
            *["-"] * 9,
            _complaint(case),
        ]
    parts = case["breakdown"]
    named = [parts[f"{name}_s"] for name in ("forward", "backward", "update")]
    named.append(parts["communication_exposed_s"])
    shares = [milliseconds(part, unit="") for part in (*named, sum(parts.values()) - sum(named))]
    in_grid = case["op_time_in_grid_ratio"]
    shares.append("-" if in_grid is None else f"{100 * in_grid:.0f} %")
    if case["measured_s"] is None:
        return [
            case["id"],
            milliseconds(case["predicted_s"], unit=""),
            *["-"] * 4,
            *shares,
            _complaint(case),
        ]
    remarks = ["BEYOND"] if is_beyond(case, BOUNDS[case["method"]].worst_ratio) else []
    if not case["predicted_beforehand"]:
        remarks.append("predicted after measuring")
    return [
        case["id"],
        milliseconds(case["predicted_s"], unit=""),
        milliseconds(case["measured_s"], unit=""),
        off(case["predicted_s"], case["measured_s"]),
        percent(case["noise_ratio"]),
        "yes" if case["low_s"] <= case["measured_s"] <= case["high_s"] else "no",
        *shares,
        ", ".join(remarks),
    ]


def _complaint(case: Case) -> str:
    return f"{case['status']}: {case['reason'][:100]}"


def describe_phases(cases: Sequence[Case]) -> str:
    """Predicted beside measured ms of each phase; communication is waited for in backward."""
    phases = ("forward", "backward", "update")
    lines = [["case", *(f"{phase} {what}" for phase in phases for what in ("pred", "meas"))]]
    for case in cases:
        if case["predicted_s"] is None or not case["phases_s"]:
            continue
        parts = dict(case["breakdown"])
        parts["backward_s"] += parts["communication_exposed_s"] + parts["straggler_s"]
        cells = [
            milliseconds(seconds, unit="")
            for phase in phases
            for seconds in (parts[f"{phase}_s"], case["phases_s"][phase])
        ]
        lines.append([case["id"], *cells])
    return format_table(lines)


def describe_canary(canary: Mapping[str, float | None]) -> str:
    """How much the machine itself changed between the stages."""
    stages = (
        f"{name.removesuffix('_s')} {1e3 * seconds:.3f} ms"
        for name, seconds in canary.items()
        if name.endswith("_s") and seconds is not None
    )
    drift = canary["drift_ratio"]
    drifted = "" if drift is None else f"; drift {100 * drift:.1f} %"
    return f"canary: {', '.join(stages)}{drifted}"


def describe_grid_share(cases: Sequence[Case]) -> Iterator[str]:
    """How much of the predicted op time was probed in exactly its shape."""
    shares = [
        case["op_time_in_grid_ratio"]
        for case in cases
        if case["method"] == "probe" and case["op_time_in_grid_ratio"] is not None
    ]
    if shares:
        yield (
            f"op time whose exact shape is in the probe's grid: median "
            f"{100 * statistics.median(shares):.1f} %, most {100 * max(shares):.1f} % "
            f"(must stay below {100 * IN_GRID_BOUND_RATIO:.0f} %)"
        )
