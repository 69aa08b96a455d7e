"""Which bytes of an op come from main memory."""

from __future__ import annotations

import pytest

from estimator.timeline.caches import cold_ratios
from tests.synthetic import perceptron


def test_a_model_that_fits_the_cache_never_reads_main_memory() -> None:
    bound = perceptron([64, 64, 64], batch=8).at()
    assert cold_ratios(bound, 1e12).max() == 0.0


def test_a_cache_that_holds_nothing_leaves_every_op_cold() -> None:
    bound = perceptron([256, 256, 256], batch=64).at()
    cold = cold_ratios(bound, 1.0)
    computing = [not op.is_view for op in bound.graph.ops]
    assert cold[computing].min() == pytest.approx(1.0)


def test_a_smaller_cache_never_makes_an_op_warmer() -> None:
    bound = perceptron([512, 512, 512, 512], batch=128).at()
    large, small = cold_ratios(bound, 8e6), cold_ratios(bound, 2e6)
    assert (small >= large - 1e-12).all()
    assert small.sum() > large.sum()
