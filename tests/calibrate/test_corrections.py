"""Corrections of what an engine predicts, of observations however far from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from estimator.calibrate import regressor
from estimator.calibrate.corrections import StepCorrections
from estimator.coefficients import JobContent, PredictedStep, StepQuestion
from estimator.workload.strategies import Strategy

CONTENT = JobContent(
    fingerprint="f", mode="train", optimizer="sgd", parameter_bytes=1, op_shares={}
)


def predicted(ranks: int = 2, nodes: int = 1, *, batch: int = 8) -> PredictedStep:
    """A step of 1.7 ms, of which 0.7 are synchronisation."""
    question = StepQuestion(
        "f", "job", "t4", ranks, nodes, -(-ranks // nodes), batch, 1, Strategy.parse("ddp")
    )
    return PredictedStep(
        question=question, compute_s=1e-3, sync_s=7e-4, step_s=1.7e-3, relative_error=0.2
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(-6, 6), st.integers(1, 100)),
        min_size=1,
        max_size=3,
    )
)
# Beside times so far apart the columns of a linear form are alike but for rounding.
@example([(1, 4.0, 1), (2, -4.0, 1)])
def test_steps_a_million_times_off_leave_estimates_with_an_interval(
    seen: list[tuple[int, float, int]],
) -> None:
    steps = [predicted(ranks) for ranks, _, times in seen for _ in range(times)]
    times_s = [1.7e-3 * 10**power for _, power, times in seen for _ in range(times)]
    fitted = StepCorrections("t4", CONTENT).fit(steps, times_s)
    for found in fitted.correct([predicted(2), predicted(8, 2)]):
        numbers = [found.step_s, found.compute_ratio, found.sync_ratio, found.relative_error]
        assert np.isfinite(np.array(numbers, dtype=float)).all()
        assert min(filter(None, numbers)) > 0


def test_three_hundred_steps_far_from_the_prediction_leave_estimates_with_an_interval() -> None:
    steps = [predicted()] * 300
    times_s = np.random.default_rng(0).uniform(0.3, 0.4, 300).tolist()
    (found,) = StepCorrections("t4", CONTENT).fit(steps, times_s).correct([predicted()])
    assert found.step_s == pytest.approx(0.35, rel=0.1)
    assert found.relative_error is not None
    assert 0 < found.relative_error < 1


def test_a_fit_uses_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> set[int]:
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    before, meanwhile, evaluate = threads(), set[int](), regressor.evaluate_model

    def watched(*given: object, **more: object) -> object:
        meanwhile.update(threads())
        return evaluate(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(regressor, "evaluate_model", watched)
    StepCorrections("t4", CONTENT).fit([predicted()], [2e-3])
    assert meanwhile == {1}
    assert threads() == before
