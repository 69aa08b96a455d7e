"""The performance model: its limits by hand, its derivatives by finite differences."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from estimator.calibrate.performance_model import (
    PARAMETERS,
    WEAK_PRIORS,
    ComputeReference,
    EngineTimes,
    ModelValues,
    evaluate_model,
)

REFERENCE = ComputeReference(compute_s=0.3, batch=30.0)
PLACEMENTS = ((1, 1, 1), (2, 1, 2), (4, 1, 4), (2, 2, 1), (5, 2, 3), (9, 3, 3), (64, 16, 4))
ROWS = np.array(
    [
        (ranks, nodes, batch, micro, most)
        for ranks, nodes, most in PLACEMENTS
        for batch in (4, 300)
        for micro in (1, 3)
    ],
    dtype=float,
)
COMPUTE_S = np.linspace(0.1, 1, len(ROWS))
SYNC_S = np.where(ROWS[:, 0] > 1, np.linspace(1, 0.1, len(ROWS)), 0.0)
ENGINE = EngineTimes(compute_s=COMPUTE_S, sync_s=SYNC_S, step_s=COMPUTE_S + SYNC_S)
KNOWN = [None, ENGINE]

# Without overlap, jitter, contention, growth with nodes, or corrections of the engine's seconds.
PLAIN = {
    "overlap": 1e-9,
    "jitter": 1e-9,
    "contention": 1e-9,
    "inter_node": 1.0,
    "intra_node": 1.0,
    "two_nodes": 1.0,
}


def parameters(**values: float) -> np.ndarray:
    """The medians of the priors with some replaced."""
    logs = WEAK_PRIORS.log_medians()
    for name, value in values.items():
        logs[PARAMETERS.index(name)] = np.log(value)
    return logs


@pytest.mark.parametrize("times", KNOWN)
def test_derivatives_are_those_of_the_values(times: EngineTimes | None) -> None:
    at = WEAK_PRIORS.log_medians() + 0.3 * np.cos(np.arange(len(PARAMETERS)))
    steps = 1e-6 * np.eye(len(PARAMETERS))
    differences = [
        evaluate_model(at + step, ROWS, REFERENCE, times).log_step
        - evaluate_model(at - step, ROWS, REFERENCE, times).log_step
        for step in steps
    ]
    model = evaluate_model(at, ROWS, REFERENCE, times)
    assert model.jacobian == pytest.approx(np.stack(differences, axis=1) / 2e-6, abs=1e-6)


def test_without_overlap_a_step_is_the_sum_of_compute_and_synchronisation() -> None:
    # overlap → 0 makes the norm a sum; no jitter or contention leaves the engine's own seconds.
    at = parameters(**PLAIN, stall=1e-9)
    model = evaluate_model(at, ROWS, REFERENCE, ENGINE)
    assert np.exp(model.log_step) == pytest.approx(ROWS[:, 3] * COMPUTE_S + SYNC_S, rel=1e-6)


def test_a_stall_adds_the_same_seconds_to_every_step() -> None:
    # A tenth of the reference's 0.3 s of compute, whatever the batch, ranks and micro-batches.
    at = parameters(**PLAIN, stall=0.1)
    model = evaluate_model(at, ROWS, REFERENCE, ENGINE)
    expected = ROWS[:, 3] * COMPUTE_S + SYNC_S + 0.03
    assert np.exp(model.log_step) == pytest.approx(expected, rel=1e-6)


def test_a_ring_over_many_ranks_takes_twice_that_over_two() -> None:
    at = parameters(rank_latency=1e-12, two_nodes=1, jitter=1e-12, overlap=1e-9)
    rows = np.array([(1, 1, 30, 1, 1), (2, 2, 30, 1, 1), (4, 4, 30, 1, 1), (1000, 1000, 30, 1, 1)])
    alone, two, four, many = np.exp(evaluate_model(at, rows.astype(float), REFERENCE).log_step)
    # 2·(n − 1)/n of the gradients cross each link: 1, 1.5 and 1.998 times as much.
    assert (four - alone) / (two - alone) == pytest.approx(1.5, rel=1e-6)
    assert (many - alone) / (two - alone) == pytest.approx(1.998, rel=1e-6)


def test_one_rank_has_nothing_to_synchronise() -> None:
    model = evaluate_model(WEAK_PRIORS.log_medians(), ROWS, REFERENCE)
    assert (model.sync_share[ROWS[:, 0] == 1] == 0).all()
    assert (model.sync_share[ROWS[:, 0] > 1] > 0).all()


def test_compute_and_synchronisation_of_the_model_add_up_to_its_step() -> None:
    at = parameters(overlap=1e-9, compute=1.2, inter_node=3.0, intra_node=0.5)
    model = evaluate_model(at, ROWS, REFERENCE, ENGINE)
    # The stall of the prior is a hundredth of the 0.3 s of the reference.
    expected = ROWS[:, 3] * np.exp(model.log_compute) + np.exp(model.log_sync) + 0.003
    assert np.exp(model.log_step) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("whole", KNOWN)
def test_a_row_alone_is_as_it_is_among_others(whole: EngineTimes | None) -> None:
    # A single row is computed in floats, several in arrays.
    at = WEAK_PRIORS.log_medians() + 0.3 * np.cos(np.arange(len(PARAMETERS)))
    together = evaluate_model(at, ROWS, REFERENCE, whole)
    for row in range(len(ROWS)):
        one = slice(row, row + 1)
        times = None if whole is None else EngineTimes(*(seconds[one] for seconds in whole))
        alone = evaluate_model(at, ROWS[one], REFERENCE, times)
        for name in (item.name for item in fields(ModelValues)):
            expected = pytest.approx(getattr(together, name)[row], rel=1e-12, abs=1e-13)
            assert getattr(alone, name)[0] == expected, name
