"""Time collectives over groups of every shape, on clocks that all ranks agree on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from estimator.machines.profile import CollectiveCost, CollectiveName
from estimator.probe.cluster.findings import World
from estimator.probe.devices.ranks import report
from estimator.probe.links.collectives import CallTimer, collective_cost
from estimator.probe.links.copies import Pace
from estimator.units import KIB, MIB

# The quickest of these tells the offset best: what delays a message makes it slower, never quicker.
_ROUND_TRIPS = 8

Window = tuple[float, float, float]


class SharedClock:
    """Rank 0's `time.perf_counter`, read on every rank of `group`, by default of all.

    Between two marks, at which all ranks meet, a rank's clock is taken to run steadily.
    """

    def __init__(self, torch: Any, dist: Any, device: Any, group: Any = None) -> None:
        self.torch, self.dist, self.device, self.group = torch, dist, device, group
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """Compare clocks; all ranks call this together, and it takes some log2(ranks) messages."""
        rank, world_size = self.dist.get_rank(self.group), self.dist.get_world_size(self.group)
        offset_s, span = 0.0, 1
        # In each round, ranks that know rank 0's clock tell as many that do not know it yet.
        while span < world_size:
            if rank < span and rank + span < world_size:
                self._answer(rank + span, offset_s)
            elif span <= rank < 2 * span:
                offset_s = self._ask(rank - span)
            span *= 2
        self._marks = [*self._marks[-1:], (time.perf_counter(), offset_s)]

    def shifted(self, windows: Sequence[Sequence[float]]) -> list[Window]:
        """(bytes, entered, left) between the last two marks, on rank 0's clock."""
        return [
            (size, entered + self._offset_s(entered), left + self._offset_s(left))
            for size, entered, left in windows
        ]

    def _offset_s(self, at: float) -> float:
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        if last <= first:
            return after
        return before + (after - before) * (at - first) / (last - first)

    def _ask(self, other: int) -> float:
        quickest_s, offset_s = float("inf"), 0.0
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            self.dist.send(self._number(0.0), group=self.group, group_dst=other)
            told = self._number(0.0)
            self.dist.recv(told, group=self.group, group_src=other)
            theirs, ended = float(told), time.perf_counter()
            if ended - began < quickest_s:
                quickest_s, offset_s = ended - began, theirs - (began + ended) / 2
        return offset_s

    def _answer(self, other: int, offset_s: float) -> None:
        asked = self._number(0.0)
        for _ in range(_ROUND_TRIPS):
            self.dist.recv(asked, group=self.group, group_src=other)
            float(asked)  # where it lies on a device, it has come only once it was read
            here = self._number(time.perf_counter() + offset_s)
            self.dist.send(here, group=self.group, group_dst=other)

    def _number(self, value: float) -> Any:
        return self.torch.tensor([value], dtype=self.torch.float64, device=self.device)


# From DDP's smallest buckets to its largest, its default of 25 MiB among them.
SIZES_BYTES = (
    KIB,
    16 * KIB,
    128 * KIB,
    1 * MIB,
    4 * MIB,
    16 * MIB,
    25 * MIB,
    64 * MIB,
)
# Sharded training gathers and scatters large pieces; small ones cost the same again and again.
OTHER_SIZES_BYTES = (16 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PAIR_SIZES_BYTES = (64 * KIB, 1 * MIB, 8 * MIB)
# Calls that take longer are warm after one.
_LONG_S = 0.25


def shapes(world: World) -> Iterator[tuple[int, ...]]:
    """Groups of ranks worth measuring, the most telling first.

    Everything; one device on each of two, of all, and of three nodes; all devices of two nodes;
    then the powers of two between. Two nodes in one rack, and two in unlike ones.
    """
    nodes = list(world.nodes.values())
    per_node, count = world.devices_per_node, len(nodes)
    powers = [1 << power for power in range(2, count.bit_length()) if 1 << power < count]
    wanted = [(1, 2), (1, count), (per_node, 2), (1, 3), (per_node, 3)]
    wanted += [(devices, power) for power in powers for devices in (1, per_node)]
    blocks = [
        tuple(position for node in nodes[:number] for position in node[:devices])
        for devices, number in wanted
        if number <= count
    ]
    first_of = {world.rack_of(host): node[0] for host, node in reversed(world.nodes.items())}
    across_racks = tuple(sorted(first_of.values()))[:2]
    groups = dict.fromkeys((tuple(range(len(world.members))), *blocks, across_racks))
    return (group for group in groups if len(group) > 1)


def shape_words(world: World, group: Sequence[int]) -> str:
    """A group in words.

    >>> shape_words(World(members=()), ())
    '0 ranks'
    """
    hosts = world.hosts(group)
    counts = {hosts.count(host) for host in hosts}
    if len(counts) == 1:
        return f"{counts.pop()} × {len(set(hosts))} nodes"
    return f"{len(group)} ranks"


def time_shape(
    ops: Sequence[str],
    *,
    kind: str,
    group: Any,
    meeting: Any,
    sizes_bytes: Sequence[int],
    budget_s: float,
    pairs: bool = False,
) -> None:
    """One rank's share of timing `ops` over its process group `group`.

    All ranks of `meeting` do so at the same time. Reports ``{"op", "windows"}`` after every size,
    windows being (bytes, entered, left) on the clock of the first rank of `meeting`; with `pairs`,
    ``{"op", "one", "two"}`` for one all-reduce and for two at once; ``{"op", "unsupported"}`` where
    the backend lacks the op.
    """
    shape = _TimedShape(kind, max(sizes_bytes), group, meeting)
    end = time.perf_counter() + budget_s
    parts: list[Callable[[float], None]] = [partial(shape.time_op, op, sizes_bytes) for op in ops]
    if pairs:
        parts.append(partial(shape.time_pairs, PAIR_SIZES_BYTES))
    for number, part in enumerate(parts):
        # All-reduces matter most: the first part may take what two later ones may.
        left = len(parts) - number
        part((end - time.perf_counter()) * (2 if number == 0 else 1) / (left + (number == 0)))


class _TimedShape:
    """Collectives on this rank's device, in step with the other ranks of the meeting."""

    def __init__(self, kind: str, largest_bytes: int, group: Any, meeting: Any) -> None:
        import torch.distributed as torch_distributed

        self.dist: Any = torch_distributed
        self.group, self.meeting = group, meeting
        size = self.dist.get_world_size(group)
        self.timer = CallTimer(size, kind, [largest_bytes], group=group, meeting=meeting)
        self.torch = self.timer.torch
        self.clock = SharedClock(self.torch, self.dist, self.timer.device, meeting)

    def time_op(self, op: str, sizes_bytes: Sequence[int], slice_s: float) -> None:
        """Size after size, as far as the time goes."""
        end = time.perf_counter() + slice_s
        pace, last_size, last_s = Pace(sizes_bytes), sizes_bytes[0], 0.0
        self.clock.mark()
        for number, size in enumerate(sizes_bytes):
            left_s = self._least(end - time.perf_counter())
            if not pace.goes_on(number, last_size, last_s, left_s):
                break
            calls = self.timer.calls(op, size)
            try:
                last_s = self._warm_up(calls, last_s * size / last_size)
            except (RuntimeError, NotImplementedError) as error:
                words = " ".join(str(error).split())
                if "support" not in words and "implement" not in words:
                    raise
                report({"op": op, "unsupported": words[:200]})
                return
            windows = [
                (size, *self.timer.timed(calls[turn % len(calls)]))
                for turn in range(pace.repeats(number, last_s, left_s))
            ]
            self.clock.mark()
            report({"op": op, "windows": self.clock.shifted(windows)})
            last_size = size

    def time_pairs(self, sizes_bytes: Sequence[int], slice_s: float) -> None:
        """One all-reduce and two at once, by turns, at each size."""
        end = time.perf_counter() + slice_s
        pace, last_size, turn_s = Pace(sizes_bytes), sizes_bytes[0], 0.0
        for number, size in enumerate(sizes_bytes):
            first, second = (half[: size // 4] for half in self.timer.halves)
            left_s = self._least(end - time.perf_counter())
            if number and not pace.goes_on(max(number, 2), last_size, turn_s, left_s):
                return
            self.clock.mark()

            def one(buffer: Any = first) -> None:
                self.dist.all_reduce(buffer, group=self.group)

            def two(buffers: tuple[Any, Any] = (first, second)) -> None:
                works = [
                    self.dist.all_reduce(each, group=self.group, async_op=True) for each in buffers
                ]
                for work in works:
                    work.wait()

            # A turn is one and then two, which take as long as two more where they share a link.
            turn_s, last_size = 1.5 * self._warm_up([two], turn_s), size
            ones: list[Window] = []
            twos: list[Window] = []
            for _ in range(pace.repeats(number, turn_s, left_s)):
                ones.append((size, *self.timer.timed(one)))
                twos.append((size, *self.timer.timed(two)))
            self.clock.mark()
            shifted = self.clock.shifted
            report({"op": "all_reduce", "one": shifted(ones), "two": shifted(twos)})

    def _least(self, value: float) -> float:
        """The least of all ranks' values, once all have come."""
        shared = self.torch.tensor([value], dtype=self.torch.float64, device=self.timer.device)
        self.dist.all_reduce(shared, op=self.dist.ReduceOp.MIN, group=self.meeting)
        return float(shared)

    def _warm_up(self, calls: Sequence[Callable[[], object]], expected_s: float) -> float:
        """Seconds of one call on the slowest rank, once it runs as it will."""
        for turn in range(1 if expected_s > _LONG_S else 2):
            entered, left = self.timer.timed(calls[turn % len(calls)])
        return -self._least(entered - left)


def shape_costs(
    reports: Sequence[Sequence[Mapping[str, Any]]], backend: str, hosts: Sequence[str]
) -> tuple[list[CollectiveCost], list[str]]:
    """Every collective that all ranks timed at two sizes or more, and what is unsupported.

    `reports` are those of each rank, in the order of `hosts`.
    """
    costs, notes = [], []
    shared = list(zip(*reports, strict=False))
    for op in dict.fromkeys(messages[0]["op"] for messages in shared):
        own = [messages for messages in shared if messages[0]["op"] == op]
        for messages in own:
            if "unsupported" in messages[0]:
                notes.append(f"{backend} has no {op}: {messages[0]['unsupported']}")
        timed = [messages for messages in own if "windows" in messages[0]]
        windows = [
            [call for messages in timed for call in messages[position]["windows"]]
            for position in range(len(hosts))
        ]
        cost = _cost(op, backend, windows, hosts) if timed else None
        if cost is not None:
            pairs = [_pair_ratio(messages) for messages in own if "two" in messages[0]]
            costs.append(replace(cost, pair_ratio=tuple(pairs)))
    return costs, notes


def _cost(
    op: CollectiveName, backend: str, windows: list[list[Any]], hosts: Sequence[str]
) -> CollectiveCost | None:
    cost = collective_cost(op, backend, windows)
    if cost is None:
        return None
    return replace(cost, nodes=len(set(hosts)), hosts=tuple(hosts))


def _pair_ratio(messages: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    def seconds(what: str) -> float:
        return statistics.median(
            max(call[2] for call in calls) - max(call[1] for call in calls)
            for calls in zip(*(message[what] for message in messages), strict=True)
        )

    return messages[0]["one"][0][0], max(seconds("two") / max(seconds("one"), 1e-9), 1e-3)
