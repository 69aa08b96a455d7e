"""Time messages between ranks on several nodes, pair by pair."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from estimator.machines.profile import DeviceKind, Link, LinkKind, Locality, PairMatrix, Provenance
from estimator.probe.links.copies import Pace, Points, RankTimer, link_from
from estimator.units import KIB, MIB

# For one cell of a matrix: what tells the latency, then sizes that drain a shaper's bucket.
CELL_SIZES_BYTES = (KIB, 256 * KIB, 1 * MIB, 4 * MIB)
_PING_BYTES, _PINGS = 8, 20
_OVER = (0, 0)
# By how much a link's rate may exceed that of its largest message, whose latency is taken off.
_MOST_OVER_AVERAGE = 1.1


def time_pairs(
    groups: Sequence[Sequence[tuple[int, int]]],
    *,
    kind: str,
    group: Any,
    sizes_bytes: Sequence[int],
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """What this rank saw of the messages that it sent along pairs (from, to) of ranks of `group`.

    Pairs of one of `groups` run at once. The sender yields ``{"from", "to", "latency_s",
    "points"}``; a message counts until its receipt is acknowledged, less half of the quickest
    exchange. Groups the budget has no time for are left.
    """
    messenger = _Messenger(kind, max(sizes_bytes), group)
    rank = messenger.dist.get_rank(group)
    end = time.perf_counter() + budget_s
    for number, pairs in enumerate(groups):
        left_s = messenger.least(end - time.perf_counter())
        if number and left_s <= 0:
            return
        slice_s = left_s / (len(groups) - number)
        for source, target in pairs:
            if rank == source:
                latency_s, points = messenger.send_all(target, sizes_bytes, slice_s)
                yield {"from": source, "to": target, "latency_s": latency_s, "points": points}
            elif rank == target:
                messenger.answer_all(source)


def _one_way_s(round_trips_s: Sequence[float]) -> float:
    # Other work on the machine only ever adds to a round trip: the lower quartile, not the median.
    return statistics.quantiles(round_trips_s, n=4)[0] / 2


class _Messenger(RankTimer):
    """Sends messages to one rank of `group` at a time and has them acknowledged."""

    def __init__(self, kind: str, largest_bytes: int, group: Any) -> None:
        super().__init__(kind, group, group)
        torch = self.torch
        self.buffer = torch.empty(largest_bytes, dtype=torch.uint8, device=self.device).fill_(1)
        self.receipt = torch.zeros(1, dtype=torch.int64, device=self.device)

    def send_all(
        self, target: int, sizes_bytes: Sequence[int], slice_s: float
    ) -> tuple[float, Points]:
        """One-way seconds of next to nothing, and (bytes, one-way seconds) of every message.

        The sender alone says what comes next, so that pairs need not agree with each other.
        """
        end = time.perf_counter() + slice_s
        self._burst(target, _PING_BYTES, 2)
        latency_s = _one_way_s(self._burst(target, _PING_BYTES, _PINGS))
        points: Points = []
        pace, last_size, last_s = Pace(sizes_bytes), sizes_bytes[0], 0.0
        for number, size in enumerate(sizes_bytes):
            left_s = end - time.perf_counter()
            if not pace.goes_on(number, last_size, last_s, left_s):
                break
            (last_s,) = self._burst(target, size, 1)
            times_s = self._burst(target, size, pace.repeats(number, last_s, left_s))
            last_size, last_s = size, statistics.median(times_s)
            points += [(size, max(1e-9, time_s - latency_s)) for time_s in times_s]
        self._send(self._header(*_OVER), target)
        return latency_s, points

    def answer_all(self, source: int) -> None:
        """Take what the sender sends until it says that it is over."""
        while True:
            header = self._header(*_OVER)
            self._recv(header, source)
            size, repeats = (int(value) for value in header)
            if (size, repeats) == _OVER:
                return
            for _ in range(repeats):
                self._recv(self.buffer[:size], source)
                self._send(self.receipt, source)

    def _burst(self, target: int, size: int, repeats: int) -> list[float]:
        self._send(self._header(size, repeats), target)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            self._send(self.buffer[:size], target)
            self._await_receipt(target)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _send(self, buffer: Any, target: int) -> None:
        self.dist.send(buffer, group=self.group, group_dst=target)

    def _recv(self, buffer: Any, source: int) -> None:
        self.dist.recv(buffer, group=self.group, group_src=source)

    def _await_receipt(self, other: int) -> None:
        self._recv(self.receipt, other)
        int(self.receipt)  # on a device it has come only once it was read

    def _header(self, size: int, repeats: int) -> Any:
        return self.torch.tensor([size, repeats], dtype=self.torch.int64, device=self.device)


def pair_link(
    kind: LinkKind, locality: Locality, message: Mapping[str, Any], *, note: str = ""
) -> Link:
    """The Link of one pair from what its sender reported."""
    link = link_from(kind, message["points"], locality=locality, note=note)
    return _with_line(link, message["latency_s"])


def _with_line(link: Link, least_latency_s: float) -> Link:
    """The link with its rate from the larger half of its points and its latency from the smaller.

    What other programs do to small messages would otherwise bend the whole line. A shaper may let
    small ones pass faster than the line, though not faster than next to nothing, which takes
    `least_latency_s`.
    """
    points = link.points
    larger = points[max(0, min(len(points) // 2, len(points) - 3)) :]
    rate = _rate_bytes_per_s(larger)
    smaller = points[: max(1, len(points) // 2)]
    by_line_s = statistics.median(taken_s - size / rate for size, taken_s in smaller)
    latency_s = max(least_latency_s, by_line_s)
    error = statistics.median(
        abs((latency_s + size / rate) / taken_s - 1) for size, taken_s in points
    )
    return replace(
        link,
        latency_s=latency_s,
        bandwidth_bytes_per_s=rate,
        provenance=replace(link.provenance, relative_error=error),
    )


def _rate_bytes_per_s(points: Sequence[tuple[float, float]]) -> float:
    """The middle one of the rates between any two sizes, each weighing as the sizes differ.

    Unlike a fitted latency this may be less than nothing, as where a shaper's full bucket lets the
    first bytes of every message pass at once. One size of three may be wildly off.
    """
    slopes = sorted(
        ((longer_s - shorter_s) / (larger - smaller), larger - smaller)
        for (smaller, shorter_s), (larger, longer_s) in combinations(points, 2)
    )
    half = sum(weight for _, weight in slopes) / 2
    passed = accumulate(weight for _, weight in slopes)
    slope = next(slope for (slope, _), sum_ in zip(slopes, passed, strict=True) if sum_ >= half)
    size, seconds = points[-1]
    # The largest message is not mostly latency: a slope that says so was measured badly.
    return size / max(seconds / _MOST_OVER_AVERAGE, slope * size) if slope > 0 else size / seconds


def pair_matrix(
    hosts: Sequence[str], timed: Mapping[tuple[str, str], Mapping[str, Any]], *, at: str
) -> PairMatrix:
    """The matrix from what the senders of (from, to) reported; None where nothing was."""
    latencies: dict[tuple[str, str], float] = {}
    rates: dict[tuple[str, str], float] = {}
    errors = []
    for pair, message in timed.items():
        link = pair_link("tcp", "rack", message)
        latencies[pair] = message["latency_s"]
        rates[pair] = link.bandwidth_bytes_per_s
        errors.append(link.provenance.relative_error or 0.0)
    return PairMatrix(
        hosts=tuple(hosts),
        latency_s=_square(hosts, latencies),
        bandwidth_bytes_per_s=_square(hosts, rates),
        provenance=Provenance(
            source="measured",
            at=at,
            samples=sum(len(message["points"]) for message in timed.values()),
            relative_error=statistics.median(errors) if errors else None,
            note="gloo or NCCL send and receive, one device of each node",
        ),
    )


def _square(
    hosts: Sequence[str], values: Mapping[tuple[str, str], float]
) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(values.get((host, other)) for other in hosts) for host in hosts)


def network_kind(kind: DeviceKind, root: Path = Path("/")) -> LinkKind:
    """What carries messages between nodes: TCP for gloo; for NCCL verbs where there are any.

    EFA's devices are among those of verbs, and none of its ports has a link layer of InfiniBand.
    """
    if kind == "cuda":
        for device in sorted((root / "sys/class/infiniband").glob("*")):
            driver = os.path.basename(os.path.realpath(device / "device" / "driver"))
            if driver == "efa" or device.name.startswith(("efa_", "rdmap")):
                return "efa"
            for port in sorted(device.glob("ports/*/link_layer")):
                layer = port.read_text(encoding="utf-8", errors="replace").strip()
                return "infiniband" if layer == "InfiniBand" else "roce"
    return "tcp"


def grouped(
    pairs: Iterable[tuple[int, int]], links: Mapping[tuple[int, int], frozenset[str]]
) -> list[list[tuple[int, int]]]:
    """Pairs in groups within which no two share a rank or anything in `links`."""
    groups: list[tuple[list[tuple[int, int]], set[object]]] = []
    for pair in pairs:
        taken = {*pair, *links[pair]}
        for members, used in groups:
            if not used & taken:
                members.append(pair)
                used |= taken
                break
        else:
            groups.append(([pair], set(taken)))
    return [members for members, _ in groups]
