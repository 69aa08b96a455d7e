"""Play one step of a pipeline: when each rank ends its last pass, and how long it waited.

Every rank computes its passes in the order of the schedule; what a stage sends travels on a lane of
its own from rank to rank, in the order in which it is sent, and the pass that needs it waits for
it. Schedules with one stage on each rank wait for what they send as well before they go on, as
``Schedule1F1B`` of torch.distributed.pipelining and Megatron-LM's do: between a forward and a
backward pass for the one just sent, within a run of either for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from estimator.timeline.spans import Label
from estimator.timeline.tasks import TaskList
from estimator.workload.schedules import Action, Schedule


class StageCosts(NamedTuple):
    """What one micro-batch takes on a stage, in seconds, or of a stage in each row of many steps.

    A backward pass takes `input_s` + `weight_s`; `sent_s` is how long the stage's output is on its
    way to the next one, `returned_s` the gradient of its input to the one before.
    """

    forward_s: Any
    input_s: Any
    weight_s: Any
    sent_s: Any = 0.0
    returned_s: Any = 0.0

    def pass_s(self, action: Action) -> Any:
        """Seconds of a pass."""
        if action.kind == "backward":
            return self.input_s + self.weight_s
        seconds = {"forward": self.forward_s, "input": self.input_s, "weight": self.weight_s}
        return seconds[action.kind]


class _Item(NamedTuple):
    """A task of a step before its cost is known: a pass, or what it sends to another rank."""

    action: Action
    rank: int
    to_rank: int | None
    after: tuple[int, ...]


def pipeline_tasks(
    schedule: Schedule, ranks: int, micro_batches: int, stages: Sequence[StageCosts]
) -> tuple[TaskList, list[int]]:
    """All passes and transfers of a step, and the number of each rank's last pass.

    `stages` are `ranks * schedule.virtual`, in the order of the model. Raises StrategyError where
    the schedule cannot run that many micro-batches.
    """
    items = _items(schedule, ranks, micro_batches)
    tasks, last = TaskList(), [0] * ranks
    for item in items:
        action, rank, to_rank, after = item
        stage = stages[action.stage]
        label = Label(f"{action.kind} of stage {action.stage}, micro-batch {action.micro_batch}")
        if to_rank is None:
            last[rank] = tasks.add(f"rank {rank}", stage.pass_s(action), *after, label=label)
        else:
            seconds = stage.sent_s if action.kind == "forward" else stage.returned_s
            lane = f"from rank {rank} to {to_rank}"
            tasks.add(lane, seconds, *after, label=label)
    return tasks, last


@lru_cache(maxsize=256)
def _items(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[_Item, ...]:
    """Tasks in an order in which each comes after all that it waits for."""
    orders = schedule.orders(ranks, micro_batches)
    return tuple(_Ordering(schedule, ranks, orders).items)


class _Ordering:
    """Puts the passes of all ranks and what they send into one order."""

    def __init__(self, schedule: Schedule, ranks: int, orders: Sequence[Sequence[Action]]) -> None:
        self._schedule, self._ranks = schedule, ranks
        self._stages = ranks * schedule.virtual
        self._awaits_sends = schedule.name == "1f1b"
        self.items: list[_Item] = []
        # What a pass leaves for that of its neighbour: the transfer, or itself on the same rank.
        self._left: dict[Action, int] = {}
        self._sent: list[list[int | None]] = [[] for _ in orders]
        places = [0] * len(orders)
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            before = len(self.items)
            for rank, order in enumerate(orders):
                while places[rank] < len(order) and self._add(rank, order, places[rank]):
                    places[rank] += 1
            if len(self.items) == before:
                raise RuntimeError(f"the passes of {schedule} wait for each other")

    def _add(self, rank: int, order: Sequence[Action], place: int) -> bool:
        """Add a pass if all that it needs is there already."""
        action = order[place]
        needed = self._needed(action)
        if needed is not None and needed not in self._left:
            return False
        after = [] if needed is None else [self._left[needed]]
        if self._awaits_sends:
            turns = place > 0 and order[place - 1].kind != action.kind
            waited = self._sent[rank][: place if turns else max(place - 1, 0)]
            after += [sent for sent in waited[-1:] if sent is not None]
        self.items.append(_Item(action, rank, None, tuple(after)))
        number = len(self.items) - 1
        receiver = self._receiver(action)
        sent = None
        if receiver is not None and receiver != rank:
            self.items.append(_Item(action, rank, receiver, (number,)))
            number = sent = len(self.items) - 1
        self._sent[rank].append(sent)
        kind = "input" if action.kind == "backward" else action.kind
        self._left[action._replace(kind=kind)] = number
        return True

    def _needed(self, action: Action) -> Action | None:
        """The pass of the neighbouring stage that one waits for; the rank's own come before."""
        kind, stage, micro_batch = action
        if kind == "forward":
            return Action(kind, stage - 1, micro_batch) if stage else None
        if kind == "weight" or stage == self._stages - 1:
            return None
        return Action("input", stage + 1, micro_batch)

    def _receiver(self, action: Action) -> int | None:
        """The rank that a pass's result goes to, its own among them; None where to none."""
        if action.kind == "weight":
            return None
        stage = action.stage + (1 if action.kind == "forward" else -1)
        if not 0 <= stage < self._stages:
            return None
        return self._schedule.rank_of(stage, self._ranks)
