"""A training job as a scheduler meets it: when it arrives, how much it trains, what it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from estimator.errors import WorkloadError, quoted
from estimator.graph.ir.op_graph import OpGraph

_POSITIVE = (
    *("devices", "global_batch", "most_devices", "most_batch_per_gpu", "most_global_batch"),
    *("gradient_noise_samples", "epoch_samples"),
)
_NUMBERS = ("arrival_s", "samples", *_POSITIVE)
# More of anything no job has; computing with as much stays exact.
_MOST = 1e15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One training job.

    `devices` is the count asked for; a policy may give from one to `most_devices` (None: no limit
    but the global batch). The global batch stays the same on any count, in micro-batches of at most
    `most_batch_per_gpu` samples (None: what was traced). `gradient_noise_samples` is Pollux's φ,
    for policies that choose the global batch, then at most `most_global_batch`. `epoch_samples` is
    one pass over the data.
    """

    name: str
    arrival_s: float
    graph: OpGraph
    samples: float
    devices: int
    global_batch: int
    most_devices: int | None = None
    most_batch_per_gpu: int | None = None
    most_global_batch: int | None = None
    gradient_noise_samples: float | None = None
    epoch_samples: float | None = None

    def __post_init__(self) -> None:
        for field in _NUMBERS:
            value = getattr(self, field)
            if value is not None and not -_MOST <= value <= _MOST:
                raise WorkloadError(
                    f"job '{self.name}' has {field} {quoted(value)}; give a number up to {_MOST:g}"
                )
        if self.arrival_s < 0:
            raise WorkloadError(
                f"job '{self.name}' arrives at {self.arrival_s} s; give a time from 0 on"
            )
        if self.samples <= 0:
            raise WorkloadError(
                f"job '{self.name}' trains {self.samples} samples; give a number above 0"
            )
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise WorkloadError(f"job '{self.name}' has {field} {value}; give more than 0")
        if self.graph.batch is None:
            raise WorkloadError(
                f"job '{self.name}' has a graph of a fixed batch, which cannot be split over other "
                "counts of devices; trace its model with a batch dimension"
            )
        if self.devices > self.highest_count:
            raise WorkloadError(
                f"job '{self.name}' asks for {self.devices} devices and can use at most "
                f"{self.highest_count}; raise global_batch or most_devices"
            )

    @property
    def highest_count(self) -> int:
        """The most devices that the job can use: every rank has a sample."""
        return min(self.most_devices or self.global_batch, self.global_batch)

    def useful_samples(self, global_batch: int | None) -> float:
        """What a step of another global batch B is worth in samples of the job's own batch B₀.

        B · (φ + B₀) / (φ + B): Pollux (OSDI 2021), section 3.1; without φ every sample counts.
        """
        if global_batch is None or self.gradient_noise_samples is None:
            return float(global_batch or self.global_batch)
        noise = self.gradient_noise_samples
        return global_batch * (noise + self.global_batch) / (noise + global_batch)

    def split(self, ranks: int, global_batch: int | None = None) -> tuple[int, int]:
        """Samples per device and micro-batch, and micro-batches of a step; the largest share."""
        most = self.most_batch_per_gpu or self.graph.batch or 1
        per_rank = -(-(global_batch or self.global_batch) // ranks)
        micro_batches = -(-per_rank // most)
        return -(-per_rank // micro_batches), micro_batches


def check_names(names: Iterable[str]) -> None:
    """Raise WorkloadError where two jobs have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise WorkloadError(f"job {quoted(name)} is listed twice; give each job its own name")
        seen.add(name)
