"""Orders of passes against those of torch's own schedules."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.errors import StrategyError
from estimator.timeline.pipelines.simulation import step_items
from estimator.workload.schedules import Action, Schedule

LETTERS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def torch_orders(text: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """What torch's class computes for each rank."""
    from torch.distributed.pipelining import schedules

    if text in ("gpipe", "1f1b"):
        kind: Any = schedules.ScheduleGPipe if text == "gpipe" else schedules.Schedule1F1B
        return [_run(kind, _RecordingStage(rank, ranks), micro_batches) for rank in range(ranks)]
    return [list(_passes(actions)) for actions in _torch_actions(text, ranks, micro_batches)]


def _torch_actions(text: str, ranks: int, micro_batches: int) -> list[list[Any]]:
    """The actions of torch's class for each rank, before what is sent and received is added."""
    from torch.distributed.pipelining import schedules

    names = {
        "zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }
    kind: Any = getattr(schedules, names.get(text, "ScheduleInterleaved1F1B"))
    virtual = Schedule.parse(text).virtual
    made = kind.__new__(kind)
    made._n_microbatches = micro_batches
    made.pp_group_size = ranks
    made._num_stages = made.num_stages = ranks * virtual
    made.n_local_stages = virtual
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    lists = [made._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[action for action in actions if action is not None] for actions in lists]


class _RecordingStage:
    """A stage without neighbours that keeps what it is told to compute."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = rank, ranks, ranks
        self.is_last, self.has_backward, self.actions = False, True, list[Action]()

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action("forward", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.actions.append(Action("backward", self.stage_index, number))

    def __getattr__(self, name: str) -> Any:
        # Whatever is sent or received: nothing.
        return lambda *_, **__: []


def _run(kind: Any, stage: _RecordingStage, micro_batches: int) -> list[Action]:
    made = kind.__new__(kind)
    made._stage, made._num_stages, made._n_microbatches = stage, stage.num_stages, micro_batches
    made.scale_grads, made._has_backward, made._loss_fn = False, True, None
    made._initialize_stage = made._update_losses = lambda *_: None
    made._maybe_compute_loss = made._maybe_get_loss = lambda *_: None
    made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return stage.actions


def _passes(actions: Any) -> Any:
    for action in actions:
        for each in action.sub_actions or (action,):
            letter = each.computation_type.value
            if letter in LETTERS:
                yield Action(LETTERS[letter], each.stage_index, each.microbatch_index)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["gpipe", "1f1b", "interleaved:2", "zb", "zbv", "dualpipev"])
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 2), (2, 4), (2, 7), (4, 8), (4, 12), (8, 16), (3, 9)]
)
def test_the_order_is_that_of_torch(text: str, ranks: int, micro_batches: int) -> None:
    schedule = Schedule.parse(text)
    try:
        orders = schedule.orders(ranks, micro_batches)
    except StrategyError:
        assert text in ("interleaved:2", "zb")
        assert micro_batches % (micro_batches // ranks)
        return
    assert [list(order) for order in orders] == torch_orders(text, ranks, micro_batches)


def test_three_virtual_stages_go_round_as_torch_has_it() -> None:
    orders = Schedule.parse("interleaved:3").orders(4, 8)
    assert [list(order) for order in orders] == torch_orders("interleaved:3", 4, 8)


def test_zb_v_with_few_micro_batches_leaves_out_those_that_lack() -> None:
    orders = Schedule.parse("zbv").orders(4, 3)
    assert [list(order) for order in orders] == torch_orders("zbv", 4, 3)


def test_the_second_rank_of_two_alternates_from_its_first_micro_batch() -> None:
    _, last = Schedule.parse("1f1b").orders(2, 2)
    assert [(action.kind[0], action.micro_batch) for action in last] == [
        ("f", 0),
        ("b", 0),
        ("f", 1),
        ("b", 1),
    ]


def test_a_v_ends_on_the_rank_it_began_on() -> None:
    schedule = Schedule.parse("zbv")
    assert [schedule.rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert schedule.stages_of(1, 3) == (1, 4)


@pytest.mark.parametrize(
    "text",
    [
        "2f2b",
        "interleaved",
        "interleaved:1",
        "zb:2",
        "",
        "interleaved:٣",
        "interleaved:²",
        "interleaved:" + "9" * 5000,
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=r"is no pipeline schedule; write one of gpipe, 1f1b"):
        Schedule.parse(text)


def test_1f1b_warms_up_with_as_many_micro_batches_as_there_are() -> None:
    """As Megatron-LM's does; torch's class asks for as many as ranks."""
    first, *_, last = Schedule.parse("1f1b").orders(4, 2)
    assert [(action.kind[0], action.micro_batch) for action in first] == [
        ("f", 0),
        ("f", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert [action.kind[0] for action in last] == ["f", "b", "f", "b"]


def test_dualpipe_holds_the_model_twice_and_halves_the_micro_batches() -> None:
    schedule = Schedule.parse("dualpipe")
    # Rank r holds stage r of the copy that goes up and stage 3 − r of that which goes down.
    assert [schedule.stages_of(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert (schedule.model_stages(4), schedule.passes_of(8)) == (4, 4)
    for rank, order in enumerate(schedule.orders(4, 8)):
        up, down = schedule.stages_of(rank, 4)
        begun = {
            stage: [a[2] for a in order if a[:2] == ("forward", stage)] for stage in (up, down)
        }
        assert begun == {up: [0, 2, 4, 6], down: [1, 3, 5, 7]}


def test_a_rank_of_dualpipe_begins_as_the_figure_of_its_authors() -> None:
    """DeepSeek-V3's figure 5: 8 ranks, 20 micro-batches; the first rank's forward passes."""
    first, *_, last = Schedule.parse("dualpipe").orders(8, 20)
    begun = [(a.kind, a.stage, a.micro_batch // 2) for a in first[:8]]
    assert begun == [("forward", 0, n) for n in range(7)] + [("forward", 15, 0)]
    # The last rank does the same with the other copy.
    assert [(a.kind, a.micro_batch // 2) for a in last] == [
        (a.kind, a.micro_batch // 2) for a in first
    ]


def test_dualpipe_holds_a_micro_batch_more_than_there_are_ranks() -> None:
    """DeepSeek-V3's report, table 2: activations of PP + 1 micro-batches, whichever the rank."""
    schedule = Schedule.parse("dualpipe")
    for rank in range(8):
        held = most = 0
        for action in schedule.orders(8, 20)[rank]:
            held += {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most == 9
        # The two in the middle begin one more before they first go back.
        first = sum(schedule.held_at_least(rank, 8, 20))
        assert first == (9 if rank in (3, 4) else 8)


def test_ways_of_dualpipe_share_ranks_and_micro_batches_evenly() -> None:
    schedule = Schedule.parse("dualpipe")
    with pytest.raises(StrategyError, match="found 3; choose an even pp or dualpipev"):
        schedule.orders(3, 8)
    with pytest.raises(StrategyError, match="from one end as from the other, found 9"):
        schedule.orders(4, 9)
    with pytest.raises(StrategyError, match="needs at least 8 micro-batches, found 6"):
        schedule.orders(4, 6)


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(StrategyError, match="dualpipev over 4 stages of ranks needs at least 8"):
        Schedule.parse("dualpipev").orders(4, 7)
    with pytest.raises(StrategyError, match="9 micro-batches in 2 rounds over 4 ranks"):
        Schedule.parse("interleaved:2").orders(4, 9)


@pytest.mark.parametrize("text", ["interleaved:2", "zb", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 9), (4, 12)])
def test_what_is_sent_and_received_comes_after_the_passes_that_torch_puts_before(
    text: str, ranks: int, micro_batches: int
) -> None:
    schedule = Schedule.parse(text)
    sent: dict[Any, Any] = {}
    received: dict[Any, Any] = {}
    items = step_items(schedule, ranks, micro_batches)
    for item in items:
        if item.to_rank is None:
            continue
        (sender, *receiver) = [items[n] for n in item.after]
        stage = item.action.stage + (1 if item.action.kind == "forward" else -1)
        way, number = item.action.kind == "forward", item.action.micro_batch
        sent[way, item.action.stage, number] = sender.action
        received[way, stage, number] = receiver[0].action if receiver else None
    assert (sent, received) == _torch_exchanges(schedule, text, ranks, micro_batches)


def _torch_exchanges(schedule: Schedule, text: str, ranks: int, micro_batches: int) -> Any:
    """The last pass before each of what torch sends and receives, by (forward, stage, number)."""
    from torch.distributed.pipelining import schedules

    found: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    sends = (schedules.SEND_F, schedules.SEND_B)
    forward = (schedules.SEND_F, schedules.RECV_F)
    orders = schedules._add_send_recv(
        dict(enumerate(_torch_actions(text, ranks, micro_batches))),
        lambda stage: schedule.rank_of(stage, ranks),
        ranks * schedule.virtual,
    )
    for order in orders.values():
        before = None
        for action in order:
            if passes := list(_passes([action])):
                before = passes[-1]
            else:
                kind = action.computation_type
                key = kind in forward, action.stage_index, action.microbatch_index
                found[kind not in sends][key] = before
    return found
