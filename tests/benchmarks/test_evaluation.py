"""Methods are evaluated on the same draws, and scored as defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from calibration.evaluation import Regressor, evaluate
from calibration.scores import overall, pair_scores, scores_of
from calibration.tables import Job
from summary import summarise

from estimator.calibrate.observation_files import MeasuredStep
from estimator.errors import ObservationError, WorkloadError

SIZES = [(1,), (2,), (1, 2), (4,), (4, 4)]
BATCHES = [8, 16, 32]


def true_step_s(sizes: tuple[int, ...], batch: float) -> float:
    return (0.1 + 0.01 * batch) * (1 + 0.1 * len(sizes))


def make_job(model: str = "m", gpu: str = "T4") -> Job[MeasuredStep]:
    steps = tuple(
        MeasuredStep(
            line=0,
            source="s",
            gpu=gpu,
            model=model,
            precision="fp32",
            strategy="ddp",
            variant=(),
            node_sizes=sizes,
            batch_per_gpu=batch,
            accumulation_steps=1,
            step_time_s=true_step_s(sizes, batch),
        )
        for sizes in SIZES
        for batch in BATCHES
    )
    return Job(label=f"{gpu}, {model}", gpu=gpu, model=model, steps=steps)


class Oracle:
    """Knows the model that made the rows; predicts `factor` times it, ± 20 %."""

    factor = 1.0

    def fit(self, X: Any, y: Any) -> Oracle:
        self.scale_ = float(np.max(y)) / 1e9
        return self

    def predict(self, X: Any) -> Any:
        X = np.asarray(X)
        return self.factor * (0.1 + 0.01 * X[:, 2]) * (1 + 0.1 * X[:, 1]) * (1 + self.scale_)

    def predict_interval(self, X: Any) -> Any:
        return 0.8 * self.predict(X), 1.2 * self.predict(X)


class TenPercentAbove(Oracle):
    factor = 1.1


class Unwilling(Oracle):
    def fit(self, X: Any, y: Any) -> Oracle:
        raise WorkloadError("it needs 99 rows; give more")


METHODS: dict[str, Callable[[], Regressor]] = {
    "calibrated": Oracle,
    "pollux": TenPercentAbove,
    "linear": Unwilling,
}


def test_scores_are_those_of_forms_whose_errors_are_known() -> None:
    evaluation = evaluate([make_job()], "k-shot", ks=[3, 5], methods=METHODS)
    scores = {(score.method, score.k): score for score in scores_of(evaluation)}
    assert set(scores) == {(method, k) for method in METHODS for k in (3, 5)}
    above = scores["pollux", 3]
    # 15 rows, of which 3 are learnt from; all others are 10 % off in each of 8 draws.
    assert (above.draws, above.rows, above.failed) == (8, 12, 0)
    for value in (above.median, above.p90, above.mape):
        assert value.mean == pytest.approx(0.1)
        assert value.deviation == pytest.approx(0, abs=1e-9)
    assert scores["calibrated", 3].mape.mean == pytest.approx(0, abs=1e-6)
    assert scores["calibrated", 3].order_right_ratio == 1
    assert scores["calibrated", 3].coverage_ratio == 1


def test_a_regressor_that_cannot_be_fitted_counts_as_an_error_of_100_percent() -> None:
    evaluation = evaluate([make_job()], "k-shot", ks=[3], methods=METHODS)
    (score,) = (score for score in scores_of(evaluation) if score.method == "linear")
    assert score.failed == 12 * 8
    assert score.median.mean == 1
    failed = [case for case in evaluation.cases("now") if case["method"] == "linear"]
    assert {(case["status"], case["reason"], case["predicted_s"]) for case in failed} == {
        ("no_prediction", "it needs 99 rows; give more", None)
    }


def test_cases_have_the_form_of_every_accuracy_benchmark() -> None:
    evaluation = evaluate([make_job()], "few-shot", methods={"calibrated": TenPercentAbove})
    cases = list(evaluation.cases("2026-01-01"))
    # 3 single-device rows; of 2 and 4 devices in a node two rows each; there is no 1+1.
    assert len(cases) == 15 - 3 - 4
    case = next(case for case in cases if case["allocation"] == "1x1:t4+1x2:t4")
    assert (case["ranks"], case["nodes"], case["global_batch"]) == (3, 2, 3 * case["batch_per_gpu"])
    assert case["predicted_s"] == pytest.approx(1.1 * case["measured_s"])
    (row,) = summarise(cases, by=("method",))
    assert row.median_ratio == pytest.approx(0.1)


def test_an_outlier_moves_the_predictions_of_a_mean_by_what_it_weighs() -> None:
    class Mean(Oracle):
        def fit(self, X: Any, y: Any) -> Oracle:
            self.mean_ = float(np.mean(y))
            return self

        def predict(self, X: Any) -> Any:
            return np.full(len(X), self.mean_)

    job = make_job()
    evaluation = evaluate([job], "online", ks=[3, 5], methods={"calibrated": Mean})
    assert {run.moved_ratio for run in evaluation.runs if run.split.k == 3} == {None}
    run = next(run for run in evaluation.runs if run.split.k == 5)
    learnt = job.y()[run.split.train]
    assert run.moved_ratio == pytest.approx(2 * learnt[-1] / learnt.sum())
    with_outlier = learnt.mean() + 2 * learnt[-1] / len(learnt)
    assert run.added_ratio == pytest.approx(abs(with_outlier / learnt[:-1].mean() - 1))
    (row,) = [row for row in overall(scores_of(evaluation)) if row.k == 5]
    assert row.moved is not None
    assert row.moved.most == max(run.moved_ratio for run in evaluation.runs if run.split.k == 5)


def test_pairs_ask_which_placement_is_faster() -> None:
    evaluation = evaluate([make_job()], "pairs", methods={"calibrated": Oracle})
    (row,) = pair_scores(evaluation)
    # 2 on one node against 3 over two: one a batch. Close pairs add 4 on one node against those 3.
    assert (row.few, row.few_right) == (3, 3)
    assert (row.close, row.close_right) == (6, 6)


def test_a_table_with_too_few_rows_is_refused() -> None:
    job = make_job()
    single = Job(label=job.label, gpu=job.gpu, model=job.model, steps=job.steps[:1])
    with pytest.raises(ObservationError, match="rows enough"):
        evaluate([single], "k-shot", methods=METHODS)


def test_the_regressor_takes_priors_from_the_machines_network_in_any_process() -> None:
    import pickle

    from calibration.evaluation import _with_machine_priors

    from estimator.calibrate.regressor import StepTimeRegressor

    job = make_job()
    named = [replace(step, interconnect="400Gb IB") for step in job.steps]
    known = _with_machine_priors(StepTimeRegressor, replace(job, steps=tuple(named)))
    regressor = pickle.loads(pickle.dumps(known))
    slow, fast = (
        made.fit([(1, 1, 8, 1, 1)], [1.0]).predict([(4, 4, 8, 1, 1)])[0]
        for made in (StepTimeRegressor(), regressor())
    )
    assert fast < slow
