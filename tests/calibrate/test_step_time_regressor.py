"""The regression learns from few rows, is robust to outliers, and converges to observations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from calibration.baselines import PolluxRegressor

from estimator.calibrate.intervals import (
    ENGINE_SPREAD_PRIOR,
    Spread,
    away_from_others,
    extrapolates,
    half_width,
    prior_scores,
    score_quantile,
)
from estimator.calibrate.mixture import (
    ENGINE,
    FORM,
    MODEL,
    LeftOut,
    LinearForm,
    Mixture,
    MixturePrior,
)
from estimator.calibrate.performance_model import (
    WEAK_PRIORS,
    ComputeReference,
    EngineTimes,
    LogNormalPrior,
    evaluate_model,
)
from estimator.calibrate.regressor import StepTimeRegressor

PLACEMENTS = (
    (1, 1, 1),
    (2, 1, 2),
    (4, 1, 4),
    (2, 2, 1),
    (4, 2, 3),
    (6, 3, 2),
    (8, 4, 4),
    (16, 4, 4),
)
ROWS = np.array(
    [
        (ranks, nodes, batch, 1, most)
        for ranks, nodes, most in PLACEMENTS
        for batch in (8, 16, 32, 64)
    ],
    dtype=float,
)
ALONE = ROWS[:, 0] == 1
# A T4-like job that does not follow the model: 50 ms + 10 ms a sample; gradients of 0.4 s a ring
# across nodes and 0.1 s within one, a third of them hidden.
RING = 2 * (1 - 1 / ROWS[:, 0])
SYNC_S = np.where(ROWS[:, 1] > 1, 0.4, 0.1) * RING
COMPUTE_S = 0.05 + 0.01 * ROWS[:, 2]
MEASURED_S = COMPUTE_S + np.maximum(SYNC_S - COMPUTE_S / 3, 0)


def rows_like(*wanted: tuple[float, ...]) -> np.ndarray:
    """Places of rows (ranks, nodes, batch)."""
    return np.array([np.flatnonzero((ROWS[:, :3] == want).all(axis=1))[0] for want in wanted])


FEW = rows_like((1, 1, 8), (1, 1, 64), (4, 1, 16), (2, 2, 8), (8, 4, 32))


def error(fitted: StepTimeRegressor | PolluxRegressor) -> float:
    """Median relative error over all rows."""
    return float(np.median(np.abs(fitted.predict(ROWS) / MEASURED_S - 1)))


def test_steps_of_the_model_itself_are_recovered_from_few_rows() -> None:
    truth = np.exp(
        evaluate_model(
            WEAK_PRIORS.log_medians(), ROWS, ComputeReference(compute_s=0.4, batch=22.0)
        ).log_step
    )
    predicted = np.exp(StepTimeRegressor().fit(ROWS[FEW], truth[FEW]).model(ROWS).log_step)
    assert predicted == pytest.approx(truth, rel=0.05)


def test_few_rows_teach_more_than_they_teach_pollux() -> None:
    seen, times = ROWS[FEW], MEASURED_S[FEW]
    ours = error(StepTimeRegressor().fit(seen, times))
    assert ours < error(PolluxRegressor().fit(seen, times))


def test_a_row_observed_often_is_predicted_as_it_was_observed() -> None:
    odd = rows_like((4, 2, 16))
    others = np.setdiff1d(np.arange(len(ROWS)), odd)
    seen = np.concatenate([others, np.repeat(odd, 4)])
    times = np.concatenate([MEASURED_S[others], 2 * MEASURED_S[odd] * [0.99, 1.01, 1.0, 1.0]])
    fitted = StepTimeRegressor().fit(ROWS[seen], times)
    assert fitted.predict(ROWS[odd]) == pytest.approx(2 * MEASURED_S[odd], rel=0.05)
    without = StepTimeRegressor().fit(ROWS[others], MEASURED_S[others])
    assert fitted.predict(ROWS[others]) == pytest.approx(without.predict(ROWS[others]), rel=0.05)


def test_an_outlier_three_times_too_long_hardly_moves_other_predictions() -> None:
    seen = np.concatenate([np.flatnonzero(ALONE), FEW, rows_like((16, 4, 64), (6, 3, 16))])
    times = MEASURED_S[seen].copy()
    clean = StepTimeRegressor().fit(ROWS[seen], times).predict(ROWS)
    times[-1] *= 3
    fitted = StepTimeRegressor().fit(ROWS[seen], times)
    assert fitted.observation_weights_[-1] < 0.05
    assert np.mean(np.abs(fitted.predict(ROWS) / clean - 1)) < 0.05


def test_an_outlier_does_not_lead_the_fit_to_another_optimum() -> None:
    # BERT on RTX 2080 Ti in the table of Sia: one row alone tells which link is the slower.
    seen = [
        (1, 1, 4, 1, 1, 0.252), (1, 1, 6, 1, 1, 0.326), (1, 1, 8, 1, 1, 0.368),
        (1, 1, 11, 1, 1, 0.413), (1, 1, 12, 1, 1, 0.447), (13, 2, 6, 1, 7, 0.953),
        (12, 2, 11, 1, 8, 0.901), (6, 2, 11, 1, 3, 0.847), (14, 2, 6, 1, 8, 0.909),
        (10, 2, 11, 1, 6, 0.926), (22, 3, 4, 1, 8, 0.901), (5, 2, 6, 1, 3, 0.708),
        (12, 2, 11, 1, 6, 0.945), (3, 2, 12, 1, 2, 0.671), (7, 1, 8, 1, 7, 3 * 0.727),
    ]  # fmt: skip
    rows, times = np.array(seen)[:, :5], np.array(seen)[:, 5]
    fitted = StepTimeRegressor().fit(rows, times)
    without = StepTimeRegressor().fit(rows[:-1], times[:-1])
    assert fitted.observation_weights_[-1] < 0.05
    others = np.vstack([rows[:-1], [(2, 1, 8, 1, 2), (4, 1, 8, 1, 4), (8, 1, 8, 1, 8)]])
    assert np.mean(np.abs(fitted.predict(others) / without.predict(others) - 1)) < 0.05


def test_a_down_weighted_outlier_still_widens_the_intervals() -> None:
    times = MEASURED_S.copy()
    times[5] *= 3
    fitted = StepTimeRegressor().fit(ROWS, times)
    assert fitted.observation_weights_[5] < 0.05
    scores = fitted.scores_
    # It is log 3 away from what its neighbours say, whose spread is some percent.
    assert scores.argmax() == 5
    assert scores[5] > 5


def test_without_observations_the_engines_times_are_the_answer() -> None:
    nothing = EngineTimes(*3 * [np.zeros(0)])
    fitted = StepTimeRegressor().fit([], [], engine_times=nothing)
    engine = EngineTimes(compute_s=COMPUTE_S, sync_s=SYNC_S * ~ALONE, step_s=MEASURED_S)
    assert fitted.predict(ROWS, engine_times=engine) == pytest.approx(MEASURED_S, rel=1e-9)


def test_beside_an_engine_left_out_errors_count_as_they_are() -> None:
    seen, expected_s = ROWS[FEW], MEASURED_S[FEW]
    times_s = expected_s * np.array([1.5, 1.0, 0.6, 1.5, 0.6])
    engine = EngineTimes(
        compute_s=COMPUTE_S[FEW], sync_s=SYNC_S[FEW] * ~ALONE[FEW], step_s=expected_s
    )
    beside = StepTimeRegressor().fit(seen, times_s, engine_times=engine)
    alone = StepTimeRegressor().fit(seen, times_s)
    assert beside.spread_.inflation_variance == pytest.approx(1, abs=0.01)
    assert alone.spread_.inflation_variance > 1.2


def test_a_stall_that_the_engine_does_not_know_is_learnt_as_seconds() -> None:
    # An input pipeline holds up each step by 60 ms, whatever the batch; the engine knows the rest.
    engine = EngineTimes(compute_s=COMPUTE_S, sync_s=SYNC_S * ~ALONE, step_s=MEASURED_S)
    seen = np.flatnonzero(ALONE & (ROWS[:, 2] < 64))
    known = EngineTimes(
        compute_s=COMPUTE_S[seen], sync_s=np.zeros(len(seen)), step_s=MEASURED_S[seen]
    )
    fitted = StepTimeRegressor().fit(ROWS[seen], MEASURED_S[seen] + 0.06, engine_times=known)
    largest = np.flatnonzero(ALONE & (ROWS[:, 2] == 64))
    predicted = np.exp(fitted.prediction(ROWS, engine_times=engine).model.log_step)[largest]
    # By the mean ratio of what was seen, 1.30, the 0.69 s of the engine would be 0.89 s.
    assert predicted == pytest.approx(0.75, rel=0.04)


def test_the_engines_shape_carries_one_observation_to_other_placements() -> None:
    # The engine sees the right shape and is 30 % short everywhere.
    parts = COMPUTE_S / 1.3, SYNC_S * ~ALONE / 1.3, MEASURED_S / 1.3
    engine, one = EngineTimes(*parts), rows_like((8, 4, 16))
    seen = EngineTimes(*(part[one] for part in parts))
    before = StepTimeRegressor().fit([], [], engine_times=EngineTimes(*3 * [np.zeros(0)]))
    after = StepTimeRegressor().fit(ROWS[one], MEASURED_S[one], engine_times=seen)
    across = ROWS[:, 1] > 1
    errors = [
        np.median(np.abs(fitted.predict(ROWS, engine_times=engine) / MEASURED_S - 1)[across])
        for fitted in (before, after)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_intervals_shrink_with_observations_and_widen_far_from_them() -> None:
    few = StepTimeRegressor().fit(ROWS[FEW], MEASURED_S[FEW])
    many = StepTimeRegressor().fit(ROWS, MEASURED_S)
    wide, narrow = (
        np.log(high / low) for low, high in (f.predict_interval(ROWS) for f in (few, many))
    )
    assert np.median(narrow) < np.median(wide)
    single = StepTimeRegressor().fit(ROWS[ALONE], MEASURED_S[ALONE])
    low_s, high_s = single.predict_interval(ROWS)
    widths = np.log(high_s / low_s)
    assert widths[~ALONE].min() > widths[ALONE].max()


def test_rows_far_from_all_observations_extrapolate() -> None:
    fitted = StepTimeRegressor().fit(ROWS, MEASURED_S)
    far = np.array([(1024, 256, 16, 1, 4), (8, 4, 4096, 1, 4)], dtype=float)
    assert fitted.prediction(far).extrapolates.all()
    assert not fitted.prediction(ROWS).extrapolates.any()
    alone = StepTimeRegressor().fit(ROWS[ALONE], MEASURED_S[ALONE])
    assert alone.prediction(ROWS[-4:-3]).extrapolates.all()


def test_the_prior_decides_where_no_row_identifies_a_parameter() -> None:
    slow = WEAK_PRIORS.updated(inter_node=LogNormalPrior(median=5.0, sigma=0.1))
    rows = ROWS[rows_like((8, 4, 8))]
    usual, slower = (
        StepTimeRegressor(priors=p).fit(ROWS[ALONE], MEASURED_S[ALONE]).predict(rows)
        for p in (None, slow)
    )
    assert slower[0] > 2 * usual[0]


def test_without_observations_the_prior_scores_are_covered() -> None:
    quantile = score_quantile(np.empty(0))
    # The conformal correction: one more observation beside the eighteen of the prior scores.
    assert np.mean(prior_scores() <= quantile) == pytest.approx(0.8 * 19 / 18, abs=0.01)


def test_many_observations_outweigh_the_prior_scores() -> None:
    scores = np.abs(np.random.default_rng(0).normal(scale=3.0, size=2000))
    quantile = score_quantile(scores)
    # Four fifths of |normal| lie within 1.2816.
    assert quantile == pytest.approx(3 * 1.2816, rel=0.05)


def test_four_times_the_largest_observed_is_no_extrapolation() -> None:
    observed = np.array([(1.0, 8.0), (4.0, 64.0)])
    asked = np.array([(16.0, 8.0), (17.0, 8.0), (2.0, 2.0), (2.0, 1.9)])
    assert extrapolates(asked, observed, np.zeros(4)).tolist() == [False, True, False, True]
    assert extrapolates(asked[:1], observed, np.array([0.5])).tolist() == [True]


def spread_sigma(spread: Spread, predicted: float) -> float:
    """The standard deviation of a step's error, of which 0.7 predicted ones are expected."""
    variance = predicted**2 * spread.inflation_variance + spread.scatter_variance
    return 0.7 * math.sqrt(variance)


def test_the_spread_of_a_job_is_that_of_its_errors() -> None:
    rng, predicted = np.random.default_rng(0), np.full(200, 0.05**2)
    quiet = Spread(rng.normal(0, 0.035, 200), predicted)
    assert spread_sigma(quiet, 0.05) == pytest.approx(0.035, rel=0.2)
    loud = Spread(rng.normal(0, 0.3, 200), predicted)
    assert spread_sigma(loud, 0.05) == pytest.approx(0.3, rel=0.1)


def test_scatter_does_not_grow_with_what_is_predicted_and_inflation_does() -> None:
    rng = np.random.default_rng(1)
    predicted = np.tile([0.02, 0.2], 100)
    scattered = Spread(rng.normal(0, 0.2, 200), predicted**2)
    inflated = Spread(rng.normal(0, 0.7 * 2 * predicted), predicted**2)
    assert spread_sigma(scattered, 0.0) > 0.1
    assert spread_sigma(inflated, 0.0) < 0.03
    # A t distribution of six degrees of freedom has 0.87 of the sigma of normal errors; the grid
    # has 1.4 and 2.
    assert 1.4**2 <= inflated.inflation_variance <= 2**2


def test_a_few_errors_are_pooled_with_most_jobs() -> None:
    one, many = (Spread(np.full(count, 0.3), np.full(count, 0.05**2)) for count in (1, 50))
    none = Spread(np.empty(0), np.empty(0))
    assert spread_sigma(none, 0.05) < spread_sigma(one, 0.05) < spread_sigma(many, 0.05)
    # One wild error among many that are small is an outlier, not scatter.
    outlier = Spread(np.append(np.full(30, 0.02), 1.1), np.full(31, 0.05**2))
    assert spread_sigma(outlier, 0.05) < 0.06


def test_a_job_with_few_observations_is_taken_to_be_like_others_on_its_machines() -> None:
    rng, predicted = np.random.default_rng(0), np.full(40, 0.05**2)
    quiet, loud = (
        [Spread(rng.normal(0, sigma, 40), predicted).posterior for _ in range(3)]
        for sigma in (0.02, 0.3)
    )
    errors = np.full(2, 0.05)
    beside_quiet, alone, beside_loud = (
        spread_sigma(Spread(errors, predicted[:2], peers), 0.05) for peers in (quiet, (), loud)
    )
    assert beside_quiet < alone < beside_loud
    # What the job itself has shown often outweighs the others.
    own = Spread(rng.normal(0, 0.02, 200), np.full(200, 0.05**2), loud)
    assert spread_sigma(own, 0.05) < 0.04


def test_no_interval_is_wider_than_one_that_says_nothing() -> None:
    found = half_width(np.ones(2), np.array([0.01, 9.0]))
    assert found == pytest.approx([0.1, 1.2])


def test_a_run_is_judged_by_the_other_runs_of_its_step() -> None:
    away, has_others = away_from_others(np.array([1.0, 2.0, 6.0, 9.0]), np.array([0, 0, 0, 1]))
    # From the mean of the others, 4, 3.5 and 1.5, whose difference from a run has a variance of
    # 1 + 1/2 runs.
    expected = np.array([3.0, 1.5, 4.5]) / math.sqrt(1.5)
    assert away[has_others] == pytest.approx(expected)
    assert has_others.tolist() == [True, True, True, False]


@pytest.mark.parametrize("peers", [(), [Spread(np.empty(0), np.empty(0)).posterior]])
@pytest.mark.parametrize("error", [1e-6, 1.0, math.log(50), math.log(1e6)])
def test_errors_of_any_size_have_a_spread(error: float, peers: list[np.ndarray]) -> None:
    found = Spread(np.full(300, error), np.full(300, 0.05**2), peers, prior=ENGINE_SPREAD_PRIOR)
    assert np.isfinite([found.inflation_variance, found.scatter_variance]).all()
    assert found.posterior.sum() == pytest.approx(1.0)


PLACED = np.array(
    [
        (ranks, nodes, batch, 1, ranks / nodes)
        for ranks, nodes in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 4))
        for batch in (8, 16, 32, 64)
    ],
    dtype=float,
)
# Optimus' form exactly: 5 ms a sample, 30 ms, and 20 ms for every rank.
OPTIMUS_S = 0.005 * PLACED[:, 2] + 0.03 + 0.02 * PLACED[:, 0]
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
    mixture = fitted(PLACED, OPTIMUS_S, model_error=0.5)
    for kind in range(3):
        assert mixture.weights_[MODEL][kind] < 0.01
        assert mixture.weights_[FORM][kind] > 0.4
        assert sum(each[kind] for each in mixture.weights_.values()) == pytest.approx(1)


def test_a_model_that_is_right_where_forms_are_not_gets_the_weight() -> None:
    scattered = OPTIMUS_S * np.exp(np.random.default_rng(0).normal(0, 0.5, len(PLACED)))
    assert fitted(PLACED, scattered, model_error=0.01).weights_[MODEL].min() > 0.9


def test_weights_follow_the_posterior_of_errors_of_unknown_variance() -> None:
    # One input: no form can be left out, the engine is off by a factor e, the model by none.
    mixture = fitted(PLACED[:1], OPTIMUS_S[:1], 0.0, engine_log_s=np.log(OPTIMUS_S[:1]) + 1)
    # (4·0.1² + e²) / (4 + 1) to the power of −0.5/2: 0.008 and 0.208, both priors being 1.
    model, engine = 0.008**-0.25, 0.208**-0.25
    assert mixture.weights_[MODEL][0] == pytest.approx(model / (model + engine))
    assert mixture.weights_[ENGINE][0] == pytest.approx(engine / (model + engine))


def test_where_experts_disagree_the_variance_says_so() -> None:
    mixture = fitted(PLACED, OPTIMUS_S, model_error=0.02)
    rows = np.array([(32.0, 8, 16, 1, 4)])
    log_s = LinearForm(PLACED, OPTIMUS_S).log_step(rows)
    _, agreed = mixture.combine(rows, log_s, VARIANCE, mixture.counts(rows))
    _, disputed = mixture.combine(rows, log_s + 1, VARIANCE, mixture.counts(rows))
    assert disputed > agreed + 0.01


def test_a_form_says_little_of_placements_of_a_kind_that_it_has_not_seen() -> None:
    within = PLACED[:, 1] == 1
    mixture = fitted(PLACED[within], OPTIMUS_S[within], model_error=0.05)
    assert mixture.weights_[MODEL][2] > 0.99
    assert mixture.weights_[FORM][1] > 0.3


def test_a_form_that_the_model_cannot_tell_from_itself_counts_more() -> None:
    mixture = fitted(PLACED, OPTIMUS_S, model_error=0.05)
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
    mixture = fitted(PLACED, OPTIMUS_S, 0.05, prior=None, engine_log_s=np.log(OPTIMUS_S))
    row = np.array([(4.0, 1, 24, 1, 4)])
    form = mixture.form_.log_step(row)
    mixture.weights_ = {MODEL: np.full(3, 0.5), FORM: np.full(3, 0.5), ENGINE: np.zeros(3)}
    found, _ = mixture.combine(row, form + 0.02, np.array([1.0]), mixture.counts(row), form)
    assert found == pytest.approx(form + 0.01)


def test_one_outlier_does_not_reach_the_forms() -> None:
    times_s = OPTIMUS_S.copy()
    times_s[5] *= 3
    ours = StepTimeRegressor().fit(PLACED, times_s).mixture_
    clean = StepTimeRegressor().fit(PLACED, OPTIMUS_S).mixture_
    assert ours.form_.log_step(PLACED) == pytest.approx(clean.form_.log_step(PLACED), abs=0.02)


def test_a_job_that_does_not_follow_the_model_is_predicted_better_than_by_it() -> None:
    # Steps that grow with the ranks alone, as a part that follows no batch makes them.
    times_s = 0.1 + 0.3 * PLACED[:, 0]
    seen = np.arange(0, len(PLACED), 3)
    rest = np.setdiff1d(np.arange(len(PLACED)), seen)
    ours = StepTimeRegressor().fit(PLACED[seen], times_s[seen])
    mixed, model = (
        np.mean(np.abs(predicted_s / times_s[rest] - 1))
        for predicted_s in (
            ours.predict(PLACED[rest]),
            np.exp(ours.model(PLACED[rest]).log_step),
        )
    )
    assert mixed < 0.7 * model
