"""Say how long a data-parallel step takes, as a law of few parameters with its exact derivatives.

compute = C·(fixed share ⊕ growing share·(batch / reference)^power), more when ranks share a node
and with the slowest of many; synchronisation = C·ring(ranks)·(network ⊕ inside a node) + latency
per rank; step = (micro-batches − 1)·compute + (compute ⊕ synchronisation), where ⊕ is a norm:
(x^g + y^g)^(1/g). All of it in logarithms, so that every derivative is a share between 0 and 1;
of one row in plain floats, which takes a tenth of the time that arrays of one element do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.calibrate.priors import PARAMETERS, Array
from estimator.elementwise import (
    Values,
    exp,
    expected_maximum,
    log,
    log1p,
    logaddexp,
    maximum,
    where,
)
from estimator.errors import WorkloadError

RANKS, NODES, BATCH, ACCUMULATION, LARGEST_NODE = range(5)
_AT = {name: column for column, name in enumerate(PARAMETERS)}
# d log(·) / d log(parameter) of what depends on each row, by parameter; 0 of those left out.
Slopes = dict[str, Values]

# Steps of much compute are less fixed cost (launches, small kernels) than short ones: the odds of
# the fixed share fall with the square root of compute, and are as the prior says at this length.
_TYPICAL_COMPUTE_S = 0.25
_FIXED_SLOPE = 0.5
# The slower of network and in-node copies rules a ring; near a tie both are felt.
_RING_NORM = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What the estimation engine predicts for each row, in seconds; None where it was not asked.

    `compute_s` is one micro-batch on a rank, the update included; `sync_s` is a step's whole
    synchronisation as if nothing overlapped it, 0 on one rank.
    """

    compute_s: Array | None = None
    sync_s: Array | None = None

    def __post_init__(self) -> None:
        compute_s = [] if self.compute_s is None else self.compute_s.tolist()
        sync_s = [] if self.sync_s is None else self.sync_s.tolist()
        if not all(0 < seconds < math.inf for seconds in compute_s):
            raise WorkloadError(f"compute_s must be positive, found {self.compute_s}; correct it")
        if not all(0 <= seconds < math.inf for seconds in sync_s):
            raise WorkloadError(f"sync_s must not be negative, found {self.sync_s}; correct it")

    def columns(self, rows: int) -> tuple[Array | None, Array | None]:
        """Both, checked against the number of rows."""
        for name, seconds in (("compute_s", self.compute_s), ("sync_s", self.sync_s)):
            if seconds is not None and seconds.shape != (rows,):
                raise WorkloadError(
                    f"{name} has {seconds.size} values for {rows} rows; give one for each"
                )
        return self.compute_s, self.sync_s


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


class _Rows(NamedTuple):
    """Columns of all rows, or the numbers of one."""

    ranks: Values
    nodes: Values
    batch: Values
    accumulation: Values
    most_on_node: Values


def log_step(
    log_parameters: Array, rows: Array, reference: Reference, parts: Parts | None = None
) -> LawValues:
    """The law at rows of (ranks, nodes, batch, micro-batches, most devices on one node)."""
    compute_s, sync_s = (parts or Parts()).columns(len(rows))
    logs = dict(zip(PARAMETERS, log_parameters.tolist(), strict=True))
    if len(rows) == 1:
        known = (None if seconds is None else seconds.item() for seconds in (compute_s, sync_s))
        return _law(logs, _Rows(*rows[0].tolist()), reference, *known)
    return _law(logs, _Rows(*rows.T), reference, compute_s, sync_s)


def _law(
    logs: Mapping[str, float],
    rows: _Rows,
    reference: Reference,
    compute_s: Values | None,
    sync_s: Values | None,
) -> LawValues:
    log_compute, d_compute = _compute(logs, rows, reference, compute_s)
    log_sync, d_sync = _sync(logs, rows, reference, sync_s)
    # exposed = compute ⊕ synchronisation
    overlap = exp(logs["overlap"])
    exposed, share = _norm(log_compute, log_sync, 1 + overlap)
    # step = (micro-batches − 1)·compute + exposed
    step, last = _norm(log(rows.accumulation - 1) + log_compute, exposed, 1.0)
    sync_share = last * share
    slopes = _mixed(d_compute, d_sync, sync_share)
    mean_log = _mean(log_compute, log_sync, share)
    slopes["overlap"] = last * (overlap / (1 + overlap) * (mean_log - exposed))
    return LawValues(
        log_step=_column(step),
        log_compute=_column(log_compute),
        log_sync=_column(log_sync),
        jacobian=_jacobian(slopes, step),
        sync_share=_column(sync_share),
    )


def _norm(first: Values, second: Values, power: float) -> tuple[Values, Values]:
    """log((e^(first·power) + e^(second·power))^(1/power)) and the second's share of it."""
    total = logaddexp(power * first, power * second) / power
    return total, exp(power * (second - where(total == -math.inf, 0.0, total)))


def _mean(first: Values, second: Values, share: Values) -> Values:
    """The mean of two logarithms by the second's share, where it may be that of nothing."""
    return share * where(share > 0, second, 0.0) + (1 - share) * first


def _mixed(first: Slopes, second: Slopes, share: Values) -> Slopes:
    """Slopes of a norm by the second's share of it."""
    rest = 1 - share
    mixed = {name: rest * slope for name, slope in first.items()}
    for name, slope in second.items():
        mixed[name] = mixed[name] + share * slope if name in mixed else share * slope
    return mixed


def _column(value: Values) -> Array:
    return value if isinstance(value, np.ndarray) else np.array([value])


def _jacobian(slopes: Slopes, step: Values) -> Array:
    """Slopes as (rows, parameters) beside what they are the slopes of."""
    if not isinstance(step, np.ndarray):
        return np.array([[slopes.get(name, 0.0) for name in PARAMETERS]], dtype=float)
    jacobian = np.zeros((len(step), len(PARAMETERS)))
    for name, slope in slopes.items():
        jacobian[:, _AT[name]] = slope
    return jacobian


def _compute(
    logs: Mapping[str, float], rows: _Rows, reference: Reference, compute_s: Values | None
) -> tuple[Values, Slopes]:
    """Logarithm of one micro-batch's compute with its stragglers, and its derivatives."""
    alone = rows.ranks == 1
    power = exp(logs["batch_power"])
    growth = log(rows.batch / reference.batch)
    if compute_s is not None:
        value = log(compute_s) + logs["compute"] + (power - 1) * growth + logs["alone"] * alone
        slopes: Slopes = {"compute": 1.0, "batch_power": power * growth, "alone": alone}
    else:
        log_scale = logs["compute"] + log(reference.compute_s)
        odds = logs["fixed_odds"] - _FIXED_SLOPE * (log_scale - log(_TYPICAL_COMPUTE_S))
        log_fixed, log_growing = -logaddexp(0.0, -odds), -logaddexp(0.0, odds)
        fixed, growing = log_fixed + logs["alone"] * alone, log_growing + power * growth
        knee = exp(logs["knee"])
        both, share = _norm(fixed, growing, 1 + knee)
        # (1 − share)·(1 − fixed share) − share·(fixed share)
        d_odds = 1 - exp(log_fixed) - share
        slopes = {
            "compute": 1 - _FIXED_SLOPE * d_odds,
            "fixed_odds": d_odds,
            "alone": (1 - share) * alone,
            "batch_power": share * power * growth,
            "knee": knee / (1 + knee) * (_mean(fixed, growing, share) - both),
        }
        value = log_scale + both
    # What many ranks cost compute: the slowest of them, and neighbours in a node.
    slowest = exp(logs["spread"]) * expected_maximum(rows.ranks)
    crowd = exp(logs["crowding"]) * (1 - 1 / rows.most_on_node)
    slopes["spread"] = slowest / (1 + slowest)
    slopes["crowding"] = crowd / (1 + crowd)
    return value + log1p(slowest) + log1p(crowd), slopes


def _sync(
    logs: Mapping[str, float], rows: _Rows, reference: Reference, sync_s: Values | None
) -> tuple[Values, Slopes]:
    """Logarithm of a step's synchronisation, -inf on one rank, and its derivatives."""
    across, two = rows.nodes > 1, rows.nodes == 2
    more = maximum(rows.nodes - 2, 0.0) * exp(logs["node_growth"])
    network = logs["across"] + logs["two_nodes"] * two + log1p(more)
    d_network: Slopes = {"two_nodes": two, "node_growth": more / (1 + more)}
    d_link: Slopes = {"across": where(across, 1.0, 0.0), "within": where(across, 0.0, 1.0)}
    if sync_s is not None:
        seconds = log(where(rows.ranks > 1, sync_s, 0.0))
        return seconds + where(across, network, logs["within"]), d_network | d_link
    # Of a ring, what goes over the network, what stays inside a node, and the latency of the
    # further ranks as a part of what two ranks need.
    beyond = maximum(rows.most_on_node - 2, 0.0)
    crowd = exp(logs["sharing"]) * beyond / (1 + beyond)
    inside = where(rows.most_on_node > 1, logs["within"] + log1p(crowd), -math.inf)
    d_inside: Slopes = {"within": 1.0, "sharing": crowd / (1 + crowd)}
    link = where(across, logs["across"], logs["within"])
    latency = logs["rank_latency"] + link + log(maximum(rows.ranks - 2, 0.0))
    rate, share = _norm(where(across, network, -math.inf), inside, _RING_NORM)
    sync, late = _norm(rate + log(2 * (1 - 1 / rows.ranks)), latency, 1.0)
    d_rate = _mixed(d_network | {"across": 1.0}, d_inside, share)
    slopes = _mixed(d_rate, d_link | {"rank_latency": 1.0}, late) | {"compute": 1.0}
    return logs["compute"] + log(reference.compute_s) + sync, slopes
