"""Order the passes of a pipeline's ranks: which stage and micro-batch each computes, one by one.

Ranks of a schedule hold several stages where it has virtual stages; a V holds stage r and, counted
from the end, stage r again. DualPipe's ranks hold the same two of a model that they hold twice, of
which the second copy takes micro-batches that begin at the last rank: its stages count on from
those of the first. The orders are those of ``torch.distributed.pipelining.schedules``
(torch 2.13) and a test holds them against it; 1F1B also takes fewer micro-batches than ranks, as
Megatron-LM's does. Sources: GPipe (Huang et al. 2019), 1F1B (Narayanan
et al. 2019, PipeDream-Flush), interleaved 1F1B (Narayanan et al. 2021), zero-bubble ZB-H1 and ZB-V
(Qi et al. 2023, 2024), DualPipeV (DeepSeek-AI 2025). DualPipe (DeepSeek-AI 2024, arXiv 2412.19437)
is not among torch's: its order is that of its authors' code (deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Literal, NamedTuple

from estimator.errors import StrategyError, quoted
from estimator.units import parse_whole

# A backward pass whole, or the gradients of its inputs and of its weights apart.
Pass = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """A pass of one stage over one micro-batch."""

    kind: Pass
    stage: int
    micro_batch: int


Order = tuple[Action, ...]
# More stages of a rank than any model has blocks.
_MOST_VIRTUAL = 10**4


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule by name, and how many stages each rank holds.

    Raises StrategyError for a name that is none.

    >>> Schedule.parse("interleaved:2")
    Schedule(name='interleaved', virtual=2)
    """

    name: str = "1f1b"
    virtual: int = 1

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``gpipe``, ``1f1b``, ``interleaved:STAGES``, ``zb``, ``zbv``, ``dualpipev``,
        ``dualpipe``.
        """
        name, _, virtual = text.partition(":")
        if name in _ONE_STAGE and not virtual:
            return cls(name)
        if name in _V_SHAPED + _TWO_WAY and not virtual:
            return cls(name, 2)
        if name == "interleaved":
            with suppress(ValueError):
                return cls(name, parse_whole(virtual, least=2, most=_MOST_VIRTUAL))
        raise StrategyError(
            f"{quoted(text)} is no pipeline schedule; write one of "
            f"{', '.join(_ONE_STAGE + _V_SHAPED + _TWO_WAY)} or interleaved:2 (stages of a rank)"
        )

    def __str__(self) -> str:
        return f"interleaved:{self.virtual}" if self.name == "interleaved" else self.name

    @property
    def is_two_way(self) -> bool:
        """Whether ranks hold two copies of the model, one for each way through them."""
        return self.name in _TWO_WAY

    def model_stages(self, ranks: int) -> int:
        """Into how many stages the model is cut."""
        return ranks if self.is_two_way else ranks * self.virtual

    def passes_of(self, micro_batches: int) -> int:
        """How many of a step's micro-batches each stage computes: of two ways, half of them."""
        return micro_batches // 2 if self.is_two_way else micro_batches

    def stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        if self.name in _V_SHAPED + _TWO_WAY:
            return rank, 2 * ranks - 1 - rank
        return tuple(range(rank, ranks * self.virtual, ranks))

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that holds a stage."""
        if self.name in _V_SHAPED + _TWO_WAY and stage >= ranks:
            return 2 * ranks - 1 - stage
        return stage % ranks

    def orders(self, ranks: int, micro_batches: int) -> tuple[Order, ...]:
        """What each rank computes; raises StrategyError where the micro-batches do not fit."""
        self.check(ranks, micro_batches)
        return unchecked_orders(self, ranks, micro_batches)

    def check(self, ranks: int, micro_batches: int) -> None:
        """Raise StrategyError where so many micro-batches do not fit."""
        if self.is_two_way and ranks % 2:
            raise StrategyError(
                f"the schedule {self} needs as many ranks before its middle as after it, found "
                f"{ranks}; choose an even pp or dualpipev"
            )
        least = 2 * ranks if self.name in ("dualpipev", "dualpipe") else 1
        if micro_batches < least:
            raise StrategyError(
                f"the schedule {self} over {ranks} stages of ranks needs at least {least} "
                f"micro-batches, found {micro_batches}; raise micro_batches or choose gpipe"
            )
        if self.is_two_way and micro_batches % 2:
            raise StrategyError(
                f"the schedule {self} takes as many micro-batches from one end as from the other, "
                f"found {micro_batches}; choose an even number"
            )
        rounds = _rounds(ranks, micro_batches)
        if self.name in ("interleaved", "zb") and micro_batches % rounds:
            raise StrategyError(
                f"the schedule {self} runs {micro_batches} micro-batches in {rounds} rounds over "
                f"{ranks} ranks, which do not divide them; choose a multiple of {ranks}"
            )

    def runs(self, ranks: int, micro_batches: int) -> bool:
        """Whether so many micro-batches fit."""
        try:
            self.check(ranks, micro_batches)
        except StrategyError:
            return False
        return True

    @property
    def backward_is_whole(self) -> bool:
        """Whether a stage before waits for a backward pass with its gradients of weights."""
        return self.name in ("gpipe", "1f1b", "interleaved")

    def held_at_least(self, rank: int, ranks: int, micro_batches: int) -> tuple[int, ...]:
        """Micro-batches of each of a rank's stages that it holds when it first goes back."""
        held = dict.fromkeys(self.stages_of(rank, ranks), 0)
        order = _ORDERS[self.name](rank, tuple(held), ranks, micro_batches)
        for action in takewhile(lambda action: action.kind == "forward", order):
            held[action.stage] += 1
        return tuple(held.values())

    def round_of(self, ranks: int, micro_batches: int) -> int:
        """After how many micro-batches the passes repeat, but for their number."""
        if self.is_two_way:
            return 2
        return micro_batches // _rounds(ranks, micro_batches) if self.name == "interleaved" else 1


DEFAULT_SCHEDULE = Schedule()
_ONE_STAGE = ("gpipe", "1f1b", "zb")
_V_SHAPED = ("zbv", "dualpipev")
_TWO_WAY = ("dualpipe",)


@lru_cache(maxsize=256)
def unchecked_orders(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[Order, ...]:
    """`Schedule.orders` of micro-batches that are known to fit."""
    held = [schedule.stages_of(rank, ranks) for rank in range(ranks)]
    ordered = _ORDERS[schedule.name]
    return tuple(tuple(ordered(rank, held[rank], ranks, micro_batches)) for rank in range(ranks))


def _rounds(ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // ranks)


def _gpipe(rank: int, held: Sequence[int], ranks: int, micro_batches: int) -> Iterator[Action]:
    for kind in ("forward", "backward"):
        yield from _one_by_one(kind, held, micro_batches, micro_batches)


def _one_forward_one_backward(
    rank: int, held: Sequence[int], ranks: int, micro_batches: int
) -> Iterator[Action]:
    forward = _one_by_one("forward", held[:1], micro_batches, micro_batches)
    backward = _one_by_one("backward", held[:1], micro_batches, micro_batches)
    yield from _alternating(forward, backward, warm_up=ranks - 1 - rank)


def _interleaved(
    rank: int, held: Sequence[int], ranks: int, micro_batches: int
) -> Iterator[Action]:
    per_round = micro_batches // _rounds(ranks, micro_batches)
    forward = _one_by_one("forward", held, micro_batches, per_round)
    backward = _one_by_one("backward", held[::-1], micro_batches, per_round)
    warm_up = (len(held) - 1) * per_round + 2 * (ranks - 1 - rank)
    yield from _alternating(forward, backward, warm_up=warm_up)


def _zero_bubble(
    rank: int, held: Sequence[int], ranks: int, micro_batches: int
) -> Iterator[Action]:
    """ZB-H1: gradients of weights wait as long as 1F1B's first rank would hold activations."""
    forward = _one_by_one("forward", held, micro_batches, micro_batches)
    inputs = _one_by_one("input", held, micro_batches, micro_batches)
    pending: deque[Action] = deque()
    for action in _alternating(forward, inputs, warm_up=ranks - 1 - rank):
        yield action
        if action.kind == "input":
            pending.append(action._replace(kind="weight"))
            if len(pending) > rank:
                yield pending.popleft()
    yield from pending


def _one_by_one(
    kind: Pass, stages: Sequence[int], micro_batches: int, per_round: int
) -> Iterator[Action]:
    """Rounds of `per_round` micro-batches, stage after stage."""
    for begin in range(0, micro_batches, per_round):
        for stage in stages:
            for micro_batch in range(begin, begin + per_round):
                yield Action(kind, stage, micro_batch)


def _alternating(
    forward: Iterator[Action], backward: Iterator[Action], *, warm_up: int
) -> Iterator[Action]:
    """So many forward passes, then one of each by turns, then the backward passes that are left."""
    for _, action in zip(range(warm_up), forward, strict=False):
        yield action
    for action in forward:
        yield action
        yield next(backward)
    yield from backward


class _Counting:
    """Passes of the two stages of a V, whose micro-batches count on by themselves."""

    def __init__(self, held: Sequence[int]) -> None:
        self._held = held
        self._next: dict[tuple[str, int], int] = {}
        self.pending: deque[Action] = deque()

    def take(self, kind: Pass, half: int) -> Action:
        """The next micro-batch of a pass in the first (0) or the second half (1) of the V."""
        counted = "input" if kind == "backward" else kind
        number = self._next.get((counted, half), 0)
        self._next[counted, half] = number + 1
        action = Action(kind, self._held[half], number)
        if kind == "input":
            self.pending.append(action._replace(kind="weight"))
        return action

    def weight(self) -> Iterator[Action]:
        """The gradients of weights that wait longest, if any do."""
        if self.pending:
            yield self.pending.popleft()

    def weight_of(self, half: int) -> Iterator[Action]:
        """Those of a half that wait longest."""
        for action in self.pending:
            if action.stage == self._held[half]:
                self.pending.remove(action)
                yield action
                return


def _zero_bubble_v(
    rank: int, held: Sequence[int], ranks: int, micro_batches: int
) -> Iterator[Action]:
    """ZB-V; with too few micro-batches to fill the pipeline those that lack are left out."""
    for action in _full_zero_bubble_v(rank, held, ranks, max(2 * ranks - 1, micro_batches)):
        if action.micro_batch < micro_batches:
            yield action


def _full_zero_bubble_v(
    rank: int, held: Sequence[int], ranks: int, micro_batches: int
) -> Iterator[Action]:
    v = _Counting(held)
    warm_up = 2 * (ranks - rank) - 1
    for _ in range(warm_up):
        yield v.take("forward", 0)
    for _ in range(rank):
        yield v.take("forward", 1)
        yield v.take("forward", 0)
    for _ in range(ranks - rank):
        yield v.take("forward", 1)
        yield v.take("input", 1)
        yield from v.weight()
    begun, ended = warm_up + rank, ranks
    while ended < max(begun, micro_batches):
        if begun < micro_batches:
            begun += 1
            yield v.take("forward", 0)
        yield v.take("input", 0)
        yield from v.weight()
        ended += 1
        yield v.take("forward", 1)
        yield v.take("input", 1)
        yield from v.weight()
    for _ in range(rank):
        yield v.take("input", 0)
        yield v.take("input", 1)
    for _ in range(ranks - rank):
        yield v.take("input", 0)
        yield from v.weight_of(0)
    yield from (action for action in v.pending if action.stage == held[1])
    yield from (action for action in v.pending if action.stage == held[0])


def _dualpipe_v(rank: int, held: Sequence[int], ranks: int, micro_batches: int) -> Iterator[Action]:
    """DualPipeV; a forward and a backward pass side by side stand one after the other."""
    v, after = _Counting(held), ranks - 1 - rank
    for _ in range(2 * after):
        yield v.take("forward", 0)
    for _ in range(rank + 1):
        yield v.take("forward", 0)
        yield v.take("forward", 1)
    for _ in range(after):
        yield v.take("input", 1)
        yield from v.weight()
        yield v.take("forward", 1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        for half in (0, 1):
            yield v.take("forward", half)
            yield v.take("backward", 1 - half)
    for _ in range(after):
        yield v.take("backward", 1)
        yield v.take("forward", 1)
        yield v.take("backward", 0)
    kind: Pass = "backward"
    for number in range(rank + 1):
        for half in (1, 0):
            # Half of what is left drains with gradients of inputs alone; odd ranks begin earlier.
            if number == (rank + 1) // 2 and half == rank % 2:
                kind = "input"
            yield v.take(kind, half)
    for _ in range(after):
        yield from v.weight()
        yield v.take(kind, 0)
    yield from v.pending


def _dualpipe(rank: int, held: Sequence[int], ranks: int, micro_batches: int) -> Iterator[Action]:
    """DualPipe: what ranks of half as many do in DualPipeV, the last ones from the other way.

    Micro-batches of the first way have even numbers, those of the second odd ones.
    """
    half = ranks // 2
    nearer, own = (rank, held) if rank < half else (ranks - 1 - rank, held[::-1])
    for kind, stage, number in _dualpipe_v(nearer, own, half, micro_batches // 2):
        yield Action(kind, stage, 2 * number + (stage >= ranks))


_ORDERS: dict[str, Callable[[int, Sequence[int], int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb": _zero_bubble,
    "zbv": _zero_bubble_v,
    "dualpipev": _dualpipe_v,
    "dualpipe": _dualpipe,
}
