"""Work out how to make a dropped tensor again from what is on the device."""

from __future__ import annotations

from collections.abc import Callable

from estimator.advise.swap_problem import SwapProblem

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
        each = problem.tensors[number]
        if each.is_standing or not each.writers:
            return None
        for writer in each.writers:
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
