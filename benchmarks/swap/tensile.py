"""Plan memory by TENSILE's algorithm (Zhang et al., "TENSILE: A Tensor Granularity Dynamic GPU
Memory Scheduling Method towards Multiple Dynamic Workloads Systems", arXiv 2105.13336)."""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np

from estimator.advise.swap.plan import Gap, Recompute, Swap, SwapPlan, gaps_of, play, recipe
from estimator.advise.swap.problem import SwapProblem
from estimator.advise.swap.search import Planned

_MOST_ROUNDS = 100
_LEAST_GAIN_RATIO = 0.0005


class _Lane:
    """Free time of one direction of the link over the steps' clock."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []

    def earliest(self, after_s: float, before_s: float, seconds: float) -> float | None:
        """The first begin in a window at which nothing else is under way; None if there is none."""
        begin = after_s
        for start, end in self.busy:
            if end <= begin:
                continue
            if start >= begin + seconds:
                break
            begin = end
        return begin if begin + seconds <= before_s else None

    def latest(self, after_s: float, before_s: float, seconds: float) -> float | None:
        """The last such begin."""
        end = before_s
        for start, stop in reversed(self.busy):
            if start >= end:
                continue
            if stop <= end - seconds:
                break
            end = start
        return end - seconds if end - seconds >= after_s else None

    def take(self, begin: float, seconds: float) -> None:
        insort(self.busy, (begin, begin + seconds))


class _Tensile:
    """One run of the algorithm; every plan on the way is kept."""

    def __init__(self, problem: SwapProblem) -> None:
        self.problem = problem
        ends_s = np.cumsum(problem.op_s)
        self.length_s = float(ends_s[-1])
        self.ends_s = np.concatenate([ends_s, ends_s + self.length_s]).tolist()
        self.starts_s = [
            end - own for end, own in zip(self.ends_s, np.tile(problem.op_s, 2), strict=True)
        ]
        self.out, self.back = _Lane(), _Lane()
        self.swaps: list[Swap] = []
        self.recomputes: list[Recompute] = []
        self.gaps: dict[int, list[Gap]] = {}
        for gap in gaps_of(problem):
            self.gaps.setdefault(gap.tensor, []).append(gap)
        self.moved: set[tuple[int, int]] = set()
        self.read_at: dict[int, list[int]] = {}

    def run(self) -> list[Planned]:
        found = [self._planned()]
        idle = 0
        while idle <= _MOST_ROUNDS:
            if not self._swap_at(found[-1]) and not self._recompute_at(found[-1]):
                break
            found.append(self._planned())
            gain = found[-2].played.peak_bytes - found[-1].played.peak_bytes
            idle = idle + 1 if gain < _LEAST_GAIN_RATIO * found[0].played.peak_bytes else 0
        return found

    def _planned(self) -> Planned:
        plan = SwapPlan(swaps=tuple(self.swaps), recomputes=tuple(self.recomputes))
        return Planned(plan=plan, played=play(self.problem, plan))

    def _swap_at(self, latest: Planned) -> bool:
        """Swap the largest tensor that is alive at the peak and can be; whether there is one."""
        peak = int(latest.played.levels.argmax())
        order = sorted(self.gaps, key=lambda number: -self.problem.tensors[number].size_bytes)
        for number in order:
            for gap in self.gaps[number]:
                if (number, gap.after) in self.moved or not _covers(gap, peak, self.problem.ops):
                    continue
                if self._placed(gap, peak):
                    return True
                self.moved.add((number, gap.after))
        return False

    def _placed(self, gap: Gap, peak: int) -> bool:
        """Copies in free slots: out before the peak, back before the use."""
        problem, n = self.problem, self.problem.ops
        place = peak if gap.after < peak < gap.use else peak + n
        out_s = problem.d2h.transfer_time_s(gap.size_bytes)
        back_s = problem.h2d.transfer_time_s(gap.size_bytes)
        use = min([gap.use, *[op for op in self.read_at.get(gap.tensor, ()) if op > gap.after]])
        if use <= place:
            return False
        after_s, peak_s = self.ends_s[gap.after], self.starts_s[place]
        begin_s = self.out.earliest(after_s, peak_s, out_s)
        if begin_s is None:
            return False
        end_s = self.ends_s[place]
        arrive_s = self.back.latest(end_s, self.starts_s[use], back_s)
        if arrive_s is None:
            return False
        free = bisect_right(self.starts_s, begin_s + out_s - 1e-15)
        fetch = bisect_right(self.starts_s, arrive_s) - 1
        if not gap.after < free < fetch <= use:
            return False
        for shift in (-self.length_s, 0.0, self.length_s):
            self.out.take(begin_s + shift, out_s)
            self.back.take(arrive_s + shift, back_s)
        self.moved.add((gap.tensor, gap.after))
        self.swaps.append(
            Swap(tensor=gap.tensor, after=gap.after, free_before=free, fetch_before=fetch, use=use)
        )
        return True

    def _recompute_at(self, latest: Planned) -> bool:
        """Make again, of what is alive at the peak, what is largest for the time of its op."""
        peak = int(latest.played.levels.argmax())
        best: tuple[float, Gap, tuple[int, ...]] | None = None
        taken = {(swap.tensor, swap.after) for swap in self.swaps}
        taken |= {(each.tensor, each.after) for each in self.recomputes}
        for number, gaps in self.gaps.items():
            for gap in gaps:
                if (number, gap.after) in taken or not gap.after < peak < gap.use:
                    continue
                if self.read_at.get(number) or gap.use >= self.problem.ops:
                    continue
                ops = recipe(self.problem, number, after=gap.after, before=gap.use)
                # Its sources must be there: nothing else is made again for it.
                if ops is None or set(ops) - set(self.problem.tensors[number].writers):
                    continue
                if not self._sources_stay(ops, number, gap.use):
                    continue
                seconds = float(self.problem.op_s[list(ops)].sum()) + 1e-12
                rate = gap.size_bytes / seconds
                if best is None or rate > best[0]:
                    best = rate, gap, ops
        if best is None:
            return False
        _, gap, ops = best
        self.recomputes.append(
            Recompute(tensor=gap.tensor, after=gap.after, before=gap.use, ops=ops)
        )
        self.recomputes.sort(key=lambda each: (each.before, each.ops[-1]))
        for op in ops:
            for source in self.problem.reads[op]:
                if source != gap.tensor:
                    self.read_at.setdefault(source, []).append(gap.use)
        return True

    def _sources_stay(self, ops: tuple[int, ...], tensor: int, before: int) -> bool:
        sources = {source for op in ops for source in self.problem.reads[op]} - {tensor}
        away = [(swap.tensor, swap.after, swap.use) for swap in self.swaps]
        away += [(each.tensor, each.after, each.before) for each in self.recomputes]
        return not any(
            number in sources and (after < before < use or after < before + self.problem.ops < use)
            for number, after, use in away
        )


def _covers(gap: Gap, op: int, ops: int) -> bool:
    return gap.after < op < gap.use or gap.after < op + ops < gap.use


def tensile(problem: SwapProblem) -> list[Planned]:
    """The plans of TENSILE's rounds, the empty one first; the last is its answer."""
    return _Tensile(problem).run()
