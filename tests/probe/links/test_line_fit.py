"""The line fit recovers what samples were made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.errors import ProbeError
from estimator.probe.links.copies import fit_line

SIZES = [1024 * 4**power for power in range(9)]


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e7, 1e12))
def test_exact_samples_give_their_line_back(latency: float, bandwidth: float) -> None:
    fit = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    for size in SIZES:
        fitted_s = fit.latency_s + size / fit.bandwidth_bytes_per_s
        assert fitted_s == pytest.approx(latency + size / bandwidth, rel=1e-5)
    assert fit.relative_error < 1e-5


def test_two_wild_samples_of_nine_do_not_move_the_line() -> None:
    seconds = [20e-6 + size / 1e9 for size in SIZES]
    seconds[2] *= 10
    seconds[7] *= 5
    fit = fit_line(SIZES, seconds)
    assert fit.latency_s == pytest.approx(20e-6, rel=0.05)
    assert fit.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_the_latency_of_small_messages_is_not_lost_beside_large_ones() -> None:
    random = np.random.default_rng(0)
    seconds = [
        (20e-6 + size / 1e9) * (1 + random.uniform(-0.05, 0.05)) for size in SIZES for _ in range(5)
    ]
    fit = fit_line([size for size in SIZES for _ in range(5)], seconds)
    assert fit.latency_s == pytest.approx(20e-6, rel=0.05)
    # Uniform errors up to 5 % have a median size of 2.5 %.
    assert 0.01 < fit.relative_error < 0.04


def test_a_curve_below_its_tangent_gets_no_negative_latency() -> None:
    fit = fit_line([1e3, 1e4, 1e5], [1e-6, 2e-5, 4e-4])
    assert fit.latency_s == 0


def test_times_that_do_not_rise_mean_latency_alone() -> None:
    fit = fit_line([1e3, 1e4, 1e5], [3e-5, 3e-5, 3e-5])
    assert fit.latency_s == pytest.approx(3e-5, rel=1e-3)
    assert 1e5 / fit.bandwidth_bytes_per_s < 3e-8


def test_one_size_is_refused() -> None:
    with pytest.raises(ProbeError, match="1 sizes"):
        fit_line([1e3, 1e3], [1e-5, 2e-5])


def test_small_messages_that_a_token_bucket_lets_pass_do_not_raise_the_rate() -> None:
    # 25 MB/s behind a bucket of 64 KiB: what fits into the bucket takes only the latency.
    seconds = [100e-6 + (size / 25e6 if size > 65536 else 0) for size in SIZES]
    assert fit_line(SIZES, seconds).bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.05)
