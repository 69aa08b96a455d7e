"""Activation checkpoints by block and by operator: what is computed again, what is kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import estimator as est
from estimator.errors import ModelError, TraceError
from estimator.graph.compile.megatron import with_checkpoints
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.step import memory_alone
from tests.conftest import make_small_profile

WIDTH, ROWS, BLOCKS = 64, 512, 4


class Block(nn.Module):
    """Four products, with an activation of its input's size after each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.sigmoid(layer(x))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def traced(checkpoint: str | None, model: nn.Module | None = None) -> OpGraph:
    return est.trace_model(model or Model(), torch.randn(ROWS, WIDTH), checkpoint=checkpoint)


def repeated(graph: OpGraph) -> Counter[str]:
    return Counter(op.call.target for op in graph.ops if op.is_repeated)


@pytest.mark.parametrize(
    ("checkpoint", "products"),
    # Of a block's four products the second and the fourth are not kept.
    [(None, 0), ("full", 4 * BLOCKS), ("selective:2", 4 * BLOCKS // 2), ("selective:op", 8)],
)
def test_products_of_checkpointed_blocks_run_again(checkpoint: Any, products: int) -> None:
    graph = traced(checkpoint)
    assert repeated(graph)["aten.mm.default"] == products
    assert graph.checkpoint == checkpoint


def test_less_is_held_the_more_runs_again() -> None:
    held = {
        form: memory_alone(traced(form).at()).peaks().peak(1)
        for form in (None, "selective:2", "selective:op", "full")
    }
    one = 4 * ROWS * WIDTH
    # Without: sigmoid's result is saved after each of 16 products. In full: the inputs of 4 blocks,
    # and one block's 4 results while it runs again.
    sizes = {form: each.activations_bytes / one for form, each in held.items()}
    assert sizes["full"] < sizes["selective:2"] < sizes[None]
    assert sizes["full"] < sizes["selective:op"]
    assert 16 <= sizes[None] <= 20
    assert 8 <= sizes["full"] <= 11


def test_what_is_kept_is_held_until_its_block_runs_again_though_nothing_reads_it() -> None:
    """Of an odd number of products the last is kept, and the second run stops before it."""

    class Odd(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner[0](x)

    model = Model()
    model.layers = nn.ModuleList(Odd() for _ in range(2))
    graph = traced("selective:op", model)
    structure = GraphStructure.of(graph)
    last = max(i for i, op in enumerate(graph.ops) if op.phase == "forward" and "mm" in op.name)
    number = structure.storage_of[graph.ops[last].outputs[0]]
    assert graph.ops[structure.dies[number]].phase == "backward"


def test_the_model_is_left_as_it_was() -> None:
    model = Model()
    own = model.layers[1].forward = model.layers[1].forward
    with pytest.raises(TraceError):
        est.trace_model(model, torch.randn(ROWS, WIDTH + 1), checkpoint="full")
    assert model.layers[1].__dict__["forward"] is own
    assert "forward" not in model.layers[0].__dict__


@pytest.mark.parametrize("form", ["half", "selective", "selective:0", "selective:-2", ""])
def test_other_forms_are_refused(form: str) -> None:
    with pytest.raises(ModelError, match="write full, selective:op or selective:N"):
        traced(form)


def test_a_model_without_repeated_blocks_says_so() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ModelError, match="no repeated blocks to checkpoint"):
        traced("full", plain)


class Encoder(nn.Module):
    """Attention and dropout in repeated blocks, an embedding before and a head behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Convolutions(nn.Sequential):
    """Blocks whose batch norm writes to its buffers."""

    def __init__(self) -> None:
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(3)
        ]
        super().__init__(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 36, 10))


WORDS, IMAGES = torch.zeros(4, 32, dtype=torch.long), torch.zeros(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "batch", "compiled", "target"),
    [
        (Model, torch.zeros(ROWS, WIDTH), False, "cuda"),
        (Encoder, WORDS, False, "cpu"),
        (Encoder, WORDS, True, "cuda"),
        (Convolutions, IMAGES, False, "cpu"),
    ],
)
def test_checkpoints_that_are_added_to_a_graph_run_again_what_traced_ones_do(
    make: type[nn.Module], batch: Tensor, compiled: bool, target: Any
) -> None:
    plain, full = (
        est.trace_model(make(), batch, checkpoint=form, target=target, compiled=compiled)
        for form in (None, "full")
    )
    added = with_checkpoints(plain)
    assert repeated(added) == repeated(full)
    assert (len(added.ops), added.checkpoint) == (len(full.ops), "full")
    peaks = [memory_alone(graph.at()).peaks().peak(1).total_bytes for graph in (added, full, plain)]
    # A second run under autograd holds some small values for an op longer.
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
    assert peaks[1] < peaks[2]
    machine = {"cpu": make_small_profile(), "cuda": None}[target]
    names = {"cpu": "1x1:local", "cuda": "1x1:h100-sxm"}
    times = [
        est.estimate(graph, names[target], profile=machine).step_time_s for graph in (added, full)
    ]
    # Modules without an operator of their own are not known to be called again.
    assert times[0] == pytest.approx(times[1], rel=0.02)
    assert with_checkpoints(full) is None


def test_views_of_what_a_checkpoint_makes_again_keep_nothing_of_the_first_run() -> None:
    plain = est.trace_model(Encoder(), WORDS)
    added = with_checkpoints(plain)
    structure = GraphStructure.of(added)
    sizes = structure.storage_bytes(added.at())
    last = sum(op.phase == "forward" for op in added.ops)
    kept = (structure.born >= 0) & (structure.born < last) & (structure.dies > last)
    modules = Counter(added.ops[index].module for index in structure.born[kept & (sizes > 1024)])
    # The inputs of three blocks, and what the head and the loss read.
    inside = {path for path in modules if path.startswith("layers.") and "norm2" not in path}
    assert not inside


class Scaled(nn.Module):
    """Elementwise operators that fuse, so that a compiled graph lacks values before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(torch.cos(2 * torch.sin(x)))  # type: ignore[no-any-return]


def held(graph: OpGraph) -> set[tuple[str, frozenset[str]]]:
    """(operator, matmuls that read an activation held until it has run), by name."""
    products = ("aten.addmm.default", "aten.mm.default")
    matmuls = [op for op in graph.ops if op.call.target in products]
    return {
        (op.name, frozenset(each.name for each in matmuls if value in each.inputs))
        for op in graph.ops
        for value in op.holds
    }


def test_a_compiled_graph_holds_the_values_that_the_eager_one_does(tmp_path: Path) -> None:
    eager, compiled = (
        est.trace_model(
            Scaled(),
            torch.randn(ROWS, WIDTH),
            checkpoint="selective:op",
            target="cuda",
            compiled=how,
        )
        for how in (False, True)
    )
    assert held(compiled)
    assert held(compiled) <= held(eager)
    compiled.save(tmp_path / "compiled.graph")
    assert OpGraph.load(tmp_path / "compiled.graph") == compiled
