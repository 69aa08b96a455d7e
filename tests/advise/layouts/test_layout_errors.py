"""What two layouts are off by together says nothing about which of them is faster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from estimator.advise.layouts.search import StepErrors, are_alike, step_errors
from estimator.coefficients import Z_80
from estimator.estimates.engine import Engine
from estimator.estimates.estimate import MODEL_ERROR, Estimate
from estimator.estimates.request import EstimateRequest
from tests.advise.layouts.test_layouts import graphs, machine


def answer(layout: str, **asked: Any) -> Estimate:
    options = {"batch_per_gpu": 8, "accumulation_steps": 4, "profile": machine()} | asked
    return Engine().estimate(EstimateRequest.of(graphs()[0], "1x4:m", layout=layout, **options))


@pytest.mark.parametrize("layout", ["dp=*", "tp=2,dp=*", "pp=4", "pp=2,dp=*"])
def test_the_sources_of_an_error_make_up_its_interval(layout: str) -> None:
    found = answer(layout)
    errors = step_errors(found)
    whole = math.log(found.high_s / found.step_time_s) / Z_80
    assert math.hypot(*errors.shared.values(), errors.own) == pytest.approx(whole)
    assert errors.own >= MODEL_ERROR * (1 - 1e-9)


def test_a_step_and_itself_differ_by_what_is_its_own() -> None:
    errors = step_errors(answer("tp=2,dp=*"))
    assert errors.ratio_error(errors) == pytest.approx(math.sqrt(2) * errors.own)


def test_kernels_of_one_family_cancel_and_other_sources_add_up() -> None:
    one = StepErrors({"matmul": 0.4, "exchanges": 0.03}, 0.0)
    other = StepErrors({"matmul": 0.36}, 0.0)
    assert one.ratio_error(other) == pytest.approx(0.05)
    assert are_alike((1.05, one), (1.0, other))
    assert not are_alike((1.08, one), (1.0, other))


def test_a_narrow_interval_leaves_nothing_beside_its_sources() -> None:
    found = answer("dp=*")
    ratio = math.exp(Z_80 * 0.001)
    calibrated = replace(found, low_s=found.step_time_s / ratio, high_s=found.step_time_s * ratio)
    errors = step_errors(calibrated)
    assert math.hypot(*errors.shared.values(), errors.own) == pytest.approx(0.001)
