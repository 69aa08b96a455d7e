"""Split graphs do what modules do that torch parallelises: on one rank of a fake group."""

from __future__ import annotations

import pytest
from layout_models import MODELS
from layout_oracle import EXPERT_CASES, compared, compared_experts

from estimator.graph.trace.trace import trace_graph

CASES = {case.name: case for case in MODELS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "degree", "sequence"),
    [
        ("decoder", 2, False),
        ("decoder", 4, True),
        ("decoder, layer norms", 2, True),
        ("decoder, biases", 8, True),
        ("llama", 4, False),
        ("gemma2", 2, False),
        ("phi", 8, False),
        ("bert", 2, False),
        ("vit", 4, False),
        ("opt", 2, False),
    ],
)
def test_a_split_graph_sends_and_multiplies_what_torch_does(
    name: str, degree: int, sequence: bool
) -> None:
    found = compared(CASES[name], degree, sequence=sequence)
    assert found.difference == ""
    assert found.collectives > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ep", "tp", "form", "collectives"),
    [
        # Of each layer: there and back, in both passes.
        ("mixtral", 4, 1, "all-to-all", 2 * 4),
        # And sums of attention in both passes (3 columns take the stream), gathered tokens, their
        # gradients and those of routes.
        ("qwen3_moe", 4, 2, "all-to-all", 2 * (4 + 1 + 3 + 3)),
        # Sums of experts, of their inputs' gradients and of routes' instead.
        ("qwen2_moe", 2, 2, "all-reduce", 2 * (3 + 1 + 3)),
    ],
)
def test_divided_experts_send_and_multiply_what_transformers_do(
    name: str, ep: int, tp: int, form: str, collectives: int
) -> None:
    pytest.importorskip("transformers")
    case = next(each for each in EXPERT_CASES if each.name == name)
    found = compared_experts(case, trace_graph(*case.make()), ep, tp, form)
    assert found.difference == ""
    assert found.collectives == collectives
