"""Find the fastest plan within a budget exactly, by integer programming: for small steps alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from estimator.advise.swap.plan import Gap, Recompute, gaps_of, recipe, transient_bytes
from estimator.advise.swap.problem import SwapProblem

_TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAnswer:
    """The least seconds of a step within a budget; None where no plan is, or none was found.

    `is_proven` says that nothing is better, `bound_s` that nothing is below.
    """

    step_s: float | None
    bound_s: float | None
    is_proven: bool


def exact_step_s(
    problem: SwapProblem, budget_bytes: int, *, time_limit_s: float = _TIME_LIMIT_S
) -> ExactAnswer:
    """The least time of a step whose peak is within a budget, over all plans within the step.

    Tensors may be away once in every stretch between two accesses, moved or made again; transfers
    may run in any order. What is held across steps stays.
    """
    return _Model(problem, budget_bytes).solved(time_limit_s)


class _Model:
    """Binary: each op at which a tensor leaves, comes back or is made again; real: every time."""

    def __init__(self, problem: SwapProblem, budget_bytes: int) -> None:
        self.problem, self.budget = problem, float(budget_bytes)
        self.integral: list[int] = []
        self.upper: list[float] = []
        self.rows: list[tuple[Mapping[int, float], float]] = []
        self.gaps = [gap for gap in gaps_of(problem) if gap.use < problem.ops]
        total = float(problem.op_s.sum())
        for gap in self.gaps:
            total += problem.d2h.transfer_time_s(gap.size_bytes)
            total += problem.h2d.transfer_time_s(gap.size_bytes)
        # Enough for everything one after the other, each op run again once for every gap.
        self.big = total + len(self.gaps) * float(problem.op_s.sum())
        self.end = [self._real() for _ in range(problem.ops)]
        self.ready = [self._real() for _ in range(problem.ops)]
        self.leaves: list[dict[int, int]] = []
        self.returns: list[dict[int, int]] = []
        self.again: list[dict[int, int]] = []
        self.recipes: dict[tuple[int, int], tuple[int, ...]] = {}
        for number, gap in enumerate(self.gaps):
            self._gap(number, gap)
        self._memory()
        self._sources()
        self._times()

    def _real(self) -> int:
        self.upper.append(np.inf)
        self.integral.append(0)
        return len(self.upper) - 1

    def _binary(self) -> int:
        self.upper.append(1.0)
        self.integral.append(1)
        return len(self.upper) - 1

    def _at_most(self, terms: Mapping[int, float], limit: float) -> None:
        self.rows.append((terms, limit))

    def _gap(self, number: int, gap: Gap) -> None:
        self.leaves.append({op: self._binary() for op in range(gap.after + 1, gap.use)})
        self.returns.append({op: self._binary() for op in range(gap.after + 2, gap.use + 1)})
        again = {}
        for op in range(gap.after + 2, gap.use + 1):
            ops = recipe(self.problem, gap.tensor, after=gap.after, before=op)
            if ops is not None:
                again[op] = self._binary()
                self.recipes[number, op] = ops
        self.again.append(again)
        chosen = dict.fromkeys([*self.leaves[-1].values(), *again.values()], 1.0)
        self._at_most(chosen, 1.0)
        left = dict.fromkeys(self.leaves[-1].values(), 1.0)
        back = dict.fromkeys(self.returns[-1].values(), -1.0)
        self._at_most({**left, **back}, 0.0)
        self._at_most({key: -value for key, value in {**left, **back}.items()}, 0.0)
        # It does not come back before it has left.
        for op in self.returns[-1]:
            terms = {var: 1.0 for at, var in self.returns[-1].items() if at <= op}
            terms |= {var: -1.0 for at, var in self.leaves[-1].items() if at < op}
            self._at_most(terms, 0.0)

    def _absent(self, number: int, op: int) -> dict[int, float]:
        """The terms whose sum is 1 where a gap's tensor is not there during an op."""
        gap = self.gaps[number]
        if not gap.after < op < gap.use:
            return {}
        terms = {var: 1.0 for at, var in self.leaves[number].items() if at <= op}
        terms |= {var: -1.0 for at, var in self.returns[number].items() if at <= op}
        return terms | {var: 1.0 for at, var in self.again[number].items() if at > op}

    def _memory(self) -> None:
        problem = self.problem
        born = problem.born_bytes()
        for op, held in enumerate(problem.levels().tolist()):
            terms: dict[int, float] = {}
            for number, gap in enumerate(self.gaps):
                for var, sign in self._absent(number, op).items():
                    terms[var] = -sign * gap.size_bytes
            self._at_most(terms, self.budget - held)
            for number, again in enumerate(self.again):
                if op not in again:
                    continue
                gap = self.gaps[number]
                each = Recompute(
                    tensor=gap.tensor,
                    after=gap.after,
                    before=op,
                    ops=self.recipes[number, op],
                )
                extra = transient_bytes(problem, each)
                # Binding where it is made again at this op.
                slack = float(held + extra)
                with_own = dict(terms)
                with_own[again[op]] = with_own.get(again[op], 0.0) + slack
                self._at_most(with_own, self.budget - held + float(born[op]) - extra + slack)

    def _sources(self) -> None:
        of_tensor: dict[int, list[int]] = {}
        for number, gap in enumerate(self.gaps):
            of_tensor.setdefault(gap.tensor, []).append(number)
        for (number, op), ops in self.recipes.items():
            written = {tensor for each in ops for tensor in self.problem.writes[each]}
            read = {tensor for each in ops for tensor in self.problem.reads[each]} - written
            for tensor in read:
                for other in of_tensor.get(tensor, ()):
                    terms = self._absent(other, op)
                    if terms:
                        self._at_most({**terms, self.again[number][op]: 1.0}, 1.0)

    def _times(self) -> None:
        problem, big = self.problem, self.big
        again_s: list[dict[int, float]] = [{} for _ in range(problem.ops)]
        for (number, op), ops in self.recipes.items():
            again_s[op][self.again[number][op]] = float(problem.op_s[list(ops)].sum())
        for op in range(problem.ops):
            own = float(problem.op_s[op])
            self._at_most({self.ready[op]: 1.0, self.end[op]: -1.0, **again_s[op]}, -own)
            if op:
                self._at_most({self.end[op - 1]: 1.0, self.ready[op]: -1.0}, 0.0)
        out, back = [], []
        for number, gap in enumerate(self.gaps):
            out_s = problem.d2h.transfer_time_s(gap.size_bytes)
            back_s = problem.h2d.transfer_time_s(gap.size_bytes)
            sent, fetched = self._real(), self._real()
            out.append((sent, out_s))
            back.append((fetched, back_s))
            moved = dict.fromkeys(self.leaves[number].values(), big)
            self._at_most({self.end[gap.after]: 1.0, sent: -1.0, **moved}, big)
            for op, var in self.leaves[number].items():
                self._at_most({sent: 1.0, self.ready[op]: -1.0, var: big}, big - out_s)
            for op, var in self.returns[number].items():
                self._at_most({self.ready[op]: 1.0, fetched: -1.0, var: big}, big)
            self._at_most({sent: 1.0, fetched: -1.0, **moved}, big - out_s)
            use = gap.use
            limit = big - back_s - float(problem.op_s[use])
            self._at_most({fetched: 1.0, self.end[use]: -1.0, **moved, **again_s[use]}, limit)
        self._one_at_a_time(out)
        self._one_at_a_time(back)

    def _one_at_a_time(self, transfers: list[tuple[int, float]]) -> None:
        big = self.big
        for first in range(len(transfers)):
            for second in range(first):
                order = self._binary()
                one, two = transfers[first], transfers[second]
                both = dict.fromkeys(
                    [*self.leaves[first].values(), *self.leaves[second].values()], big
                )
                self._at_most({one[0]: 1.0, two[0]: -1.0, order: big, **both}, 3 * big - one[1])
                self._at_most({two[0]: 1.0, one[0]: -1.0, order: -big, **both}, 2 * big - two[1])

    def solved(self, time_limit_s: float) -> ExactAnswer:
        entries = [
            (row, var, value)
            for row, (terms, _) in enumerate(self.rows)
            for var, value in terms.items()
        ]
        rows, columns, values = (np.array(each) for each in zip(*entries, strict=True))
        shape = len(self.rows), len(self.upper)
        limits: NDArray[np.float64] = np.array([limit for _, limit in self.rows])
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        cost = np.zeros(len(self.upper))
        cost[self.end[-1]] = 1.0
        found = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, -np.inf, limits),
            options={"time_limit": time_limit_s},
        )
        bound = found.mip_dual_bound
        return ExactAnswer(
            step_s=None if found.x is None else float(found.fun),
            bound_s=None if bound is None else float(bound),
            is_proven=found.status in (0, 2),
        )
