"""Multipliers that calibration learns and every estimate applies; all 1 until learnt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from estimator.errors import WorkloadError, quoted
from estimator.placement.allocation import Allocation
from estimator.workload.strategies import Strategy

# The stated intervals hold the truth in 8 of 10 cases: that many normal deviations to either side.
INTERVAL_ALPHA = 0.2
Z_80 = 1.2816


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


# Parameters by whose ratio jobs are e times less alike: kernels that fill a device run at other
# rates than those that do not.
_SIZE_RATIO = 10.0
# How alike jobs are that differ in nothing but the mode (precision, execution), or the optimizer.
_OTHER_MODE, _OTHER_OPTIMIZER = 0.7, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContent:
    """What a training computes, whatever it is called and at whatever batch size.

    Jobs of one `fingerprint` are the same job; `op_shares` are the shares of each operator among
    the calls of a step.
    """

    fingerprint: str
    mode: str
    optimizer: str
    parameter_bytes: int
    op_shares: Mapping[str, float]

    def likeness(self, other: JobContent) -> float:
        """How much two jobs have in common, from 0 to 1: their operators, size, mode, optimizer.

        A product of kernels, so that a matrix of it is positive semi-definite.
        """
        ours, theirs = self.op_shares, other.op_shares
        common = sum(min(share, theirs.get(target, 0.0)) for target, share in ours.items())
        sizes = (max(content.parameter_bytes, 1) for content in (self, other))
        size = math.exp(-abs(math.log(next(sizes) / next(sizes))) / math.log(_SIZE_RATIO))
        mode = 1.0 if self.mode == other.mode else _OTHER_MODE
        return (
            common * size * mode * (1.0 if self.optimizer == other.optimizer else _OTHER_OPTIMIZER)
        )


class StepQuestion(NamedTuple):
    """What calibration tells the steps of one cluster apart by.

    `job` is the fingerprint of the graph and `workload` its name; `machines` are the names of the
    machine types in order of name, joined by "+"; `batch` is samples per rank and micro-batch (the
    mean where ranks differ, 0 for a fixed-batch graph); `layout` is how ranks share the model, None
    where none do, without the number of data-parallel ranks; `hosts` are those named, where
    calibration tells any of them from others of its type.
    """

    job: str
    workload: str
    machines: str
    ranks: int
    nodes: int
    most_on_node: int
    batch: float
    accumulation_steps: int
    strategy: Strategy
    layout: str | None = None
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """What the engine says of a step under some coefficients, in seconds.

    `compute_s` is a micro-batch on the slowest rank, the update and its share of a pipeline's
    bubble included; `sync_s` all of a step's communication as if nothing overlapped it.
    `relative_error` is one standard deviation of log(measured / step_s), as the engine alone has
    it.
    """

    question: StepQuestion
    compute_s: float
    sync_s: float
    step_s: float
    relative_error: float


class StepPredictor(Protocol):
    """Predicts steps of the workload that an estimate is asked for.

    Engines with equal keys answer alike.
    """

    @property
    def key(self) -> Hashable:
        """What the answers depend on: the job, the cluster and the profile."""
        ...

    @property
    def content(self) -> JobContent:
        """What the job computes."""
        ...

    @property
    def workload(self) -> str:
        """The name of the job."""
        ...

    @property
    def slowed_hosts(self) -> frozenset[str]:
        """The hosts that the cluster says are slower or faster than their machine type."""
        ...

    def predict(
        self,
        allocation: str | Allocation,
        *,
        batch_per_gpu: int | None,
        accumulation_steps: int,
        strategy: str | Strategy,
        coefficients: Coefficients,
        layout: str | None = None,
    ) -> PredictedStep:
        """One step; raises EstimatorError."""
        ...


class Calibration(Protocol):
    """What `estimate` needs of a calibrator."""

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: StepPredictor,
    ) -> list[Coefficients]:
        """The factors for each step, on an allocation; what is not known is asked of `engine`."""
        ...


def check_calibration(calibration: Any) -> None:
    """Raise WorkloadError for an argument of another kind; None is one."""
    if calibration is not None and not hasattr(calibration, "coefficients_for"):
        raise WorkloadError(
            f"calibration is a Calibrator, found {quoted(calibration)}; write "
            "Calibrator(PATH), or leave it out"
        )
