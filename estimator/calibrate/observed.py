"""Say what was observed of a workload's steps, and detect what the others contradict.

Most are of a wrong unit, milliseconds taken for seconds: a factor of 1,000. The threshold is 500,
since steps themselves vary. An observation is an outlier if it is more than 500 times off

- the others of the same workload, allocation, layout, strategy and batch, if there are two or more;
- else the others of its workload on the same machine types (a CPU and a GPU may well differ by a
  factor of 500).

Off is longer than 500 × both their median step time and its own samples × their median time per
sample (samples of one rank and step), or shorter than 1/500 of both: from one batch to another,
step times lie between equal and proportional. Of only two observations, the later is the outlier.
The rule is applied to a whole workload whenever it is read: later observations may show that the
first one is an outlier, or that one taken for an outlier is not.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from estimator.errors import ObservationError, quoted
from estimator.placement.allocation import Allocation
from estimator.units import format_seconds
from estimator.workload import Strategy
from estimator.workload.layouts import Layout

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import OpGraph


# More than any training has; what lies beyond is another unit or a slip of the pen.
_MOST = {
    "batch_per_gpu": 10**9,
    "accumulation_steps": 10**6,
    "steps": 10**12,
    "parameter_bytes": 10**18,
    "tensors": 10**9,
}
_SHORTEST_S, _LONGEST_S, _MOST_FLOPS, _MOST_NOISE = 1e-9, 1e9, 1e30, 1e15
_LONGEST_TEXT = 500
# A clock that runs ahead is none the less a clock; what comes later than this is no observation.
_AHEAD = timedelta(days=1)
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The time of one optimizer step, seen in a real training.

    `batch_per_gpu` is samples per rank and micro-batch; `step_time_s` the median over `steps` steps
    and `spread_ratio` their noise, half of the 10–90 % range over that median. `workload` is the
    name of the graph, or whatever the jobs of a cluster are told apart by; `fingerprint` is that of
    what the job computes (`JobContent`), None where only the name is known. `identity` makes it
    harmless to store the same twice. `outlier_reason` is why fits leave it out, as the rule of
    `estimator.calibrate.observed` finds on reading. `layout` is how ranks shared layers, tokens,
    experts or stages, without how many are data-parallel: that follows from `ranks`; None where all
    are. `gradient_noise_samples` is the noise scale of its gradients then (`GradientNoise`), None
    where it was not measured. `ranks`, `nodes` and `most_on_node` (devices used of the fullest
    node) follow from the allocation. Raises ObservationError, AllocationError, StrategyError.
    """

    workload: str
    allocation: str
    batch_per_gpu: int
    step_time_s: float
    accumulation_steps: int = 1
    strategy: str = "ddp"
    layout: str | None = None
    steps: int = 1
    spread_ratio: float | None = None
    source: str = "observed"
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    identity: str = field(default_factory=lambda: uuid4().hex)
    fingerprint: str | None = None
    outlier_reason: str | None = field(default=None, compare=False)
    gradient_noise_samples: float | None = None
    ranks: int = field(init=False)
    nodes: int = field(init=False)
    most_on_node: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("workload", "source", "identity", "fingerprint"):
            if name != "fingerprint" or self.fingerprint is not None:
                _check_text(name, getattr(self, name))
        object.__setattr__(self, "step_time_s", _step_time_s(self.step_time_s))
        for name in ("batch_per_gpu", "accumulation_steps", "steps"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        if self.spread_ratio is not None:
            spread_ratio = _positive("spread_ratio", self.spread_ratio, least=0.0)
            object.__setattr__(self, "spread_ratio", spread_ratio)
        if self.gradient_noise_samples is not None:
            noise = _positive(
                "gradient_noise_samples", self.gradient_noise_samples, most=_MOST_NOISE
            )
            object.__setattr__(self, "gradient_noise_samples", noise)
        object.__setattr__(self, "at", _in_utc(self.at))
        text, ranks, nodes, most_on_node = placement_of(self.allocation)
        object.__setattr__(self, "allocation", text)
        object.__setattr__(self, "strategy", str(Strategy.parse(self.strategy)))
        object.__setattr__(self, "layout", _layout(self.layout, ranks, self.strategy))
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "most_on_node", most_on_node)

    @property
    def job(self) -> tuple[str, str]:
        """What tells its job from others: its content or, where that is unknown, its name."""
        known = self.fingerprint
        return ("name", self.workload) if known is None else ("content", known)

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that it names."""
        return hosts_of(Allocation.parse(self.allocation))

    @property
    def samples_per_rank(self) -> int:
        """Samples that one rank computes in a step."""
        return self.batch_per_gpu * self.accumulation_steps


def latest_noise_samples(observations: Iterable[Observation]) -> float | None:
    """The gradient noise scale when it was last measured; None where it never was."""
    known = [one for one in observations if one.gradient_noise_samples is not None]
    return max(known, key=lambda one: one.at).gradient_noise_samples if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorkload:
    """What is known of a workload apart from its step times; None is unknown.

    Without a `fingerprint` the name is all that tells it from others.
    """

    name: str
    parameter_bytes: int | None = None
    tensors: int | None = None
    flops_per_sample: float | None = None
    optimizer: str | None = None
    precision: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        _check_text("workload", self.name)
        for name in ("parameter_bytes", "tensors"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _count(name, value))
        if self.flops_per_sample is not None:
            flops = _positive("flops_per_sample", self.flops_per_sample, most=_MOST_FLOPS)
            object.__setattr__(self, "flops_per_sample", flops)
        for name in ("optimizer", "precision", "fingerprint"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)

    @classmethod
    def of(cls, workload: str | ObservedWorkload | OpGraph) -> ObservedWorkload:
        """The summary of a workload given by name, as a summary, or as a traced graph."""
        if isinstance(workload, str):
            return cls(name=workload)
        if isinstance(workload, ObservedWorkload):
            return workload
        from estimator.estimates.engine import DEFAULT

        return cls(
            name=workload.workload,
            fingerprint=DEFAULT.content(workload).fingerprint,
            parameter_bytes=workload.parameter_bytes or None,
            tensors=len(workload.parameters) or None,
            optimizer=workload.optimizer,
            precision=workload.precision,
        )

    def contradicts(self, other: ObservedWorkload) -> bool:
        """Whether something that is known of both differs: they are two jobs of one name."""
        names = ("parameter_bytes", "tensors", "optimizer", "precision")
        both = ((getattr(self, name), getattr(other, name)) for name in names)
        return any(one != two for one, two in both if one is not None and two is not None)


def hosts_of(allocation: Allocation) -> frozenset[str]:
    """The hosts that an allocation names."""
    return frozenset([group.host for group in allocation.groups if group.host is not None])


@lru_cache(maxsize=4096)
def placement_of(allocation: str) -> tuple[str, int, int, int]:
    """(text, ranks, nodes, most devices on one node) of an allocation; raises AllocationError."""
    parsed = Allocation.parse(allocation)
    on_hosts: Counter[str] = Counter()
    nodes = most_on_node = 0
    for group in parsed.groups:
        if group.host is not None:
            on_hosts[group.host] += group.devices_per_node
        else:
            nodes += group.nodes
            most_on_node = max(most_on_node, group.devices_per_node)
    most_on_node = max(most_on_node, *on_hosts.values(), 0)
    return str(parsed), parsed.ranks, nodes + len(on_hosts), most_on_node


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST_TEXT:
        raise ObservationError(
            f"{name} must be a text of 1 to {_LONGEST_TEXT} characters, found {quoted(value)}; "
            "give it a name"
        )
    if not value.isprintable():
        raise ObservationError(f"{name} {quoted(value)} has unprintable characters; leave them out")


def _layout(text: str | None, ranks: int, strategy: str) -> str | None:
    """The layout as `Observation` keeps it; raises StrategyError where it does not fit."""
    if text is None:
        return None
    layout = Layout.parse(text)
    layout.data_axes(ranks, Strategy.parse(strategy))
    return layout.apart_from_data


def _positive(
    name: str, value: Any, *, least: float = math.ulp(0.0), most: float = math.inf
) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (least <= number <= most and number < math.inf):
        kind = "a positive number" if least else "0 or more"
        bound = "" if most == math.inf else f" up to {most:g}"
        raise ObservationError(
            f"{name} must be {kind}{bound}, found {quoted(value)}; leave out what is unknown"
        )
    return number


def _step_time_s(value: Any) -> float:
    seconds = _positive("step_time_s", value)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise ObservationError(
            f"step_time_s must be {_SHORTEST_S:g} to {_LONGEST_S:g}, found {seconds:g}; give "
            "seconds"
        )
    return seconds


def _in_utc(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ObservationError(f"the time {at} has no time zone; give it one, such as UTC")
    try:
        utc = at.astimezone(UTC)
    except OverflowError:
        utc = None
    if utc is None or utc < _EARLIEST:
        raise ObservationError(f"the time {at} is before 1970; correct it")
    if utc > datetime.now(UTC) + _AHEAD:
        raise ObservationError(f"the time {at} is more than a day ahead; correct it or the clock")
    return utc


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise ObservationError(
            f"{name} must be a whole number, found {quoted(value)}; correct it"
        ) from None
    if not 1 <= count <= _MOST[name]:
        raise ObservationError(
            f"{name} must be 1 to {_MOST[name]:g}, found {quoted(count)}; correct it"
        )
    return count


OUTLIER_RATIO = 500.0


def outliers(observations: Iterable[Observation]) -> dict[str, str]:
    """The identities of outliers, each with the reason.

    `observations` are in the order of arrival and all that are known of each job.
    """
    jobs: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in observations:
        jobs[observation.job].append(observation)
    reasons: dict[str, str] = {}
    for ours in jobs.values():
        times_s = [one.step_time_s for one in ours]
        # Step times that all lie within the ratio contain no outlier.
        if max(times_s) / min(times_s) > OUTLIER_RATIO:
            for alike in _by_machines(ours).values():
                reasons.update(_outliers_among(alike))
    return reasons


def _by_machines(
    observations: Iterable[Observation],
) -> dict[frozenset[str | None], list[Observation]]:
    groups: dict[frozenset[str | None], list[Observation]] = defaultdict(list)
    for one in observations:
        placed = Allocation.parse(one.allocation).groups
        # Hosts of a cluster file do not say what machines they are: they count as one type.
        groups[frozenset(group.machine for group in placed)].append(one)
    return groups


def _outliers_among(observations: Sequence[Observation]) -> Iterable[tuple[str, str]]:
    """Outliers of one workload on one set of machine types."""
    pairs: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for one in observations:
        place = one.allocation, one.layout, one.strategy, one.batch_per_gpu, one.accumulation_steps
        pairs[place].append(one)
    anywhere = _Sample(observations, "of this workload on such machines")
    for same in pairs.values():
        here = _Sample(same, "of this workload, allocation and batch")
        for one in same:
            reason = (here if len(same) > 2 else anywhere).outlier_reason(one)
            if reason is not None:
                yield one.identity, reason


class _Sample:
    """Observations each of which can be compared with the median of the others."""

    def __init__(self, observations: Sequence[Observation], what: str) -> None:
        self.observations, self.what = observations, what
        self.times_s = sorted(one.step_time_s for one in observations)
        self.times_s_per_sample = sorted(
            one.step_time_s / one.samples_per_rank for one in observations
        )

    def outlier_reason(self, one: Observation) -> str | None:
        """Why one of them is an outlier, if it is."""
        others = len(self.observations) - 1
        if others == 0 or (others == 1 and one is self.observations[0]):
            return None
        time_s, samples = one.step_time_s, one.samples_per_rank
        equal_s = _median_without(self.times_s, time_s)
        proportional_s = samples * _median_without(self.times_s_per_sample, time_s / samples)
        if time_s > OUTLIER_RATIO * (longest_s := max(equal_s, proportional_s)):
            ratio, side, expected_s = time_s / longest_s, "longer", longest_s
        elif time_s * OUTLIER_RATIO < (shortest_s := min(equal_s, proportional_s)):
            ratio, side, expected_s = shortest_s / time_s, "shorter", shortest_s
        else:
            return None
        count = "the other" if others == 1 else f"{others} others"
        return (
            f"{format_seconds(time_s)} is {ratio:.0f} times {side} than the "
            f"{format_seconds(expected_s)} of {count} {self.what}"
        )


def _median_without(values: Sequence[float], value: float) -> float:
    """The median of sorted positive numbers without one of them; of an even count, geometric."""
    taken = bisect_left(values, value)
    rest = len(values) - 1
    low, high = (values[index + (index >= taken)] for index in ((rest - 1) // 2, rest // 2))
    return math.sqrt(low * high)
