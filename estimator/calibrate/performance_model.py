"""Model the time of a data-parallel step by few parameters, with derivatives and priors.

WEAK_PRIORS are weakly informative: the medians and standard deviations of fits to whole tables of
data-parallel training (Pollux's T4 cluster, the same jobs on two other GPUs), widened since those
are few.

compute = C·(fixed share ⊕ proportional share·(batch / reference)^exponent), times the jitter of
the slowest rank and the contention of ranks on one node; synchronisation = C·ring(ranks)·
(inter-node ⊕ intra-node) + latency per rank; step = (micro-batches − 1)·compute + (compute ⊕
synchronisation) + stall, that of the input pipeline or the host, the same at every batch. ⊕ is a
p-norm, (x^p + y^p)^(1/p), as in Pollux (Qiao et al., OSDI 2021): a sum for p = 1, the larger of
both for p → ∞.

All of it is in logarithms, so that every partial derivative is a share between 0 and 1. A single
row is computed in plain floats, ten times as fast as arrays of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Self

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
from estimator.errors import WorkloadError

Array = NDArray[np.float64]

# The parameters of `performance_model`, all positive; times are relative to compute.
PARAMETERS = (
    "compute",  # factor on compute
    "fixed_odds",  # odds of the fixed share of compute: launches, small kernels
    "knee",  # p − 1 of the norm of fixed and batch-proportional compute
    "batch_exponent",  # exponent of the batch in the latter
    "single_rank",  # factor on compute without other ranks
    "inter_node",  # time of a ring's network links
    "intra_node",  # time of a ring's links inside a node
    "link_contention",  # slowdown of the latter by many ranks on a node
    "two_nodes",  # factor on inter_node for exactly two nodes
    "node_growth",  # growth of inter_node with each node beyond two
    "rank_latency",  # latency of each rank beyond two, as a share of the link's time
    "jitter",  # standard deviation of compute between ranks
    "contention",  # slowdown of compute by other ranks on the node
    "overlap",  # p − 1 of the norm of compute and synchronisation
    "stall",  # of each step, as a share of compute at the mean batch
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalPrior:
    """exp(N(log(median), sigma²)): `sigma` 0.1 is about 10 %."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0 and 0 < self.sigma < math.inf):
            raise WorkloadError(
                f"a prior needs a positive median and sigma, found {self.median} and {self.sigma}; "
                "give the median in natural units and sigma of its logarithm"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """One prior for each parameter of the performance model."""

    by_name: Mapping[str, LogNormalPrior]

    def __post_init__(self) -> None:
        if set(self.by_name) != set(PARAMETERS):
            wrong = sorted(set(self.by_name) ^ set(PARAMETERS))
            raise WorkloadError(f"priors name each parameter of the model once; correct {wrong}")
        object.__setattr__(self, "by_name", MappingProxyType(dict(self.by_name)))

    def updated(self, **priors: LogNormalPrior) -> Self:
        """The same with some replaced."""
        return replace(self, by_name={**self.by_name, **priors})

    def log_medians(self) -> Array:
        """Logarithms of the medians, in the order of PARAMETERS."""
        return np.log([self.by_name[name].median for name in PARAMETERS])

    def sigmas(self) -> Array:
        """Standard deviations of the logarithms, in the order of PARAMETERS."""
        return np.array([self.by_name[name].sigma for name in PARAMETERS])


# `compute` multiplies an estimate from the rows themselves, hence a prior that is almost flat.
WEAK_PRIORS = Priors(
    by_name={
        "compute": LogNormalPrior(median=1.0, sigma=3.0),
        "fixed_odds": LogNormalPrior(median=0.65, sigma=1.4),
        "knee": LogNormalPrior(median=1.0, sigma=0.7),
        "batch_exponent": LogNormalPrior(median=1.0, sigma=0.15),
        "single_rank": LogNormalPrior(median=1.0, sigma=0.25),
        "inter_node": LogNormalPrior(median=0.28, sigma=1.1),
        "intra_node": LogNormalPrior(median=0.2, sigma=1.1),
        "link_contention": LogNormalPrior(median=0.3, sigma=0.8),
        "two_nodes": LogNormalPrior(median=1.28, sigma=0.28),
        "node_growth": LogNormalPrior(median=0.007, sigma=1.0),
        "rank_latency": LogNormalPrior(median=0.015, sigma=1.2),
        "jitter": LogNormalPrior(median=0.03, sigma=0.8),
        "contention": LogNormalPrior(median=0.05, sigma=1.0),
        "overlap": LogNormalPrior(median=1.4, sigma=0.45),
        "stall": LogNormalPrior(median=0.01, sigma=1.5),
    }
)

# Given the engine's seconds the same parameters are corrections to these, with median 1 (none) or
# nearly 0 (none on top).
COMPUTE_CORRECTIONS = {
    "compute": LogNormalPrior(median=1.0, sigma=0.3),
    "batch_exponent": LogNormalPrior(median=1.0, sigma=0.08),
    "single_rank": LogNormalPrior(median=1.0, sigma=0.08),
    "jitter": LogNormalPrior(median=0.01, sigma=1.0),
    "contention": LogNormalPrior(median=0.01, sigma=1.0),
}
SYNC_CORRECTIONS = {
    "inter_node": LogNormalPrior(median=1.0, sigma=0.5),
    "intra_node": LogNormalPrior(median=1.0, sigma=0.5),
    "two_nodes": LogNormalPrior(median=1.0, sigma=0.15),
    "node_growth": LogNormalPrior(median=0.003, sigma=1.0),
}

ENGINE_PRIORS = WEAK_PRIORS.updated(**COMPUTE_CORRECTIONS, **SYNC_CORRECTIONS)

RANKS, NODES, BATCH, ACCUMULATION, LARGEST_NODE = range(5)
_AT = {name: column for column, name in enumerate(PARAMETERS)}
# d log(·) / d log(parameter) by parameter; 0 for those that are left out.
Derivatives = dict[str, Values]

# The longer the compute, the smaller the share of its fixed cost (launches, small kernels): the
# odds of the fixed share fall with the square root of compute, and are the prior's at this length.
_TYPICAL_COMPUTE_S = 0.25
_FIXED_ODDS_EXPONENT = 0.5
# A ring runs at the rate of its slower link, inter-node or intra-node; with two links that are
# nearly equal it is slower than either.
_RING_NORM = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineTimes:
    """What the estimation engine predicts for each row, in seconds; None where it was not asked.

    `compute_s` is one micro-batch on a rank, the update included; `sync_s` is a step's whole
    synchronisation as if nothing overlapped it, 0 on one rank; `step_s` is the whole step.
    """

    compute_s: Array | None = None
    sync_s: Array | None = None
    step_s: Array | None = None

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
    compute_s, sync_s = (engine_times or EngineTimes()).columns(len(rows))
    logs = dict(zip(PARAMETERS, log_parameters.tolist(), strict=True))
    if len(rows) == 1:
        known = (None if seconds is None else seconds.item() for seconds in (compute_s, sync_s))
        return _evaluate(logs, _Rows(*rows[0].tolist()), reference, *known)
    return _evaluate(logs, _Rows(*rows.T), reference, compute_s, sync_s)


def _evaluate(
    logs: Mapping[str, float],
    rows: _Rows,
    reference: ComputeReference,
    compute_s: Values | None,
    sync_s: Values | None,
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
    exponent = exp(logs["batch_exponent"])
    log_batch = log(rows.batch / reference.batch)
    if compute_s is not None:
        value = log(compute_s) + logs["compute"] + (exponent - 1) * log_batch
        value = value + logs["single_rank"] * single
        derivatives: Derivatives = {
            "compute": 1.0,
            "batch_exponent": exponent * log_batch,
            "single_rank": single,
        }
    else:
        log_scale = logs["compute"] + log(reference.compute_s)
        odds = logs["fixed_odds"] - _FIXED_ODDS_EXPONENT * (log_scale - log(_TYPICAL_COMPUTE_S))
        log_fixed, log_proportional = -logaddexp(0.0, -odds), -logaddexp(0.0, odds)
        fixed = log_fixed + logs["single_rank"] * single
        proportional = log_proportional + exponent * log_batch
        knee = exp(logs["knee"])
        both, share = _norm(fixed, proportional, 1 + knee)
        # (1 − share)·(1 − fixed share) − share·(fixed share)
        d_odds = 1 - exp(log_fixed) - share
        derivatives = {
            "compute": 1 - _FIXED_ODDS_EXPONENT * d_odds,
            "fixed_odds": d_odds,
            "single_rank": (1 - share) * single,
            "batch_exponent": share * exponent * log_batch,
            "knee": knee / (1 + knee) * (_mean(fixed, proportional, share) - both),
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
    growth = maximum(rows.nodes - 2, 0.0) * exp(logs["node_growth"])
    inter_node = logs["inter_node"] + logs["two_nodes"] * two + log1p(growth)
    d_inter_node: Derivatives = {"two_nodes": two, "node_growth": growth / (1 + growth)}
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
    contention = exp(logs["link_contention"]) * neighbours / (1 + neighbours)
    shared = logs["intra_node"] + log1p(contention)
    intra_node = where(rows.most_on_node > 1, shared, -math.inf)
    d_intra_node: Derivatives = {
        "intra_node": 1.0,
        "link_contention": contention / (1 + contention),
    }
    slower = where(across, logs["inter_node"], logs["intra_node"])
    latency = logs["rank_latency"] + slower + log(maximum(rows.ranks - 2, 0.0))
    ring, share = _norm(where(across, inter_node, -math.inf), intra_node, _RING_NORM)
    sync, latency_share = _norm(ring + log(2 * (1 - 1 / rows.ranks)), latency, 1.0)
    d_ring = _norm_derivatives(d_inter_node | {"inter_node": 1.0}, d_intra_node, share)
    d_latency = d_slower | {"rank_latency": 1.0}
    derivatives = _norm_derivatives(d_ring, d_latency, latency_share) | {"compute": 1.0}
    return logs["compute"] + log(reference.compute_s) + sync, derivatives
