"""Experts are weighted by how they predict what was left out, and their disagreement is width."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.mixture import (
    ENGINE,
    FORM,
    MODEL,
    LeftOut,
    LinearForm,
    Mixture,
    MixturePrior,
)
from estimator.calibrate.regressor import StepTimeRegressor

ROWS = np.array(
    [
        (ranks, nodes, batch, 1, ranks / nodes)
        for ranks, nodes in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 4))
        for batch in (8, 16, 32, 64)
    ],
    dtype=float,
)
# Optimus' form exactly: 5 ms a sample, 30 ms, and 20 ms for every rank.
OPTIMUS_S = 0.005 * ROWS[:, 2] + 0.03 + 0.02 * ROWS[:, 0]
PRIOR = MixturePrior(
    weights={MODEL: 1.0, ENGINE: 1.0, FORM: 1.0},
    error_sigma=0.1,
)

VARIANCE = np.array([0.01])


def fitted(
    rows: np.ndarray,
    times_s: np.ndarray,
    model_error: float,
    prior: MixturePrior | None = PRIOR,
    **other: object,
) -> Mixture:
    """A mixture whose performance model is off by a factor on all that it has not seen."""
    count = len(rows)
    left_out = LeftOut(
        observation=np.arange(count),
        log_ratio=np.full(count, model_error),
        variance=np.full(count, 0.01),
    )
    return Mixture(prior).fit(
        rows,
        np.log(times_s),
        left_out=left_out,
        observation_weights=np.ones(count),
        **other,  # type: ignore[arg-type]
    )


def test_the_form_that_a_job_follows_gets_the_weight() -> None:
    mixture = fitted(ROWS, OPTIMUS_S, model_error=0.5)
    for kind in range(3):
        assert mixture.weights_[MODEL][kind] < 0.01
        assert mixture.weights_[FORM][kind] > 0.4
        assert sum(each[kind] for each in mixture.weights_.values()) == pytest.approx(1)


def test_a_model_that_is_right_where_forms_are_not_gets_the_weight() -> None:
    scattered = OPTIMUS_S * np.exp(np.random.default_rng(0).normal(0, 0.5, len(ROWS)))
    assert fitted(ROWS, scattered, model_error=0.01).weights_[MODEL].min() > 0.9


def test_weights_follow_the_posterior_of_errors_of_unknown_variance() -> None:
    # One input: no form can be left out, the engine is off by a factor e, the model by none.
    mixture = fitted(ROWS[:1], OPTIMUS_S[:1], 0.0, engine_log_s=np.log(OPTIMUS_S[:1]) + 1)
    # (4·0.1² + e²) / (4 + 1) to the power of −0.5/2: 0.008 and 0.208, both priors being 1.
    model, engine = 0.008**-0.25, 0.208**-0.25
    assert mixture.weights_[MODEL][0] == pytest.approx(model / (model + engine))
    assert mixture.weights_[ENGINE][0] == pytest.approx(engine / (model + engine))


def test_where_experts_disagree_the_variance_says_so() -> None:
    mixture = fitted(ROWS, OPTIMUS_S, model_error=0.02)
    rows = np.array([(32.0, 8, 16, 1, 4)])
    log_s = LinearForm(ROWS, OPTIMUS_S).log_step(rows)
    _, agreed = mixture.combine(rows, log_s, VARIANCE, mixture.counts(rows))
    _, disputed = mixture.combine(rows, log_s + 1, VARIANCE, mixture.counts(rows))
    assert disputed > agreed + 0.01


def test_a_form_says_little_of_placements_of_a_kind_that_it_has_not_seen() -> None:
    within = ROWS[:, 1] == 1
    mixture = fitted(ROWS[within], OPTIMUS_S[within], model_error=0.05)
    assert mixture.weights_[MODEL][2] > 0.99
    assert mixture.weights_[FORM][1] > 0.3


def test_a_form_that_the_model_cannot_tell_from_itself_counts_more() -> None:
    mixture = fitted(ROWS, OPTIMUS_S, model_error=0.05)
    row = np.array([(4.0, 1, 24, 1, 4)])
    form = mixture.form_.log_step(row)
    mixture.weights_ = {MODEL: np.full(3, 0.5), FORM: np.full(3, 0.5)}
    # Of a model that is 0.02 away from the form, the share that the form takes back.
    taken = [
        1
        - (
            mixture.combine(row, form + 0.02, np.array([variance]), mixture.counts(row))[0] - form
        ).item()
        / 0.02
        for variance in (1.0, 1e-6)
    ]
    # (1 + 30)·0.5 against 0.5; and 0.5 against 0.5, where 0.02 is twenty standard deviations.
    assert taken == pytest.approx([31 / 32, 0.5], rel=0.01)


def test_agreement_counts_nothing_where_the_model_corrects_an_engine() -> None:
    mixture = fitted(ROWS, OPTIMUS_S, 0.05, prior=None, engine_log_s=np.log(OPTIMUS_S))
    row = np.array([(4.0, 1, 24, 1, 4)])
    form = mixture.form_.log_step(row)
    mixture.weights_ = {MODEL: np.full(3, 0.5), FORM: np.full(3, 0.5), ENGINE: np.zeros(3)}
    found, _ = mixture.combine(row, form + 0.02, np.array([1.0]), mixture.counts(row), form)
    assert found == pytest.approx(form + 0.01)


def test_one_outlier_does_not_reach_the_forms() -> None:
    times_s = OPTIMUS_S.copy()
    times_s[5] *= 3
    ours = StepTimeRegressor().fit(ROWS, times_s).mixture_
    clean = StepTimeRegressor().fit(ROWS, OPTIMUS_S).mixture_
    assert ours.form_.log_step(ROWS) == pytest.approx(clean.form_.log_step(ROWS), abs=0.02)


def test_a_job_that_does_not_follow_the_model_is_predicted_better_than_by_it() -> None:
    # Steps that grow with the ranks alone, as a part that follows no batch makes them.
    times_s = 0.1 + 0.3 * ROWS[:, 0]
    seen = np.arange(0, len(ROWS), 3)
    rest = np.setdiff1d(np.arange(len(ROWS)), seen)
    ours = StepTimeRegressor().fit(ROWS[seen], times_s[seen])
    mixed, model = (
        np.mean(np.abs(predicted_s / times_s[rest] - 1))
        for predicted_s in (ours.predict(ROWS[rest]), np.exp(ours.model(ROWS[rest]).log_step))
    )
    assert mixed < 0.7 * model
