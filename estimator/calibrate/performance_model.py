"""Model the time of a data-parallel step by few parameters, with derivatives and priors.

WEAK_PRIORS are weakly informative: the medians and standard deviations of fits to whole tables of
data-parallel training (Pollux's T4 cluster, the same jobs on two other GPUs), widened since those
are few.

compute = C·(fixed share ⊕ proportional share·batch / reference), times the jitter of the slowest
rank and the contention of ranks on one node; synchronisation = C·ring(ranks)·(inter-node ⊕
intra-node) + latency per rank; step = (micro-batches − 1)·compute + (compute ⊕ synchronisation) +
stall, that of the input pipeline or the host, the same at every batch. ⊕ is a p-norm,
(x^p + y^p)^(1/p), as in Pollux (Qiao et al., OSDI 2021): a sum for p = 1, the larger of both for
p → ∞.

All of it is in logarithms, so that every partial derivative is a share between 0 and 1. A single
row is computed in plain floats, ten times as fast as arrays of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

Array = NDArray[np.float64]


class LogNormalPrior(NamedTuple):
    """exp(N(log(median), sigma²)): `sigma` 0.1 is about 10 %."""

    median: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Priors:
    """One prior for each parameter of the performance model."""

    by_name: Mapping[str, LogNormalPrior]

    def updated(self, **priors: LogNormalPrior) -> Priors:
        """The same with some replaced."""
        return Priors({**self.by_name, **priors})

    def log_medians(self) -> Array:
        """Logarithms of the medians, in the order of PARAMETERS."""
        return np.log([self.by_name[name].median for name in PARAMETERS])

    def sigmas(self) -> Array:
        """Standard deviations of the logarithms, in the order of PARAMETERS."""
        return np.array([self.by_name[name].sigma for name in PARAMETERS])


# The parameters, all positive; times are relative to compute.
WEAK_PRIORS = Priors(
    {
        # Factor on compute: it multiplies an estimate from the rows themselves, hence almost flat.
        "compute": LogNormalPrior(1.0, 3.0),
        # Odds of the fixed share of compute: launches, small kernels.
        "fixed_odds": LogNormalPrior(0.65, 1.4),
        # Factor on compute without other ranks.
        "single_rank": LogNormalPrior(1.0, 0.25),
        # Time of a ring's network links, and of those inside a node.
        "inter_node": LogNormalPrior(0.28, 1.1),
        "intra_node": LogNormalPrior(0.2, 1.1),
        # Factor on inter_node for exactly two nodes.
        "two_nodes": LogNormalPrior(1.28, 0.28),
        # Latency of each rank beyond two, as a share of the link's time.
        "rank_latency": LogNormalPrior(0.015, 1.2),
        # Standard deviation of compute between ranks, and its slowdown by others on the node.
        "jitter": LogNormalPrior(0.03, 0.8),
        "contention": LogNormalPrior(0.05, 1.0),
        # p − 1 of the norm of compute and synchronisation.
        "overlap": LogNormalPrior(1.4, 0.45),
        # Of each step, as a share of compute at the mean batch.
        "stall": LogNormalPrior(0.01, 1.5),
    }
)
PARAMETERS = tuple(WEAK_PRIORS.by_name)
# Given the engine's seconds the same parameters are corrections to these, with median 1 (none) or
# nearly 0 (none on top).
ENGINE_PRIORS = WEAK_PRIORS.updated(
    compute=LogNormalPrior(1.0, 0.3),
    single_rank=LogNormalPrior(1.0, 0.08),
    jitter=LogNormalPrior(0.01, 1.0),
    contention=LogNormalPrior(0.01, 1.0),
    inter_node=LogNormalPrior(1.0, 0.5),
    intra_node=LogNormalPrior(1.0, 0.5),
    two_nodes=LogNormalPrior(1.0, 0.15),
)

RANKS, NODES, BATCH, ACCUMULATION, LARGEST_NODE = range(5)
_AT = {name: column for column, name in enumerate(PARAMETERS)}
# d log(·) / d log(parameter) by parameter; 0 for those that are left out.
Derivatives = dict[str, Values]

# The longer the compute, the smaller the share of its fixed cost (launches, small kernels): the
# odds of the fixed share fall with the square root of compute, and are the prior's at this length.
_TYPICAL_COMPUTE_S = 0.25
_FIXED_ODDS_EXPONENT = 0.5
# Launches are hidden by the work before them, but not all of them.
_COMPUTE_NORM = 2.0
# A ring runs at the rate of its slower link, inter-node or intra-node; with two links that are
# nearly equal it is slower than either.
_RING_NORM = 3.0
# By how much more many ranks of a node slow its links than two do.
_LINK_CONTENTION = 0.3


class EngineTimes(NamedTuple):
    """What the estimation engine predicts for each row, in seconds.

    `compute_s` is one micro-batch on a rank, the update included; `sync_s` is a step's whole
    synchronisation as if nothing overlapped it, 0 on one rank; `step_s` is the whole step.
    """

    compute_s: Array
    sync_s: Array
    step_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeReference:
    """The point that the model is relative to: seconds of compute at a batch size."""

    compute_s: float
    batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelValues:
    """Logarithms of step times, their derivatives, and the share of synchronisation in each step.

    `log_compute` is that of one micro-batch with its stragglers, `log_sync` of a step's whole
    synchronisation, -inf on one rank. `jacobian` is d log(step) / d log(parameter), (rows,
    parameters); `sync_share` is d log(step) / d log(synchronisation), its elasticity.
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


def evaluate_model(
    log_parameters: Array,
    rows: Array,
    reference: ComputeReference,
    engine_times: EngineTimes | None = None,
) -> ModelValues:
    """The model at rows of (ranks, nodes, batch, micro-batches, most devices on one node)."""
    logs = dict(zip(PARAMETERS, log_parameters.tolist(), strict=True))
    known = () if engine_times is None else (engine_times.compute_s, engine_times.sync_s)
    if len(rows) == 1:
        one = _Rows(*rows[0].tolist())
        return _evaluate(logs, one, reference, *(seconds.item() for seconds in known))
    return _evaluate(logs, _Rows(*rows.T), reference, *known)


def _evaluate(
    logs: Mapping[str, float],
    rows: _Rows,
    reference: ComputeReference,
    compute_s: Values | None = None,
    sync_s: Values | None = None,
) -> ModelValues:
    log_compute, d_compute = _compute(logs, rows, reference, compute_s)
    log_sync, d_sync = _sync(logs, rows, reference, sync_s)
    # overlapped = compute ⊕ synchronisation
    overlap = exp(logs["overlap"])
    overlapped, share = _norm(log_compute, log_sync, 1 + overlap)
    # busy = (micro-batches − 1)·compute + overlapped
    busy, last_share = _norm(log(rows.accumulation - 1) + log_compute, overlapped, 1.0)
    derivatives = _norm_derivatives(d_compute, d_sync, last_share * share)
    mean_log = _mean(log_compute, log_sync, share)
    derivatives["overlap"] = last_share * (overlap / (1 + overlap) * (mean_log - overlapped))
    # step = busy + stall
    step, stall_share = _norm(busy, logs["stall"] + log(reference.compute_s), 1.0)
    derivatives = _norm_derivatives(derivatives, {"stall": 1.0}, stall_share)
    sync_share = (1 - stall_share) * last_share * share
    return ModelValues(
        log_step=_column(step),
        log_compute=_column(log_compute),
        log_sync=_column(log_sync),
        jacobian=_jacobian(derivatives, step),
        sync_share=_column(sync_share),
    )


def _norm(first: Values, second: Values, p: float) -> tuple[Values, Values]:
    """log((e^(first·p) + e^(second·p))^(1/p)), and its derivative by the second."""
    total = logaddexp(p * first, p * second) / p
    return total, exp(p * (second - where(total == -math.inf, 0.0, total)))


def _mean(first: Values, second: Values, share: Values) -> Values:
    """The mean of two logarithms weighted by the second's share; the second may be log(0)."""
    return share * where(share > 0, second, 0.0) + (1 - share) * first


def _norm_derivatives(first: Derivatives, second: Derivatives, share: Values) -> Derivatives:
    """Derivatives of a p-norm from those of its two terms, by the chain rule."""
    rest = 1 - share
    derivatives = {name: rest * value for name, value in first.items()}
    for name, value in second.items():
        derivatives[name] = (
            derivatives[name] + share * value if name in derivatives else share * value
        )
    return derivatives


def _column(value: Values) -> Array:
    return value if isinstance(value, np.ndarray) else np.array([value])


def _jacobian(derivatives: Derivatives, step: Values) -> Array:
    """Derivatives of `step` as an array (rows, parameters)."""
    if not isinstance(step, np.ndarray):
        return np.array([[derivatives.get(name, 0.0) for name in PARAMETERS]], dtype=float)
    jacobian = np.zeros((len(step), len(PARAMETERS)))
    for name, value in derivatives.items():
        jacobian[:, _AT[name]] = value
    return jacobian


def _compute(
    logs: Mapping[str, float], rows: _Rows, reference: ComputeReference, compute_s: Values | None
) -> tuple[Values, Derivatives]:
    """Logarithm of one micro-batch's compute on the slowest rank, and its derivatives."""
    single = rows.ranks == 1
    if compute_s is not None:
        value = log(compute_s) + logs["compute"] + logs["single_rank"] * single
        derivatives: Derivatives = {"compute": 1.0, "single_rank": single}
    else:
        log_scale = logs["compute"] + log(reference.compute_s)
        odds = logs["fixed_odds"] - _FIXED_ODDS_EXPONENT * (log_scale - log(_TYPICAL_COMPUTE_S))
        log_fixed, log_proportional = -logaddexp(0.0, -odds), -logaddexp(0.0, odds)
        fixed = log_fixed + logs["single_rank"] * single
        both, share = _norm(
            fixed, log_proportional + log(rows.batch / reference.batch), _COMPUTE_NORM
        )
        # (1 − share)·(1 − fixed share) − share·(fixed share)
        d_odds = 1 - exp(log_fixed) - share
        derivatives = {
            "compute": 1 - _FIXED_ODDS_EXPONENT * d_odds,
            "fixed_odds": d_odds,
            "single_rank": (1 - share) * single,
        }
        value = log_scale + both
    # Several ranks slow compute: a step waits for the slowest, and ranks on one node share its
    # memory bandwidth and host.
    jitter = exp(logs["jitter"]) * expected_maximum(rows.ranks)
    contention = exp(logs["contention"]) * (1 - 1 / rows.most_on_node)
    derivatives["jitter"] = jitter / (1 + jitter)
    derivatives["contention"] = contention / (1 + contention)
    return value + log1p(jitter) + log1p(contention), derivatives


def _sync(
    logs: Mapping[str, float], rows: _Rows, reference: ComputeReference, sync_s: Values | None
) -> tuple[Values, Derivatives]:
    """Logarithm of a step's gradient synchronisation, -inf on one rank, and its derivatives."""
    across, two = rows.nodes > 1, rows.nodes == 2
    inter_node = logs["inter_node"] + logs["two_nodes"] * two
    d_inter_node: Derivatives = {"two_nodes": two}
    d_slower: Derivatives = {
        "inter_node": where(across, 1.0, 0.0),
        "intra_node": where(across, 0.0, 1.0),
    }
    if sync_s is not None:
        seconds = log(where(rows.ranks > 1, sync_s, 0.0))
        return seconds + where(across, inter_node, logs["intra_node"]), d_inter_node | d_slower
    # The ring's bandwidth term, over the network and inside a node, and its latency term: that of
    # the third rank and further ones, as a share of the time that two ranks need.
    neighbours = maximum(rows.most_on_node - 2, 0.0)
    shared = logs["intra_node"] + log1p(_LINK_CONTENTION * neighbours / (1 + neighbours))
    intra_node = where(rows.most_on_node > 1, shared, -math.inf)
    slower = where(across, logs["inter_node"], logs["intra_node"])
    latency = logs["rank_latency"] + slower + log(maximum(rows.ranks - 2, 0.0))
    ring, share = _norm(where(across, inter_node, -math.inf), intra_node, _RING_NORM)
    sync, latency_share = _norm(ring + log(2 * (1 - 1 / rows.ranks)), latency, 1.0)
    d_ring = _norm_derivatives(d_inter_node | {"inter_node": 1.0}, {"intra_node": 1.0}, share)
    d_latency = d_slower | {"rank_latency": 1.0}
    derivatives = _norm_derivatives(d_ring, d_latency, latency_share) | {"compute": 1.0}
    return logs["compute"] + log(reference.compute_s) + sync, derivatives
