"""What an estimate says beside its step: the interval, and whether the model fits."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.estimates import FITS, fits_code, interval_ratio


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
