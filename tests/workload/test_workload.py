"""Strategies: parsing and printing are inverse, and the defaults are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn, optim

from estimator.errors import StrategyError
from estimator.timeline.pipelines.simulation import step_items
from estimator.workload.optimizers import (
    OPTIMIZERS,
    RULES,
    OptimizedTensor,
    check_optimizer,
    master_size,
    state_sizes,
    temporaries_bytes,
)
from estimator.workload.recipe import check_precision
from estimator.workload.schedules import Action, Schedule
from estimator.workload.strategies import (
    DDP,
    SAVING_MEMORY,
    SEARCHED,
    SEARCHED_WITH_LAYOUTS,
    ParameterServers,
    Strategy,
)
from tests.synthetic import fake_ranks

MIB = 1024 * 1024


DDPS = some.builds(
    DDP,
    bucket_cap_bytes=some.integers(1, 1 << 40),
    first_bucket_bytes=some.none() | some.integers(1, 1 << 40),
    gradient_as_bucket_view=some.booleans(),
    bucketed=some.booleans(),
)
SERVERS = some.builds(
    ParameterServers,
    servers=some.integers(1, 1000),
    server_bytes_per_s=some.none() | some.integers(1, 10**12),
    part_bytes=some.none() | some.integers(1 << 16, 10**9),
    **{name: some.booleans() for name in ("asynchronous", "on_workers", "local", "sums_only")},
)


@pytest.mark.parametrize("strategies", [DDPS, SERVERS], ids=["ddp", "servers"])
@given(data=some.data())
def test_parsing_undoes_printing(
    strategies: some.SearchStrategy[Strategy], data: some.DataObject
) -> None:
    strategy = data.draw(strategies)
    assert Strategy.parse(str(strategy)) == strategy


def test_servers_are_somewhere_and_their_link_is_read_as_a_rate() -> None:
    assert Strategy.parse("ps:beside").merged_on == "host"
    assert Strategy.parse("ps:2,beside,sum").merged_on == "server and host"
    assert Strategy.parse("ps:2,beside,sum").updated_on == "device"
    assert Strategy.parse("ps:2").updated_on == "server"
    assert Strategy.parse("fsdp:offload").updated_on == "host"
    assert Strategy.parse("ps:2,link=10Gbit/s").server_bytes_per_s == 1.25e9


def test_dtypes_of_shards_are_read_and_fit_what_the_model_computes_in() -> None:
    recipe = Strategy.parse("fsdp:shard=8,param=bf16,reduce=fp32")
    assert Strategy.parse(str(recipe)) == recipe
    # Shards and reductions of 4 bytes, parameters of 2.
    assert recipe.shard_dtypes("bf16") == (2, 2.0)
    # Without `param` shards are what the model has, and so are reductions.
    assert Strategy.parse("fsdp").shard_dtypes("bf16") == (1, 1.0)
    assert Strategy.parse("fsdp:reduce=bf16").shard_dtypes("bf16-amp") == (1, 0.5)
    assert Strategy.parse("fsdp:param=fp16").shard_dtypes("fp16") == (2, 1.0)
    with pytest.raises(StrategyError, match="--precision bf16"):
        recipe.shard_dtypes("bf16-amp")


def test_the_first_bucket_is_1_mib_by_default_and_the_cap_under_an_explicit_cap() -> None:
    # torch/nn/parallel/distributed.py: an explicit bucket_cap_mb applies to the first bucket too.
    assert DDP().bucket_cap_bytes == 25 * MIB
    assert DDP().first_cap_bytes == MIB
    assert Strategy.parse("ddp:bucket=5MiB").first_cap_bytes == 5 * MIB
    assert Strategy.parse("ddp:bucket=5MiB,first=2MiB").first_cap_bytes == 2 * MIB


@pytest.mark.parametrize(
    "text",
    ["", "fsdp9", "DDP", "ddp:bucket", "ddp:bucket=", "ddp:bucket=-1MiB", "ddp:bucket=0",
     "ddp:first=x", "ddp:views", "ddp:view=1", "ddp:bucket=5MiB;view", "ddp,view",
     "ddp:bucket=1MiB,bucket=2MiB", "ddp:view,view", "ps:2,3", "fsdp:shard=٣",
     "ddp:link=10Gbit/s", "ps:1,link=fast", "ps:1,link=0 GB/s",
     "fsdp:param=int8", "fsdp:reduce=", "ddp:param=bf16",
     "ddp:bucket=" + "9" * 400, "ps:²", "fsdp:shard=²", "ps:1,link=" + "9" * 400 + "GB/s"],
)  # fmt: skip
def test_what_is_no_strategy_is_refused(text: str) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.parse(text)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: Strategy.parse("ps:local"), "at least 1 server"),
        (lambda: Strategy.parse("ps:1,part=1KB"), "parts of 65536"),
        (lambda: Strategy.parse("gossip"), "'gossip' is unknown; write one of ddp, zero1"),
        (Strategy, "a strategy is one of its classes"),
        (lambda: check_precision("int4"), "bf16-amp"),
        (lambda: check_optimizer("lion"), "adamw-8bit, adamw-bf16, lamb, muon"),
        (
            lambda: check_optimizer("AdamW(lr=1e-3, fused=True, fused=False)"),
            "an optimizer's fused stands twice; write it once",
        ),
        *(
            (lambda unknown=unknown: check_optimizer(unknown), "is unknown; choose one of sgd")
            for unknown in (optim.Adagrad([nn.Parameter(torch.zeros(2))]), "Lion", None, ["adam"])
        ),
        (
            lambda: Schedule.parse("dualpipe").orders(3, 8),
            "found 3; choose an even pp or dualpipev",
        ),
        (
            lambda: Schedule.parse("dualpipe").orders(4, 9),
            "from one end as from the other, found 9",
        ),
        (
            lambda: Schedule.parse("dualpipe").orders(4, 6),
            "needs at least 8 micro-batches, found 6",
        ),
        (
            lambda: Schedule.parse("dualpipev").orders(4, 7),
            "dualpipev over 4 stages of ranks needs at least 8",
        ),
        (
            lambda: Schedule.parse("interleaved:2").orders(4, 9),
            "9 micro-batches in 2 rounds over 4 ranks",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_can(
    ask: Callable[[], object], said: str
) -> None:
    with pytest.raises(StrategyError, match=said):
        ask()


def test_strategies_that_are_tried_unasked_follow_from_their_facts() -> None:
    assert SEARCHED == ("ddp", "zero1", "zero2", "fsdp")
    assert SEARCHED_WITH_LAYOUTS == ("ddp", "zero1", "distributed-optimizer", "zero2", "fsdp")
    # Every rank of DDP holds all of the optimizer's state.
    assert SAVING_MEMORY == ("zero1", "zero2", "fsdp")


# 1024 x 512 in fp32, in a block; a vector of 1000; an embedding outside all blocks.
MATRIX = OptimizedTensor((1024, 512), 1024 * 512, 4 * 1024 * 512)
VECTOR = OptimizedTensor((1000,), 1000, 4000)
EMBEDDING = OptimizedTensor((2048, 512), 2048 * 512, 4 * 2048 * 512, in_block=False)


def _of_two(form: Callable[..., optim.Optimizer], **options: Any) -> optim.Optimizer:
    """An optimizer of one parameter of two elements."""
    return form([nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("AdamW", "adamw"),
        (_of_two(optim.Adam), "adam"),
        (_of_two(optim.AdamW), "adamw"),
        (_of_two(optim.Adam, fused=True), "adam-fused"),
        (_of_two(optim.AdamW, fused=True), "adamw-fused"),
        (_of_two(optim.SGD, lr=0.1), "sgd"),
        (_of_two(optim.SGD, lr=0.1, momentum=0.9), "sgd-momentum"),
        # Told not to run foreach, it loops.
        (_of_two(optim.SGD, foreach=False), "sgd-loop"),
        (_of_two(optim.Adam, foreach=False), "adam-loop"),
        (_of_two(optim.AdamW, foreach=False), "adamw-loop"),
        # As torch writes it.
        (optim.AdamW, "adamw"),
        ("torch.optim.AdamW(lr=1e-3, fused=True)", "adamw-fused"),
        ("AdamW(fused=False)", "adamw"),
        ("Adam(foreach = False)", "adam-loop"),
        ("SGD(model.parameters(), 0.1, momentum=0.9)", "sgd-momentum"),
        ("SGD(lr=0.1, momentum=0)", "sgd"),
        # Other packages' by their classes.
        ("FusedLAMB", "lamb"),
        ("AdamW8bit", "adamw-8bit"),
        ("Muon", "muon"),
    ],
)
def test_an_optimizer_is_named_by_its_class_and_its_form(written: Any, name: str) -> None:
    assert check_optimizer(written) == name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_as_many_as_torch_keeps(optimizer: str, dtype: torch.dtype) -> None:
    forms: dict[str, Any] = {
        "sgd": lambda p: optim.SGD(p, lr=0.1),
        "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "adam-fused": lambda p: optim.Adam(p, fused=True),
        "adamw-fused": lambda p: optim.AdamW(p, fused=True),
        "sgd-loop": lambda p: optim.SGD(p, lr=0.1, foreach=False),
        "sgd-momentum-loop": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "adam-loop": lambda p: optim.Adam(p, foreach=False),
        "adamw-loop": lambda p: optim.AdamW(p, foreach=False),
        "muon": optim.Muon,
    }
    if optimizer not in forms:
        pytest.skip(f"torch has no {optimizer}")
    weight = nn.Parameter(torch.randn(64, 32, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    step = forms[optimizer]([weight])
    step.step()
    kept = [state.nbytes for state in step.state[weight].values() if state.dim() == 2]
    assert sorted(kept) == sorted(
        state_sizes(optimizer, OptimizedTensor((64, 32), 2048, weight.nbytes))
    )


@pytest.mark.parametrize(
    ("optimizer", "tensor", "sizes"),
    [
        # A byte an element and a scale of 4 bytes for 256 of the 524,288 elements; under 4096
        # elements both states stay in fp32.
        ("adamw-8bit", MATRIX, (524_288 + 8192,) * 2),
        ("adamw-8bit", VECTOR, (4000, 4000)),
        # Megatron-Core's precision-aware optimizer: 2 + 2 for moments.
        ("adamw-bf16", MATRIX, (2 * 524_288,) * 2),
        # One state for matrices of blocks, AdamW's two for the rest.
        ("muon", MATRIX, (MATRIX.size_bytes,)),
        ("muon", VECTOR, (4000, 4000)),
        ("muon", EMBEDDING, (EMBEDDING.size_bytes,) * 2),
    ],
)
def test_states_of_other_packages_are_as_large_as_they_say(
    optimizer: str, tensor: OptimizedTensor, sizes: tuple[int, ...]
) -> None:
    assert state_sizes(optimizer, tensor) == sizes


def test_a_master_weight_takes_two_bytes_beyond_a_weight_in_bf16_else_four() -> None:
    assert master_size("adamw-bf16", MATRIX) == 2 * 524_288
    assert master_size("adamw-fused", MATRIX) == 4 * 524_288


@pytest.mark.parametrize(
    ("optimizer", "fp32_bytes", "bf16_bytes"),
    [
        # Read parameter, gradient and two moments, write all but the gradient: 7 tensors.
        ("adamw-fused", 28, 14),
        # Foreach: mul 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
        ("adamw", 80, 40),
        # Parameter twice, gradient once; two states of 1 + 4/256 bytes, read and written.
        ("adamw-8bit", 12 + 4.0625, 6 + 4.0625),
        # Weight, remainder, gradient, two moments in bf16 read, all but the gradient written.
        ("adamw-bf16", 18, 18),
        # Three norms, seven tensors in stage one, three in stage two.
        ("lamb", 52, 26),
    ],
)
def test_an_update_moves_what_its_kernels_read_and_write(
    optimizer: str, fp32_bytes: float, bf16_bytes: float
) -> None:
    assert RULES[optimizer].bytes_of(4) == fp32_bytes
    assert RULES[optimizer].bytes_of(2) == bf16_bytes


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ("sgd-loop", lambda own: optim.SGD(own, foreach=False)),
        ("sgd", lambda own: optim.SGD(own, foreach=True)),
        ("sgd-momentum", lambda own: optim.SGD(own, momentum=0.9, foreach=True)),
        ("adam", lambda own: optim.Adam(own, foreach=True)),
        ("adamw-loop", lambda own: optim.AdamW(own, foreach=False)),
        ("adamw", lambda own: optim.AdamW(own, foreach=True)),
        ("adamw-fused", lambda own: optim.AdamW(own, fused=True)),
    ],
)
def test_dtensor_sums_a_partial_gradient_as_often_as_an_update_reads_it(
    optimizer: str, made: Callable[[Any], optim.Optimizer]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.debug import CommDebugMode

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        vector = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        update = made([vector])
        # The first update makes the states.
        for _ in range(2):
            vector.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
            with CommDebugMode() as seen:
                update.step()
    assert seen.get_total_counts() == RULES[optimizer].gradient_reads


def test_temporaries_are_of_all_parameters_or_of_one_at_a_time() -> None:
    both = [VECTOR, MATRIX]
    # Foreach takes every root at once, the fused kernel none.
    assert temporaries_bytes("adamw", both, foreach=True) == (4000 + MATRIX.size_bytes, 0)
    assert temporaries_bytes("adamw-fused", both, foreach=True) == (0, 0)
    # The loop goes from the last to the first: the matrix' root and quotient are the most, then
    # the vector's beside the matrix' root.
    assert temporaries_bytes("adamw", both, foreach=False) == (0, 2 * MATRIX.size_bytes)
    # Muon: the update in fp32, X and the next X in bf16, two squares of 512 x 512 in bf16; the
    # vector's root by AdamW.
    own = 4 * 1024 * 512 + 2 * 2 * 1024 * 512 + 2 * 2 * 512 * 512
    assert temporaries_bytes("muon", both, foreach=True) == (4000, own)


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


@pytest.mark.parametrize(
    ("text", "ranks", "micro_batches"),
    [
        *(
            (text, *asked)
            for text in ("gpipe", "1f1b", "interleaved:2", "zb", "zbv", "dualpipev")
            for asked in ((1, 2), (2, 4), (2, 7), (4, 8), (4, 12), (8, 16), (3, 9))
        ),
        ("interleaved:3", 4, 8),
        # With few micro-batches those that lack are left out.
        ("zbv", 4, 3),
    ],
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


@pytest.mark.parametrize(
    ("ranks", "rank", "order"),
    [
        # The second rank of two alternates from its first micro-batch.
        (2, 1, "f0 b0 f1 b1"),
        # Warming up takes as many micro-batches as there are, as Megatron-LM's does; torch's class
        # asks for as many as ranks.
        (4, 0, "f0 f1 b0 b1"),
        (4, 3, "f0 b0 f1 b1"),
    ],
)
def test_two_micro_batches_of_1f1b_by_hand(ranks: int, rank: int, order: str) -> None:
    found = Schedule.parse("1f1b").orders(ranks, 2)[rank]
    assert " ".join(f"{action.kind[0]}{action.micro_batch}" for action in found) == order


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
