"""Priors name each parameter of the model once."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.performance_model import (
    WEAK_PRIORS,
    LogNormalPrior,
    Priors,
)
from estimator.errors import WorkloadError


def test_a_prior_that_names_no_parameter_is_refused() -> None:
    with pytest.raises(WorkloadError, match="overlop"):
        WEAK_PRIORS.updated(overlop=LogNormalPrior(median=1.0, sigma=0.1))
    with pytest.raises(WorkloadError, match="inter_node"):
        Priors(by_name={"compute": LogNormalPrior(median=1.0, sigma=0.1)})


@pytest.mark.parametrize(
    ("median", "sigma"), [(0.0, 1.0), (1.0, 0.0), (np.nan, 1.0), (1.0, np.inf)]
)
def test_a_prior_needs_a_positive_median_and_sigma(median: float, sigma: float) -> None:
    with pytest.raises(WorkloadError, match="positive"):
        LogNormalPrior(median=median, sigma=sigma)
