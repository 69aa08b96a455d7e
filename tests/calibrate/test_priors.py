"""Priors name each parameter of the model once, and transfer to a new kind of device."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.performance_model import (
    PARAMETERS,
    WEAK_PRIORS,
    LogNormalPrior,
    Priors,
    transferred,
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


def test_a_new_device_keeps_the_jobs_overlap_and_not_the_old_networks_speed() -> None:
    fitted = WEAK_PRIORS.log_medians() + 1.0
    priors = transferred(fitted, np.full(len(PARAMETERS), 0.1)).by_name
    assert priors["overlap"].median == pytest.approx(np.e * WEAK_PRIORS.by_name["overlap"].median)
    assert priors["inter_node"] == WEAK_PRIORS.by_name["inter_node"]


def test_a_new_device_keeps_the_prior_of_its_own_network() -> None:
    fast = WEAK_PRIORS.updated(inter_node=LogNormalPrior(median=0.01, sigma=1.1))
    priors = transferred(WEAK_PRIORS.log_medians(), np.full(len(PARAMETERS), 0.1), target=fast)
    assert priors.by_name["inter_node"].median == 0.01
