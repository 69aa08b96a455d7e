"""Measure what an all-reduce and the compute beside it cost each other on the same devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from estimator.errors import ProbeError
from estimator.machines.profile import Device, OverlapCost, Provenance
from estimator.probe.devices.backend import (
    CpuBackend,
    device_seconds,
    open_backend,
    square_matmul,
)
from estimator.probe.devices.ranks import DeviceProcesses, report, world_of
from estimator.units import KIB, MIB

ComputeBound = Literal["compute_bound", "memory_bound"]

# (bytes, how many at once): gradients one by one, DDP's first bucket, and its full bucket.
CASES = ((64 * KIB, 8), (1 * MIB, 4), (25 * MIB, 1))
# Compute lasts this many times the collective alone, so that a slowed collective still ends within.
_COMPUTE_RATIO = 3.0
_LEAST_COMPUTE_S = 0.01
# Below this an exposed ratio is near perfect overlap, and its error relative to 0 says nothing.
_LEAST_EXPOSED_RATIO = 0.1
_FEWEST_REPEATS, _MOST_REPEATS = 3, 40
_START_ALLOWANCE_S = 60.0
# On a GPU both take a millisecond and more at its peak.
_MATMUL_SIDE = 384
_STREAM_ELEMENTS = {"cpu": 8 << 20, "cuda": 512 << 20}

Finding = OverlapCost | str


def probe_overlaps(
    devices: Sequence[Device],
    backend_name: str,
    *,
    budget_s: float,
    report: Callable[[Finding], None] | None = None,
    ranks: DeviceProcesses | None = None,
) -> tuple[OverlapCost, ...]:
    """All-reduces over all devices beside a compute-bound and a memory-bound loop on each.

    `report` gets each OverlapCost as soon as it is known, or one sentence on what is missing.
    Several all-reduces in flight are one case of their summed size, which its provenance says.
    """
    costs: list[OverlapCost] = []
    if len(devices) < 2:
        return ()
    rounds: dict[tuple[str, int, int], dict[int, list[dict[str, float]]]] = {}

    def take(rank: int, message: dict[str, Any]) -> None:
        case = (message["compute"], message["size_bytes"], message["in_flight"])
        parts = rounds.setdefault(case, {})
        parts[rank] = message["rounds"]
        if len(parts) == len(devices):
            cost = overlap_cost(*case, backend_name, [parts[r] for r in range(len(devices))])
            costs.append(cost)
            if report is not None:
                report(cost)

    try:
        with world_of(devices, ranks) as world:
            world.run(
                f"{__name__}:time_rank",
                {"budget_s": budget_s, "kind": devices[0].kind},
                timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
                on_report=take,
            )
    except ProbeError as error:
        if report is not None:
            report(f"communication beside compute was not measured in full: {error}")
    return tuple(costs)


def overlap_cost(
    compute: ComputeBound | str,
    size_bytes: int,
    in_flight: int,
    backend: str,
    rounds: Sequence[Sequence[Mapping[str, float]]],
    *,
    nodes: int = 1,
) -> OverlapCost:
    """An OverlapCost from every rank's rounds: compute_s, collective_s, both_s, beside_s of each.

    Per round the slowest rank counts; over rounds the median, of gloo the mean: what its calls
    take comes in two modes. Together and alone are compared within a round, so that a drift of the
    machine falls on both.
    """
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
    bound: ComputeBound = "compute_bound" if compute == "compute_bound" else "memory_bound"
    return OverlapCost(
        compute=bound,
        backend=backend,
        group_size=len(rounds),
        nodes=nodes,
        size_bytes=size_bytes * in_flight,
        in_flight=in_flight,
        exposed_ratio=max(0.0, exposed_ratio),
        collective_slowdown_ratio=slowest("beside_s") / alone_s,
        provenance=Provenance(
            source="measured",
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            samples=len(exposed),
            relative_error=spread / max(abs(exposed_ratio), _LEAST_EXPOSED_RATIO),
            note=f"{in_flight} all-reduces of {size_bytes} bytes in flight",
        ),
    )


def time_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    """One rank's share: every case beside both kinds of compute; called in its own process.

    `arguments` may name other `cases` than CASES, another `compute_ratio`, and the process group
    `group` of all that take part.
    """
    chosen = arguments.get("cases", CASES)
    cases = [(bound, *case) for case in chosen for bound in get_args(ComputeBound)]
    meeting = _Meeting(
        arguments["kind"], arguments.get("compute_ratio", _COMPUTE_RATIO), arguments.get("group")
    )
    end = time.perf_counter() + arguments["budget_s"]
    for number, (bound, size_bytes, in_flight) in enumerate(cases):
        slice_s = (end - time.perf_counter()) / (len(cases) - number)
        report(
            {
                "compute": bound,
                "size_bytes": size_bytes,
                "in_flight": in_flight,
                "rounds": meeting.rounds(bound, size_bytes, in_flight, slice_s),
            }
        )


class _Meeting:
    """All-reduces and a loop of operators on one rank's device, apart and together."""

    def __init__(self, kind: str, compute_ratio: float, group: Any) -> None:
        import torch
        import torch.distributed as torch_distributed

        self.compute_ratio, self.group = compute_ratio, group
        self.torch: Any = torch
        self.dist: Any = torch_distributed
        self.on_cuda = kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else None
        here = open_backend("cuda", torch.cuda.current_device()) if self.on_cuda else CpuBackend()
        matmul = square_matmul(here, _MATMUL_SIDE)
        self.token = torch.zeros(1, device=self.device)
        stream = torch.zeros(_STREAM_ELEMENTS[kind], device=self.device).fill_(0.0)
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
            collective_s = self._timed(lambda: self._fly(buffers).land())
            op_s = self._timed(op)
        agreed = self._largest([collective_s, op_s, -slice_s])
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
            "compute_s": self._timed(compute),
            "collective_s": self._timed(lambda: self._fly(buffers).land()),
            "both_s": self._timed(both),
            "beside_s": flights[0].duration_s(),
        }

    def _fly(self, buffers: Sequence[Any]) -> _Flight:
        return _Flight(self.torch, self.dist, self.group, buffers, on_cuda=self.on_cuda)

    def _largest(self, values: Sequence[float]) -> list[float]:
        """Every value's maximum over the ranks, so that all decide alike."""
        shared = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(shared, op=self.dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in shared]

    def _timed(self, call: Callable[[], object]) -> float:
        """Seconds of one call that all ranks begin together."""
        self.dist.barrier(self.group)
        if self.on_cuda:
            meet = partial(self.dist.all_reduce, self.token, group=self.group)
            return device_seconds(call, self.torch.cuda, meet=meet)
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


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
