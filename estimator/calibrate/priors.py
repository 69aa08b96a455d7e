"""Say what is believed of a job's step time before it is seen: one log-normal prior per parameter.

The centres and widths of NEUTRAL are the spread of fits to whole tables of data-parallel training
(Pollux's T4 cluster, the same jobs on two other GPUs), made wider, since those are few.
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

# What each parameter multiplies is said in `step_law`.
PARAMETERS = (
    "compute",
    "fixed_odds",
    "knee",
    "batch_power",
    "alone",
    "across",
    "within",
    "sharing",
    "two_nodes",
    "node_growth",
    "rank_latency",
    "spread",
    "crowding",
    "overlap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPrior:
    """A parameter believed to be exp(N(log(centre), width)): `width` 0.1 is about 10 %."""

    centre: float
    width: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.centre) and self.centre > 0 and 0 < self.width < math.inf):
            raise WorkloadError(
                f"a prior needs a positive centre and width, found {self.centre} and {self.width}; "
                "give both in natural units"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """One prior for each parameter of the step law."""

    by_name: Mapping[str, LogPrior]

    def __post_init__(self) -> None:
        if set(self.by_name) != set(PARAMETERS):
            wrong = sorted(set(self.by_name) ^ set(PARAMETERS))
            raise WorkloadError(f"priors name each parameter of the law once; correct {wrong}")
        object.__setattr__(self, "by_name", MappingProxyType(dict(self.by_name)))

    def centred(self, **priors: LogPrior) -> Self:
        """The same with some replaced."""
        return replace(self, by_name={**self.by_name, **priors})

    def log_centres(self) -> Array:
        """Logarithms of the centres, in the order of PARAMETERS."""
        return np.log([self.by_name[name].centre for name in PARAMETERS])

    def widths(self) -> Array:
        """Widths, in the order of PARAMETERS."""
        return np.array([self.by_name[name].width for name in PARAMETERS])


# `compute` is a multiple of what the rows themselves suggest: hardly a belief.
NEUTRAL = Priors(
    by_name={
        "compute": LogPrior(centre=1.0, width=3.0),
        "fixed_odds": LogPrior(centre=0.65, width=1.4),
        "knee": LogPrior(centre=1.0, width=0.7),
        "batch_power": LogPrior(centre=1.0, width=0.15),
        "alone": LogPrior(centre=1.0, width=0.25),
        "across": LogPrior(centre=0.28, width=1.1),
        "within": LogPrior(centre=0.2, width=1.1),
        "sharing": LogPrior(centre=0.3, width=0.8),
        "two_nodes": LogPrior(centre=1.28, width=0.28),
        "node_growth": LogPrior(centre=0.007, width=1.0),
        "rank_latency": LogPrior(centre=0.015, width=1.2),
        "spread": LogPrior(centre=0.03, width=0.8),
        "crowding": LogPrior(centre=0.05, width=1.0),
        "overlap": LogPrior(centre=1.4, width=0.45),
    }
)

# Beside the engine's own seconds the same parameters are corrections, centred on none.
COMPUTE_KNOWN = {
    "compute": LogPrior(centre=1.0, width=0.3),
    "batch_power": LogPrior(centre=1.0, width=0.08),
    "alone": LogPrior(centre=1.0, width=0.08),
    "spread": LogPrior(centre=0.01, width=1.0),
    "crowding": LogPrior(centre=0.01, width=1.0),
}
SYNC_KNOWN = {
    "across": LogPrior(centre=1.0, width=0.5),
    "within": LogPrior(centre=1.0, width=0.5),
    "two_nodes": LogPrior(centre=1.0, width=0.15),
    "node_growth": LogPrior(centre=0.003, width=1.0),
}

# What a job keeps on another kind of device: how its communication overlaps, how its ranks spread.
# The rest is the device's and its network's own.
_KEPT = {
    "knee": 0.5,
    "rank_latency": 0.7,
    "spread": 0.5,
    "node_growth": 0.7,
    "overlap": 0.3,
}

# How much slower two nodes are than more is known least of a network nobody has measured.
_NEW_NETWORK = {"two_nodes": LogPrior(centre=1.15, width=0.28)}


def carried_over(log_parameters: Array, spreads: Array, *, new: Priors = NEUTRAL) -> Priors:
    """Beliefs about a job on a new kind of device, from its fitted parameters on another.

    `spreads` are standard deviations of `log_parameters`; `new` is what is believed of any job on
    the new device.
    """
    priors = dict(_NEW_NETWORK)
    for name, between in _KEPT.items():
        place = PARAMETERS.index(name)
        width = min(math.hypot(float(spreads[place]), between), NEUTRAL.by_name[name].width)
        priors[name] = LogPrior(centre=math.exp(log_parameters[place]), width=width)
    return new.centred(**priors)
