"""What an answer says of its scaling."""

from __future__ import annotations

import pytest

import estimator as est
from estimator.advise.scaling import Scaling
from estimator.report.facts import answer_facts
from tests.synthetic import Machine, perceptron

ANSWER = est.estimate(perceptron([64, 64]), "1x2:m", profile=Machine(devices=2).profile())


@pytest.mark.parametrize(("efficiency_ratio", "is_asked_for"), [(0.8949, True), (0.8951, False)])
def test_a_target_that_the_efficiency_meets_as_printed_is_not_asked_for(
    efficiency_ratio: float, is_asked_for: bool
) -> None:
    scaling = Scaling(
        efficiency_ratio=efficiency_ratio,
        against="1x1:m",
        wanted_ratio=0.9,
        link="the network of 'm'",
        link_bytes_per_s=300e9,
        needed_bytes_per_s=382e9,
    )
    words = dict(answer_facts(ANSWER, scaling=scaling))["scaling"]
    assert words.startswith("89 % of linear" if is_asked_for else "90 % of linear")
    assert ("90 % needs 382 GB/s" in words) == is_asked_for
    assert "300 GB/s" in words
