"""A training job as a scheduler meets it: when it arrives, how much it trains, what it asks for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from estimator.errors import EstimatorError, WorkloadError, quoted
from estimator.graph.ir.op_graph import OpGraph
from estimator.workload.layouts import Layout
from estimator.workload.loader import Loader
from estimator.workload.strategies import Strategy

# Of which 0 is one.
_FROM_0 = ("arrival_s", "restart_s", "checkpoint_s")
_NUMBERS = (
    *_FROM_0,
    *("samples", "devices", "global_batch", "least_devices", "most_devices", "most_batch_per_gpu"),
    *("most_global_batch", "gradient_noise_samples", "epoch_samples"),
)
# More of anything no job has; computing with as much stays exact.
_MOST = 1e15


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One training job.

    `devices` is the count asked for; a policy may give from `least_devices` (None: one) to
    `most_devices` (None: no limit but the global batch), a fixed job as many as it asks for: both
    are that. The global batch stays the same on any count, in micro-batches of at most
    `most_batch_per_gpu` samples (None: what was traced), unless `most_global_batch` lets policies
    choose it; `gradient_noise_samples` is Pollux's φ, by which they do. `epoch_samples` is one pass
    over the data. Ranks train by `strategy` in a `layout` (None: data-parallel), each fed by a
    `loader` (None: never waited for). `restart_s` and `checkpoint_s` go before those of the replay.
    """

    name: str
    arrival_s: float
    graph: OpGraph
    samples: float
    devices: int
    global_batch: int
    least_devices: int | None = None
    most_devices: int | None = None
    most_batch_per_gpu: int | None = None
    most_global_batch: int | None = None
    gradient_noise_samples: float | None = None
    epoch_samples: float | None = None
    strategy: str = "ddp"
    layout: str | None = None
    loader: str | None = None
    restart_s: float | None = None
    checkpoint_s: float | None = None

    def __post_init__(self) -> None:
        for field in _NUMBERS:
            value = getattr(self, field)
            if value is not None and not -_MOST <= value <= _MOST:
                raise WorkloadError(
                    f"job '{self.name}' has {field} {quoted(value)}; give a number up to {_MOST:g}"
                )
            if value is not None and (value < 0 or (value == 0 and field not in _FROM_0)):
                least = "0 or more" if field in _FROM_0 else "more than 0"
                raise WorkloadError(f"job '{self.name}' has {field} {value}; give {least}")
        if self.graph.batch is None:
            raise WorkloadError(
                f"job '{self.name}' has a graph of a fixed batch, which cannot be split over other "
                "counts of devices; trace its model with a batch dimension"
            )
        for read, text in (
            (Strategy.parse, self.strategy),
            (Layout.parse, self.layout),
            (Loader.parse, self.loader),
        ):
            if text is not None:
                try:
                    read(text)
                except EstimatorError as error:
                    raise WorkloadError(f"job '{self.name}': {error}") from None
        if self.devices % self.replica_ranks:
            raise WorkloadError(
                f"job '{self.name}' asks for {self.devices} devices and its layout takes "
                f"multiples of {self.replica_ranks}; change devices or layout"
            )
        if not self.lowest_count <= self.devices <= self.highest_count:
            raise WorkloadError(
                f"job '{self.name}' asks for {self.devices} devices and can use "
                f"{self.lowest_count} to {self.highest_count}; change global_batch, least_devices "
                "or most_devices"
            )

    @cached_property
    def replica_ranks(self) -> int:
        """Ranks that share a model: 1 where all are data-parallel."""
        layout = Layout.parse(self.layout) if self.layout is not None else Layout()
        return layout.tp * layout.cp * layout.pp

    @cached_property
    def speed_key(self) -> Hashable:
        """What its step times depend on, beside the batch and the devices."""
        how = self.strategy, self.layout, self.loader
        return id(self.graph), self.most_batch_per_gpu, *how

    @property
    def lowest_count(self) -> int:
        """The fewest devices that the job takes."""
        return max(self.least_devices or 1, self.replica_ranks)

    @property
    def highest_count(self) -> int:
        """The most devices that the job can use: every replica has a sample."""
        most = self.global_batch * self.replica_ranks
        return min(self.most_devices or most, most)

    def counts(self, most: int) -> list[int]:
        """Counts worth considering up to `most`: powers of two of replicas, and what was asked for.

        Every policy gives one of these; on twenty devices a job that asks for six may have 1, 2, 4,
        6, 8 or 16.
        """
        lowest, highest = self.lowest_count, min(most, self.highest_count)
        replicas = highest // self.replica_ranks
        counts = {self.replica_ranks << power for power in range(replicas.bit_length())}
        ends = {self.devices, self.least_devices or self.devices, self.most_devices or self.devices}
        counts |= {count for count in ends if count % self.replica_ranks == 0}
        return sorted(count for count in counts if lowest <= count <= highest)

    def useful_samples(self, global_batch: int | None) -> float:
        """What a step of another global batch B is worth in samples of the job's own batch B₀.

        B · (φ + B₀) / (φ + B): Pollux (OSDI 2021), section 3.1; without φ every sample counts.
        """
        if global_batch is None or self.gradient_noise_samples is None:
            return float(global_batch or self.global_batch)
        noise = self.gradient_noise_samples
        return global_batch * (noise + self.global_batch) / (noise + global_batch)

    def split(self, ranks: int, global_batch: int | None = None) -> tuple[int, int]:
        """Samples per replica and micro-batch, and micro-batches of a step; the largest share."""
        most = self.most_batch_per_gpu or self.graph.batch or 1
        per_rank = -(-(global_batch or self.global_batch) * self.replica_ranks // ranks)
        micro_batches = -(-per_rank // most)
        return -(-per_rank // micro_batches), micro_batches


def check_names(names: Iterable[str]) -> None:
    """Raise WorkloadError where two jobs have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise WorkloadError(f"job {quoted(name)} is listed twice; give each job its own name")
        seen.add(name)
