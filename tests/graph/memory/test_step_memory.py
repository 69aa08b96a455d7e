"""Peak memory by the number of shards: by hand, by its symmetries, and beside torch's own FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import estimator as est
from estimator.graph.ir.op_graph import OpGraph, frozen_unit_bytes
from estimator.graph.memory.peak import Envelope, ShardedMemory, by_module, live_tensors, tensors_of
from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.timeline.rank.rules import Bucket
from tests.graph.memory.test_memory import KILO, live_peak_bytes, over_step, two_layers
from tests.synthetic import fake_ranks, in_blocks, perceptron
from tests.timeline.strategies.test_sharding import profile as machine

# The CUDA allocator's.
BLOCK = 512


def memory(graph: OpGraph, text: str, optimizer: str = "sgd", **more: Any) -> ShardedMemory:
    return over_step(replace(graph, optimizer=optimizer), text, **more).peaks()


def replica(graph: OpGraph, optimizer: str = "sgd") -> ShardedMemory:
    return memory(graph, "ddp", optimizer)


def blocks(count: float) -> int:
    return round(count * BLOCK)


def three_layers() -> OpGraph:
    """A rest of 128 blocks of memory and two units of 256 on a GPU; activations of 1 or 2 blocks.

    The backward pass of a layer makes its gradient first, then a transposed copy of its weight.
    """
    return in_blocks(perceptron([128, 128, 256, 128], batch=1, target="cuda"))


def test_fsdp_by_hand() -> None:
    found = memory(three_layers(), "fsdp")
    # Shards of 128 + 256 + 256 = 640 blocks. At the end of the second unit's backward pass there
    # are the rest and the unit (384), the first unit being prefetched (256), the gradient (256),
    # the transposed weight (256), 6 of activations and 1 of input. At the end of the first unit's
    # the reduce-scatter's input (256) has replaced the prefetch, the second unit's gradients are
    # sharded, and there are 4 of activations.
    assert found.total.lines == (
        (blocks(1159), blocks(640)),
        (blocks(1157), blocks(640 + 256)),
    )
    assert found.total_bytes(4) == blocks(1157 + 896 / 4)
    assert found.total_bytes(256) == blocks(1159 + 640 / 256)
    peak = found.peak(4)
    assert peak.parameters_bytes == blocks(128 + 256 + 640 / 4)
    assert peak.gradients_bytes == blocks(256 + 256 / 4)
    # The first unit's buffer is kept until the second one has been copied out of its own; later one
    # unit is prefetched and the gradients of another are copied in.
    assert peak.bucket_bytes == blocks(256 + 256)
    assert (peak.inputs_bytes, peak.optimizer_state_bytes, peak.update_bytes) == (BLOCK, 0, 0)


def test_gradient_shards_of_earlier_micro_batches_are_held_by_hand() -> None:
    found = memory(three_layers(), "fsdp", micro_batches=2)
    # All 640 of gradient shards are there before the second micro-batch.
    assert found.total.lines == ((blocks(1159), blocks(640 + 640)),)


def test_gradients_without_sync_stay_whole_by_hand() -> None:
    found = memory(three_layers(), "fsdp:no_sync", micro_batches=2)
    # 640 of whole gradients, those of the second unit added to them (256), the rest and the unit
    # (384), the first one prefetched (256), 6 of activations and 1 of input.
    assert found.total.lines == ((blocks(640 + 256 + 384 + 256 + 7), blocks(640)),)


def test_a_loop_on_gloo_copies_what_it_reduces() -> None:
    graph = replace(three_layers(), target="cpu")
    # Beside what CUDA holds, an all-gather of 256 blocks has a copy of it.
    more = memory(graph, "fsdp").buckets.at(8) - memory(three_layers(), "fsdp").buckets.at(8)
    assert more == blocks(256)


def test_zero2_reduces_bucket_by_bucket_by_hand() -> None:
    graph = three_layers()
    ready = [parameter.ready_after for parameter in graph.parameters]
    buckets = [
        Bucket(size_bytes=blocks(size), tensors=1, ready_after=after)
        for after, size in ((ready[1] or 0, 512), (ready[2] or 0, 128))
    ]
    found = memory(graph, "zero2", buckets=buckets)
    # Two whole gradients and their bucket (512 + 512) when the first is ready, parameters (640), 2
    # of activations and 1 of input; nothing is sharded yet.
    through, upstream_product = 2, 1
    assert found.total.lines[0] == (blocks(512 + 512 + 640 + through + upstream_product + 1), 0)
    # Before the update all gradients are shards.
    assert found.gradients.at(10**9) == blocks(512)


def test_zero1_shares_whole_tensors() -> None:
    graph = three_layers()
    ddp = replica(graph)
    found = memory(graph, "zero1", optimizer="adamw")
    # Of 640 blocks in tensors of 128, 256 and 256 two ranks have 320 on average, three have 256.
    assert found.optimizer_state.at(2) == blocks(2 * 320)
    assert found.optimizer_state.at(3) == found.optimizer_state.at(64) == blocks(2 * 256)
    assert found.update.at(64) == blocks(256)
    # In the update: parameters, gradients and buckets, the input, the rank's state and its roots.
    assert found.total_bytes(64) == blocks(3 * 640 + 1 + 3 * 256)
    assert ddp.total_bytes(1) < found.total_bytes(64)
    # DDP shards nothing.
    found = memory(graph, "ddp", optimizer="adamw")
    whole = found.peak(1)
    assert found.peak(8) == whole
    assert found.total_bytes(np.array([2, 64])).tolist() == [whole.total_bytes] * 2
    # A worker of parameter servers holds no optimizer.
    assert memory(graph, "ps:1", optimizer="adamw").peak(8) == replica(graph).peak(1)


@pytest.mark.parametrize("text", ["zero1:master", "distributed-optimizer:master"])
def test_master_weights_and_gradients_cast_for_the_update_are_divided(text: str) -> None:
    graph = replace(three_layers(), precision="bf16")
    found = memory(graph, text).peak(2)
    # Of 640 blocks in half, master weights and fp32 gradients are 1280 each. In the update there
    # are parameters, gradients (DDP's also in buckets) and the input whole, and half of both.
    whole = 640 * (3 if text.startswith("zero1") else 2) + 1
    assert found.optimizer_state_bytes == found.update_bytes == blocks(1280 / 2)
    assert found.total_bytes == blocks(whole + 1280)


def test_the_temporaries_of_an_update_are_those_of_the_shard() -> None:
    found = memory(three_layers(), "fsdp", optimizer="adamw")
    # Square roots of the second moment of every shard at once.
    assert found.peak(64).update_bytes == blocks(640 / 64)


def test_a_larger_batch_has_more_activations_where_a_whole_update_would_need_the_most() -> None:
    graph = in_blocks(perceptron([1000] * 6, batch=8))
    known = machine()
    peaks = [
        est.estimate(
            graph, "1x4:m", profile=known, strategy="fsdp", batch_per_gpu=batch
        ).peak_memory_bytes
        for batch in (8, 16)
    ]
    # What a layer keeps for its gradient, beside the inputs that are 8 samples more.
    assert peaks[1] - peaks[0] > 2 * 8 * 1000 * 4


def test_frozen_parameters_are_gathered_with_the_unit_that_reads_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False))
    model[0].weight.requires_grad_(False)
    graph = trace_graph(model, torch.randn(4, 8))
    assert frozen_unit_bytes(graph) == {"0": 256, "1": 0, "": 0}
    # Unit 1 is trained; both are gathered for the forward pass, one after the other.
    gathered = memory(graph, "fsdp").parameters.lines
    assert gathered == ((8 * 16 * 4, 8 * 8 * 4 + 8 * 16 * 4),)


lines = some.lists(some.tuples(some.integers(0, 50), some.integers(0, 200)), min_size=1, max_size=9)


@given(lines, some.lists(some.integers(1, 300), min_size=1, max_size=9))
def test_an_envelope_is_the_largest_of_its_lines(
    pairs: list[tuple[int, int]], shards: list[int]
) -> None:
    found = Envelope.through(pairs)
    expected = [max(fixed + -(-sharded // n) for fixed, sharded in pairs) for n in shards]
    assert [found.at(n) for n in shards] == expected
    assert found.at(np.array(shards)).tolist() == expected


widths = some.lists(some.sampled_from([32, 96, 256, 1000]), min_size=3, max_size=6)
graphs = some.builds(
    lambda widths, target: replace(in_blocks(perceptron(widths, batch=8)), target=target),
    widths,
    some.sampled_from(["cpu", "cuda"]),
)
kinds = some.sampled_from(["fsdp", "zero1", "zero2"])
optimizers = some.sampled_from(["sgd", "sgd-momentum", "adamw"])
passes = some.sampled_from([(1, True), (2, True), (2, False), (3, False)])


def found_memory(
    graph: OpGraph, batch: int, kind: str, optimizer: str, steps: tuple[int, bool]
) -> ShardedMemory:
    text = {"zero2": "zero2:unbucketed", "fsdp": "fsdp" if steps[1] else "fsdp:no_sync"}
    return memory(graph, text.get(kind, kind), optimizer, batch=batch, micro_batches=steps[0])


@settings(deadline=None)
@given(graphs, kinds, optimizers, passes)
def test_the_laws_of_sharded_memory(
    graph: OpGraph, kind: str, optimizer: str, steps: tuple[int, bool]
) -> None:
    small, large = (found_memory(graph, batch, kind, optimizer, steps) for batch in (8, 24))
    counts = [1, 2, 3, 4, 7, 8, 64, 1000, 4096]
    totals = small.total_bytes(np.array(counts))
    assert totals.tolist() == [small.total_bytes(n) for n in counts]
    assert (np.diff(totals) <= 0).all()
    assert (totals <= large.total_bytes(np.array(counts))).all()
    for n, total in zip(counts, totals.tolist(), strict=True):
        peak = small.peak(n)
        assert peak.total_bytes == total
        assert total >= max(
            peak.parameters_bytes,
            peak.gradients_bytes,
            peak.optimizer_state_bytes,
            peak.bucket_bytes,
            peak.inputs_bytes + peak.activations_bytes,
            peak.update_bytes,
        )


@settings(deadline=None)
@given(graphs, optimizers)
def test_with_many_shards_only_activations_and_units_at_work_are_left(
    graph: OpGraph, optimizer: str
) -> None:
    many = 1 << 50
    peak = found_memory(graph, 8, "fsdp", optimizer, (1, True)).peak(many)
    # At most the whole rest, its gradients and its buffers, and of units: one at work, one being
    # gathered or reduced and gloo's copy of it, one's gradients.
    sizes = [int(size) + BLOCK for size in ShardedPasses.of(graph).gathered_bytes]
    bound = peak.activations_bytes + peak.inputs_bytes + 3 * sizes[0] + 5 * max(sizes) + 64
    assert peak.activations_bytes <= peak.total_bytes <= bound
    # Neither parameters nor the optimizer are felt.
    plain = found_memory(graph, 8, "fsdp", "sgd", (1, True)).peak(many)
    assert abs(peak.total_bytes - plain.total_bytes) <= 1


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, head: int, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 256, bias=False)
        self.layers = nn.ModuleList(Block(256, checkpointed) for _ in range(4))
        self.head = nn.Linear(256, head, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of ranks whose other members are not there: memory is as if they were."""
    with fake_ranks(request.param):
        yield request.param


@pytest.mark.parametrize("ranks", [2, 16], indirect=True)
@pytest.mark.parametrize(
    ("head", "batch", "checkpointed", "micro_batches", "text"),
    [
        (2048, 16, False, 1, "fsdp"),
        (128, 16, False, 1, "fsdp"),
        (128, 512, False, 1, "fsdp"),
        (128, 512, True, 1, "fsdp"),
        (2048, 16, False, 2, "fsdp"),
        (2048, 16, False, 2, "fsdp:no_sync"),
        (2048, 16, False, 3, "fsdp:no_sync"),
        # Blocks stay whole.
        (128, 16, False, 1, "fsdp:no_reshard"),
        (128, 16, False, 2, "fsdp:no_reshard"),
    ],
)
def test_the_peak_of_a_real_sharded_step_is_what_the_allocator_counts(
    ranks: int, head: int, batch: int, checkpointed: bool, micro_batches: int, text: str
) -> None:
    model = Model(head, checkpointed)
    x = torch.randn(batch, 64)
    # What collectives of CUDA hold; gloo's copies are made in threads that no profiler sees.
    graph = trace_graph(model, x, target="cuda", optimizer="sgd-momentum")
    found = memory(graph, text, "sgd-momentum", micro_batches=micro_batches).peak(ranks)
    how = {"sync": "no_sync" not in text, "reshard_after_forward": "no_reshard" not in text}
    measured = sharded_step_bytes(model, x, micro_batches, **how)
    standing = x.nbytes + 2 * graph.parameter_bytes // ranks
    assert found.total_bytes == pytest.approx(standing + measured, rel=0.002)


def sharded_step_bytes(
    model: Model, x: torch.Tensor, micro_batches: int, *, sync: bool = True, **how: Any
) -> int:
    """The most that a second step of a model under FSDP2 allocates."""
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, mp_policy=how.get("mp_policy", MixedPrecisionPolicy()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        for turn in range(micro_batches):
            model.set_requires_gradient_sync(sync or turn == micro_batches - 1)  # type: ignore[operator]
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return live_peak_bytes(step, model)


@pytest.mark.parametrize("ranks", [2, 16], indirect=True)
@pytest.mark.parametrize(
    ("reduce", "micro_batches", "sync", "rel"),
    [
        (None, 1, True, 0.005),
        ("fp32", 1, True, 0.005),
        ("fp32", 2, True, 0.005),
        (None, 3, False, 0.005),
        # 1.0 MB more is held than is counted, which is not explained.
        ("fp32", 2, False, 0.06),
    ],
)
def test_the_peak_of_a_real_step_whose_shards_are_of_another_dtype(
    ranks: int,
    reduce: str | None,
    micro_batches: int,
    sync: bool,
    rel: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What oneDNN holds beside a matmul in bf16 is each CPU's own.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    model, x = Model(2048, False), torch.randn(16, 64)
    graph = trace_graph(model, x, target="cuda", optimizer="sgd-momentum", precision="bf16")
    text = "fsdp:param=bf16" + (f",reduce={reduce}" if reduce else "")
    text += "" if sync else ",no_sync"
    found = memory(graph, text, "sgd-momentum", micro_batches=micro_batches)
    model = Model(2048, False)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if reduce else None
    )
    allocated = sharded_step_bytes(model, x, micro_batches, sync=sync, mp_policy=policy)
    # Shards and momentum in fp32, the graph's parameters in bf16.
    standing = x.nbytes + 2 * 2 * graph.parameter_bytes // ranks
    assert found.total_bytes(ranks) == pytest.approx(standing + allocated, rel=rel)


def convolutional() -> OpGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    graph = trace_graph(model, torch.randn(4, 3, 8, 8), optimizer="adam")
    return replace(graph, target="cuda")


def test_levels_by_hand() -> None:
    graph = two_layers()
    curve = memory_alone(graph.at()).curve()
    kilobytes = {kind: (each / KILO).tolist() for kind, each in curve.levels.items()}
    # Parameters of 1 + 2 and an input of 4 throughout.
    assert kilobytes["parameters"] == [3.0] * (len(graph.ops) + 1)
    assert kilobytes["buffers and inputs"] == [4.0] * (len(graph.ops) + 1)
    # h (8) is made by op 0 and last read by op 4, y (16) by op 2 and 3: forward for backward. The
    # gradients of y (16) and of h (8) are not; those of the parameters (2 and 1) stay.
    assert kilobytes["activations"] == [8, 8, 24, 24, 8, 0, 0, 0]
    assert kilobytes["temporaries"] == [0, 0, 0, 16, 16, 24, 8, 0]
    assert kilobytes["gradients"] == [0, 0, 0, 0, 2, 2, 3, 3]
    assert curve.peak_at == 3
    assert curve.peak_bytes == (3 + 4 + 24 + 16) * KILO


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("text", ["ddp", "ddp:view", "ddp:reduce=fp16"])
def test_the_maximum_is_the_peak_of_a_replica(merging: bool, text: str) -> None:
    found = over_step(convolutional(), text, batch=16, merging=merging)
    assert found.curve().peak_bytes == found.peaks().total_bytes(1)


@pytest.mark.parametrize("text", ["zero1", "zero1:master", "zero2:bucket=4096", "fsdp", "ps:1"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shards", [2, 8])
def test_the_maximum_is_the_peak_of_a_shard(text: str, micro_batches: int, shards: int) -> None:
    graph = replace(three_layers(), precision="bf16", optimizer="adam")
    found = over_step(graph, text, micro_batches=micro_batches)
    curve = found.curve(shards)
    # Kinds are rounded up to whole bytes each, the peak once.
    assert abs(curve.peak_bytes - found.peaks().total_bytes(shards)) <= 4
    assert all((levels >= 0).all() for levels in curve.levels.values())


@pytest.mark.parametrize("text", ["fsdp:param=bf16", "fsdp:offload", "fsdp:param=bf16,offload"])
def test_the_maximum_is_the_peak_of_a_rank_alone_whose_shards_are_kept_apart(text: str) -> None:
    graph = replace(three_layers(), precision="bf16", optimizer="adam")
    found = over_step(graph, text, merging=False)
    assert abs(found.curve().peak_bytes - found.peaks().total_bytes(1)) <= 4


def test_tensors_alive_at_an_op_add_up_to_its_levels() -> None:
    graph = convolutional()
    bound = graph.at(64)
    curve = memory_alone(bound).curve()
    for place in range(len(graph.ops) + 1):
        found = live_tensors(tensors_of(bound), place)
        for kind in ("parameters", "gradients", "activations"):
            held = sum(tensor.size_bytes for tensor in found if tensor.kind == kind)
            assert held == curve.at(place)[kind], (place, kind)
    # Modules are listed by what they hold.
    found = by_module(live_tensors(tensors_of(graph.at(64)), 1), depth=1)
    # The convolution's output, 64 x 8 x 6 x 6 floats, beside its 3 x 3 x 3 x 8 weights and 8
    # biases, each in blocks of 512 bytes.
    assert found["0"] == 64 * 8 * 36 * 4 + 1024 + 512
    assert sum(found.values()) == sum(
        tensor.size_bytes for tensor in live_tensors(tensors_of(graph.at(64)), 1)
    )
