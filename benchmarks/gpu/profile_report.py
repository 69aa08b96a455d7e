"""Set a probed GPU beside its datasheet and beside published times of matrix products."""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from summary import format_table

from estimator.cache import Cache
from estimator.kernels.durations import kernel_fits
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.tensors import OpCall, TensorSpec


def rate_lines(measured: MachineProfile, datasheet: MachineProfile) -> Iterator[list[str]]:
    """Best rates seen by the probe, those promised, and their ratio."""
    found, promised = measured.devices[0], datasheet.devices[0]
    yield ["", "measured", "datasheet", "ratio"]
    rates = {"memory, GB/s": (found.memory_bandwidth_bytes_per_s, 1e9)}
    rates |= {f"{d}, TFLOP/s": (r, 1e12) for d, r in found.peak_flops_per_s.items()}
    limits: Mapping[str, float | None] = {
        "memory, GB/s": promised.memory_bandwidth_bytes_per_s,
        **{f"{d}, TFLOP/s": r for d, r in promised.peak_flops_per_s.items()},
    }
    for name, (rate, unit) in rates.items():
        limit = limits.get(name)
        known = rate is not None and limit is not None
        yield [
            name,
            "-" if rate is None else f"{rate / unit:.1f}",
            "-" if limit is None else f"{limit / unit:.1f}",
            f"{rate / limit:.2f}" if known and rate is not None and limit is not None else "-",
        ]


def fact_lines(measured: MachineProfile) -> Iterator[list[str]]:
    """Links, host costs, updates and what the device ran at."""
    yield ["fact", ""]
    for link in measured.links:
        kind = f"{link.kind}, {'pinned' if link.pinned else 'pageable'}"
        yield [kind, f"{link.bandwidth_bytes_per_s / 1e9:.1f} GB/s, {1e6 * link.latency_s:.1f} µs"]
    if measured.host is not None:
        for name in ("bare_op_s", "forward_op_s", "forward_view_s", "backward_op_s"):
            yield [name, f"{1e6 * getattr(measured.host, name):.2f} µs"]
        for name in ("module_call_s", "step_s", "ddp_step_s", "ddp_bucket_s"):
            yield [name, f"{1e6 * getattr(measured.host, name):.1f} µs"]
    for cost in measured.updates:
        yield [
            f"{cost.optimizer}, {cost.form}, {cost.device}",
            f"{1e6 * cost.launch_s:.1f} µs + {1e6 * cost.per_tensor_s:.2f} µs a tensor + "
            f"{1e12 * cost.per_parameter_s:.2f} ps a parameter",
        ]
    for name, value in sorted(measured.devices[0].details.items()):
        yield [name, str(value)]


def matmul_lines(measured: MachineProfile, table: Path, gpu: str) -> Iterator[list[str]]:
    """Published seconds of (m, k) x (k, n) products in 16 bits beside the profile's prediction."""
    yield ["products of", "rows", "median error", "90 % below", "bias"]
    fits = kernel_fits(measured, cache=Cache(1 << 26))
    errors: dict[str, list[float]] = {}
    with table.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["gpu"] != gpu:
                continue
            m, n, k = (int(row[name]) for name in "mnk")
            left, out = TensorSpec((m, k), "bfloat16"), TensorSpec((m, n), "bfloat16")
            right = TensorSpec((k, n), "bfloat16", (1, k))
            found = fits.predict(OpCall("aten.mm.default", (left, right), outputs=(out,)))
            if found is None:
                continue
            size = f"10^{math.floor(math.log10(2.0 * m * n * k))} flops"
            published_s = 1e-3 * float(row["latency_ms"])
            errors.setdefault(size, []).append(found.warm_s / published_s - 1)
    for size, signed in sorted(errors.items(), key=lambda item: len(item[0] + item[0])):
        sizes = sorted(abs(error) for error in signed)
        shares = (statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))])
        cells = [f"{100 * share:.1f} %" for share in (*shares, statistics.median(signed))]
        yield [size, str(len(signed)), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", required=True, help="the measured profile")
    parser.add_argument("--datasheet", default="h100-sxm", help="the catalogue's machine")
    parser.add_argument("--products", type=Path, help="a table gpu,m,n,k,latency_ms")
    parser.add_argument("--gpu", default="H100-SXM-80GB", help="the table's name of the GPU")
    options = parser.parse_args()
    measured = load_profile(options.profile)
    print(format_table(list(rate_lines(measured, load_profile(options.datasheet)))))
    print(format_table(list(fact_lines(measured))))
    if options.products is not None:
        print(format_table(list(matmul_lines(measured, options.products, options.gpu))))
    for part in measured.missing:
        print(f"not measured: {part}")


if __name__ == "__main__":
    main()
