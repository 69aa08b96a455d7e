"""Say the step law beside the engine's own seconds for a single row, in plain Python.

The same formulas as `step_law` where both of the engine's parts are known: what a calibrated
estimate waits for, in a tenth of the time that arrays of one element take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from estimator.elementwise import expected_maximum

_NEVER = -math.inf


class ScalarLaw(NamedTuple):
    """One row of `step_law.LawValues`."""

    log_step: float
    log_compute: float
    log_sync: float
    jacobian: list[float]
    sync_share: float


def log_step_of_parts(
    log_parameters: Sequence[float],
    row: Sequence[float],
    reference_batch: float,
    compute_s: float,
    sync_s: float,
) -> ScalarLaw:
    """The law at (ranks, nodes, batch, micro-batches, most devices on one node).

    `log_parameters` are in the order of `priors.PARAMETERS`.
    """
    ranks, nodes, batch, accumulation, largest = row
    (log_factor, _, _, log_power, log_alone, log_across, log_within, _, log_two, log_growth, _) = (
        log_parameters[:11]
    )
    spread, crowding, overlap = map(math.exp, log_parameters[11:])
    batch_power, alone = math.exp(log_power), float(ranks == 1)
    growth = math.log(batch / reference_batch)
    slowest, beside = spread * expected_maximum(int(ranks)), crowding * (1 - 1 / largest)
    log_compute = log_factor + math.log(compute_s) + (batch_power - 1) * growth
    log_compute += log_alone * alone + math.log1p(slowest) + math.log1p(beside)
    d_slowest, d_beside = slowest / (1 + slowest), beside / (1 + beside)
    more = max(nodes - 2, 0) * math.exp(log_growth)
    across, two = float(nodes > 1), float(nodes == 2)
    log_sync = _NEVER
    if ranks > 1 and sync_s > 0:
        network = log_across + log_two * two + math.log1p(more) if across else log_within
        log_sync = math.log(sync_s) + network
    power = 1 + overlap
    exposed, share = _norm(log_compute, log_sync, power)
    mean_log = share * log_sync + (1 - share) * log_compute if share > 0 else log_compute
    d_overlap = overlap / power * (mean_log - exposed)
    earlier = math.log(accumulation - 1) + log_compute if accumulation > 1 else _NEVER
    step, last = _norm(earlier, exposed, 1.0)
    sync_share = last * share
    of_compute, of_network = 1 - sync_share, sync_share * across
    jacobian = [
        of_compute,
        0.0,
        0.0,
        of_compute * batch_power * growth,
        of_compute * alone,
        of_network,
        sync_share - of_network,
        0.0,
        of_network * two,
        of_network * more / (1 + more),
        0.0,
        of_compute * d_slowest,
        of_compute * d_beside,
        last * d_overlap,
    ]
    return ScalarLaw(step, log_compute, log_sync, jacobian, sync_share)


def _norm(first: float, second: float, power: float) -> tuple[float, float]:
    """log((e^(first·power) + e^(second·power))^(1/power)) and the second's share of it."""
    larger, smaller = (first, second) if first >= second else (second, first)
    total = larger + math.log1p(math.exp(power * (smaller - larger))) / power
    return total, math.exp(power * (second - total))
