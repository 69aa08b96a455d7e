"""Time collectives over groups of this machine's devices."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from estimator.errors import ProbeError
from estimator.machines.profile import CollectiveCost, CollectiveName, Device, Provenance
from estimator.probe.devices.backend import device_seconds
from estimator.probe.devices.ranks import DeviceProcesses, report, world_of
from estimator.probe.links.copies import fit_line
from estimator.units import KIB, MIB

SIZES_BYTES = tuple(KIB * 4**power for power in range(9))  # 1 KiB to 64 MiB
# Gradients are merged by all-reduces; the other collectives matter to fewer strategies.
_SHARES = {
    "all_reduce": 0.48,
    "all_gather": 0.13,
    "reduce_scatter": 0.13,
    "broadcast": 0.13,
    "all_to_all": 0.13,
}
_ROUNDS = 2
_FEWEST_REPEATS, _MOST_REPEATS = 3, 100
_WARM_UPS = 2
# A gradient bucket was written a while ago: buffers are used in turn, so that when one comes round
# again up to this much has passed through the caches.
_TURNING_BYTES, _MOST_BUFFERS = 64 * MIB, 16
_START_ALLOWANCE_S = 60.0
# Of gloo's calls, sorted by time, the mean leaves out this share at both ends.
_TRIMMED_RATIO = 0.05
# Ranks that share layers wait for each collective and compute in between: a call in a row passes
# beside others, and finds the threads of gloo awake.
_BLOCKING_OPS = ("all_reduce", "all_gather", "reduce_scatter")
_BLOCKING_RATIO = 0.42
_BLOCKING_SIZES_BYTES = (32 * KIB, 512 * KIB, 4 * MIB)
_WINDOWS_S = (0.0, 1e-3, 6e-3)
_MATMUL_SIDE = 256
# Calls are timed as DDP makes them, one after the other without waiting, as many as move so many
# bytes and at most so many: in a queue some of what ranks of gloo wait for passes beside other
# calls, and what it takes to start and to time NCCL's calls is shared by more of them.
_QUEUED = {"cpu": (32 * MIB, 8), "cuda": (256 * MIB, 20)}


Finding = CollectiveCost | str
# (bytes, entered, left, calls): of some calls in a row that nobody waits for before the last.
Window = tuple[float, float, float, int]
# (planned seconds of computing, bytes, begun to compute, entered, left): of one call.
BlockingCall = tuple[float, float, float, float, float]


def probe_collectives(
    devices: Sequence[Device],
    backend_name: str,
    *,
    budget_s: float,
    report: Callable[[Finding], None] | None = None,
    ranks: DeviceProcesses | None = None,
) -> tuple[CollectiveCost, ...]:
    """Size → time of every collective over the first 2, 3, … and all devices.

    They run in the processes of `ranks`, which are a world of all devices, or in some of their own.

    `report` gets each finding as soon as it is complete, so that an interrupted probe keeps it: a
    CollectiveCost, or one sentence on what could not be measured and why. A time runs from when the
    last rank entered to when the last rank left; sizes follow nccl-tests.
    """
    costs: list[CollectiveCost] = []

    def keep(finding: Finding) -> None:
        if isinstance(finding, CollectiveCost):
            costs.append(finding)
        if report is not None:
            report(finding)

    # All devices first: the group that data-parallel training uses most.
    group_sizes = range(len(devices), 1, -1)
    with world_of(devices, ranks) as world:
        for done, group_size in enumerate(group_sizes):
            # The whole machine gets half the time, where smaller groups are to be measured too.
            smaller = len(group_sizes) - 1
            share = 1.0 if not smaller else 0.5 if done == 0 else 0.5 / smaller
            gathered = _Gathered(backend_name, group_size, keep)
            try:
                world.run(
                    f"{__name__}:time_rank",
                    {
                        "group_size": group_size,
                        "ops": list(get_args(CollectiveName)),
                        "sizes_bytes": list(SIZES_BYTES),
                        "budget_s": budget_s * share,
                        "kind": devices[0].kind,
                    },
                    timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
                    on_report=gathered.take,
                )
            except ProbeError as error:
                keep(f"collectives over {group_size} devices were not measured: {error}")
    return tuple(costs)


class _Gathered:
    """Collects what the ranks of one group report until a collective is complete."""

    def __init__(self, backend: str, group_size: int, keep: Callable[[Finding], None]) -> None:
        self.backend, self.group_size, self.keep = backend, group_size, keep
        self.parts: dict[str, dict[int, dict[str, Any]]] = {}

    def take(self, rank: int, message: dict[str, Any]) -> None:
        op = message["op"]
        parts = self.parts.setdefault(op, {})
        parts[rank] = message
        if len(parts) < self.group_size:
            return
        if "unsupported" in message:
            self.keep(f"{self.backend} has no {op}: {message['unsupported']}")
            return
        ranks = [parts[number]["windows"] for number in range(self.group_size)]
        cost = collective_cost(op, self.backend, ranks)
        blocking = [parts[number]["blocking"] for number in range(self.group_size)]
        if cost is None:
            self.keep(
                f"{self.backend} {op} over {self.group_size} devices was not measured: "
                "the time was over; use a larger --budget"
            )
        else:
            self.keep(replace(cost, blocking=blocking_points(self.backend, blocking)))


def collective_cost(
    op: CollectiveName, backend: str, windows: Sequence[Sequence[Sequence[float]]]
) -> CollectiveCost | None:
    """A CollectiveCost from every rank's (bytes, entered, left[, calls in a row]).

    Entered and left are on one clock for all ranks. None if fewer than two sizes were timed, or
    one rank alone, whose collectives move nothing.
    """
    seconds: dict[float, list[float]] = {}
    for calls in zip(*windows, strict=True):
        size = calls[0][0]
        entered, left = max(call[1] for call in calls), max(call[2] for call in calls)
        # What clocks of several nodes say is held within what each rank saw on its own.
        durations = [call[2] - call[1] for call in calls]
        taken_s = min(max(left - entered, min(durations)), max(durations))
        taken_s /= calls[0][3] if len(calls[0]) > 3 else 1
        seconds.setdefault(size, []).append(max(taken_s, 1e-9))
    if len(seconds) < 2 or len(windows) < 2:
        return None
    points, note = _points(backend, seconds)
    line = fit_line([size for size, _ in points], [time_s for _, time_s in points])
    return CollectiveCost(
        op=op,
        backend=backend,
        group_size=len(windows),
        points=points,
        latency_s=line.latency_s,
        bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
        provenance=Provenance(
            source="measured",
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            samples=sum(len(times) for times in seconds.values()),
            relative_error=line.relative_error,
            note=f"{note} from the last rank's entry to the last rank's end",
        ),
    )


def blocking_points(
    backend: str, ranks: Sequence[Sequence[BlockingCall]]
) -> tuple[tuple[float, float, float], ...]:
    """(seconds of computing before, bytes, seconds) of blocking calls, from every rank's.

    A call takes from the mean of the ranks' entries to the last one's end, since a step goes on
    then, and its computing is that of the mean rank.
    """
    windows_s: dict[float, list[float]] = {}
    seconds: dict[float, dict[float, list[float]]] = {}
    for calls in zip(*ranks, strict=True):
        planned_s, size = calls[0][:2]
        entered_s = statistics.fmean(call[3] for call in calls)
        windows_s.setdefault(planned_s, []).append(
            entered_s - statistics.fmean(call[2] for call in calls)
        )
        taken_s = max(call[4] for call in calls) - entered_s
        seconds.setdefault(planned_s, {}).setdefault(size, []).append(max(taken_s, 1e-9))
    return tuple(
        (statistics.median(windows_s[planned_s]), *point)
        for planned_s in sorted(seconds)
        for point in _points(backend, seconds[planned_s])[0]
    )


def _points(
    backend: str, seconds: Mapping[float, Sequence[float]]
) -> tuple[tuple[tuple[float, float], ...], str]:
    """The seconds of each size that was timed, and which statistic they are.

    A small call of gloo takes either some tenths of a millisecond or a time slice of the scheduler
    more: its event loop asks again and again for a lock while the thread that holds it waits for
    the same core (Pair::handleEvents, gloo/transport/tcp/pair.cc). A step makes many calls, so it
    takes their mean, which rises with the size.
    """
    sizes = sorted(seconds)
    if backend != "gloo":
        # Of two, the quicker: what disturbs a call makes it longer.
        return tuple((size, statistics.median_low(seconds[size])) for size in sizes), "median"
    from sklearn.isotonic import isotonic_regression

    means_s = [_mean(seconds[size]) for size in sizes]
    counts = [len(seconds[size]) for size in sizes]
    rising_s = isotonic_regression(means_s, sample_weight=counts)
    return tuple(zip(sizes, map(float, rising_s), strict=True)), "mean"


def _mean(seconds: Sequence[float]) -> float:
    from scipy.stats import trim_mean

    return float(trim_mean(seconds, _TRIMMED_RATIO))


def _after_computing(
    call: Callable[[], object], compute: Callable[[], object], times: int
) -> tuple[float, float, float]:
    """(begun, entered, left) of a call after computing some times."""
    begun = time.perf_counter()
    for _ in range(times):
        compute()
    entered = time.perf_counter()
    call()
    return begun, entered, time.perf_counter()


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def time_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    """One rank's share: time every op at every size over the first `group_size` ranks."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    size = arguments["group_size"]
    group = None if size == world_size else dist.new_group(list(range(size)))
    if rank >= size:
        return
    kind, sizes_bytes = arguments["kind"], arguments["sizes_bytes"]
    timer = CallTimer(size, kind, sizes_bytes, group=group, meeting=group)
    for op in arguments["ops"]:
        blocks = arguments["kind"] == "cpu" and op in _BLOCKING_OPS
        blocking_s = arguments["budget_s"] * _BLOCKING_RATIO / len(_BLOCKING_OPS)
        share_s = arguments["budget_s"] * (1 - _BLOCKING_RATIO * (arguments["kind"] == "cpu"))
        try:
            windows = timer.time_op(op, arguments["sizes_bytes"], share_s * _SHARES[op])
            blocking = timer.time_blocking(op, blocking_s) if blocks else []
        # What torch raises where a backend lacks a collective; all ranks find out alike.
        except (RuntimeError, NotImplementedError, ValueError) as error:
            report({"op": op, "unsupported": " ".join(str(error).split())[:200]})
            continue
        report({"op": op, "windows": windows, "blocking": blocking})


class CallTimer:
    """Runs collectives on this rank's device, in step with the other ranks.

    They run over `group` of `world_size` ranks, by default everything. The ranks of `meeting`, by
    default everything, begin together: several groups may do the same at the same time.
    """

    def __init__(
        self,
        world_size: int,
        kind: str,
        sizes_bytes: Sequence[int],
        *,
        group: Any = None,
        meeting: Any = None,
    ) -> None:
        import torch
        import torch.distributed as torch_distributed

        self.torch: Any = torch
        self.dist: Any = torch_distributed
        self.world_size, self.group, self.meeting = world_size, group, meeting
        self.on_cuda = kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else None
        self.token = torch.zeros(1, device=self.device)
        # Zeros stay zeros under sums; written, so that no page is the kernel's shared zero page.
        # Buffers smaller than the group have one element per rank, hence the allowance.
        elements = max(_TURNING_BYTES, *sizes_bytes) // 4 + _MOST_BUFFERS * world_size
        self.halves = [
            torch.empty(elements, dtype=torch.float32, device=self.device).fill_(0.0)
            for _ in range(2)
        ]

    def time_op(self, op: str, sizes_bytes: Sequence[int], share_s: float) -> list[Window]:
        """The windows of all timed calls, as far as `share_s` goes."""
        windows: list[Window] = []
        end = time.perf_counter() + share_s
        call_s: dict[int, float] = {}
        for done in range(_ROUNDS):
            for number, size in enumerate(sizes_bytes):
                queued = self.queued(size)
                calls = self.calls(op, size, queued=queued)
                if done == 0:
                    first = [self.timed(calls[turn % len(calls)]) for turn in range(_WARM_UPS)]
                    call_s[size] = first[-1][1] - first[-1][0]
                # The first round is finished in any case, if only just; the second sharpens it.
                fewest = _FEWEST_REPEATS if done == 0 else 0
                slices = (_ROUNDS - done) * len(sizes_bytes) - number
                slice_s = (end - time.perf_counter()) / slices
                for turn in range(max(fewest, self.agreed_repeats(call_s[size], slice_s))):
                    windows.append((size, *self.timed(calls[turn % len(calls)]), queued))
        return windows

    def time_blocking(self, op: str, share_s: float) -> list[BlockingCall]:
        """Calls after windows of computing, each waited for, as far as `share_s` goes.

        A small call takes now and then a time slice of the scheduler more: short windows, which
        steps have most of, are timed as long as long ones, and so more often.
        """
        left = self.torch.ones(_MATMUL_SIDE, _MATMUL_SIDE, device=self.device)
        product = self.torch.empty_like(left)
        matmul = partial(self.torch.mm, left, left, out=product)
        matmul_s = min(_seconds(matmul) for _ in range(_MOST_BUFFERS))
        cases = [(window_s, size) for window_s in _WINDOWS_S for size in _BLOCKING_SIZES_BYTES]
        found: list[BlockingCall] = []
        end = time.perf_counter() + share_s
        for number, (window_s, size) in enumerate(cases):
            matmuls = self.agreed_repeats(matmul_s, window_s)
            calls = itertools.cycle(self.calls(op, size))
            warm = [_after_computing(next(calls), matmul, matmuls) for _ in range(_WARM_UPS)][-1]
            slice_s = (end - time.perf_counter()) / (len(cases) - number)
            repeats = max(_FEWEST_REPEATS, self.agreed_repeats(warm[-1] - warm[0], slice_s))
            timed = [_after_computing(next(calls), matmul, matmuls) for _ in range(repeats)]
            found += [(window_s, size, *times) for times in timed]
        return found

    def agreed_repeats(self, call_s: float, slice_s: float) -> int:
        """The same number on every rank: as often as the slowest can in the least time left."""
        limits = self.torch.tensor([call_s, -slice_s], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(limits, op=self.dist.ReduceOp.MAX, group=self.meeting)
        wanted = math.floor(-float(limits[1]) / max(float(limits[0]), 1e-6))
        return max(0, min(_MOST_REPEATS, wanted))

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

    def queued(self, size: int) -> int:
        """How many calls of a size are timed in a row."""
        most_bytes, most = _QUEUED["cuda" if self.on_cuda else "cpu"]
        return max(1, min(most, most_bytes // size))

    def calls(self, op: str, size: int, *, queued: int = 1) -> list[Callable[[], object]]:
        """The op on buffers that are used in turn; `size` is the whole buffer of one rank.

        Each makes `queued` calls and waits for all of them.
        """
        count = max(1, min(_MOST_BUFFERS, _TURNING_BYTES // size))
        each = [self._call(op, size, turn) for turn in range(count)]

        def in_a_row(first: int) -> None:
            works = [each[(first + number) % count]() for number in range(queued)]
            for work in works:
                work.wait()

        return [partial(in_a_row, turn * queued) for turn in range(count)]

    def _call(self, op: str, size: int, turn: int) -> Callable[[], Any]:
        dist, how = self.dist, {"group": self.group, "async_op": True}
        elements = max(1, size // 4 // self.world_size) * self.world_size
        start = turn * elements
        whole, other = (half[start : start + elements] for half in self.halves)
        if op == "all_reduce":
            return lambda: dist.all_reduce(whole, **how)
        if op == "broadcast":
            return lambda: dist.broadcast(whole, group_src=0, **how)
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(other, whole, **how)
        part = other[: elements // self.world_size]
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, **how)
        return lambda: dist.reduce_scatter_tensor(part, whole, **how)
