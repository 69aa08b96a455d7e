"""Copies are issued where hooks are called: in time, where the plan's peak leaves room."""

from __future__ import annotations

import pytest

from estimator.advise.swap.plan import Swap, SwapPlan
from estimator.integrations.swap.apply_plan import CallTimes, SwapCalls
from tests.advise.swap.swap_problems import problem_of

# Tensor 0 is absent during ops 3 and 4 of 8 ops of a second; its copies take two.
SWAP = Swap(tensor=0, after=0, free_before=3, fetch_before=5, use=7)


def retimed(places: list[int], other: tuple[int, int], *, send: int, free: int) -> SwapCalls:
    """The swap beside another tensor of 4 bytes that lives from op to op."""
    born, dies = other
    problem = problem_of([1.0] * 8, [(2, 0, 7, [0, 7]), (4, born, dies, [born, dies])])
    use = len(places) - 1
    found = SwapCalls(swap=SWAP, size_bytes=2, send=send, free=free, fetch=use, use=use)
    CallTimes(places, problem, SwapPlan(swaps=(SWAP,))).retime([found])
    return found


@pytest.mark.parametrize(
    ("dies", "fetch"),
    # Back by second 7, the copy starts at 5 at the latest: at the call before op 4. If the other
    # tensor is still there, 4 + 2 bytes are over the plan's peak of 4, and op 7 waits.
    [(3, 4), (4, 5)],
)
def test_a_copy_back_is_issued_early_where_there_is_room(dies: int, fetch: int) -> None:
    found = retimed([0, 1, 2, 3, 4, 7], (3, dies), send=1, free=3)
    assert (found.free, found.fetch) == (3, fetch)


@pytest.mark.parametrize(
    ("born", "free"),
    # Sent at second 2, the copy has ended at 4: memory is given up before op 4 (call 3), unless
    # op 3 needs it (call 2).
    [(4, 3), (3, 2)],
)
def test_memory_is_given_up_when_its_copy_has_ended_where_there_is_room(
    born: int, free: int
) -> None:
    found = retimed([0, 2, 3, 4, 5, 7], (born, 4), send=1, free=2)
    assert found.free == free


def test_copies_back_share_a_lane() -> None:
    # Both are used at second 7: the later one is issued by 5, the one before it by 3.
    tensors = [(2, 0, 7, [0, 7]), (2, 0, 7, [0, 7]), (9, 1, 1, [1])]
    problem = problem_of([1.0] * 8, tensors)
    swaps = [
        Swap(tensor=number, after=0, free_before=1, fetch_before=2, use=7) for number in (0, 1)
    ]
    found = [SwapCalls(swap=each, size_bytes=2, send=1, free=1, fetch=7, use=7) for each in swaps]
    CallTimes(range(8), problem, SwapPlan(swaps=tuple(swaps))).retime(found)
    assert sorted(each.fetch for each in found) == [3, 5]
