"""Split graphs beside what torch and transformers divide, steps of layouts, the choice of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import layout_accuracy
import pytest
from best_layout import chosen_of, near_ratio
from layout_accuracy import CASES as TRAINED
from layout_accuracy import measured, run
from layout_models import MODELS
from layout_oracle import EXPERT_CASES, compared, compared_experts
from options import Options

from estimator.graph.partition.plan import Plan
from estimator.graph.trace.trace import trace_graph
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

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


PLAN = Plan((), sequence=False)


def profile() -> MachineProfile:
    return load_profile("h100-sxm")


def test_ranks_train_the_case_asked_for_where_only_some_cases_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Mapping[str, Any]] = []

    def run_on(devices: Any, target: str, arguments: Mapping[str, Any], **_: Any) -> list[Any]:
        asked.append(arguments)
        return [{"step_s": 1.0}, {"step_s": 2.0}]

    monkeypatch.setattr(layout_accuracy, "run_on_devices", run_on)
    monkeypatch.setattr(layout_accuracy, "CASES", TRAINED[3:])
    assert measured(TRAINED[3], "tp", PLAN, profile(), steps=1, processes=1) == [2.0]
    # A rank is a fresh process, which knows all cases again.
    (found,) = (case for case in TRAINED if case.name == asked[0]["case"])
    assert found is TRAINED[3]
    measured(TRAINED[3], "zb", None, profile(), steps=1, processes=1)
    layouts = ["tp=2", "pp=2,schedule=zb,cut=blocks.2,dp=1"]
    assert [each["layout"] for each in asked] == layouts
    assert [each["points"] for each in asked] == [(), ("blocks.2",)]


def test_a_case_that_was_found_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Answer:
        layout, step_time_s, low_s, high_s = "tp=2", 0.9, 0.8, 1.0

        class breakdown:
            layer_communication_s = 0.1

    measurements = iter([[float(n), n + 0.2, n - 0.2] for n in range(1, 6)])
    monkeypatch.setattr(layout_accuracy, "local_machine", lambda _: profile())
    monkeypatch.setattr(layout_accuracy, "predicted", lambda *_, **__: (PLAN, Answer()))
    monkeypatch.setattr(layout_accuracy, "measured", lambda *_, **__: next(measurements))
    options = Options(quick=True, data=tmp_path, work=tmp_path)
    first = list(run(options))
    assert [case["measured_s"] for case in first] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {case["method"] for case in first} == {"layers", "pipeline"}
    assert list(run(options)) == first


def case(layout: str | None, predicted_s: float | None, measured_s: float) -> dict[str, Any]:
    return {
        "layout": layout,
        "batch_per_gpu": 2.0,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
    }


def test_the_fastest_prediction_is_judged_by_what_was_measured_of_it() -> None:
    found = chosen_of([case("tp=2", 1.0, 1.2), case(None, 1.5, 1.0), case("pp=2", 2.0, 3.0)])
    assert found["chosen"] == "tp=2 x 2"
    assert found["best"] == "dp=* x 2"
    assert round(found["regret_ratio"], 9) == 0.2
    assert found["said_ratio"] == 0.5


def test_without_an_answer_the_slowest_counts() -> None:
    found = chosen_of([case("tp=2", None, 1.0), case("pp=2", None, 3.0)])
    assert found["chosen"] == "none"
    assert found["regret_ratio"] == 2.0
    assert found["said_ratio"] is None


def test_a_choice_five_percent_slower_is_near_the_best() -> None:
    near, far = {"regret_ratio": 0.05}, {"regret_ratio": 0.06}
    assert near_ratio([near] * 9 + [far]) == 0.9
    assert near_ratio([]) == 0.0
