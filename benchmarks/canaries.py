"""Time a fixed operation at every stage of a benchmark, and tell which cases it leaves judged.

A case is judged by a rule that was fixed before anything was measured: the canary beside its
training took within `MOST_DRIFT_RATIO` of what it took when its prediction's figures were measured,
which is at the probe, or where its operators were timed. Nothing is ever corrected by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from records import Record, Records
from summary import noise_ratio

from estimator.machines.profile import MachineProfile

# Turbo clocks alone make a tenth; more is nearly the whole error allowed to the worst model.
MOST_DRIFT_RATIO = 0.10
# Where each method's figures were measured.
STAGES = {"probe": "probe_s", "measured": "timing_s"}

Case = Mapping[str, Any]


def case_canaries(key: str, profile: MachineProfile, records: Records) -> dict[str, float | None]:
    """Seconds of the canary at the probe, beside the case's timed operators, beside its training.

    Beside a run it is the mean of before and after; of several runs, the median.
    """
    timed = [each.get("canary_s") for each in records.of("prediction", key, method="measured")]
    trained = [
        statistics.fmean((run["canary_s"], run.get("canary_after_s") or run["canary_s"]))
        for run in records.of("measurement", key)
    ]
    return {
        "probe_s": profile.canary_s,
        "timing_s": timed[-1] if timed else None,
        "training_s": statistics.median(trained) if trained else None,
    }


def drift_ratio(canaries: Mapping[str, float | None], method: str) -> float | None:
    """How much longer the canary took at training than where the method's figures come from.

    >>> drift_ratio({"probe_s": 2.0, "timing_s": None, "training_s": 2.5}, "probe")
    0.25
    """
    before, after = canaries[STAGES[method]], canaries["training_s"]
    return after / before - 1 if before and after else None


def is_judged(case: Case) -> bool:
    """Whether the machine was the same at both stages; what failed is judged, as a failure."""
    drift = case["canary_drift_ratio"]
    return drift is None or abs(drift) <= MOST_DRIFT_RATIO


def judged(cases: Sequence[Case]) -> list[Case]:
    """The cases that `is_judged` allows, in their order."""
    return [case for case in cases if is_judged(case)]


def canary_drift(profile: MachineProfile, records: Records) -> Record:
    """The fixed op's seconds when probing, predicting and measuring; never used to correct."""
    stages = {
        "probe_s": [profile.canary_s] if profile.canary_s else [],
        "prediction_s": [
            seconds
            for record in records.of("canary") + records.of("prediction")
            if (seconds := record.get("canary_s"))
        ],
        "measurement_s": [record["canary_s"] for record in records.of("measurement")],
    }
    medians = {name: statistics.median(seen) if seen else None for name, seen in stages.items()}
    known = [seconds for seconds in medians.values() if seconds]
    return {
        **medians,
        "drift_ratio": max(known) / min(known) - 1 if known else None,
        "measurement_noise_ratio": (
            noise_ratio(stages["measurement_s"]) if stages["measurement_s"] else None
        ),
    }


def time_canary(rank: int, world_size: int, arguments: Record) -> float:
    """Seconds of the fixed op, in a process pinned as a rank of a training run is."""
    from estimator.probe.backend import open_backend
    from estimator.probe.canary import canary_s

    return canary_s(open_backend(arguments["kind"]))


def canary_now(profile: MachineProfile) -> float:
    """Seconds of the fixed op on the first device, here and now."""
    from estimator.probe.ranks import run_on_devices

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
