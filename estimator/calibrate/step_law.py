"""Say how long a data-parallel step takes, as a law of few parameters with its exact derivatives.

compute = C·(fixed share ⊕ growing share·(batch / reference)^power), more when ranks share a node
and with the slowest of many; synchronisation = C·ring(ranks)·(network ⊕ inside a node) + latency
per rank; step = (micro-batches − 1)·compute + (compute ⊕ synchronisation), where ⊕ is a norm:
(x^g + y^g)^(1/g). All of it in logarithms, so that every derivative is a share between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from estimator.calibrate.priors import PARAMETERS, Array
from estimator.calibrate.step_law_scalar import log_step_of_parts
from estimator.errors import WorkloadError

RANKS, NODES, BATCH, ACCUMULATION, LARGEST_NODE = range(5)
_AT = {name: column for column, name in enumerate(PARAMETERS)}

# Steps of much compute are less fixed cost (launches, small kernels) than short ones: the odds of
# the fixed share fall with the square root of compute, and are as the prior says at this length.
_TYPICAL_COMPUTE_S = 0.25
_FIXED_SLOPE = 0.5
# The slower of network and in-node copies rules a ring; near a tie both are felt.
_RING_NORM = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the estimation engine predicts for each row, in seconds; None where it was not asked.

    `compute_s` is one micro-batch on a rank, the update included; `sync_s` is a step's whole
    synchronisation as if nothing overlapped it, 0 on one rank.
    """

    compute_s: ArrayLike | None = None
    sync_s: ArrayLike | None = None

    def columns(self, rows: int) -> tuple[Array | None, Array | None]:
        """Both as arrays, checked against the number of rows."""
        return (
            _seconds("compute_s", self.compute_s, rows, positive=True),
            _seconds("sync_s", self.sync_s, rows, positive=False),
        )


def _seconds(name: str, values: ArrayLike | None, rows: int, *, positive: bool) -> Array | None:
    if values is None:
        return None
    seconds = np.asarray(values, dtype=float)
    if seconds.shape != (rows,):
        raise WorkloadError(f"{name} has {seconds.size} values for {rows} rows; give one for each")
    if not np.isfinite(seconds).all() or (seconds < 0).any() or (positive and (seconds == 0).any()):
        raise WorkloadError(f"{name} must be finite and not negative; leave it out if unknown")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where the law is centred: seconds of compute at a batch size."""

    compute_s: float
    batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LawValues:
    """Logarithms of step times, their derivatives, and how much of the step synchronisation rules.

    `log_compute` is that of one micro-batch with its stragglers, `log_sync` of a step's whole
    synchronisation, -inf on one rank. `jacobian` is d log(step) / d log(parameter), (rows,
    parameters); `sync_share` is d log(step) / d log(synchronisation).
    """

    log_step: Array
    log_compute: Array
    log_sync: Array
    jacobian: Array
    sync_share: Array


def log_step(
    log_parameters: Array, rows: Array, reference: Reference, parts: Parts | None = None
) -> LawValues:
    """The law at rows of (ranks, nodes, batch, micro-batches, most devices on one node)."""
    compute_s, sync_s = (parts or Parts()).columns(len(rows))
    if len(rows) == 1 and compute_s is not None and sync_s is not None:
        one = log_step_of_parts(
            log_parameters.tolist(),
            rows[0].tolist(),
            reference.batch,
            float(compute_s[0]),
            float(sync_s[0]),
        )
        return LawValues(**{name: np.array([value]) for name, value in one._asdict().items()})
    values = dict(zip(PARAMETERS, np.exp(log_parameters), strict=True))
    log_compute, d_compute = _compute(values, rows, reference, compute_s)
    _straggling(values, rows, log_compute, d_compute)
    log_sync, d_sync = _sync(values, rows, reference, sync_s)
    # exposed = compute ⊕ synchronisation
    power = 1 + values["overlap"]
    exposed, share = _norm(log_compute, log_sync, power)
    d_exposed = (1 - share)[:, None] * d_compute + share[:, None] * d_sync
    finite_sync = np.where(share > 0, log_sync, 0.0)
    mean_log = share * finite_sync + (1 - share) * log_compute
    d_exposed[:, _AT["overlap"]] += values["overlap"] / power * (mean_log - exposed)
    # step = (micro-batches − 1)·compute + exposed
    with np.errstate(divide="ignore"):
        earlier = np.log(rows[:, ACCUMULATION] - 1) + log_compute
    step, last = _norm(earlier, exposed, 1.0)
    jacobian = (1 - last)[:, None] * d_compute + last[:, None] * d_exposed
    return LawValues(
        log_step=step,
        log_compute=log_compute,
        log_sync=log_sync,
        jacobian=jacobian,
        sync_share=last * share,
    )


def _norm(first: Array, second: Array, power: float) -> tuple[Array, Array]:
    """log((e^(first·power) + e^(second·power))^(1/power)) and the second's share of it."""
    total = np.logaddexp(power * first, power * second) / power
    return total, np.exp(power * (second - np.where(np.isneginf(total), 0.0, total)))


def _compute(
    values: dict[str, float], rows: Array, reference: Reference, compute_s: Array | None
) -> tuple[Array, Array]:
    """Logarithm of one micro-batch's compute, and its derivatives."""
    alone = rows[:, RANKS] == 1
    slopes = _slopes(len(rows), compute=1.0)
    growth = np.log(rows[:, BATCH] / reference.batch)
    if compute_s is not None:
        slopes[:, _AT["batch_power"]] = values["batch_power"] * growth
        slopes[:, _AT["alone"]] = alone
        logs = np.log(values["compute"] * compute_s)
        logs += (values["batch_power"] - 1) * growth + np.log(values["alone"]) * alone
        return logs, slopes
    log_scale = np.log(values["compute"] * reference.compute_s)
    odds = np.log(values["fixed_odds"]) - _FIXED_SLOPE * (log_scale - np.log(_TYPICAL_COMPUTE_S))
    log_fixed, log_growing = -np.logaddexp(0, -odds), -np.logaddexp(0, odds)
    fixed_share = np.exp(log_fixed)
    fixed = log_fixed + np.log(values["alone"]) * alone
    growing = log_growing + values["batch_power"] * growth
    power = 1 + values["knee"]
    both, share = _norm(fixed, growing, power)
    d_odds = (1 - share) * (1 - fixed_share) - share * fixed_share
    slopes[:, _AT["compute"]] -= _FIXED_SLOPE * d_odds
    slopes[:, _AT["fixed_odds"]] = d_odds
    slopes[:, _AT["alone"]] = (1 - share) * alone
    slopes[:, _AT["batch_power"]] = share * values["batch_power"] * growth
    mean_log = share * growing + (1 - share) * fixed
    slopes[:, _AT["knee"]] = values["knee"] / power * (mean_log - both)
    return log_scale + both, slopes


def _straggling(values: dict[str, float], rows: Array, logs: Array, slopes: Array) -> None:
    """Add what many ranks cost compute: the slowest of them, and neighbours in a node."""
    for name, feature in (
        ("spread", expected_largest(rows[:, RANKS])),
        ("crowding", 1 - 1 / rows[:, LARGEST_NODE]),
    ):
        extra = values[name] * feature
        logs += np.log1p(extra)
        slopes[:, _AT[name]] = extra / (1 + extra)


def expected_largest(count: Array) -> Array:
    """Expected largest of `count` standard normal draws, 0 for one (Blom, 1958)."""
    from scipy.special import ndtri

    return np.asarray(np.where(count > 1, ndtri((count - 0.375) / (count + 0.25)), 0.0))


def _sync(
    values: dict[str, float], rows: Array, reference: Reference, sync_s: Array | None
) -> tuple[Array, Array]:
    """Logarithm of a step's synchronisation, -inf on one rank, and its derivatives."""
    nodes = rows[:, NODES]
    several = nodes > 1
    more_nodes = np.maximum(nodes - 2, 0) * values["node_growth"]
    d_network = _slopes(len(rows), across=1.0, two_nodes=nodes == 2)
    d_network[:, _AT["node_growth"]] = more_nodes / (1 + more_nodes)
    network = np.log(values["across"]) + np.log(values["two_nodes"]) * (nodes == 2)
    network += np.log1p(more_nodes)
    d_inside = _slopes(len(rows), within=1.0)
    inside = np.full(len(rows), np.log(values["within"]))
    if sync_s is not None:
        with np.errstate(divide="ignore"):
            seconds = np.log(np.where(rows[:, RANKS] > 1, sync_s, 0.0))
        corrected = seconds + np.where(several, network, inside)
        return corrected, np.where(several[:, None], d_network, d_inside)
    log_scale = np.log(values["compute"] * reference.compute_s)
    latency, d_latency = _rank_latency(values, rows)
    beyond = np.maximum(rows[:, LARGEST_NODE] - 2, 0)
    crowd = values["sharing"] * beyond / (1 + beyond)
    d_inside[:, _AT["sharing"]] = crowd / (1 + crowd)
    inside = np.where(rows[:, LARGEST_NODE] > 1, inside + np.log1p(crowd), -np.inf)
    rate, share = _norm(np.where(several, network, -np.inf), inside, _RING_NORM)
    with np.errstate(divide="ignore"):
        ring = rate + np.log(2 * (1 - 1 / rows[:, RANKS]))
    sync, late = _norm(ring, latency, 1.0)
    d_rate = (1 - share)[:, None] * d_network + share[:, None] * d_inside
    slopes = (1 - late)[:, None] * d_rate + late[:, None] * d_latency
    slopes[:, _AT["compute"]] = 1.0
    return log_scale + sync, slopes


def _rank_latency(values: dict[str, float], rows: Array) -> tuple[Array, Array]:
    """Latency of the ring's further ranks, as a part of what two ranks need."""
    several = rows[:, NODES] > 1
    link = np.where(several, np.log(values["across"]), np.log(values["within"]))
    with np.errstate(divide="ignore"):
        further = np.log(np.maximum(rows[:, RANKS] - 2, 0))
    slopes = _slopes(len(rows), rank_latency=1.0, across=several, within=~several)
    return np.log(values["rank_latency"]) + link + further, slopes


def _slopes(rows: int, **columns: ArrayLike) -> Array:
    """Derivatives that are zero but for the named parameters."""
    slopes = np.zeros((rows, len(PARAMETERS)))
    for name, column in columns.items():
        slopes[:, _AT[name]] = column
    return slopes
