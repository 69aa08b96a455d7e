"""A recipe as one value says what the keywords of `trace_model` say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import estimator as est

SAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "bf16-amp"}, {"precision": "bf16-amp"}),
    ({"optimizer": "sgd", "clip": 1.0}, {"optimizer": "sgd", "clip_grad_norm": True}),
    (
        {"precision": "fp16-amp", "grad_scaler": True},
        {"precision": "fp16-amp", "grad_scaler": True},
    ),
    ({"checkpointing": "full"}, {"checkpoint": "full"}),
    ({"compile": True}, {"compiled": True}),
    (
        {"precision": "bf16", "compile": "blocks", "float8": "rowwise"},
        {"precision": "bf16", "compiled": "blocks", "float8": "rowwise"},
    ),
    (
        {"precision": "bf16", "framework": "megatron", "fp8": "current"},
        {"precision": "bf16", "recipe": "megatron:fp8=current"},
    ),
]


def traced(**options: Any) -> est.OpGraph:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
    return est.trace_model(
        nn.Sequential(*blocks), torch.randn(16, 32), target="cuda", name="m", **options
    )


@pytest.mark.parametrize(("recipe", "keywords"), SAID, ids=str)
def test_a_recipe_traces_what_its_keywords_do(
    recipe: dict[str, Any], keywords: dict[str, Any]
) -> None:
    assert traced(recipe=est.Recipe(**recipe)) == traced(**keywords)


def test_what_a_recipe_leaves_open_stands_beside_it_and_what_it_says_does_not() -> None:
    recipe = est.Recipe(precision="bf16-amp")
    assert traced(recipe=recipe, optimizer="sgd").optimizer == "sgd"
    assert traced(recipe=recipe, precision="bf16-amp").precision == "bf16-amp"
    with pytest.raises(est.EstimatorError, match="the recipe says precision 'bf16-amp'"):
        traced(recipe=recipe, precision="fp16-amp")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "fp7"}, "precision 'fp7' is unknown"),
        ({"compile": "fast"}, "compile 'fast' is unknown; choose one of cuda-graphs, blocks"),
        ({"float8": "all"}, "float8 'all' is unknown"),
        ({"fp8": "current"}, "fp8 is a switch of a framework"),
    ],
)
def test_a_wrong_recipe_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(est.EstimatorError, match=says):
        est.Recipe(**wrong)
