"""Give the log-normal priors of the performance model's parameters.

WEAK_PRIORS are weakly informative: the medians and standard deviations of fits to whole tables of
data-parallel training (Pollux's T4 cluster, the same jobs on two other GPUs), widened since those
are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

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

# Parameters that transfer with a job from one kind of device to another, with the standard
# deviation between two kinds: those of overlap, jitter and latency. The others belong to the device
# and its network.
_TRANSFERRED_SIGMA = {
    "knee": 0.5,
    "rank_latency": 0.7,
    "jitter": 0.5,
    "node_growth": 0.7,
    "overlap": 0.3,
}

# How much slower two nodes are than more differs most between networks: its prior on a new one.
_NEW_NETWORK = {"two_nodes": LogNormalPrior(median=1.15, sigma=0.28)}


def transferred(log_parameters: Array, sigmas: Array, *, target: Priors = WEAK_PRIORS) -> Priors:
    """Priors of a job on a new kind of device, from its fitted parameters on another.

    `sigmas` are the standard deviations of `log_parameters`; `target` are the priors of any job on
    the new device.
    """
    priors = dict(_NEW_NETWORK)
    for name, between in _TRANSFERRED_SIGMA.items():
        place = PARAMETERS.index(name)
        sigma = min(math.hypot(float(sigmas[place]), between), WEAK_PRIORS.by_name[name].sigma)
        priors[name] = LogNormalPrior(median=math.exp(log_parameters[place]), sigma=sigma)
    return target.updated(**priors)
