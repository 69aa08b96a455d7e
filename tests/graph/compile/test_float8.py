"""Float8 linear layers: which products change, what is cast before them, and how long they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import estimator as est
from estimator.errors import ModelError
from estimator.graph.compile.float8 import with_float8
from estimator.graph.ir.op_graph import OpGraph
from estimator.kernels.datasheet_model import chip_of
from estimator.machines.catalogue import load_profile

WIDTH, ROWS = 1024, 4096


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def traced(float8: str | None, *, width: int = WIDTH, **options: Any) -> OpGraph:
    asked: dict[str, Any] = {"precision": "bf16", "target": "cuda", "compiled": "blocks", **options}
    with torch.device("meta"):
        model = Model(width)
    return est.trace_model(model, torch.randn(ROWS, width), float8=float8, **asked)


def counted(graph: OpGraph) -> Counter[str]:
    return Counter(op.call.target.split(".")[1] for op in graph.ops)


def test_the_three_products_of_each_layer_in_a_block_change_and_the_head_does_not() -> None:
    plain, changed = counted(traced(None)), counted(traced("tensorwise"))
    # Four layers forward, each with two gradients but for the input's of the first one, which
    # nothing asks for; the head has its own forward product and two gradients.
    assert plain["mm"] == 4 + 4 + 3 + 3
    assert changed["_scaled_mm"] == 11
    assert changed["mm"] == 3


def test_a_tensorwise_factor_is_read_for_its_largest_and_then_cast() -> None:
    plain, changed = counted(traced(None)), counted(traced("tensorwise"))
    # Forward four inputs and four weights; backward the gradient of each layer, by rows and turned,
    # by columns, but for the first one's, whose input needs none; the inputs, three weights again.
    assert changed["_to_copy"] - plain["_to_copy"] == 8 + (4 + 3) + 4 + 3
    # What is the largest of a gradient is found once for both.
    assert changed["amax"] - plain["amax"] == 8 + 4 + 4 + 3


def test_layers_of_one_input_cast_it_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((part(x) for part in self.parts), torch.zeros_like(x))

    with torch.device("meta"):
        model = nn.Sequential(Heads(), Heads())
    options: dict[str, Any] = {"precision": "bf16", "target": "cuda", "compiled": "blocks"}
    # Three dimensions: each layer flattens its input by a view of its own.
    graph = est.trace_model(model, torch.randn(4, ROWS, WIDTH), float8="tensorwise", **options)
    casts = [op for op in graph.ops if op.phase == "forward" and "_to_copy" in op.call.target]
    assert len(casts) == 2 * (1 + 3)


def test_rows_that_lie_together_are_scaled_in_one_pass() -> None:
    rowwise = traced("rowwise")
    forward = [op for op in rowwise.ops if op.phase == "forward"]
    # Inputs are scaled by row and weights by what is a row of theirs: no pass of its own.
    assert not any("amax" in op.call.target for op in forward)
    assert any("amax" in op.call.target for op in rowwise.ops if op.phase == "backward")


def test_backward_products_of_scaled_rows_are_scaled_in_a_pass_of_their_own() -> None:
    plain, rowwise = traced(None), traced("rowwise")
    more = counted(rowwise)["mul"] - counted(plain)["mul"]
    # Four gradients of weights, three of inputs.
    assert more == 7
    assert counted(traced("tensorwise"))["mul"] == counted(plain)["mul"]
    for number, op in enumerate(rowwise.ops):
        if "_scaled_mm" not in op.call.target or op.phase == "forward":
            continue
        after = rowwise.ops[number + 1]
        assert after.inputs == op.outputs
        assert after.call.outputs == op.call.outputs


def test_products_keep_their_sizes_and_gradients_their_places() -> None:
    plain, changed = traced(None), traced("rowwise")
    assert [p.name for p in plain.parameters] == [p.name for p in changed.parameters]
    for parameter in changed.parameters:
        assert parameter.ready_after is not None
        assert parameter.gradient is not None
        made = changed.ops[parameter.ready_after].outputs
        gradient = changed.values[parameter.gradient]
        assert (parameter.gradient if gradient.base is None else gradient.base) in made
    scaled = next(op for op in changed.ops if "_scaled_mm" in op.call.target)
    assert [spec.dtype for spec in scaled.call.arguments] == ["float8_e4m3fn"] * 2
    assert changed.at(2 * ROWS).calls != changed.at(ROWS).calls


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_pays_in_large_products_and_costs_more_in_small_ones(recipe: str) -> None:
    # torchao's README: 0.8 times as fast at 1024 x 2048 x 1024, 1.39 at 4096 x 8192 x 16384.
    def speedup(width: int, rows: int) -> float:
        plain, changed = (
            est.estimate(traced(each, width=width), "1x1:h100-sxm", batch_per_gpu=rows)
            for each in (None, recipe)
        )
        forward_and_backward = [
            each.breakdown.forward_s + each.breakdown.backward_s for each in (plain, changed)
        ]
        return forward_and_backward[0] / forward_and_backward[1]

    assert speedup(1024, 1024) < 1.0
    assert 1.2 < speedup(8192, 4096) < 1.7


def test_a_narrower_product_takes_less_energy() -> None:
    # 700 W over 989 and 1979 TFLOP/s: as much energy for each flop's byte of factors.
    device = load_profile("h100-sxm").devices[0]
    half, eighth = (chip_of(device, name) for name in ("bfloat16", "float8_e4m3fn"))
    assert eighth.headroom == pytest.approx(half.headroom, rel=1e-3)
    assert eighth.flops_per_s == pytest.approx(2 * half.flops_per_s, rel=1e-3)


@pytest.mark.parametrize(
    "options", [{"compiled": None}, {"precision": "fp32"}, {"target": "cpu", "compiled": True}]
)
def test_layers_that_cannot_be_float8_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="write --precision bf16 with --compile"):
        traced("rowwise", **options)


def test_unknown_recipes_and_models_without_such_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="write tensorwise or rowwise"):
        traced("blockwise")
    graph = traced(None)
    apart = tuple(replace(op, module="") for op in graph.ops)
    with pytest.raises(ModelError, match="no linear layers in repeated blocks"):
        with_float8(replace(graph, ops=apart), "rowwise")


def test_a_saved_graph_knows_that_it_is_float8(tmp_path: Path) -> None:
    traced("rowwise").save(tmp_path / "graph")
    again = OpGraph.load(tmp_path / "graph")
    assert again.mode == "bf16, compiled-blocks, float8 rowwise"
