"""What an estimate says beside its step: the interval, and whether the model fits."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from estimator.api import estimate
from estimator.errors import WorkloadError
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import FITS, Estimate, fits_code, interval_ratio
from estimator.estimates.request import EstimateRequest
from estimator.timeline import assumptions
from estimator.timeline.collectives import costs
from estimator.timeline.strategies.ddp import BucketedNetwork
from tests.synthetic import Machine, in_blocks, perceptron


def test_an_interval_of_80_percent_is_1_28_standard_deviations_of_the_logarithm() -> None:
    # A tenth of a normal distribution lies above 1.2816 standard deviations: e^(1.2816 · 0.2).
    assert interval_ratio(0.2) == pytest.approx(1.2922, rel=1e-4)
    assert interval_ratio(0.0) == 1.0


@pytest.mark.parametrize(
    ("used_ratio", "knows_all", "fits"),
    [
        # A tenth must be left to be sure, and a twentieth too much is forgiven.
        (0.90, True, "yes"),
        (0.91, True, "uncertain"),
        (1.05, True, "uncertain"),
        (1.06, True, "no"),
        (0.10, False, "uncertain"),
        (1.06, False, "no"),
    ],
)
def test_a_model_fits_surely_perhaps_or_not(used_ratio: float, knows_all: bool, fits: str) -> None:
    assert FITS[int(fits_code(np.float64(used_ratio), knows_all))] == fits


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "ps:1"])
def test_an_estimate_from_another_process_is_equal(strategy: str) -> None:
    graph = replace(perceptron([64] * 4, batch=8), target="cuda")
    found = estimate(graph, "2x2:dgx-a100", strategy=strategy)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert hash(again) == hash(found)
    assert again != estimate(graph, "1x1:dgx-a100")


PROFILE = Machine(devices=4).profile()


def test_a_pickled_graph_is_small_and_equal_and_has_the_same_hash() -> None:
    graph = perceptron([64] * 300, batch=8)
    pickled = pickle.dumps(graph)
    again = pickle.loads(pickled)
    assert again == graph
    assert hash(again) == hash(graph)
    assert {graph: "known"}[again] == "known"
    # The operators of so many equal layers are alike: a hundred bytes are left of each.
    assert len(pickled) < 100 * len(graph.ops)


@pytest.mark.parametrize("loader", [None, "prep=80ms,workers=2"])
def test_an_estimate_is_pickled_without_its_plan_and_says_the_same(loader: str | None) -> None:
    graph = perceptron([64] * 300, batch=8)
    answer = estimate(graph, "1x2:m", profile=PROFILE, loader=loader)
    assert bool(answer.input_remedy) == (loader is not None)
    pickled = pickle.dumps(answer)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert again.to_dict() == answer.to_dict()
    assert repr(again) == repr(answer)
    assert hash(again) == hash(answer)
    assert pickle.loads(pickle.dumps(again)).to_dict() == answer.to_dict()
    with pytest.raises(WorkloadError, match="pickled has no timeline"):
        _ = again.timeline


def test_an_estimate_is_pickled_small_where_python_replaces_getstate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What CPython before 3.11.4 does with every frozen dataclass that has slots.
    replacement = dataclasses._dataclass_getstate  # type: ignore[attr-defined]
    monkeypatch.setattr(Estimate, "__getstate__", replacement)
    answer = estimate(perceptron([64] * 300, batch=8), "1x2:m", profile=PROFILE)
    pickled = pickle.dumps(answer)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled).to_dict() == answer.to_dict()


def test_a_warm_answer_and_its_reasons_look_at_no_collective_or_operator_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def counted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            asked.append(name)
            return of(*words)

        return call

    for of, name in (
        (costs, "lines_of"),
        (assumptions, "_class_assumptions"),
        (BucketedNetwork, "communication"),
    ):
        monkeypatch.setattr(of, name, counted(name, getattr(of, name)))
    graph = replace(perceptron([64] * 4, batch=8), target="cuda")
    for _ in ("cold", "warm"):
        asked.clear()
        DEFAULT.estimate(EstimateRequest.of(graph, "2x2:dgx-a100")).to_dict()
    # What reduces gradients is kept for the kinds of ranks and the group's shape.
    assert not asked


def test_what_an_estimate_says_of_a_pipeline_is_plain_json() -> None:
    graph = replace(in_blocks(perceptron([64] * 8, batch=8)), target="cuda")
    answer = estimate(graph, "1x4:dgx-a100", layout="pp=2,dp=*", accumulation_steps=4)
    said = answer.to_dict()
    assert json.loads(json.dumps(said))["layout"] == answer.layout
    assert pickle.loads(pickle.dumps(answer)).to_dict() == said
