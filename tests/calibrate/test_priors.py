"""Priors name each parameter of the law once, and carry over to a new kind of device."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.priors import NEUTRAL, PARAMETERS, LogPrior, Priors, carried_over
from estimator.errors import WorkloadError


def test_a_prior_that_names_no_parameter_is_refused() -> None:
    with pytest.raises(WorkloadError, match="overlop"):
        NEUTRAL.centred(overlop=LogPrior(centre=1.0, width=0.1))
    with pytest.raises(WorkloadError, match="across"):
        Priors(by_name={"compute": LogPrior(centre=1.0, width=0.1)})


@pytest.mark.parametrize(
    ("centre", "width"), [(0.0, 1.0), (1.0, 0.0), (np.nan, 1.0), (1.0, np.inf)]
)
def test_a_prior_needs_a_positive_centre_and_width(centre: float, width: float) -> None:
    with pytest.raises(WorkloadError, match="positive"):
        LogPrior(centre=centre, width=width)


def test_a_new_device_keeps_the_jobs_overlap_and_not_the_old_networks_speed() -> None:
    fitted = NEUTRAL.log_centres() + 1.0
    priors = carried_over(fitted, np.full(len(PARAMETERS), 0.1)).by_name
    assert priors["overlap"].centre == pytest.approx(np.e * NEUTRAL.by_name["overlap"].centre)
    assert priors["across"] == NEUTRAL.by_name["across"]


def test_a_new_device_keeps_what_is_believed_of_its_own_network() -> None:
    fast = NEUTRAL.centred(across=LogPrior(centre=0.01, width=1.1))
    priors = carried_over(NEUTRAL.log_centres(), np.full(len(PARAMETERS), 0.1), new=fast)
    assert priors.by_name["across"].centre == 0.01
