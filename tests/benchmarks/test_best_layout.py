"""The layout that would be chosen, beside the one measured fastest."""

from __future__ import annotations

from typing import Any

from best_layout import chosen_of, near_ratio


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
