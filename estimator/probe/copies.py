"""Time copies between host and devices and between devices, alone and all at once."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, Link, LinkKind, Provenance
from estimator.probe.backend import Backend, open_backend
from estimator.probe.line_fit import fit_line
from estimator.probe.ranks import report, run_on_devices
from estimator.units import KIB

COPY_SIZES_BYTES = tuple(4 * KIB * 8**power for power in range(6))  # 4 KiB to 128 MiB
MESSAGE_SIZES_BYTES = tuple(KIB * 4**power for power in range(8))  # 1 KiB to 16 MiB
_FEWEST_REPEATS, _MOST_REPEATS = 3, 50
_WARM_UPS = 2
# A pageable copy over PCIe 3 beside its launch: no copy that is timed takes much longer.
_SLOW_COPY_S, _SLOW_LINK_BYTES_PER_S = 50e-6, 2e9
_START_ALLOWANCE_S = 60.0

Points = list[tuple[float, float]]


def probe_copies(
    devices: Sequence[Device],
    *,
    budget_s: float,
    report: Callable[[Link | str], None] | None = None,
) -> tuple[Link, ...]:
    """The links of this machine: `report` gets each as it is known, or a sentence on what is not.

    Accelerators: host to device and back, pinned and pageable, one device alone and all at once,
    and device to device. Groups of cores: messages between two of them through the loopback, which
    is how gloo moves bytes inside a machine.
    """
    links: list[Link] = []

    def keep(finding: Link | str) -> None:
        if isinstance(finding, Link):
            links.append(finding)
        if report is not None:
            report(finding)

    try:
        if devices[0].kind == "cuda":
            _probe_accelerators(devices, budget_s, keep)
        elif len(devices) > 1:
            windows = run_on_devices(
                devices[:2],
                f"{__name__}:time_messages",
                {"sizes_bytes": list(MESSAGE_SIZES_BYTES), "budget_s": budget_s},
                timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
                world=True,
            )
            keep(link_from("loopback", message_points(windows), note="gloo send and receive"))
    except ProbeError as error:
        keep(f"copies were not measured in full: {error}")
    return tuple(links)


def link_from(
    kind: LinkKind, points: Points, *, pinned: bool = False, flows: int = 1, note: str = ""
) -> Link:
    """A Link fitted to (bytes, seconds) samples; the points kept are medians by size."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    medians = tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))
    line = fit_line([size for size, _ in medians], [seconds for _, seconds in medians])
    return Link(
        kind=kind,
        latency_s=line.latency_s,
        bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
        pinned=pinned,
        flows=flows,
        points=medians,
        provenance=Provenance(
            source="measured",
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            samples=len(points),
            relative_error=line.relative_error,
            note=note,
        ),
    )


def message_points(windows: Sequence[Sequence[Sequence[float]]]) -> Points:
    """(bytes, seconds) from what sender and receiver saw: (bytes, entered, left) per message.

    A message takes from when both were there to when the receiver had it; their clock is one.
    """
    return [
        (sent[0], max(1e-9, received[2] - max(sent[1], received[1])))
        for sent, received in zip(*windows, strict=True)
    ]


def time_messages(
    rank: int, world_size: int, arguments: Mapping[str, Any]
) -> list[tuple[float, float, float]]:
    """(bytes, entered, left) of messages from rank 0 to rank 1, largest size last."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    sizes = arguments["sizes_bytes"]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8).fill_(1)
    end = time.perf_counter() + arguments["budget_s"]

    def move(size: int) -> tuple[float, float, float]:
        dist.barrier()
        entered = time.perf_counter()
        if rank == 0:
            dist.send(buffer[:size], dst=1)
        else:
            dist.recv(buffer[:size], src=0)
        return size, entered, time.perf_counter()

    windows: list[tuple[float, float, float]] = []
    for number, size in enumerate(sizes):
        warm = [move(size) for _ in range(_WARM_UPS)][-1]
        slice_s = (end - time.perf_counter()) / (len(sizes) - number)
        limits = torch.tensor([warm[2] - warm[1], -slice_s], dtype=torch.float64)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX)
        wanted = int(-float(limits[1]) / max(float(limits[0]), 1e-6))
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, wanted))
        windows += [move(size) for _ in range(repeats)]
    return windows


def _probe_accelerators(
    devices: Sequence[Device], budget_s: float, keep: Callable[[Link | str], None]
) -> None:
    groups = [1] if len(devices) == 1 else [1, len(devices)]
    shares = len(groups) + (len(devices) > 1)
    for flows in groups:
        gathered: dict[tuple[str, bool], Points] = {}

        def take(
            _rank: int, message: dict[str, Any], into: dict[tuple[str, bool], Points] = gathered
        ) -> None:
            key = (message["kind"], message["pinned"])
            into.setdefault(key, []).extend((size, s) for size, s in message["points"])

        run_on_devices(
            devices[:flows],
            f"{__name__}:time_host_copies",
            {"kind": devices[0].kind, "budget_s": budget_s / shares},
            timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
            world=flows > 1,
            on_report=take,
        )
        for (kind, pinned), points in gathered.items():
            host_kind: LinkKind = "h2d" if kind == "h2d" else "d2h"
            keep(link_from(host_kind, points, pinned=pinned, flows=flows))
    if len(devices) > 1:
        _probe_peers(devices, budget_s / shares, keep)


def _probe_peers(
    devices: Sequence[Device], budget_s: float, keep: Callable[[Link | str], None]
) -> None:
    def take(_rank: int, message: dict[str, Any]) -> None:
        points = [(size, seconds) for size, seconds in message["points"]]
        keep(link_from("d2d", points, note=f"device {message['from']} to {message['to']}"))

    run_on_devices(
        devices[:1],
        f"{__name__}:time_peer_copies",
        {"indices": [device.index for device in devices], "budget_s": budget_s},
        timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
        on_report=take,
    )


def time_host_copies(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    """Report the host copies of this rank's device; in a world, all ranks copy at once."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    index = torch.cuda.current_device() if arguments["kind"] == "cuda" else 0
    backend = open_backend(arguments["kind"], index)

    def meet() -> None:
        if world_size > 1:
            dist.barrier()
            backend.synchronize()

    for message in host_copies(backend, torch, meet=meet, budget_s=arguments["budget_s"]):
        report(message)


def host_copies(
    backend: Backend,
    torch: Any,
    *,
    meet: Callable[[], None],
    budget_s: float,
    sizes_bytes: Sequence[int] = COPY_SIZES_BYTES,
) -> list[dict[str, Any]]:
    """Host-to-device and device-to-host samples, pinned and pageable, through `backend`'s clock.

    `meet` is called before each size, so that several processes copy at the same time; how often
    a size is repeated follows from the budget and not from the clock, alike in all of them.
    """
    found = []
    cases = list(itertools.product(("h2d", "d2h"), (True, False)))
    for kind, pinned in cases:
        points: Points = []
        for size in sizes_bytes:
            there = torch.ones(size, dtype=torch.uint8, device=backend.device)
            here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
            target, source = (there, here) if kind == "h2d" else (here, there)
            meet()
            slice_s = budget_s / len(cases) / len(sizes_bytes)
            points += _time_copy(backend, target, source, size, slice_s)
        found.append({"kind": kind, "pinned": pinned, "points": points})
    return found


def _time_copy(
    backend: Backend, target: Any, source: Any, size_bytes: int, slice_s: float
) -> Points:
    # As often as fits into the slice on a slow link.
    wanted = int(slice_s / (_SLOW_COPY_S + size_bytes / _SLOW_LINK_BYTES_PER_S))
    repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, wanted))
    seconds = backend.time_calls(
        lambda _: target.copy_(source, non_blocking=True), repeats=_WARM_UPS + repeats
    )
    return [(size_bytes, each) for each in seconds[_WARM_UPS:]]


def time_peer_copies(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    """Report the copies between every ordered pair of devices, all from this one process."""
    import torch

    pairs = list(itertools.permutations(arguments["indices"], 2))
    for origin, goal in pairs:
        backend = open_backend("cuda", origin)
        points: Points = []
        for size in COPY_SIZES_BYTES:
            source = torch.ones(size, dtype=torch.uint8, device=f"cuda:{origin}")
            target = torch.ones(size, dtype=torch.uint8, device=f"cuda:{goal}")
            slice_s = arguments["budget_s"] / len(pairs) / len(COPY_SIZES_BYTES)
            points += _time_copy(backend, target, source, size, slice_s)
        report({"from": origin, "to": goal, "points": points})
