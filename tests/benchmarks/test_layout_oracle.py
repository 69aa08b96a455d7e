"""Split graphs do what modules do that torch parallelises: on one rank of a fake group."""

from __future__ import annotations

import pytest
from layout_models import MODELS
from layout_oracle import compared

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
