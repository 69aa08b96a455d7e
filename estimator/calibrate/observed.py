"""Say what was observed of a workload's steps."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from estimator.errors import ObservationError, quoted
from estimator.placement.allocation import Allocation
from estimator.workload.layouts import Layout
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import OpGraph


# More than any training has; what lies beyond is another unit or a slip of the pen.
_MOST = {
    "batch_per_gpu": 10**9,
    "accumulation_steps": 10**6,
    "steps": 10**12,
    "parameter_bytes": 10**18,
}
# The least and the largest, in seconds and in samples.
_SECONDS, _NOISE = (1e-9, 1e9), (1e-15, 1e15)
_LONGEST_TEXT = 500
# A clock that runs ahead is none the less a clock; what comes later than this is no observation.
_AHEAD = timedelta(days=1)
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The time of one optimizer step, seen in a real training.

    `batch_per_gpu` is samples per rank and micro-batch; `step_time_s` the median over `steps`
    steps. `workload` is the name of the graph, or whatever the jobs of a cluster are told apart by;
    `fingerprint` is that of what the job computes (`JobContent`), None where only the name is
    known. `identity` makes it harmless to store the same twice. `layout` is how ranks shared
    layers, tokens, experts or stages, without how many are data-parallel: that follows from
    `ranks`; None where all are. `gradient_noise_samples` is the noise scale of its gradients then
    (`GradientNoise`), None where it was not measured. `ranks`, `nodes` and `most_on_node` (devices
    used of the fullest node) follow from the allocation. Raises ObservationError, AllocationError,
    StrategyError.
    """

    workload: str
    allocation: str
    batch_per_gpu: int
    step_time_s: float
    accumulation_steps: int = 1
    strategy: str = "ddp"
    layout: str | None = None
    steps: int = 1
    source: str = "observed"
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    identity: str = field(default_factory=lambda: uuid4().hex)
    fingerprint: str | None = None
    gradient_noise_samples: float | None = None
    ranks: int = field(init=False)
    nodes: int = field(init=False)
    most_on_node: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("workload", "source", "identity"):
            _check_text(name, getattr(self, name))
        if self.fingerprint is not None:
            _check_text("fingerprint", self.fingerprint)
        text, ranks, nodes, most_on_node = placement_of(self.allocation)
        values: dict[str, Any] = {
            "step_time_s": _positive("step_time_s", self.step_time_s, *_SECONDS),
            "at": _in_utc(self.at),
            "allocation": text,
            "strategy": str(Strategy.parse(self.strategy)),
            "layout": _layout(self.layout, ranks, self.strategy),
            "ranks": ranks,
            "nodes": nodes,
            "most_on_node": most_on_node,
        }
        for name in ("batch_per_gpu", "accumulation_steps", "steps"):
            values[name] = _count(name, getattr(self, name))
        if (noise := self.gradient_noise_samples) is not None:
            values["gradient_noise_samples"] = _positive("gradient_noise_samples", noise, *_NOISE)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def job(self) -> tuple[str, str]:
        """What tells its job from others: its content or, where that is unknown, its name."""
        known = self.fingerprint
        return ("name", self.workload) if known is None else ("content", known)

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that it names."""
        return hosts_of(Allocation.parse(self.allocation))


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
    optimizer: str | None = None
    precision: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        _check_text("workload", self.name)
        if self.parameter_bytes is not None:
            size_bytes = _count("parameter_bytes", self.parameter_bytes)
            object.__setattr__(self, "parameter_bytes", size_bytes)
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
            optimizer=workload.optimizer,
            precision=workload.precision,
        )

    def contradicts(self, other: ObservedWorkload) -> bool:
        """Whether something that is known of both differs: they are two jobs of one name."""
        names = ("parameter_bytes", "optimizer", "precision")
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


def _positive(name: str, value: Any, least: float, most: float) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise ObservationError(
            f"{name} must be a positive number, found {quoted(value)}; give one from {least:g} to "
            f"{most:g} in base units, or leave out what is unknown"
        )
    return number


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
