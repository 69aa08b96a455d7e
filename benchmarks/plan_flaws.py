"""Check a plan of memory by walking through its steps tensor by tensor.

It shares nothing with what makes and plays plans but the problem and the plan themselves: where a
planner counts bytes per op, this keeps a state for every tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

from estimator.advise.swap.plan import PlayedPlan, Recompute, SwapPlan, Transfer
from estimator.advise.swap.problem import SwapProblem

State = Literal["absent", "leaving", "arriving", "here"]

_ROUNDING = 1e-9
# The second step begins as the first one has left things.
_STEPS = 2


def plan_flaws(
    problem: SwapProblem,
    plan: SwapPlan,
    played: PlayedPlan | None = None,
    *,
    budget_bytes: int | None = None,
) -> list[str]:
    """What is wrong with a plan, one sentence each; an empty list for a sound one.

    No op may use a tensor that is not there, nothing may be moved twice at once, no more than the
    budget may be held, and no two transfers may share a direction of the link or begin before what
    they wait for.
    """
    walk = _Walk(problem, plan)
    for _ in range(_STEPS):
        for op in range(problem.ops):
            walk.op(op)
    flaws = walk.flaws
    if budget_bytes is not None and walk.peak_bytes > budget_bytes:
        flaws.append(
            f"{walk.peak_bytes} bytes are held at op {walk.peak_at}, the budget is {budget_bytes}"
        )
    if played is not None:
        flaws += _transfer_flaws(problem, plan, played)
        if walk.peak_bytes > played.peak_bytes:
            flaws.append(
                f"{walk.peak_bytes} bytes are held at op {walk.peak_at}, the plan promises "
                f"{played.peak_bytes}"
            )
    return list(dict.fromkeys(flaws))


class _Walk:
    """Where every tensor is while steps run."""

    def __init__(self, problem: SwapProblem, plan: SwapPlan) -> None:
        self.problem = problem
        self.flaws: list[str] = []
        self.peak_bytes, self.peak_at = 0, 0
        self.state: dict[int, State] = {
            tensor.number: "here" for tensor in problem.tensors if tensor.is_standing
        }
        # What happens to which tensors around which op; "again" are those computed again.
        self.around: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
        n = problem.ops
        for swap in plan.swaps:
            if swap.use >= n:
                # It has been under way since the step before.
                begun = [swap.free_before < n, swap.fetch_before < n]
                states: tuple[State, ...] = ("leaving", "absent", "arriving")
                self.state[swap.tensor] = states[sum(begun)]
            if not swap.after < swap.free_before <= swap.fetch_before <= swap.use:
                self.flaws.append(f"the windows of tensor {swap.tensor} are out of order")
            if swap.use - swap.after > n:
                self.flaws.append(f"tensor {swap.tensor} is away for more than a step")
            moves = {"free": swap.free_before, "fetch": swap.fetch_before, "use": swap.use}
            for what, op in {**moves, "leaves": swap.after}.items():
                self.around[what, op % n].append(swap.tensor)
        for each in plan.recomputes:
            self.around["dropped", each.after].append(each.tensor)
            self.around["again", each.before].append(each)
        for tensor in problem.tensors:
            self.around["born", tensor.born].append(tensor.number)
            self.around["dies", min(tensor.dies, n - 1)].append(tensor.number)
            for access in tensor.accesses:
                self.around["touched", access].append(tensor.number)

    def op(self, op: int) -> None:
        for what in ("free", "fetch", "use"):
            for tensor in self.around[what, op]:
                self._moved(what, tensor, op)
        for each in self.around["again", op]:
            self._made_again(each, op)
        for tensor in self.around["born", op]:
            self.state[tensor] = "here"
        for tensor in self.around["touched", op]:
            if self.state.get(tensor) not in ("here", "leaving"):
                where = self.state.get(tensor, "not yet made")
                self.flaws.append(f"op {op} uses tensor {tensor}, which is {where}")
        self._hold(op, int(self.problem.workspace_bytes[op]))
        for tensor in self.around["leaves", op]:
            if self.state.get(tensor) != "here":
                self.flaws.append(f"tensor {tensor} leaves after op {op}, where it is not")
            self.state[tensor] = "leaving"
        for tensor in self.around["dropped", op]:
            self.state[tensor] = "absent"
        for tensor in self.around["dies", op]:
            if not self.problem.tensors[tensor].is_standing:
                self.state.pop(tensor, None)

    def _moved(self, what: str, tensor: int, op: int) -> None:
        expected: dict[str, tuple[State, State]] = {
            "free": ("leaving", "absent"),
            "fetch": ("absent", "arriving"),
            "use": ("arriving", "here"),
        }
        before, after = expected[what]
        if self.state.get(tensor) != before:
            where = self.state.get(tensor, "not yet made")
            self.flaws.append(f"tensor {tensor} is {where} before op {op}, not {before}")
        self.state[tensor] = after

    def _made_again(self, each: Recompute, op: int) -> None:
        own: set[int] = set()
        writes = set(each.ops)
        for index, place in enumerate(each.ops):
            if not self.problem.repeatable[place]:
                self.flaws.append(f"op {place} cannot run again before op {op}")
            for tensor in self.problem.reads[place]:
                if tensor in own:
                    continue
                if self.state.get(tensor) not in ("here", "leaving"):
                    self.flaws.append(
                        f"op {place} runs again before op {op} without tensor {tensor}"
                    )
                later = [w for w in self.problem.tensors[tensor].writers if place < w < op]
                if later:
                    self.flaws.append(
                        f"tensor {tensor} has changed since op {place}, which runs again"
                    )
            own |= set(self.problem.writes[place])
            needed_later = {
                t for later_op in each.ops[index:] for t in self.problem.reads[later_op]
            } | set(self.problem.writes[place])
            size = sum(
                self.problem.tensors[t].size_bytes
                for t in own & (needed_later | {each.tensor})
                if self.problem.tensors[t].born in writes
            )
            self._hold(op, size + int(self.problem.workspace_bytes[place]))
        if each.tensor not in own:
            self.flaws.append(f"tensor {each.tensor} is not made by what runs before op {op}")
        self.state[each.tensor] = "here"

    def _hold(self, op: int, more_bytes: int) -> None:
        held = self.problem.fixed_bytes + more_bytes
        for tensor, state in self.state.items():
            if state != "absent":
                held += self.problem.tensors[tensor].size_bytes
        if held > self.peak_bytes:
            self.peak_bytes, self.peak_at = held, op


def _transfer_flaws(problem: SwapProblem, plan: SwapPlan, played: PlayedPlan) -> list[str]:
    flaws = []
    for name, link, transfers in (
        ("out", problem.d2h, played.out),
        ("back", problem.h2d, played.back),
    ):
        ordered = sorted(transfers, key=lambda each: each.start_s)
        for first, second in pairwise(ordered):
            if second.start_s < first.end_s - _ROUNDING:
                flaws.append(
                    f"tensors {first.tensor} and {second.tensor} are copied {name} at once"
                )
        for each in ordered:
            least_s = link.transfer_time_s(problem.tensors[each.tensor].size_bytes)
            if each.end_s - each.start_s < least_s - _ROUNDING:
                flaws.append(f"tensor {each.tensor} is copied {name} faster than the link")
    return flaws + _order_flaws(problem, plan, played)


def _order_flaws(problem: SwapProblem, plan: SwapPlan, played: PlayedPlan) -> list[str]:
    """Copies begin after the op that they follow, and ops after the copies that they wait for."""
    flaws = []
    start_s = [
        float(end) - float(own) for end, own in zip(played.ends_s, problem.op_s, strict=True)
    ]
    out, back = (_by_tensor(transfers) for transfers in (played.out, played.back))
    for swap in plan.swaps:
        follows = float(played.ends_s[swap.after % problem.ops])
        if not any(each.start_s >= follows - _ROUNDING for each in out[swap.tensor]):
            flaws.append(f"tensor {swap.tensor} leaves before op {swap.after} has ended")
        # A copy that began late in the step before has ended when the step begins, or is waited
        # for there: only those of the same step can be compared.
        if swap.fetch_before // problem.ops != swap.use // problem.ops:
            continue
        use_s = start_s[swap.use % problem.ops]
        if not any(each.end_s <= use_s + _ROUNDING for each in back[swap.tensor]):
            flaws.append(f"op {swap.use} runs before tensor {swap.tensor} is back")
    return flaws


def _by_tensor(transfers: Iterable[Transfer]) -> Mapping[int, list[Transfer]]:
    found: defaultdict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        found[transfer.tensor].append(transfer)
    return found
