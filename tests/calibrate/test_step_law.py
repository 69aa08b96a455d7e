"""The step law: its limits by hand, its derivatives by differences."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from estimator.calibrate.priors import NEUTRAL, PARAMETERS
from estimator.calibrate.step_law import (
    LawValues,
    Parts,
    Reference,
    log_step,
)
from estimator.errors import WorkloadError

REFERENCE = Reference(compute_s=0.3, batch=30.0)
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
KNOWN = [
    Parts(),
    Parts(compute_s=COMPUTE_S),
    Parts(sync_s=SYNC_S),
    Parts(compute_s=COMPUTE_S, sync_s=SYNC_S),
]


def parameters(**values: float) -> np.ndarray:
    """The neutral centres with some replaced."""
    logs = NEUTRAL.log_centres()
    for name, value in values.items():
        logs[PARAMETERS.index(name)] = np.log(value)
    return logs


@pytest.mark.parametrize("parts", KNOWN)
def test_derivatives_are_those_of_the_values(parts: Parts) -> None:
    at = NEUTRAL.log_centres() + 0.3 * np.cos(np.arange(len(PARAMETERS)))
    steps = 1e-6 * np.eye(len(PARAMETERS))
    differences = [
        log_step(at + step, ROWS, REFERENCE, parts).log_step
        - log_step(at - step, ROWS, REFERENCE, parts).log_step
        for step in steps
    ]
    law = log_step(at, ROWS, REFERENCE, parts)
    assert law.jacobian == pytest.approx(np.stack(differences, axis=1) / 2e-6, abs=1e-6)


def test_ranks_that_hide_nothing_add_compute_and_synchronisation() -> None:
    # overlap → 0 makes the norm a sum; no spread or crowding leaves the engine's own seconds.
    at = parameters(overlap=1e-9, spread=1e-9, crowding=1e-9, across=1, within=1, two_nodes=1)
    at[PARAMETERS.index("node_growth")] = np.log(1e-9)
    law = log_step(at, ROWS, REFERENCE, Parts(compute_s=COMPUTE_S, sync_s=SYNC_S))
    assert np.exp(law.log_step) == pytest.approx(ROWS[:, 3] * COMPUTE_S + SYNC_S, rel=1e-6)


def test_a_ring_over_many_ranks_takes_twice_that_over_two() -> None:
    at = parameters(rank_latency=1e-12, node_growth=1e-12, two_nodes=1, spread=1e-12, overlap=1e-9)
    rows = np.array([(1, 1, 30, 1, 1), (2, 2, 30, 1, 1), (4, 4, 30, 1, 1), (1000, 1000, 30, 1, 1)])
    alone, two, four, many = np.exp(log_step(at, rows.astype(float), REFERENCE).log_step)
    # 2·(n − 1)/n of the gradients cross each link: 1, 1.5 and 1.998 times as much.
    assert (four - alone) / (two - alone) == pytest.approx(1.5, rel=1e-6)
    assert (many - alone) / (two - alone) == pytest.approx(1.998, rel=1e-6)


def test_one_rank_has_nothing_to_synchronise() -> None:
    law = log_step(NEUTRAL.log_centres(), ROWS, REFERENCE)
    assert (law.sync_share[ROWS[:, 0] == 1] == 0).all()
    assert (law.sync_share[ROWS[:, 0] > 1] > 0).all()


def test_compute_and_synchronisation_of_the_law_make_its_step() -> None:
    at = parameters(overlap=1e-9, compute=1.2, across=3.0, within=0.5)
    law = log_step(at, ROWS, REFERENCE, Parts(compute_s=COMPUTE_S, sync_s=SYNC_S))
    expected = ROWS[:, 3] * np.exp(law.log_compute) + np.exp(law.log_sync)
    assert np.exp(law.log_step) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("whole", KNOWN)
def test_a_row_alone_is_as_it_is_among_others(whole: Parts) -> None:
    # Alone it is worked out in floats, among others in arrays.
    at = NEUTRAL.log_centres() + 0.3 * np.cos(np.arange(len(PARAMETERS)))
    together = log_step(at, ROWS, REFERENCE, whole)
    for row in range(len(ROWS)):
        one = slice(row, row + 1)
        compute_s = None if whole.compute_s is None else whole.compute_s[one]
        sync_s = None if whole.sync_s is None else whole.sync_s[one]
        alone = log_step(at, ROWS[one], REFERENCE, Parts(compute_s=compute_s, sync_s=sync_s))
        for name in (item.name for item in fields(LawValues)):
            expected = pytest.approx(getattr(together, name)[row], rel=1e-12, abs=1e-13)
            assert getattr(alone, name)[0] == expected, name


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_of_another_number_of_rows_are_refused(rows: int) -> None:
    with pytest.raises(WorkloadError, match=f"compute_s has {rows} values for 2 rows"):
        log_step(NEUTRAL.log_centres(), ROWS[:2], REFERENCE, Parts(compute_s=np.ones(rows)))


@pytest.mark.parametrize("values", [[0.1, -0.1], [0.1, np.nan], [0.1, 0.0]])
def test_senseless_parts_are_refused(values: list[float]) -> None:
    with pytest.raises(WorkloadError, match="compute_s"):
        Parts(compute_s=np.array(values))
