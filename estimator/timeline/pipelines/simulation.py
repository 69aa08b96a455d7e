"""Simulate one step of a pipeline: when each rank ends its last pass, how long it waited.

Every rank computes its passes in the order of the schedule; what a stage sends travels on a lane of
its own from rank to rank, in the order in which it is sent, and the pass that needs it waits for
it. As in torch.distributed.pipelining nothing is sent before it is received: GPipe and 1F1B receive
once they have nothing else to do before, the other schedules after the passes that a rank has come
to when all take one at a time. DualPipe's and DualPipeV's pairs of passes send what they give after
both.
1F1B (Megatron-LM's too) waits for what it sends as well: between a forward and a backward pass for
the one just sent, within a run of either for the one before.

Every task ends at the latest end that it waits for and its cost. The schedule repeats blocks of
tasks, one block for each micro-batch (or round of them). Once every task of a block ends later by
an amount of its own than in the block before, and has done so for as long as any task looks back,
the ends go on by these amounts until a wait that was not the latest becomes it: that many blocks
are added at once. The result is that of all tasks, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from estimator.timeline.simulator.tasks import TaskList
from estimator.workload.schedules import Action, Schedule, unchecked_orders


class StageCosts(NamedTuple):
    """What one micro-batch takes on a stage, in seconds, or of a stage in each row of many steps.

    A backward pass takes `input_s` + `weight_s`, and `added_s` where it adds gradients of weights
    to those of micro-batches before; `sent_s` is how long the stage's output is on its way to the
    next one, `returned_s` the gradient of its input to the one before.
    """

    forward_s: Any
    input_s: Any
    weight_s: Any
    sent_s: Any = 0.0
    returned_s: Any = 0.0
    added_s: Any = 0.0

    @property
    def both_s(self) -> Any:
        """Seconds of a forward and a backward pass."""
        return self.forward_s + self.input_s + self.weight_s

    def times(self, compute: float, sending: float) -> StageCosts:
        """As many times as long: passes, and what is sent."""
        ratios = compute, compute, compute, sending, sending, compute
        return StageCosts(*map(mul, self, ratios))

    def of(self) -> tuple[Any, ...]:
        """Seconds of each of COSTS."""
        weight_s, first_s = self.weight_s + self.added_s, self.weight_s
        return (
            *(self.forward_s, self.input_s + weight_s, self.input_s, weight_s),
            *(self.input_s + first_s, first_s, self.sent_s, self.returned_s),
        )


# What a task of a stage takes: a pass, the first pass with gradients of weights, a transfer.
COSTS = (
    *("forward", "backward", "input", "weight"),
    *("first backward", "first weight", "sent", "returned"),
)


class Item(NamedTuple):
    """A task of a step before its cost is known: a pass, or what it sends to another rank."""

    action: Action
    rank: int
    to_rank: int | None
    after: tuple[int, ...]


def pipeline_tasks(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    stages: Sequence[StageCosts],
) -> tuple[TaskList, list[int]]:
    """All passes and transfers of a step, and the number of each rank's last pass.

    `stages` are `ranks * schedule.virtual`, in the order of the model, of DualPipe one copy after
    the other. Raises StrategyError where the schedule cannot run that many micro-batches.
    """
    schedule.check(ranks, micro_batches)
    tasks, last = TaskList(), [0] * ranks
    seconds = [stage.of() for stage in stages]
    for number, item in enumerate(step_items(schedule, ranks, micro_batches)):
        action, rank, to_rank, after = item
        lane = f"rank {rank}" if to_rank is None else f"from rank {rank} to {to_rank}"
        if to_rank is None:
            last[rank] = number
        tasks.add(lane, seconds[action.stage][cost_of(schedule, item)], *after)
    return tasks, last


def cost_of(schedule: Schedule, item: Item) -> int:
    """Which of COSTS a task takes."""
    kind: str = item.action.kind
    if item.to_rank is not None:
        kind = "sent" if kind == "forward" else "returned"
    elif kind in ("backward", "weight") and item.action.micro_batch < 1 + schedule.is_two_way:
        kind = f"first {kind}"
    return COSTS.index(kind)


def step_items(schedule: Schedule, ranks: int, micro_batches: int) -> list[Item]:
    """Tasks in an order in which each comes after all that it waits for."""
    return _Ordering(schedule, ranks, unchecked_orders(schedule, ranks, micro_batches)).items


class _Ordering:
    """Puts the passes of all ranks and what they send into one order."""

    def __init__(self, schedule: Schedule, ranks: int, orders: Sequence[Sequence[Action]]) -> None:
        self._schedule, self._ranks, self._orders = schedule, ranks, orders
        self._stages = schedule.model_stages(ranks)
        self._awaits_sends = schedule.name == "1f1b"
        self._receives_late = schedule.virtual == 1 and schedule.name != "zb"
        self.items: list[Item] = []
        # What a pass leaves for that of its neighbour: the transfer, or itself on the same rank.
        self._left: dict[Action, int] = {}
        self._passes: list[list[int]] = [[] for _ in orders]
        # For each pass of a rank the number of what it sends, None for nothing.
        self._sent: list[dict[int, int | None]] = [{} for _ in orders]
        self._unsent: list[tuple[int, int]] = []
        self._places = [{action: place for place, action in enumerate(order)} for order in orders]
        while any(len(done) < len(order) for done, order in zip(self._passes, orders, strict=True)):
            before = len(self.items)
            # One pass of each rank at a time: what repeats stands close together.
            for rank in range(ranks):
                if self._add(rank):
                    self._send()
            if len(self.items) == before:
                raise RuntimeError(f"the passes of {schedule} wait for each other")

    def _add(self, rank: int) -> bool:
        """Add the next pass of a rank, or a pair, if all that it needs is there already."""
        order, place = self._orders[rank], len(self._passes[rank])
        passes = order[place : place + 1 + self._is_paired(rank, place)]
        needed = map(self._needed, passes)
        if not passes or any(stage is not None and stage not in self._left for stage in needed):
            return False
        return all(self._add_pass(rank, place + n) for n in range(len(passes)))

    def _is_paired(self, rank: int, place: int) -> bool:
        """Whether a pass is the forward one that DualPipe(V) has beside a backward one."""
        kinds = [action.kind for action in self._orders[rank][place : place + 2]]
        name = self._schedule.name
        if name not in ("dualpipe", "dualpipev") or kinds != ["forward", "backward"]:
            return False
        # The first pair of the last rank, or of those in the middle of two ways, stands apart.
        is_first = not any(action.kind == "backward" for action in self._orders[rank][:place])
        half = self._ranks // 2
        apart = (half - 1, half) if name == "dualpipe" else (self._ranks - 1,)
        return not (is_first and rank in apart)

    def _add_pass(self, rank: int, place: int) -> bool:
        """Add a pass that all is there for but, of 1F1B, what its rank waits to have sent."""
        order = self._orders[rank]
        action = order[place]
        needed = self._needed(action)
        after = [] if needed is None else [self._left[needed]]
        if self._awaits_sends and place:
            turns = order[place - 1].kind != action.kind
            awaited = place - 1 if turns else place - 2
            if awaited >= 0:
                if awaited not in self._sent[rank]:
                    return False
                sent = self._sent[rank][awaited]
                after += [] if sent is None else [sent]
        self.items.append(Item(action, rank, None, tuple(after)))
        self._passes[rank].append(len(self.items) - 1)
        receiver = self._receiver(action)
        if receiver is None or receiver == rank:
            self._sent[rank][place] = None
            self._left[_result(action)] = len(self.items) - 1
        else:
            self._unsent.append((rank, place))
        return True

    def _send(self) -> None:
        """Add the transfers whose receiver has come to where it receives them."""
        for rank, place in tuple(self._unsent):
            action = self._orders[rank][place]
            receiver = self._receiver(action)
            assert receiver is not None
            # What a pair gives is sent after both.
            after = [self._passes[rank][place + self._is_paired(rank, place)]]
            if self._receives_late:
                before = self._place_of_use(action, receiver) - 1
                if before >= len(self._passes[receiver]):
                    continue
                after += self._passes[receiver][before : before + 1] if before >= 0 else []
            else:
                # As torch's `_add_send_recv` does (pipelining/schedules.py).
                after += self._passes[receiver][-1:]
            self._unsent.remove((rank, place))
            self.items.append(Item(action, rank, receiver, tuple(after)))
            self._sent[rank][place] = self._left[_result(action)] = len(self.items) - 1

    def _place_of_use(self, action: Action, receiver: int) -> int:
        """Where in the receiver's order the pass stands that needs what one sends."""
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return self._places[receiver][action._replace(stage=stage)]

    def _needed(self, action: Action) -> Action | None:
        """The pass of the neighbouring stage that one waits for; the rank's own come before."""
        kind, stage, micro_batch = action
        if kind == "forward":
            return Action(kind, stage - 1, micro_batch) if stage % self._stages else None
        if kind == "weight" or (stage + 1) % self._stages == 0:
            return None
        return Action("input", stage + 1, micro_batch)

    def _receiver(self, action: Action) -> int | None:
        """The rank that a pass's result goes to, its own among them; None where to none."""
        if action.kind == "weight":
            return None
        stage = action.stage + (1 if action.kind == "forward" else -1)
        # Each copy of the model ends for itself.
        if stage // self._stages != action.stage // self._stages:
            return None
        return self._schedule.rank_of(stage, self._ranks)


def _result(action: Action) -> Action:
    """What the neighbouring stage asks for: gradients of inputs, however they were computed."""
    return action._replace(kind="input") if action.kind == "backward" else action


# Amounts that differ by this share of the step so far are equal: what sums of floats are off by.
_SAME = 1e-12
# Blocks that must follow each other alike to be taken as repeated.
_FEWEST_BLOCKS = 3


class RunTask(NamedTuple):
    """The number of a task's cost, and how far back the ends that it waits for stand (negative).

    With one or two of these the first one stands for the others.
    """

    cost: int
    first: int
    second: int
    third: int


class RepeatedTasks(NamedTuple):
    """Tasks that run so many times; `more` times more for each further block."""

    tasks: tuple[RunTask, ...]
    times: int
    more: int


class _Pattern(NamedTuple):
    """A step as runs of tasks, of `blocks` micro-batches or rounds.

    `last` is how far from the end each rank's last pass stands, `reach` how far back anything
    looks.
    """

    runs: tuple[RepeatedTasks, ...]
    last: tuple[int, ...]
    reach: int
    blocks: int


def last_ends_s(
    schedule: Schedule, ranks: int, micro_batches: int, stages: Sequence[StageCosts]
) -> list[float]:
    """When each rank ends its last pass; raises StrategyError as `pipeline_tasks` does."""
    schedule.check(ranks, micro_batches)
    return list(_last_ends_s(schedule, ranks, micro_batches, tuple(stages)))


@lru_cache(maxsize=4096)
def _last_ends_s(
    schedule: Schedule, ranks: int, micro_batches: int, stages: tuple[StageCosts, ...]
) -> tuple[float, ...]:
    # Strategies differ in what comes after the last pass: the passes themselves are played once.
    per_round = schedule.round_of(ranks, micro_batches)
    pattern = _pattern(schedule, ranks, per_round, micro_batches // per_round)
    seconds = [float(cost) for stage in stages for cost in stage.of()]
    ends = [0.0]
    added = micro_batches // per_round - pattern.blocks
    for run in pattern.runs:
        play_run(run, run.times + run.more * added, pattern.reach, seconds, ends)
    return tuple([ends[place] for place in pattern.last])


def play_run(
    run: RepeatedTasks, times: int, reach: int, seconds: Sequence[float], ends: list[float]
) -> None:
    """Play a run so many times and add the ends."""
    length, alike = len(run.tasks), 0
    window = -(-reach // length) + 2
    growth: list[float] = []
    left = times
    while left:
        begin = len(ends)
        for cost, first, second, third in run.tasks:
            end, other = ends[first], ends[second]
            if other > end:
                end = other
            other = ends[third]
            if other > end:
                end = other
            ends.append(end + seconds[cost])
        left -= 1
        if times <= window or times - left < 2:
            continue
        before, now = ends[begin - length : begin], ends[begin:]
        grown = [b - a for a, b in zip(before, now, strict=True)]
        tolerance = _SAME * ends[-1]
        same = len(growth) == length and all(
            -tolerance <= b - a <= tolerance for a, b in zip(growth, grown, strict=True)
        )
        alike, growth = (alike + 1 if same else 0), grown
        if left and alike >= window:
            added = min(left, _blocks_ahead(run, seconds, ends, growth, tolerance))
            if added:
                _advance(ends, growth, added, reach)
                left -= added
                alike = 0


def _blocks_ahead(
    run: RepeatedTasks,
    seconds: Sequence[float],
    ends: Sequence[float],
    growth: Sequence[float],
    tolerance: float,
) -> int:
    """For how many blocks more every task waits for what it waits for now."""
    length = len(run.tasks)
    tasks = np.array(run.tasks)
    place = np.arange(length)[:, None]
    waited = place + tasks[:, 1:]
    known = np.array(ends[waited.min() - length :] if waited.min() < 0 else ends[-length:])
    own = np.array(growth)
    slack_s = (known[-length:] - np.array(seconds)[tasks[:, 0]])[:, None] - known[waited - length]
    nearing_s = own[waited % length] - own[:, None]
    if not ((slack_s <= tolerance) & (np.abs(nearing_s) <= tolerance)).any(axis=1).all():
        return 0
    nears = nearing_s > tolerance
    if not nears.any():
        return 1 << 62
    return max(int((slack_s[nears] / nearing_s[nears]).min()) - 1, 0)


def _advance(ends: list[float], growth: Sequence[float], blocks: int, reach: int) -> None:
    """Let the last ends be those of so many blocks later."""
    length = len(growth)
    count = min(-(-reach // length) * length, len(ends) - 1)
    for back in range(1, count + 1):
        ends[-back] += blocks * growth[-((back - 1) % length) - 1]


@lru_cache(maxsize=512)
def _pattern(schedule: Schedule, ranks: int, per_round: int, blocks: int) -> _Pattern:
    """The pattern of a step; that of many micro-batches is found from fewer."""
    few = 4 * schedule.virtual * ranks // per_round + 6
    if blocks > few:
        pattern = _repeating(schedule, ranks, per_round, few)
        if pattern is not None:
            return pattern
    return _runs_of(schedule, ranks, per_round, blocks)


@lru_cache(maxsize=128)
def _repeating(schedule: Schedule, ranks: int, per_round: int, blocks: int) -> _Pattern | None:
    """The pattern of so many blocks and more; None where one more changes what does not repeat."""
    one, more = (_runs_of(schedule, ranks, per_round, count) for count in (blocks, blocks + 1))
    alike = [run.tasks for run in one.runs] == [run.tasks for run in more.runs]
    if not alike or one[1:3] != more[1:3]:
        return None
    runs = [
        run._replace(more=longer.times - run.times)
        for run, longer in zip(one.runs, more.runs, strict=True)
    ]
    return one._replace(runs=tuple(runs))


def _runs_of(schedule: Schedule, ranks: int, per_round: int, blocks: int) -> _Pattern:
    """All tasks of a step, as runs of those that repeat and of those that do not."""
    tasks, micro_batches, last = _tasks(schedule, ranks, per_round * blocks)
    place = {
        (task.cost, number): at
        for at, (task, number) in enumerate(zip(tasks, micro_batches, strict=True))
    }
    runs: list[RepeatedTasks] = []
    # Up to where tasks repeat, by how far apart: found once for all that begin on the way.
    known: dict[int, int] = {}
    begin = at = 0
    while at < len(tasks):
        length = place.get((tasks[at].cost, micro_batches[at] + per_round), at) - at
        end = max(at, known.get(length, 0))
        while (
            0 < length < len(tasks) - end
            and tasks[end] == tasks[end + length]
            and micro_batches[end] + per_round == micro_batches[end + length]
        ):
            end += 1
        known[length] = end
        times = (end - at) // length + 1 if length > 0 else 1
        if times < _FEWEST_BLOCKS:
            at += 1
            continue
        if begin < at:
            runs.append(RepeatedTasks(tuple(tasks[begin:at]), 1, 0))
        runs.append(RepeatedTasks(tuple(tasks[at : at + length]), times, 0))
        begin = at = at + times * length
    if begin < len(tasks):
        runs.append(RepeatedTasks(tuple(tasks[begin:]), 1, 0))
    reach = -min([*last, *(back for task in tasks for back in task[1:])])
    return _Pattern(tuple(runs), last, reach, blocks)


def _tasks(
    schedule: Schedule, ranks: int, micro_batches: int
) -> tuple[list[RunTask], list[int], tuple[int, ...]]:
    """(tasks, the micro-batch of each, how far from the end each rank's last pass stands)."""
    tasks: list[RunTask] = []
    numbers: list[int] = []
    free: dict[tuple[int, int | None], int] = {}
    last = [0] * ranks
    for at, item in enumerate(step_items(schedule, ranks, micro_batches)):
        action, rank, to_rank, after = item
        if to_rank is None:
            last[rank] = at
        lane = rank, to_rank
        waits = {*after, *([free[lane]] if lane in free else [])} or {-1}
        free[lane] = at
        backs = sorted(wait - at for wait in waits)
        cost = action.stage * len(COSTS) + cost_of(schedule, item)
        tasks.append(RunTask(cost, *(backs * 3)[:3]))
        numbers.append(action.micro_batch)
    return tasks, numbers, tuple(at - len(tasks) for at in last)


def contended(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    beside: Sequence[StageCosts],
    apart: Sequence[StageCosts],
    tails_s: Sequence[float],
    relief_s: Sequence[float],
) -> tuple[list[StageCosts], list[float]]:
    """What stages take, and ranks after their last pass, where others compute on their nodes.

    Of stages the costs `beside` others that compute and `apart` from them are known; `tails_s` are
    those of ranks beside others, which apart take `relief_s` less. Where the passes take T, ranks
    that compute for B in all have B / T - 1 others beside them: always one computes. After its last
    pass a rank has others beside it until the last of them is through.
    """
    if beside == apart:
        return list(beside), list(tails_s)
    held = [schedule.stages_of(rank, ranks) for rank in range(ranks)]
    ends = last_ends_s(schedule, ranks, micro_batches, apart)
    passes, passes_s = schedule.passes_of(micro_batches), max(ends)
    alone_s = [tail_s - less_s for tail_s, less_s in zip(tails_s, relief_s, strict=True)]
    busy_s = sum(
        sum(passes * apart[number].both_s + (passes - 1) * apart[number].added_s for number in own)
        + min(tail_s, passes_s - end_s)
        for own, tail_s, end_s in zip(held, alone_s, ends, strict=True)
    )
    share = min(max(busy_s / passes_s - 1.0, 0.0) / (ranks - 1), 1.0)
    costs = [
        StageCosts(
            *(share * busy + (1.0 - share) * alone for busy, alone in zip(*both, strict=True))
        )
        for both in zip(beside, apart, strict=True)
    ]
    through = [end_s + tail_s for end_s, tail_s in zip(ends, alone_s, strict=True)]
    others = [max(through[:rank] + through[rank + 1 :]) for rank in range(ranks)]
    tails = [
        alone + less_s * min(max(other_s - end_s, 0.0) / alone, 1.0) if less_s else alone
        for alone, less_s, other_s, end_s in zip(alone_s, relief_s, others, ends, strict=True)
    ]
    return costs, tails


def most_held_bytes(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int, kept: Mapping[int, int]
) -> int:
    """The most that micro-batches hold on a rank, whose stages keep `kept` bytes for each.

    That is p − s times as much at stage s of 1F1B, and all micro-batches in GPipe. What a gradient
    of weights still needs counts.
    """
    own = schedule.stages_of(rank, ranks)
    return max(
        sum(count * kept[stage] for count, stage in zip(counts, own, strict=True))
        for counts in _held_at_once(schedule, ranks, rank, micro_batches)
    )


@lru_cache(maxsize=4096)
def _held_at_once(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each of a rank's stages that are held at once, where none holds more."""
    held = dict.fromkeys(schedule.stages_of(rank, ranks), 0)
    seen: set[tuple[int, ...]] = set()
    for action in schedule.orders(ranks, micro_batches)[rank]:
        if action.kind == "forward":
            held[action.stage] += 1
            seen.add(tuple(held.values()))
        elif action.kind in ("backward", "weight"):
            held[action.stage] -= 1
    return tuple(
        one
        for one in seen
        if not any(
            other != one and all(more >= count for more, count in zip(other, one, strict=True))
            for other in seen
        )
    )
