"""Modules that are divided over ranks before they are traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import estimator as est
from estimator.advise.layouts.search import best_layouts
from estimator.errors import ModelError, StrategyError
from estimator.graph.ir.collectives import collectives_of, is_collective
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan
from estimator.graph.trace.trace import trace_graph
from tests.synthetic import fake_ranks

WIDTH, TOKENS, WORDS = 16, 8, 64
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """An embedding, layers and a head, as language models have them."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).logsumexp(-1).mean()


BATCH = torch.randint(0, WORDS, (4, TOKENS))
LAYERS: dict[str, Callable[[], ParallelStyle]] = {"up": ColwiseParallel, "down": RowwiseParallel}
PLAIN = Plan((("layers.*.up", "column"), ("layers.*.down", "row")), reduces_once=False)


@contextmanager
def ranks(*sizes: int, names: tuple[str, ...] = ("tp",)) -> Iterator[DeviceMesh]:
    """One rank of a mesh whose others do not exist."""
    count = int(torch.tensor(sizes).prod())
    with fake_ranks(count):
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)


def divided(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {f"layers.*.{name}": style() for name, style in LAYERS.items()}
    return parallelize_module(model, mesh, plan)


def traced(degree: int, *, target: str = "cuda") -> OpGraph:
    with ranks(degree) as mesh:
        return trace_graph(divided(Words(), mesh), BATCH, target=target)  # type: ignore[arg-type]


def exchanged(graph: OpGraph, batch: int | None = None) -> list[tuple[str, str, int]]:
    return [(each.op, each.axis, each.size_bytes) for each in collectives_of(graph.at(batch))]


def products(graph: OpGraph) -> Counter[tuple[tuple[int, ...], ...]]:
    return Counter(
        tuple(spec.shape for spec in op.call.inputs)
        for op in graph.ops
        if op.call.target in PRODUCTS and not is_collective(op.call)
    )


@pytest.mark.parametrize("degree", [2, 4])
def test_a_divided_module_agrees_with_the_split_of_the_whole_one(degree: int) -> None:
    found = traced(degree)
    expected = split(trace_graph(Words(), BATCH, target="cuda"), PLAIN, tp=degree)
    # A sum of the stream in each layer and pass: 4 samples of 8 tokens of 16 numbers.
    assert exchanged(found) == [("all_reduce", "tp", 4 * TOKENS * WIDTH * 4)] * 4
    assert exchanged(found) == exchanged(expected)
    assert products(found) == products(expected)
    assert found.parameters == tuple(
        replace(own, gradient=other.gradient, ready_after=other.ready_after)
        for own, other in zip(expected.parameters, found.parameters, strict=True)
    )
    layout = f"tp={degree},dp=*"
    for place in (f"1x{degree}:dgx-a100", "1x8:dgx-a100"):
        ours, theirs = (
            est.estimate(graph, place).step_time_s
            for graph in (found, replace(expected, layout=layout))
        )
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_shapes_of_a_divided_module_follow_the_batch() -> None:
    found = traced(2)
    assert (found.batch, found.other_batch) == (4, 8)
    assert exchanged(found, 12) == [("all_reduce", "tp", 12 * TOKENS * WIDTH * 4)] * 4


def test_divided_tokens_are_gathered_and_scattered_as_by_the_split() -> None:
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    with ranks(2) as mesh:
        found = trace_graph(parallelize_module(Words(), mesh, plan), BATCH, target="cuda")
    styles = Plan(
        (("words", "vocabulary"), *PLAIN.styles, ("head", "gather")),
        sequence=True,
        reduces_once=False,
    )
    expected = split(trace_graph(Words(), BATCH, target="cuda"), styles, tp=2)
    assert Counter(exchanged(found)) == Counter(exchanged(expected))
    assert products(found) == products(expected)
    # What DTensor adds: masks of the words that other ranks have (_ops/_embedding_ops.py).
    more = Counter(op.call.target for op in found.ops if op.module in ("words", ""))
    more -= Counter(op.call.target for op in expected.ops if op.module in ("words", ""))
    assert {target.split(".")[1] for target in more} >= {"lt", "ge", "sub", "index_put_"}


def test_a_ranks_graph_is_answered_where_its_layout_is_asked_for() -> None:
    found = traced(2)
    assert found.layout == "tp=2,dp=*"
    answer = est.estimate(found, "1x8:dgx-a100")
    assert (answer.layout, answer.global_batch) == ("tp=2,dp=*", 4 * 4)
    assert est.estimate(found, "1x8:dgx-a100", layout="tp=2,dp=4").step_time_s == pytest.approx(
        answer.step_time_s
    )
    assert est.estimate(found, "1x8:dgx-a100", global_batch=16).step_time_s == pytest.approx(
        answer.step_time_s
    )
    table = est.estimate_many(found, ["1x2:dgx-a100", "1x8:dgx-a100"])
    assert table.step_time_s[1] == pytest.approx(answer.step_time_s)
    (piece,) = est.estimate_chunks(found, ["1x8:dgx-a100"])
    assert piece.step_time_s[0] == pytest.approx(answer.step_time_s)


@pytest.mark.parametrize("layout", ["tp=4,dp=*", "dp=*", "tp=2,pp=2,dp=*", "tp=2,cp=2,dp=*"])
def test_another_layout_than_a_modules_own_is_refused(layout: str) -> None:
    found = traced(2)
    with pytest.raises(StrategyError, match=r"a rank of 'tp=2,dp=\*', by which its module"):
        est.estimate(found, "1x8:dgx-a100", layout=layout)
    with pytest.raises(StrategyError, match=r"a rank of 'tp=2,dp=\*'"):
        est.estimate_many(found, ["1x8:dgx-a100"], layout=layout)
    with pytest.raises(StrategyError, match="trace the module before it is divided"):
        best_layouts(found, "1x8:dgx-a100", global_batch=32)


def test_a_divided_module_and_torch_are_left_as_they_were() -> None:
    originals = functional.all_reduce, functional.all_gather_single
    with ranks(2) as mesh:
        model = divided(Words(), mesh)
        before = dict(model.named_parameters())
        trace_graph(model, BATCH)
        assert all(own is before[name] for name, own in model.named_parameters())
        assert all(own.grad is None for own in model.parameters())
    assert originals == (functional.all_reduce, functional.all_gather_single)


def test_a_module_divided_along_two_axes_is_refused_with_what_to_do() -> None:
    with ranks(2, 2, names=("dp", "tp")) as mesh:
        model = Words()
        divided(model, mesh["tp"])
        parallelize_module(model, mesh["dp"], {"head": ColwiseParallel()})
        with pytest.raises(ModelError, match="one axis of ranks that share layers"):
            trace_graph(model, BATCH)


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "precision", "strategy"),
    [
        ({}, "fp32", "fsdp"),
        ({"mp_policy": MIXED}, "bf16", "fsdp:param=bf16,reduce=fp32"),
        ({"reshard_after_forward": False}, "fp32", "fsdp:no_reshard"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "fp32", "fsdp:offload"),
    ],
)
def test_a_sharded_module_is_estimated_as_the_whole_one_under_fsdp(
    options: dict[str, Any], precision: str, strategy: str
) -> None:
    with ranks(4, names=("dp",)) as mesh:
        found = trace_graph(sharded(Words(), mesh, **options), BATCH, target="cuda")
    whole = trace_graph(Words(), BATCH, target="cuda", precision=precision)
    assert (found.strategy, found.layout, found.precision) == (strategy, None, precision)
    assert (found.ops, found.parameters) == (whole.ops, whole.parameters)
    for place in ("1x4:dgx-a100", "2x8:dgx-a100"):
        ours, theirs = est.estimate(found, place), est.estimate(whole, place, strategy=strategy)
        assert ours.strategy == theirs.strategy
        assert ours.step_time_s == pytest.approx(theirs.step_time_s, rel=1e-6)
        assert ours.peak_memory_bytes == theirs.peak_memory_bytes
    table = est.estimate_many(found, ["1x4:dgx-a100"])
    assert table.step_time_s[0] == pytest.approx(est.estimate(found, "1x4:dgx-a100").step_time_s)


def test_shards_that_are_replicated_are_as_many_as_the_mesh_has() -> None:
    with ranks(2, 4, names=("dp_replicate", "dp_shard")) as mesh:
        found = trace_graph(sharded(Words(), mesh), BATCH)
    assert found.strategy == "fsdp:shard=4"


def test_a_divided_and_sharded_module_agrees_with_the_split_under_fsdp() -> None:
    with ranks(2, 2, names=("dp", "tp")) as mesh:
        model = sharded(divided(Words(), mesh["tp"]), mesh["dp"])
        before = dict(model.named_parameters())
        found = trace_graph(model, BATCH, target="cuda")
        assert all(own is before[name] for name, own in model.named_parameters())
        # Its hooks are back: a step on real numbers gathers and reduces again.
        model(BATCH).backward()
        assert all(own.grad is not None for own in model.parameters())
    expected = split(trace_graph(Words(), BATCH, target="cuda"), PLAIN, tp=2)
    assert (found.strategy, found.layout) == ("fsdp", "tp=2,dp=*")
    assert exchanged(found) == exchanged(expected)
    assert products(found) == products(expected)
    expected = replace(expected, layout="tp=2,dp=*")
    ours = est.estimate(found, "2x8:dgx-a100").step_time_s
    theirs = est.estimate(expected, "2x8:dgx-a100", strategy="fsdp").step_time_s
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp:shard=2", "ddp:unbucketed"])
def test_another_strategy_than_a_modules_own_is_refused(strategy: str) -> None:
    with ranks(4, names=("dp",)) as mesh:
        found = trace_graph(sharded(Words(), mesh), BATCH, target="cuda")
    with pytest.raises(StrategyError, match="was sharded by 'fsdp' before it was traced"):
        est.estimate(found, "1x4:dgx-a100", strategy=strategy)
    with pytest.raises(StrategyError, match="was sharded by 'fsdp'"):
        est.estimate_many(found, ["1x4:dgx-a100"], strategy=strategy)
    whole_gradients = est.estimate(
        found, "1x4:dgx-a100", strategy="fsdp:no_sync", accumulation_steps=2
    )
    assert whole_gradients.strategy == "fsdp:no_sync"


def test_units_other_than_the_repeated_blocks_are_refused_with_what_to_do() -> None:
    with ranks(4, names=("dp",)) as mesh:
        model = fully_shard(Words(), mesh=mesh)
        with pytest.raises(ModelError, match=r"call fully_shard on each of these and on the model"):
            trace_graph(model, BATCH)


def test_modules_sharded_unlike_each_other_are_refused() -> None:
    with ranks(4, names=("dp",)) as mesh:
        model = Words()
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model.layers[1], mesh=mesh, mp_policy=MIXED)
        fully_shard(model, mesh=mesh)
        with pytest.raises(ModelError, match="sharded unlike each other"):
            trace_graph(model, BATCH)
