"""Multipliers that calibration learns and every estimate applies; all 1 until learnt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from estimator.placement.allocation import Allocation
from estimator.workload import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Factors on the physical model's parts, and the relative error that remains after them.

    `relative_error` is one standard deviation of log(measured / predicted); None leaves the
    interval to the profile's own errors. `remark` says in a sentence what to think of the answer.
    """

    compute_ratio: float = 1.0
    update_ratio: float = 1.0
    communication_ratio: float = 1.0
    relative_error: float | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise ValueError(f"Coefficients.{item.name} must be positive, found {value}")


UNCALIBRATED = Coefficients()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuestion:
    """What calibration tells the steps of one cluster apart by.

    `workload` is the name of the graph, `machines` the names of the machine types in order of name,
    joined by "+"; `batch` is samples per rank and micro-batch (the mean where ranks differ, 0 for a
    fixed-batch graph).
    """

    workload: str
    machines: str
    ranks: int
    nodes: int
    most_on_node: int
    batch: float
    accumulation_steps: int
    strategy: Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """What the engine says of a step under some coefficients, in seconds.

    `compute_s` is a micro-batch on the slowest rank, the update included; `sync_s` all of a step's
    communication as if nothing overlapped it.
    """

    question: StepQuestion
    compute_s: float
    sync_s: float
    step_s: float


class Engine(Protocol):
    """Predicts steps of the workload that an estimate is asked for.

    Engines with equal keys answer alike.
    """

    @property
    def key(self) -> Hashable:
        """What the answers depend on: the graph, the cluster and the profile, by identity."""
        ...

    def predict(
        self,
        allocation: str | Allocation,
        *,
        batch_per_gpu: int | None,
        accumulation_steps: int,
        strategy: str | Strategy,
        coefficients: Coefficients,
    ) -> PredictedStep:
        """One step; raises EstimatorError."""
        ...


class Calibration(Protocol):
    """What `estimate` needs of a calibrator."""

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: Engine,
    ) -> list[Coefficients]:
        """The factors for each step, on an allocation; what is not known is asked of `engine`."""
        ...
