"""Measure what an all-reduce and the compute beside it cost each other on the same devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from estimator.machines.profile import OverlapCost
from estimator.probe.devices.backend import open_backend, square_matmul
from estimator.probe.links.copies import RankTimer, measured_now
from estimator.units import KIB, MIB

ComputeBound = Literal["compute_bound", "memory_bound"]

# (bytes, how many at once): gradients one by one, DDP's first bucket, and its full bucket.
NODE_CASES = ((64 * KIB, 8), (1 * MIB, 4), (25 * MIB, 1))
_LEAST_COMPUTE_S = 0.01
# Below this an exposed ratio is near perfect overlap, and its error relative to 0 says nothing.
_LEAST_EXPOSED_RATIO = 0.1
_FEWEST_REPEATS, _MOST_REPEATS = 3, 40
# On a GPU both take a millisecond and more at its peak.
_MATMUL_SIDE = 384
_STREAM_ELEMENTS = {"cpu": 8 << 20, "cuda": 512 << 20}


def overlap_cost(
    messages: Sequence[Mapping[str, Any]], backend: str, *, nodes: int = 1
) -> OverlapCost:
    """An OverlapCost from what every rank saw of one case.

    A round has compute_s, collective_s, both_s and beside_s. Of each the slowest rank counts; over
    rounds the median, of gloo the mean: what its calls take comes in two modes. Together and alone
    are compared within a round, so that a drift of the machine falls on both. Several all-reduces
    in flight are one case of their summed size, which its provenance says.
    """
    size_bytes, in_flight = messages[0]["size_bytes"], messages[0]["in_flight"]
    rounds = [message["rounds"] for message in messages]
    middle = statistics.fmean if backend == "gloo" else statistics.median

    def slowest(what: str) -> float:
        return middle([max(rank[what] for rank in ranks) for ranks in zip(*rounds, strict=True)])

    alone_s = slowest("collective_s")
    exposed = [
        (max(rank["both_s"] for rank in ranks) - max(rank["compute_s"] for rank in ranks)) / alone_s
        for ranks in zip(*rounds, strict=True)
    ]
    exposed_ratio = middle(exposed)
    spread = statistics.median(abs(value - exposed_ratio) for value in exposed)
    return OverlapCost(
        compute=messages[0]["compute"],
        backend=backend,
        group_size=len(rounds),
        nodes=nodes,
        size_bytes=size_bytes * in_flight,
        in_flight=in_flight,
        exposed_ratio=max(0.0, exposed_ratio),
        collective_slowdown_ratio=slowest("beside_s") / alone_s,
        provenance=measured_now(
            len(exposed),
            spread / max(abs(exposed_ratio), _LEAST_EXPOSED_RATIO),
            note=f"{in_flight} all-reduces of {size_bytes} bytes in flight",
        ),
    )


def time_overlaps(
    cases: Sequence[tuple[int, int]],
    *,
    kind: str,
    group: Any,
    compute_ratio: float,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """What this rank of `group` saw of every case (bytes, in flight) beside both kinds of compute.

    Compute lasts `compute_ratio` times the collective alone, so that a slowed one ends within.
    Yields ``{"compute", "size_bytes", "in_flight", "rounds"}``.
    """
    meeting = _Meeting(kind, compute_ratio, group)
    both = [(bound, *case) for case in cases for bound in get_args(ComputeBound)]
    end = time.perf_counter() + budget_s
    for number, (bound, size_bytes, in_flight) in enumerate(both):
        slice_s = (end - time.perf_counter()) / (len(both) - number)
        yield {
            "compute": bound,
            "size_bytes": size_bytes,
            "in_flight": in_flight,
            "rounds": meeting.rounds(bound, size_bytes, in_flight, slice_s),
        }


class _Meeting(RankTimer):
    """All-reduces and a loop of operators on one rank's device, apart and together."""

    def __init__(self, kind: str, compute_ratio: float, group: Any) -> None:
        super().__init__(kind, group, group)
        self.compute_ratio = compute_ratio
        matmul = square_matmul(open_backend(kind), _MATMUL_SIDE)
        stream = self.torch.zeros(_STREAM_ELEMENTS[kind], device=self.device).fill_(0.0)
        self.ops: dict[str, Callable[[], object]] = {
            "compute_bound": lambda: matmul(0),
            "memory_bound": lambda: stream.add_(1.0),
        }

    def rounds(
        self, bound: str, size_bytes: int, in_flight: int, slice_s: float
    ) -> list[dict[str, float]]:
        """As many rounds as fit into `slice_s`; every rank does the same number."""
        buffers = [
            self.torch.empty(size_bytes // 4, device=self.device).fill_(0.0)
            for _ in range(in_flight)
        ]
        op = self.ops[bound]
        for _ in range(2):
            collective_s = self._seconds(lambda: self._fly(buffers).land())
            op_s = self._seconds(op)
        agreed = self.largest([collective_s, op_s, -slice_s])
        loops = max(2, round(max(self.compute_ratio * agreed[0], _LEAST_COMPUTE_S) / agreed[1]))
        round_s = 2 * loops * agreed[1] + 3 * agreed[0]
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(-agreed[2] / round_s)))
        return [self._round(op, loops, buffers) for _ in range(repeats)]

    def _round(
        self, op: Callable[[], object], loops: int, buffers: Sequence[Any]
    ) -> dict[str, float]:
        def compute() -> None:
            for _ in range(loops):
                op()

        flights: list[_Flight] = []

        def both() -> None:
            flights.append(self._fly(buffers))
            compute()
            flights[0].land()

        return {
            "compute_s": self._seconds(compute),
            "collective_s": self._seconds(lambda: self._fly(buffers).land()),
            "both_s": self._seconds(both),
            "beside_s": flights[0].duration_s(),
        }

    def _fly(self, buffers: Sequence[Any]) -> _Flight:
        return _Flight(self.torch, self.dist, self.group, buffers, on_cuda=self.on_cuda)

    def _seconds(self, call: Callable[[], object]) -> float:
        entered, left = self.timed(call)
        return left - entered


class _Flight:
    """All-reduces on their way: when they began, and when the last of them ended."""

    def __init__(
        self, torch: Any, dist: Any, group: Any, buffers: Sequence[Any], *, on_cuda: bool
    ) -> None:
        self.torch, self.on_cuda = torch, on_cuda
        self.ends: list[Any] = []
        self.began = self._now()
        self.works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        if on_cuda:
            # The end is marked on a stream of its own, so that compute issued next is not ahead.
            with torch.cuda.stream(torch.cuda.Stream()):
                for work in self.works:
                    work.wait()
                self.ends.append(self._now())
        else:
            for work in self.works:
                work.get_future().add_done_callback(lambda _: self.ends.append(self._now()))

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def land(self) -> None:
        """Have the device wait for the last of them."""
        for work in self.works:
            work.wait()

    def duration_s(self) -> float:
        """From the first one's issue to the last one's end; known once all are done."""
        if self.on_cuda:
            # Event.elapsed_time is in milliseconds.
            return float(self.began.elapsed_time(self.ends[0]) * 1e-3)
        # Gloo wakes those who wait just before it calls back.
        patience_s = time.perf_counter() + 1.0
        while len(self.ends) < len(self.works) and time.perf_counter() < patience_s:
            time.sleep(1e-4)
        return float(max(self.ends, default=time.perf_counter()) - self.began)
