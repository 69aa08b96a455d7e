"""Time copies between host and devices and between devices; fit latency and bandwidth."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ProbeError
from estimator.machines.profile import Device, Link, LinkKind, Locality, Provenance
from estimator.probe.devices.backend import Backend, device_seconds, open_backend
from estimator.units import KIB

# Errors beyond this many typical ones count by their size, not by its square (soft L1).
_TYPICAL_ERRORS = 2.0
_LEAST_TYPICAL_ERROR = 1e-3
# Where times do not rise with size, the slope is this small part of the mean rise instead of zero.
_LEAST_SLOPE_RATIO = 1e-6
# Of the shortest time: a latency below this is none.
_LEAST_LATENCY_RATIO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFit:
    """n bytes take latency_s + n / bandwidth_bytes_per_s, give or take `relative_error`.

    `relative_error` is the median of |fitted − measured| / measured over the samples.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float


def fit_line(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit the line that errs least in relative terms, with a latency that is not negative.

    Errors are |log(fitted / measured)|, so that twice too long weighs as much as half as long.
    Starts from the best of the lines through two sizes (least absolute deviations) and refines it
    with a soft-L1 loss (scipy.optimize.least_squares): neither a few wild samples nor the largest
    sizes decide, nor messages so small that a shaper or a cache lets them pass at another rate.
    Raises ProbeError on fewer than two sizes.

    >>> round(fit_line([0, 1000, 2000], [0.001, 0.002, 0.003]).bandwidth_bytes_per_s)
    1000000
    """
    from scipy.optimize import least_squares

    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(seconds, dtype=float)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2:
        raise ProbeError(
            f"cannot fit latency and bandwidth to {len(set(sizes.tolist()))} sizes; "
            "measure at least two"
        )
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise ProbeError("cannot fit times that are not positive; measure again")

    def log_errors(line: Any) -> NDArray[np.float64]:
        # A line through the origin takes no time for no bytes: bounded, or its log is infinite.
        fitted = np.maximum(line[0] + line[1] * sizes, 1e-3 * times)
        return np.asarray(np.log(fitted / times))

    least_slope = float(_LEAST_SLOPE_RATIO * np.median(times) / sizes.max())
    start = min(
        _lines(sizes, times, least_slope), key=lambda line: float(np.abs(log_errors(line)).sum())
    )
    typical = float(np.median(np.abs(log_errors(start))))
    # In parts of the shortest time, and of the longest for the largest size.
    units = np.array([times.min(), times.max() / sizes.max()])
    found = least_squares(
        lambda line: log_errors(line * units),
        np.maximum(start / units, [_LEAST_LATENCY_RATIO, 0.0]),
        bounds=([0.0, least_slope / units[1]], np.inf),
        loss="soft_l1",
        f_scale=_TYPICAL_ERRORS * max(typical, _LEAST_TYPICAL_ERROR),
    )
    latency, slope = found.x * units
    errors = np.abs(latency + slope * sizes - times) / times
    return LineFit(
        latency_s=float(latency) if latency > _LEAST_LATENCY_RATIO * units[0] else 0.0,
        bandwidth_bytes_per_s=float(1 / slope),
        relative_error=float(np.median(errors)),
    )


def _lines(
    sizes: NDArray[np.float64], times: NDArray[np.float64], least_slope: float
) -> Iterator[tuple[float, float]]:
    """(latency, slope) through the medians of any two sizes, none of them negative."""
    medians = [(size, float(np.median(times[sizes == size]))) for size in np.unique(sizes)]
    for (size, time_s), (larger, longer_s) in itertools.combinations(medians, 2):
        slope = max((longer_s - time_s) / (larger - size), least_slope)
        latency = time_s - slope * size
        yield (latency, slope) if latency >= 0 else (0.0, longer_s / larger)


# Larger messages than one that takes this long add little but waiting.
LONGEST_S = 1.5
# A size is tried where a warm-up and two more fit into the time that is left.
_FEWEST_CALLS = 3
# Short calls are cheap and noisy, long ones dear and steady: (seconds at most, repeats at least).
_FEWEST_REPEATS_OF_SIZES = ((0.02, 10), (0.25, 3), (math.inf, 2))
_MOST_REPEATS_OF_SIZES = 100


class RankTimer:
    """Times calls on this rank's device, in step with the other ranks.

    They run over the process group `group`. The ranks of `meeting` begin together: several groups
    may do the same at the same time. None is everything.
    """

    def __init__(self, kind: str, group: Any, meeting: Any) -> None:
        import torch
        import torch.distributed as torch_distributed

        self.torch: Any = torch
        self.dist: Any = torch_distributed
        self.group, self.meeting = group, meeting
        self.on_cuda = kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else None
        self.token = torch.zeros(1, device=self.device)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Every value's maximum over the ranks of the meeting, so that all decide alike."""
        shared = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(shared, op=self.dist.ReduceOp.MAX, group=self.meeting)
        return [float(value) for value in shared]

    def least(self, value: float) -> float:
        """The least of all ranks' values, once all have come."""
        return -self.largest([-value])[0]

    def timed(self, call: Callable[[], object]) -> tuple[float, float]:
        """(entered, left) of a call that all ranks begin together."""
        self.dist.barrier(self.meeting)
        if self.on_cuda:
            return 0.0, device_seconds(call, self.torch.cuda, meet=self._meet_on_device)
        entered = time.perf_counter()
        call()
        return entered, time.perf_counter()

    def _meet_on_device(self) -> None:
        """What the device runs next starts on all ranks at once, host and device in any state."""
        self.dist.all_reduce(self.token, group=self.group)


@dataclass(frozen=True, slots=True)
class Pace:
    """A plan for calls of rising `sizes_bytes`, whose time rises no faster than their size.

    The first `least_sizes` are tried in any case (of fewer than two there is no line), short calls
    `least_repeats` times. All ranks that decide by equal numbers decide alike.

    >>> Pace((1 << 20, 4 << 20, 16 << 20)).goes_on(2, 4 << 20, call_s=0.4, left_s=3.0)
    False
    """

    sizes_bytes: Sequence[int]
    least_sizes: int = 2
    least_repeats: int = 10

    def goes_on(self, number: int, last_bytes: int, call_s: float, left_s: float) -> bool:
        """Whether size `number` comes next, after calls of `last_bytes` that take `call_s`."""
        expected_s = call_s * self.sizes_bytes[number] / last_bytes
        is_in_time = call_s <= LONGEST_S and _FEWEST_CALLS * expected_s <= left_s
        return number < self.least_sizes or is_in_time

    def repeats(self, number: int, call_s: float, left_s: float) -> int:
        """How often to repeat size `number`, leaving time for the larger ones to be tried."""
        fewest = next(least for longest_s, least in _FEWEST_REPEATS_OF_SIZES if call_s <= longest_s)
        fewest = min(fewest, self.least_repeats)
        size = self.sizes_bytes[number]
        larger_s, expected_s = 0.0, call_s
        for larger in self.sizes_bytes[number + 1 :]:
            if expected_s > LONGEST_S:
                break
            expected_s = call_s * larger / size
            larger_s += _FEWEST_CALLS * expected_s
        # Where there is no time for all of them, the larger ones share what is left.
        own_s = max(left_s - larger_s, 0.0) / (len(self.sizes_bytes) - number)
        return max(fewest, min(_MOST_REPEATS_OF_SIZES, math.floor(own_s / max(call_s, 1e-6))))


_COPY_SIZES_BYTES = tuple(4 * KIB * 8**power for power in range(6))  # 4 KiB to 128 MiB
MESSAGE_SIZES_BYTES = tuple(KIB * 4**power for power in range(8))  # 1 KiB to 16 MiB
_FEWEST_REPEATS, _MOST_REPEATS = 3, 50
_WARM_UPS = 2
# A pageable copy over PCIe 3 beside its launch: no copy that is timed takes much longer.
_SLOW_COPY_S, _SLOW_LINK_BYTES_PER_S = 50e-6, 2e9

Points = list[tuple[float, float]]


def link_from(
    kind: LinkKind,
    points: Points,
    *,
    locality: Locality = "node",
    pinned: bool = False,
    flows: int = 1,
    note: str = "",
) -> Link:
    """A Link fitted to (bytes, seconds) samples; the points kept are medians by size."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    medians = tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))
    line = fit_line([size for size, _ in medians], [seconds for _, seconds in medians])
    return Link(
        kind=kind,
        locality=locality,
        latency_s=line.latency_s,
        bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
        pinned=pinned,
        flows=flows,
        points=medians,
        provenance=measured_now(len(points), line.relative_error, note=note),
    )


def measured_now(samples: int, relative_error: float, *, note: str = "") -> Provenance:
    """The provenance of a number that was measured just now."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Provenance(
        source="measured", at=at, samples=samples, relative_error=relative_error, note=note
    )


def measure_host_copies(backend: Backend, emit: Callable[..., None], *, budget_s: float) -> None:
    """Emit the host copies of a device alone, kind by kind."""
    import torch

    for message in host_copies(backend, torch, meet=backend.synchronize, budget_s=budget_s):
        emit(message)


def peer_links(
    devices: Sequence[Device], timed: Mapping[tuple[int, int], Points]
) -> tuple[Link, ...]:
    """One link for each way in which devices reach each other, typical of its pairs.

    Ways are what the driver says: NVLink among all or among rings of neighbours, PCIe directly, or
    through the host's memory.
    """
    ways: dict[int, dict[int, str]] = {}
    for device in devices:
        peers = str(device.details.get("peer_access") or "").split()
        ways[device.index] = {
            int(other): way for other, _, way in (peer.partition(":") for peer in peers)
        }
    links = []
    for way in ("nvlink", "pcie", "no", ""):
        pairs = [pair for pair in timed if ways.get(pair[0], {}).get(pair[1], "") == way]
        if not pairs:
            continue
        kind: LinkKind = "nvlink" if way == "nvlink" else "pcie" if way else "d2d"
        rings = [1 + sum(peer == way for peer in peers.values()) for peers in ways.values()]
        joined = min(size for size in rings if size > 1) if way else len(devices)
        over = "over the host" if way == "no" else "directly"
        note = f"{len(pairs)} pairs of devices, copied {over}"
        link = typical_link([link_from(kind, timed[pair], note=note) for pair in pairs])
        links.append(
            replace(
                link,
                peer_to_peer=way != "no",
                ring_devices=joined if way == "nvlink" and joined < len(devices) else None,
            )
        )
    return tuple(links)


def typical_link(links: Sequence[Link]) -> Link:
    """The one of middling bandwidth; its error says how far the others are from it."""
    ranked = sorted(links, key=lambda link: link.bandwidth_bytes_per_s)
    middle = ranked[(len(ranked) - 1) // 2]
    spread = statistics.median(
        abs(link.bandwidth_bytes_per_s / middle.bandwidth_bytes_per_s - 1) for link in ranked
    )
    error = max(middle.provenance.relative_error or 0.0, spread)
    return replace(middle, provenance=replace(middle.provenance, relative_error=error))


def host_copies(
    backend: Backend,
    torch: Any,
    *,
    meet: Callable[[], None],
    budget_s: float,
) -> list[dict[str, Any]]:
    """Host-to-device and device-to-host samples, pinned and pageable, through `backend`'s clock.

    `meet` is called before each size, so that several processes copy at the same time; how often
    a size is repeated follows from the budget and not from the clock, alike in all of them.
    """
    links = []
    cases = list(itertools.product(("h2d", "d2h"), (True, False)))
    for kind, pinned in cases:
        points: Points = []
        for size in _COPY_SIZES_BYTES:
            there = torch.ones(size, dtype=torch.uint8, device=backend.device)
            here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
            target, source = (there, here) if kind == "h2d" else (here, there)
            meet()
            slice_s = budget_s / len(cases) / len(_COPY_SIZES_BYTES)
            points += _time_copy(backend, target, source, size, slice_s)
        links.append({"kind": kind, "pinned": pinned, "points": points})
    return links


def _time_copy(
    backend: Backend, target: Any, source: Any, size_bytes: int, slice_s: float
) -> Points:
    # As often as fits into the slice on a slow link.
    wanted = int(slice_s / (_SLOW_COPY_S + size_bytes / _SLOW_LINK_BYTES_PER_S))
    repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, wanted))
    seconds = backend.time_calls(
        lambda _: target.copy_(source, non_blocking=True), repeats=_WARM_UPS + repeats
    )
    return [(size_bytes, second) for second in seconds[_WARM_UPS:]]


def time_peer_copies(indices: Sequence[int], *, budget_s: float) -> Iterator[dict[str, Any]]:
    """The copies between every ordered pair of devices, all from this process."""
    import torch

    pairs = list(itertools.permutations(indices, 2))
    for origin, goal in pairs:
        backend = open_backend("cuda", origin)
        points: Points = []
        for size in _COPY_SIZES_BYTES:
            source = torch.ones(size, dtype=torch.uint8, device=f"cuda:{origin}")
            target = torch.ones(size, dtype=torch.uint8, device=f"cuda:{goal}")
            slice_s = budget_s / len(pairs) / len(_COPY_SIZES_BYTES)
            points += _time_copy(backend, target, source, size, slice_s)
        yield {"from": origin, "to": goal, "points": points}
