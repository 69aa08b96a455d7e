"""Time collectives over groups of ranks, on one node or on many, on a clock that all share."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from estimator.machines.profile import CollectiveCost, CollectiveName
from estimator.probe.links.copies import Pace, RankTimer, fit_line, measured_now
from estimator.units import KIB, MIB

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
NODE_SIZES_BYTES = tuple(KIB * 4**power for power in range(9))  # 1 KiB to 64 MiB
_PAIR_SIZES_BYTES = (64 * KIB, 1 * MIB, 8 * MIB)
# Ranks that share layers wait for each collective and compute in between: a call in a row passes
# beside others, and finds the threads of gloo awake.
_BLOCKING_SIZES_BYTES = (32 * KIB, 512 * KIB, 4 * MIB)
_WINDOWS_S = (0.0, 1e-3, 6e-3)
_MATMUL_SIDE = 256
_FEWEST_REPEATS, _MOST_REPEATS = 3, 100
_WARM_UPS = 2
_ROUNDS = 2
# Calls that take longer are warm after one.
_LONG_S = 0.25
# A gradient bucket was written a while ago: buffers are used in turn, so that when one comes round
# again up to this much has passed through the caches.
_TURNING_BYTES, _MOST_BUFFERS = 64 * MIB, 16
# Of gloo's calls, sorted by time, the mean leaves out this share at both ends.
_TRIMMED_RATIO = 0.05
# Calls of a node are timed as DDP makes them, one after the other without waiting, as many as move
# so many bytes and at most so many: in a queue some of what ranks of gloo wait for passes beside
# other calls, and what it takes to start and to time NCCL's calls is shared by more of them.
_QUEUED = {"cpu": (32 * MIB, 8), "cuda": (256 * MIB, 20)}

# (planned seconds of computing, bytes, begun to compute, entered, left): of one call.
BlockingCall = tuple[float, float, float, float, float]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimedPart:
    """A collective, how it is called, and the share of the time that this may take.

    "calls" waits for each, "rows" makes some in a row, "blocking" computes before each, and "pairs"
    makes one and two at once.
    """

    how: Literal["calls", "rows", "blocking", "pairs"]
    op: CollectiveName
    share: float = 1.0


# Gradients are merged by all-reduces; the other collectives matter to fewer strategies.
NODE_PARTS = (
    TimedPart("rows", "all_reduce", 4.0),
    *(TimedPart("rows", op) for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all")),
)
BLOCKING_PARTS = tuple(
    TimedPart("blocking", op, 2.0) for op in ("all_reduce", "all_gather", "reduce_scatter")
)


# The quickest of these tells the offset best: what delays a message makes it slower, never quicker.
_ROUND_TRIPS = 8


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

    def shifted(self, windows: Sequence[Sequence[float]]) -> list[Any]:
        """(bytes, entered, left, …) between the last two marks, on rank 0's clock."""
        return [
            (size, entered + self._offset_s(entered), left + self._offset_s(left), *more)
            for size, entered, left, *more in windows
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
            number = self._number(0.0)
            self.dist.recv(number, group=self.group, group_src=other)
            theirs, ended = float(number), time.perf_counter()
            if ended - began < quickest_s:
                quickest_s, offset_s = ended - began, theirs - (began + ended) / 2
        return offset_s

    def _answer(self, other: int, offset_s: float) -> None:
        wanted = self._number(0.0)
        for _ in range(_ROUND_TRIPS):
            self.dist.recv(wanted, group=self.group, group_src=other)
            float(wanted)  # where it lies on a device, it has come only once it was read
            here = self._number(time.perf_counter() + offset_s)
            self.dist.send(here, group=self.group, group_dst=other)

    def _number(self, value: float) -> Any:
        return self.torch.tensor([value], dtype=self.torch.float64, device=self.device)


def time_collectives(
    parts: Sequence[TimedPart],
    *,
    kind: str,
    group: Any,
    own: Any,
    sizes_bytes: Sequence[int],
    budget_s: float,
) -> Iterator[Message]:
    """What this rank saw of collectives over its `own` process group.

    All ranks of `group` time theirs at the same time. Yields ``{"op", "windows"}`` after every
    size, windows being (bytes, entered, left, calls) on the clock of the first rank of `group`;
    of blocking calls ``{"op", "blocking"}``; of pairs ``{"op", "one", "two"}`` for one all-reduce
    and for two at once; ``{"op", "unsupported"}`` where the backend lacks the op. A time runs from
    when the last rank entered to when the last rank left; sizes follow nccl-tests.
    """
    end = time.perf_counter() + budget_s
    timer = CallTimer(kind, sizes_bytes, group=own, meeting=group)
    lacking: set[str] = set()
    for number, part in enumerate(parts):
        if part.op in lacking:
            continue
        left = sum(later.share for later in parts[number:])
        slice_s = (end - time.perf_counter()) * part.share / left
        try:
            yield from timer.time_part(part, slice_s)
        # What torch raises where a backend lacks a collective; all ranks find out alike.
        except (RuntimeError, NotImplementedError) as error:
            words = " ".join(str(error).split())
            if "support" not in words and "implement" not in words:
                raise
            lacking.add(part.op)
            yield {"op": part.op, "unsupported": words[:200]}


class CallTimer(RankTimer):
    """Runs collectives on this rank's device, in step with the other ranks."""

    def __init__(self, kind: str, sizes_bytes: Sequence[int], *, group: Any, meeting: Any) -> None:
        super().__init__(kind, group, meeting)
        self.sizes_bytes, self.world_size = sizes_bytes, self.dist.get_world_size(group)
        self.clock = SharedClock(self.torch, self.dist, self.device, meeting)
        # Zeros stay zeros under sums; written, so that no page is the kernel's shared zero page.
        # Buffers smaller than the group have one element per rank, hence the allowance.
        elements = max(_TURNING_BYTES, *sizes_bytes) // 4 + _MOST_BUFFERS * self.world_size
        self.halves = [
            self.torch.empty(elements, dtype=self.torch.float32, device=self.device).fill_(0.0)
            for _ in range(2)
        ]

    def time_part(self, part: TimedPart, slice_s: float) -> Iterator[Message]:
        """Time one part as far as `slice_s` goes."""
        if part.how == "blocking":
            return self._time_blocking(part.op, slice_s)
        if part.how == "pairs":
            return self._time_pairs(slice_s)
        return self._time_sizes(part.op, slice_s, in_a_row=part.how == "rows")

    def _time_sizes(self, op: str, slice_s: float, *, in_a_row: bool) -> Iterator[Message]:
        """Size after size: all of them in a row, in two rounds; else as far as the time goes."""
        end = time.perf_counter() + slice_s
        queued = [self.queued(size) if in_a_row else 1 for size in self.sizes_bytes]
        moved = [size * count for size, count in zip(self.sizes_bytes, queued, strict=True)]
        # In a row there are many calls in each.
        pace = Pace(moved, len(moved), _FEWEST_REPEATS) if in_a_row else Pace(moved)
        rounds = _ROUNDS if in_a_row else 1
        warm_s: dict[int, float] = {}
        # Ranks of one node read one clock.
        shared = not in_a_row and not self.on_cuda
        if shared:
            self.clock.mark()
        for done in range(rounds):
            round_end = time.perf_counter() + (end - time.perf_counter()) / (rounds - done)
            last, last_s = moved[0], 0.0
            for number, size in enumerate(self.sizes_bytes):
                left_s = self.least(round_end - time.perf_counter())
                # The first round is finished in any case, if only just; the second sharpens it.
                if (done and left_s <= 0) or not pace.goes_on(number, last, last_s, left_s):
                    break
                calls = self.calls(op, size, queued=queued[number])
                if size not in warm_s:
                    warm_s[size] = self._warm_up(calls, last_s * moved[number] / last)
                last, last_s = moved[number], warm_s[size]
                windows = [
                    (size, *self.timed(calls[turn % len(calls)]), queued[number])
                    for turn in range(pace.repeats(number, last_s, left_s))
                ]
                if shared:
                    self.clock.mark()
                yield {"op": op, "windows": self.clock.shifted(windows) if shared else windows}

    def _time_pairs(self, slice_s: float) -> Iterator[Message]:
        """One all-reduce and two at once, by turns, at each size."""
        end = time.perf_counter() + slice_s
        pace, last_size, turn_s = Pace(_PAIR_SIZES_BYTES), _PAIR_SIZES_BYTES[0], 0.0
        for number, size in enumerate(_PAIR_SIZES_BYTES):
            left_s = self.least(end - time.perf_counter())
            if number and not pace.goes_on(max(number, 2), last_size, turn_s, left_s):
                return
            self.clock.mark()
            buffers = [half[: size // 4] for half in self.halves]

            def flown(count: int, buffers: Sequence[Any] = buffers) -> None:
                works = [
                    self.dist.all_reduce(buffer, group=self.group, async_op=True)
                    for buffer in buffers[:count]
                ]
                for work in works:
                    work.wait()

            # A turn is one and then two, which take as long as two more where they share a link.
            turn_s, last_size = 1.5 * self._warm_up([partial(flown, 2)], turn_s), size
            taken: dict[int, list[Any]] = {1: [], 2: []}
            for _ in range(pace.repeats(number, turn_s, left_s)):
                for count, windows in taken.items():
                    windows.append((size, *self.timed(partial(flown, count))))
            self.clock.mark()
            one, two = (self.clock.shifted(windows) for windows in taken.values())
            yield {"op": "all_reduce", "one": one, "two": two}

    def _time_blocking(self, op: str, slice_s: float) -> Iterator[Message]:
        """Calls after windows of computing, each waited for, as far as the time goes.

        A small call takes now and then a time slice of the scheduler more: short windows, which
        steps have most of, are timed as long as long ones, and so more often.
        """
        left = self.torch.ones(_MATMUL_SIDE, _MATMUL_SIDE, device=self.device)
        product = self.torch.empty_like(left)
        matmul = partial(self.torch.mm, left, left, out=product)
        matmul_s = min(_seconds(matmul) for _ in range(_MOST_BUFFERS))
        cases = [(window_s, size) for window_s in _WINDOWS_S for size in _BLOCKING_SIZES_BYTES]
        timed: list[BlockingCall] = []
        end = time.perf_counter() + slice_s
        for number, (window_s, size) in enumerate(cases):
            matmuls = self._agreed_repeats(matmul_s, window_s)
            calls = itertools.cycle(self.calls(op, size))
            warm = [_after_computing(next(calls), matmul, matmuls) for _ in range(_WARM_UPS)][-1]
            case_s = (end - time.perf_counter()) / (len(cases) - number)
            repeats = max(_FEWEST_REPEATS, self._agreed_repeats(warm[-1] - warm[0], case_s))
            for _ in range(repeats):
                timed.append((window_s, size, *_after_computing(next(calls), matmul, matmuls)))
        yield {"op": op, "blocking": timed}

    def _agreed_repeats(self, call_s: float, slice_s: float) -> int:
        """The same number on every rank: as often as the slowest can in the least time left."""
        slowest_s, least_s = self.largest([call_s, -slice_s])
        return max(0, min(_MOST_REPEATS, math.floor(-least_s / max(slowest_s, 1e-6))))

    def _warm_up(self, calls: Sequence[Callable[[], object]], expected_s: float) -> float:
        """Seconds of one call on the slowest rank, once it runs as it will."""
        for turn in range(1 if expected_s > _LONG_S else _WARM_UPS):
            entered, left = self.timed(calls[turn % len(calls)])
        return -self.least(entered - left)

    def queued(self, size: int) -> int:
        """How many calls of a size are timed in a row."""
        most_bytes, most = _QUEUED["cuda" if self.on_cuda else "cpu"]
        return max(1, min(most, most_bytes // size))

    def calls(self, op: str, size: int, *, queued: int = 1) -> list[Callable[[], object]]:
        """The op on buffers that are used in turn; `size` is the whole buffer of one rank.

        Each makes `queued` calls and waits for all of them.
        """
        count = max(1, min(_MOST_BUFFERS, _TURNING_BYTES // size))
        turns = [self._call(op, size, turn) for turn in range(count)]

        def in_a_row(first: int) -> None:
            works = [turns[(first + number) % count]() for number in range(queued)]
            for work in works:
                work.wait()

        return [partial(in_a_row, turn * queued) for turn in range(count)]

    def _call(self, op: str, size: int, turn: int) -> Callable[[], Any]:
        dist, how = self.dist, {"group": self.group, "async_op": True}
        elements = max(1, size // 4 // self.world_size) * self.world_size
        start = turn * elements
        buffer, other = (half[start : start + elements] for half in self.halves)
        if op == "all_reduce":
            return lambda: dist.all_reduce(buffer, **how)
        if op == "broadcast":
            return lambda: dist.broadcast(buffer, group_src=0, **how)
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(other, buffer, **how)
        part = other[: elements // self.world_size]
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(buffer, part, **how)
        return lambda: dist.reduce_scatter_tensor(part, buffer, **how)


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
        provenance=measured_now(
            sum(map(len, seconds.values())),
            line.relative_error,
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


def shape_costs(
    reports: Sequence[Sequence[Mapping[str, Any]]], backend: str, hosts: Sequence[str]
) -> tuple[list[CollectiveCost], list[str]]:
    """Every collective that all ranks timed at two sizes or more, and what is unsupported.

    `reports` are those of each rank, in the order of `hosts`; those of one node have no names.
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
        cost = collective_cost(op, backend, windows) if timed else None
        if cost is None:
            continue
        pairs = [_pair_ratio(messages) for messages in own if "two" in messages[0]]
        blocking = next((messages for messages in own if "blocking" in messages[0]), ())
        calls = [message["blocking"] for message in blocking]
        costs.append(
            replace(
                cost,
                nodes=len(set(hosts)),
                hosts=tuple(hosts) if all(hosts) else (),
                pair_ratio=tuple(pairs),
                blocking=blocking_points(backend, calls) if calls else (),
            )
        )
    return costs, notes


def _pair_ratio(messages: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    def seconds(what: str) -> float:
        return statistics.median(
            max(call[2] for call in calls) - max(call[1] for call in calls)
            for calls in zip(*(message[what] for message in messages), strict=True)
        )

    return messages[0]["one"][0][0], max(seconds("two") / max(seconds("one"), 1e-9), 1e-3)
