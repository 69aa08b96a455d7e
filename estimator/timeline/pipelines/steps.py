"""Play one step of a pipeline: when each rank ends its last pass, and how long it waited.

Every rank computes its passes in the order of the schedule; what a stage sends travels on a lane of
its own from rank to rank, in the order in which it is sent, and the pass that needs it waits for
it. As in torch.distributed.pipelining nothing is sent before it is received: GPipe and 1F1B receive
once they have nothing else to do before, the other schedules after the passes that a rank has come
to when all take one at a time. DualPipe's and DualPipeV's pairs of passes send what they give after
both.
1F1B (Megatron-LM's too) waits for what it sends as well: between a forward and a backward pass for
the one just sent, within a run of either for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from estimator.timeline.spans import Label
from estimator.timeline.tasks import NO_LABEL, Task, TaskList
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
    *,
    labelled: bool = False,
) -> tuple[TaskList, list[int]]:
    """All passes and transfers of a step, and the number of each rank's last pass.

    `stages` are `ranks * schedule.virtual`, in the order of the model, of DualPipe one copy after
    the other. Raises StrategyError where the schedule cannot run that many micro-batches.
    """
    schedule.check(ranks, micro_batches)
    tasks, last = TaskList(), [0] * ranks
    count = schedule.model_stages(ranks)
    seconds = [stage.of() for stage in stages]
    computing = [f"rank {rank}" for rank in range(ranks)]
    for number, item in enumerate(step_items(schedule, ranks, micro_batches)):
        (kind, stage, micro_batch), rank, to_rank, after = item
        cost_s = seconds[stage][cost_of(schedule, item)]
        label = NO_LABEL
        if labelled:
            label = Label(f"{kind} of stage {stage % count}, micro-batch {micro_batch}", phase=kind)
        if to_rank is None:
            last[rank] = number
            task = Task(computing[rank], cost_s, after, label=label)
        else:
            task = Task(f"from rank {rank} to {to_rank}", cost_s, after, label=label)
        tasks.tasks.append(task)
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
        if not passes or any(each is not None and each not in self._left for each in needed):
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
