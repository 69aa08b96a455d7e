"""Predict one GPU's measured steps from another's profile and both datasheets' memory bandwidths.

Made for devices that share a compute die and differ in memory (H100 and H200): of each probed call
the share of its time in which memory was the limit is scaled by the ratio of the bandwidths.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from records import Records
from summary import error_ratio, format_table

from estimator.errors import EstimatorError
from estimator.graph.costs.call_costs import features_of
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, KernelCost, KernelPoint, MachineProfile
from estimator.tensors import OpCall
from gpu.cases import Case, gpu_cases
from gpu.predictions import load_graph, predict

MEDIAN_BOUND_RATIO = 0.05


def on_other_memory(profile: MachineProfile, own: Device, other: Device) -> MachineProfile:
    """The profile as it would be with the memory of `other`; both devices are of datasheets."""
    if own.memory_bandwidth_bytes_per_s is None or other.memory_bandwidth_bytes_per_s is None:
        raise SystemExit("both datasheets must give the memory's bandwidth; name other machines")
    ratio = own.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    cache = profile.memory.shared_cache_bytes if profile.memory else 0

    def scaled(kernel: KernelCost) -> KernelCost:
        points = [_scaled(point, own, ratio, cache) for point in kernel.points]
        return replace(kernel, points=tuple(points))

    return replace(
        profile,
        name=f"{profile.name}-as-{other.name.split()[1].lower()}",
        devices=tuple(
            replace(device, memory_bytes=other.memory_bytes) for device in profile.devices
        ),
        kernels=tuple(map(scaled, profile.kernels)),
        updates=tuple(
            replace(cost, per_parameter_s=cost.per_parameter_s * ratio)
            if cost.device == "cuda"
            else cost
            for cost in profile.updates
        ),
    )


def _scaled(point: KernelPoint, own: Device, ratio: float, cache_bytes: float) -> KernelPoint:
    features = features_of(OpCall.decode(dict(point.call)))
    bandwidth = own.memory_bandwidth_bytes_per_s
    if features is None or not bandwidth:
        return point
    moved = features.cost.moved_bytes
    # What fits the cache is read from there when warm, written back later.
    from_memory = moved if moved > cache_bytes else 0.0
    cold_s = None
    if point.cold_s is not None:
        cold_s = _with_memory(point.cold_s, moved / bandwidth, ratio)
    return replace(
        point, warm_s=_with_memory(point.warm_s, from_memory / bandwidth, ratio), cold_s=cold_s
    )


def _with_memory(seconds: float, memory_s: float, ratio: float) -> float:
    """Seconds of a call of which memory takes `memory_s`, where that takes `ratio` as long.

    >>> _with_memory(10.0, 5.0, 0.5), _with_memory(10.0, 20.0, 0.5)
    (7.5, 5.0)
    """
    share = min(memory_s / seconds, 1.0)
    return seconds * (1.0 - share + share * ratio)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print predicted beside measured for every case the other GPU's records hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--profile", required=True, help="the measured profile of one GPU")
    add("--own", default="h100-sxm", help="the catalogue's machine with that GPU")
    add("--other", default="h200", help="the catalogue's machine with the other GPU")
    add("--work", type=Path, required=True, help="--work of gpu_accuracy.py on the other GPU")
    options = parser.parse_args(arguments)
    own, other = (load_profile(name).devices[0] for name in (options.own, options.other))
    profile = on_other_memory(load_profile(options.profile), own, other)
    records = Records(options.work / "records.jsonl")
    lines, errors = [["case", "predicted", "measured", "error"]], []
    for case in gpu_cases():
        row = _compared(case, options.work / "graphs", profile, records)
        if row is None:
            continue
        predicted_s, measured_s = row
        errors.append(error_ratio({"predicted_s": predicted_s, "measured_s": measured_s}))
        cells = [f"{1e3 * seconds:.2f} ms" for seconds in row]
        lines.append([case.key, *cells, f"{100 * (predicted_s / measured_s - 1):+.1f} %"])
    if not errors:
        raise SystemExit(f"{options.work} holds no measured case with a graph; measure some first")
    print(format_table(lines))
    median = sorted(errors)[len(errors) // 2]
    print(
        f"{len(errors)} cases: median {100 * median:.1f} % (bound {100 * MEDIAN_BOUND_RATIO:.0f} %)"
    )


def _compared(
    case: Case, folder: Path, profile: MachineProfile, records: Records
) -> tuple[float, float] | None:
    runs = records.of("measurement", case.key)
    if not runs:
        return None
    try:
        found = predict(case, load_graph(folder, case), profile)
    except (EstimatorError, OSError):
        return None
    return found["predicted_s"], runs[-1]["measured_s"]


if __name__ == "__main__":
    main()
