"""Time a fixed operation at every stage of a benchmark, and tell which steps count as quiet.

By a rule fixed before anything is measured: a step is quiet where the canary just before and just
after it took what it took at the probe, within `MOST_DRIFT_RATIO`. A case is judged, by the median
of its quiet steps, where there are `LEAST_QUIET_STEPS`, and operators timed only where the canary
beside them was as near. Nothing is ever corrected by it, and what all steps took is shown first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from records import Record, Records

from estimator.machines.profile import MachineProfile

# Turbo clocks alone make a tenth; more is nearly the whole error allowed to the worst model.
MOST_DRIFT_RATIO = 0.10
LEAST_QUIET_STEPS = 3

Case = Mapping[str, Any]


def case_canaries(key: str, profile: MachineProfile, records: Records) -> dict[str, float | None]:
    """Median seconds of the canary at the probe, beside timed operators, beside trained steps."""
    timed = [each.get("canary_s") for each in records.of("prediction", key, method="measured")]
    trained = [
        seconds
        for run in records.of("measurement", key)
        for seconds in run.get("canaries_s") or [run["canary_s"]]
    ]
    return {
        "probe_s": profile.canary_s,
        "timing_s": timed[-1] if timed else None,
        "training_s": statistics.median(trained) if trained else None,
    }


def quiet_steps(
    key: str, method: str, canaries: Mapping[str, float | None], records: Records
) -> Record:
    """How many steps of a case were quiet, of how many, and their median where it is judged."""
    usual_s, quiet, count = canaries["probe_s"], [], 0
    for run in records.of("measurement", key):
        beside = run.get("canaries_s") or []
        for step_s, around in zip(run.get("steps_s") or [], pairwise(beside), strict=False):
            count += 1
            if all(is_near(seconds, usual_s) for seconds in around):
                quiet.append(step_s)
    enough = len(quiet) >= LEAST_QUIET_STEPS
    as_probed = method == "probe" or is_near(canaries["timing_s"], usual_s)
    return {
        "steps": count,
        "quiet_steps": len(quiet),
        "quiet_step_s": statistics.median(quiet) if enough and as_probed else None,
    }


def is_near(seconds: float | None, usual_s: float | None) -> bool:
    """Whether the canary took what it usually takes.

    >>> is_near(2.9e-3, 2.7e-3), is_near(3.0e-3, 2.7e-3), is_near(None, 2.7e-3)
    (True, False, False)
    """
    if not seconds or not usual_s:
        return False
    return abs(seconds / usual_s - 1) <= MOST_DRIFT_RATIO


def judged(cases: Sequence[Case]) -> list[Record]:
    """The cases with enough quiet steps, measured by these; what failed stays, as a failure."""
    return [
        {**case, "measured_s": case["quiet_step_s"] or case["measured_s"]}
        for case in cases
        if case["quiet_step_s"] or case["status"] != "ok"
    ]


def time_canary(rank: int, world_size: int, arguments: Record) -> float:
    """Seconds of the fixed op, in a process pinned as a rank of a training run is."""
    from estimator.probe.devices.backend import open_backend
    from estimator.probe.devices.jobs import canary_s

    return canary_s(open_backend(arguments["kind"]))


def canary_now(profile: MachineProfile) -> float:
    """Seconds of the fixed op on the first device, here and now."""
    from estimator.probe.devices.ranks import run_on_devices

    (seconds,) = run_on_devices(
        profile.devices[:1],
        f"{__name__}:time_canary",
        {"kind": profile.kind},
        timeout_s=60.0,
        trains=False,
    )
    return float(seconds)


def note_canary(profile: MachineProfile, records: Records) -> None:
    """Time the fixed op now, at prediction."""
    records.add({"kind": "canary", "canary_s": canary_now(profile)})
