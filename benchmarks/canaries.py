"""Time a fixed operation at every stage of a benchmark; nothing is ever corrected by it."""

from __future__ import annotations

import statistics

from records import Record, Records

from estimator.machines.profile import MachineProfile


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
