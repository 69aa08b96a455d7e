"""Hold a plan that moves tensors to the host or computes them again, and simulate it.

Ops are counted around the clock: op n + i of a step with n ops is op i of the next step. A plan
fixes between which ops a tensor is absent, so that its peak does not depend on how long anything
takes; what takes longer than foreseen makes the step wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.advise.swap.problem import SwapProblem
from estimator.elementwise import Array, Sizes

# Steps after which a loop over the same step repeats itself.
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A tensor goes to the host after op `after` and is back for op `use`.

    Op `free_before` waits for the copy out, whose memory it may take; the copy in is issued before
    op `fetch_before`. The tensor is absent during ops free_before .. fetch_before - 1.
    """

    tensor: int
    after: int
    free_before: int
    fetch_before: int
    use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """A tensor is dropped after op `after` and made again before op `before` by running `ops`.

    What those write beside it is dropped as soon as the last of them has read it.
    """

    tensor: int
    after: int
    before: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """What is moved and what is computed again; recomputations stand in the order they run in."""

    swaps: tuple[Swap, ...] = ()
    recomputes: tuple[Recompute, ...] = ()


class Transfer(NamedTuple):
    """One copy of a tensor on one direction of the link, from the begin of the last step."""

    tensor: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedPlan:
    """What a plan brings: peak, seconds of a step among like ones, when its ops end, transfers."""

    peak_bytes: int
    step_s: float
    levels: Sizes
    ends_s: Array
    out: tuple[Transfer, ...]
    back: tuple[Transfer, ...]
    vanilla_bytes: int
    vanilla_s: float

    @property
    def saved_ratio(self) -> float:
        """Memory saving ratio (MSR)."""
        return 1 - self.peak_bytes / self.vanilla_bytes

    @property
    def overhead_ratio(self) -> float:
        """Extra overhead ratio (EOR)."""
        return self.step_s / self.vanilla_s - 1


def planned_levels(problem: SwapProblem, plan: SwapPlan) -> tuple[Sizes, Sizes]:
    """(bytes during each op, bytes before each op while tensors are made again)."""
    held = problem.levels() - absent_bytes(problem, plan)
    again = np.zeros(problem.ops, dtype=np.int64)
    if plan.recomputes:
        born = problem.born_bytes()
        for recompute in plan.recomputes:
            place = recompute.before
            transient = transient_bytes(problem, recompute)
            again[place] = max(again[place], held[place] - born[place] + transient)
    return held, again


def absent_bytes(problem: SwapProblem, plan: SwapPlan) -> Sizes:
    """What is not on the device during each op."""
    ops = problem.ops
    changes = np.zeros(2 * ops + 1, dtype=np.int64)
    for swap in plan.swaps:
        if swap.free_before < swap.fetch_before:
            changes[swap.free_before] += problem.tensors[swap.tensor].size_bytes
            changes[swap.fetch_before] -= problem.tensors[swap.tensor].size_bytes
    for again in plan.recomputes:
        changes[again.after + 1] += problem.tensors[again.tensor].size_bytes
        changes[again.before] -= problem.tensors[again.tensor].size_bytes
    gone = np.cumsum(changes)[: 2 * ops]
    return np.asarray(gone[:ops] + gone[ops:])


def transient_bytes(problem: SwapProblem, again: Recompute) -> int:
    """The most that running a recomputation takes beside its result."""
    last_read: dict[int, int] = {}
    for index, op in enumerate(again.ops):
        for tensor in (*problem.reads[op], *problem.writes[op]):
            last_read[tensor] = index
    held = most = 0
    alive: dict[int, int] = {}
    for index, op in enumerate(again.ops):
        for tensor in problem.writes[op]:
            born = problem.tensors[tensor].born
            if tensor != again.tensor and tensor not in alive and born == op:
                alive[tensor] = problem.tensors[tensor].size_bytes
                held += alive[tensor]
        most = max(most, held + int(problem.workspace_bytes[op]))
        for tensor in [held for held in alive if last_read[held] == index]:
            held -= alive.pop(tensor)
    return most


def play(problem: SwapProblem, plan: SwapPlan) -> PlayedPlan:
    """Play steps under a plan until they repeat; the last one is what a step takes."""
    held, again = planned_levels(problem, plan)
    events = _Events(problem, plan)
    now = out_free = back_free = 0.0
    start = 0.0
    ends_s = np.zeros(problem.ops)
    out_end: dict[int, float] = {}
    back_end: dict[int, float] = {}
    out: list[Transfer] = []
    back: list[Transfer] = []
    op_s = problem.op_s.tolist()
    for _ in range(_STEPS):
        start = now
        out, back = [], []
        for op in range(problem.ops):
            for number in events.freed[op]:
                # In the first step what left in the step before has left.
                now = max(now, out_end.get(number, 0.0))
            for number in events.fetched[op]:
                tensor = plan.swaps[number].tensor
                begin = max(now, back_free, out_end.get(number, 0.0))
                back_free = back_end[number] = begin + events.back_s[number]
                back.append(Transfer(tensor, begin - start, back_free - start))
            for number in events.used[op]:
                now = max(now, back_end.get(number, 0.0))
            now += events.again_s[op] + op_s[op]
            ends_s[op] = now - start
            for number in events.left[op]:
                begin = max(now, out_free)
                out_free = out_end[number] = begin + events.out_s[number]
                out.append(Transfer(plan.swaps[number].tensor, begin - start, out_free - start))
    return PlayedPlan(
        peak_bytes=int(max(held.max(), again.max())),
        step_s=now - start,
        levels=held,
        ends_s=ends_s,
        out=tuple(out),
        back=tuple(back),
        vanilla_bytes=problem.vanilla_bytes,
        vanilla_s=problem.vanilla_s,
    )


class _Events:
    """What happens around each op, by the numbers of the swaps."""

    def __init__(self, problem: SwapProblem, plan: SwapPlan) -> None:
        ops = problem.ops
        self.freed: list[list[int]] = [[] for _ in range(ops)]
        self.fetched: list[list[int]] = [[] for _ in range(ops)]
        self.used: list[list[int]] = [[] for _ in range(ops)]
        self.left: list[list[int]] = [[] for _ in range(ops)]
        self.out_s, self.back_s = [], []
        self.again_s = [0.0] * ops
        for number, swap in enumerate(plan.swaps):
            size = problem.tensors[swap.tensor].size_bytes
            self.out_s.append(problem.d2h.transfer_time_s(size))
            self.back_s.append(problem.h2d.transfer_time_s(size))
            self.freed[swap.free_before % ops].append(number)
            self.fetched[swap.fetch_before % ops].append(number)
            self.used[swap.use % ops].append(number)
            self.left[swap.after % ops].append(number)
        for numbers in self.fetched:
            # What is used first is fetched first.
            numbers.sort(key=lambda number: plan.swaps[number].use)
        for again in plan.recomputes:
            self.again_s[again.before] += sum(float(problem.op_s[op]) for op in again.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch in which nobody touches a tensor: after op `after`, until op `use`."""

    tensor: int
    after: int
    use: int
    size_bytes: int


def gaps_of(problem: SwapProblem, kinds: Iterable[str] = ()) -> list[Gap]:
    """Every stretch of at least one op without an access, of tensors of these kinds (all)."""
    wanted = set(kinds)
    gaps = []
    for tensor in problem.tensors:
        if wanted and tensor.kind not in wanted:
            continue
        pairs = list(zip(tensor.accesses, tensor.accesses[1:], strict=False))
        if tensor.is_standing and tensor.accesses:
            pairs.append((tensor.accesses[-1], tensor.accesses[0] + problem.ops))
        gaps += [
            Gap(tensor=tensor.number, after=after, use=use, size_bytes=tensor.size_bytes)
            for after, use in pairs
            if use - after > 1
        ]
    return gaps


@dataclass(slots=True, kw_only=True)
class Moved:
    """A gap in which a tensor is to be moved, and by which op it must be back at the latest."""

    gap: Gap
    by: int


def scheduled(
    problem: SwapProblem, moved: Sequence[Moved], held: Sizes, budget_bytes: int
) -> tuple[Swap, ...]:
    """Windows for the moved tensors, copied in the order of their gaps, each as soon as it can.

    `held` are the bytes during each op with none of them moved. An op waits for copies out where it
    would not have room without them; copies in begin as late as they can without making the step
    wait, and later where there is no room for them. Tensors that would not be absent are left out.
    """
    ops = problem.ops
    sent = [
        (
            move.gap.after,
            move.by,
            move.gap.size_bytes,
            problem.d2h.transfer_time_s(move.gap.size_bytes),
        )
        for move in moved
    ]
    freed = _freed(problem.op_s, held, sent, budget_bytes)
    # The same backwards: what is fetched leaves the device after its use, seen from there.
    mirrored = [
        (
            ops - 1 - move.by,
            ops - free,
            move.gap.size_bytes,
            problem.h2d.transfer_time_s(move.gap.size_bytes),
        )
        for move, free in zip(moved, freed, strict=True)
    ]
    offset = [0 if start >= 0 else ops for start, *_ in mirrored]
    placed = [
        (start + add, end + add, size, seconds)
        for (start, end, size, seconds), add in zip(mirrored, offset, strict=True)
    ]
    back = _freed(problem.op_s[::-1], held[::-1], placed, budget_bytes)
    swaps = []
    for move, free, mirror, add in zip(moved, freed, back, offset, strict=True):
        fetch = ops - (mirror - add)
        if free < fetch:
            gap = move.gap
            swaps.append(
                Swap(
                    tensor=gap.tensor,
                    after=gap.after,
                    free_before=free,
                    fetch_before=fetch,
                    use=move.by,
                )
            )
    return tuple(swaps)


def _freed(
    op_s: Array, held: Sizes, sent: Sequence[tuple[int, int, int, float]], budget_bytes: int
) -> list[int]:
    """Before which op each tensor is gone that leaves after op `start` and is back by op `end`."""
    ops = len(op_s)
    seconds, levels = op_s.tolist(), held.tolist()
    leaving: list[list[int]] = [[] for _ in range(ops)]
    for number, (start, *_rest) in enumerate(sent):
        leaving[start % ops].append(number)
    for numbers in leaving:
        numbers.sort(key=lambda number: -sent[number][1])
    freed = [end for _, end, _, _ in sent]
    ends: dict[int, list[int]] = {}
    queue: list[tuple[float, int, int]] = []
    head = 0
    now = lane_s = 0.0
    gone = 0
    for place in range(_STEPS * ops):
        op = place % ops
        for number in ends.pop(place, []):
            gone -= sent[number][2]
        while head < len(queue):
            done_s, number, base = queue[head]
            full = levels[op] - gone > budget_bytes
            if done_s > now and not full:
                break
            now = max(now, done_s)
            head += 1
            start, end, size, _ = sent[number]
            absolute_end = base + end
            if place < absolute_end:
                gone += size
                ends.setdefault(absolute_end, []).append(number)
            if base == ops:
                freed[number] = min(place - base, end)
        now += seconds[op]
        for number in leaving[op]:
            lane_s = max(now, lane_s) + sent[number][3]
            base = place - sent[number][0]
            queue.append((lane_s, number, base))
    return freed


_LONGEST = 64


def recipe(
    problem: SwapProblem,
    tensor: int,
    *,
    after: int,
    before: int,
    absent: Callable[[int, int], bool] = lambda _tensor, _op: False,
) -> tuple[int, ...] | None:
    """The ops that make a tensor again just before op `before`, in order; None if none can.

    `absent` says which tensors are not on the device then. What is dead by then, or absent, is made
    again as well; what an op would overwrite that is still there cannot be.
    """
    ops: set[int] = set()
    ahead = [tensor]
    again = {tensor}
    while ahead:
        number = ahead.pop()
        moved = problem.tensors[number]
        if moved.is_standing or not moved.writers:
            return None
        for writer in moved.writers:
            # A tensor that is written later than it was dropped would need another's content.
            if writer > after or not problem.repeatable[writer]:
                return None
            ops.add(writer)
            for source in problem.reads[writer]:
                if source in again:
                    continue
                known = problem.tensors[source]
                if any(writer < other < before for other in known.writers):
                    return None
                if known.dies < before or absent(source, before):
                    again.add(source)
                    ahead.append(source)
        if len(ops) > _LONGEST:
            return None
    for op in ops:
        for written in problem.writes[op]:
            # In place on something that is not made from scratch.
            if written not in again and problem.tensors[written].born != op:
                return None
    return tuple(sorted(ops))
