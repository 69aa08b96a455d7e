"""Hold what was measured of one machine type, as checked values and as JSON, with provenance.

A profile stores measurements and simple fits; everything derived from them (kernel-cost fits,
collective costs on a topology) is derived where it is used, so a better formula needs no new probe.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from estimator.errors import ProfileError, first_fault, quoted, unprintable
from estimator.files import write_text_atomically
from estimator.tensors import OpCall
from estimator.units import format_ratio

Source = Literal["measured", "imported", "fitted", "datasheet"]

# Repeats of an undisturbed probe differ by less.
_MATTERS = 0.1
# Beyond any quantity of a machine, and few enough digits that products stay finite.
LEAST, MOST = 1e-30, 1e30


def check_positive(
    owner: object, *names: str, least: float = LEAST, words: str = "positive"
) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not least <= value <= MOST:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be {words}, at most {MOST:g}, found "
                f"{quoted(value)}"
            )


def check_not_negative(owner: object, *names: str) -> None:
    check_positive(owner, *names, least=0, words="0 or more")


def check_points(owner: object, points: Iterable[tuple[float, float]]) -> None:
    for size, seconds in points:
        if not (0 <= size <= MOST and LEAST <= seconds <= MOST):
            raise ValueError(
                f"{type(owner).__name__}.points must be (bytes >= 0, seconds > 0), "
                f"found ({size}, {seconds})"
            )


def check_rising_shares(owner: object, name: str) -> None:
    """Points of (bytes, share): larger and larger bytes, and shares of 0 to 1 that never fall."""
    points = ((0.0, 0.0), *getattr(owner, name), (MOST, 1.0))
    for (size, share), (next_size, next_share) in itertools.pairwise(points):
        if not (size < next_size <= MOST and share <= next_share <= 1):
            raise ValueError(
                f"{type(owner).__name__}.{name} must be (bytes, share), both rising, shares 0 to "
                f"1, found ({next_size}, {next_share}) after ({size}, {share})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a group of numbers comes from, and how far its fit or its repeats disagree."""

    source: Source
    at: str = ""
    samples: int = 0
    relative_error: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        check_not_negative(self, "samples", "relative_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What other programs did to the measurements of a profile.

    They used `others_ratio` of the cores' time meanwhile, and the canary took `canary_ratio` times
    as long as usual; `waited_s` went by in waiting for them and measuring `repeats` parts again.
    """

    others_ratio: float = 0.0
    canary_ratio: float = 1.0
    waited_s: float = 0.0
    repeats: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "canary_ratio")
        check_not_negative(self, "others_ratio", "waited_s", "repeats")

    @property
    def relative_error(self) -> float:
        """How far log times may be off: what shares cores for r of the time takes 1 / (1 − r)."""
        idle_ratio = 1 - min(self.others_ratio, 0.9)
        return max(-math.log(idle_ratio), math.log(self.canary_ratio))

    @property
    def matters(self) -> bool:
        """Whether estimates are to say so, and `check` is to fail."""
        return self.relative_error > _MATTERS

    def __str__(self) -> str:
        used = f"other programs used {format_ratio(self.others_ratio)} of the cores"
        if self.canary_ratio <= 1 + _MATTERS:
            return used
        slower = f"a fixed matmul took {self.canary_ratio:.2f} times as long as usual"
        return f"{used}, and {slower}" if self.others_ratio > _MATTERS else slower


DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one pinned group of CPU cores that acts as a device.

    `memory_bytes` of a core group is its share of the machine's memory; `peak_flops_per_s` holds
    dense peaks by dtype, from the datasheet or (for cores) the best rate the probe saw.
    """

    kind: DeviceKind
    index: int
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float | None = None
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    numa_node: int | None = None
    details: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")
        for dtype, rate in self.peak_flops_per_s.items():
            if not LEAST <= rate <= MOST:
                raise ValueError(
                    f"Device.peak_flops_per_s[{quoted(dtype)}] must be positive, found {rate}"
                )

    @property
    def threads(self) -> int:
        """How many threads compute its operators: one a core, none for an accelerator."""
        return max(len(self.cores), 1) if self.kind == "cpu" else 0

    @property
    def compute_capability(self) -> float | None:
        """NVIDIA's number for what a chip can do, such as 8.0; None where it is not known."""
        text = str(self.details.get("compute_capability", ""))
        # AMD's are names, such as gfx90a.
        return float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", text) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """What the probe saw of memory: page faults, caches, allocator settings.

    `first_touch_s_per_byte` is the cost of memory the process has not touched since it got it from
    the operating system. `cold_read_s_per_byte` is what a byte read from main
    memory costs beyond one read from cache. `reuse_points` are (reuse distance in bytes, share of
    that cost): what a byte costs to read again once so many other bytes were touched. Cache sizes
    are those that one device can use alone.
    """

    first_touch_s_per_byte: float = 0.0
    allocator: str = "unknown"
    cold_read_s_per_byte: float = 0.0
    private_cache_bytes: int = 0
    shared_cache_bytes: int = 0
    reuse_points: tuple[tuple[float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_rising_shares(self, "reuse_points")
        check_not_negative(
            self,
            "first_touch_s_per_byte",
            "cold_read_s_per_byte",
            "private_cache_bytes",
            "shared_cache_bytes",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCost:
    """What the probe saw of feeding a loader; None: not measured.

    `disk_bytes_per_s` is what several readers of files that are not in the page cache get together,
    `cache_bytes_per_s` what one gets of those that are. One core copies `copy_bytes_per_s` in
    memory, decodes `jpeg_pixels_per_s` and makes batches of `tokens_per_s` from stored records.
    """

    disk_bytes_per_s: float | None = None
    cache_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    jpeg_pixels_per_s: float | None = None
    tokens_per_s: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_positive(
            self, *(item.name for item in dataclasses.fields(self) if item.name != "provenance")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """One probed kernel call.

    `warm_s`: inputs as the previous op left them (in cache where they fit), output memory already
    touched. `cold_s`: inputs read from main memory; None where the device has no such difference.
    Neither includes the host's dispatch cost beyond the bare operator call. `noise_ratio` is half
    the 10–90 % range of the repeats over their median. `host_s` is what the host takes to issue the
    bare call to a device that is idle; None on CPUs, where it is part of `warm_s`, and where only
    long calls were timed.
    """

    call: OpCall
    warm_s: float
    cold_s: float | None = None
    noise_ratio: float = 0.0
    host_s: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "warm_s", "cold_s", "host_s")
        check_not_negative(self, "noise_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """Every probed call of one operator in one dtype."""

    target: str
    dtype: str
    points: tuple[KernelPoint, ...]
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much slower a kernel runs on each of `devices_busy` devices busy at once.

    `points` are (bytes touched by the call, seconds busy / seconds alone).
    """

    bound: Literal["compute", "memory", "update"]
    devices_busy: int
    points: tuple[tuple[float, float], ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        check_positive(self, "devices_busy")
        check_points(self, self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds of host work: what a step costs when kernels take no time at all.

    forward_op_s: one differentiable op called from Python, recorded by autograd, beyond the bare
    operator call that `KernelPoint` times; forward_view_s: the same for a view; backward_op_s: one
    backward node beyond its kernels; bare_op_s: the bare call of the smallest kernel;
    module_call_s: one `nn.Module.__call__`; step_s: an empty training step (zero_grad, backward
    entry, update entry). ddp_step_s / ddp_bucket_s: what DDP adds per step and per bucket.
    cached_forward_op_s, cached_forward_view_s and cached_backward_op_s: the same three where the
    kernel before has left the host's code and data in the private caches that it shares with them;
    None where that makes no difference.
    shard_unit_s: what FSDP adds per step and unit that it gathers; shard_update_tensor_s: what an
    update adds per sharded tensor. dtensor_forward_s, dtensor_backward_s: what DTensor adds to one
    call of a module that ranks divide; dtensor_exchange_s: what it adds to a collective;
    dtensor_update_tensor_s: what it adds to the update of a tensor too large for the private
    caches, None where that was not measured (then `shard_update_tensor_s` for all sizes).
    """

    forward_op_s: float
    forward_view_s: float
    backward_op_s: float
    bare_op_s: float
    module_call_s: float
    cached_forward_op_s: float | None = None
    cached_forward_view_s: float | None = None
    cached_backward_op_s: float | None = None
    step_s: float = 0.0
    ddp_step_s: float = 0.0
    ddp_bucket_s: float = 0.0
    shard_unit_s: float = 0.0
    shard_update_tensor_s: float = 0.0
    dtensor_forward_s: float = 0.0
    dtensor_backward_s: float = 0.0
    dtensor_exchange_s: float = 0.0
    dtensor_update_tensor_s: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(
            self, *(item.name for item in dataclasses.fields(self) if item.name != "provenance")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Optimizer step: launch_s + tensors · per_tensor_s + parameters · per_parameter_s.

    `per_idle_parameter_s` comes on top for a parameter whose gradient has always been zero, as in
    rows of an embedding that no batch has picked: some CPUs take the square root of zero slowly.

    On CUDA the first two are the host's, the last the device's, and `lanes` are (tensors,
    parameters, host seconds, device seconds) of measured steps: in a training loop the two overlap.

    `form` is how torch runs it: ``loop`` (one tensor at a time), ``foreach`` or ``fused``.
    `zero_grad` costs are part of the step's host cost.
    """

    optimizer: str
    form: Literal["loop", "foreach", "fused"]
    device: DeviceKind
    dtype: str = "float32"
    launch_s: float
    per_tensor_s: float
    per_parameter_s: float
    per_idle_parameter_s: float = 0.0
    points: tuple[tuple[float, float, float], ...] = ()
    lanes: tuple[tuple[float, float, float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(
            self, "launch_s", "per_tensor_s", "per_parameter_s", "per_idle_parameter_s"
        )
        for tensors, parameters, seconds in self.points:
            if not all(LEAST <= value <= MOST for value in (tensors, parameters, seconds)):
                raise ValueError("UpdateCost.points must be (tensors, parameters, seconds) > 0")
        if not all(0 <= value <= MOST for lane in self.lanes for value in lane):
            raise ValueError("UpdateCost.lanes must be numbers from 0 on")

    def update_time_s(self, *, tensors: float, parameters: float, idle: float = 0.0) -> float:
        """Seconds of a step; `idle` of the `parameters` elements in `tensors` tensors are idle."""
        busy_s = self.launch_s + tensors * self.per_tensor_s + parameters * self.per_parameter_s
        return busy_s + idle * self.per_idle_parameter_s


LinkKind = Literal[
    "h2d",
    "d2h",
    "d2d",
    "pcie",
    "nvlink",
    "infinity_fabric",
    "roce",
    "infiniband",
    "efa",
    "tcp",
    "loopback",
]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
# How far apart the two ends of a link are, nearest first.
Locality = Literal["device_switch", "socket", "node", "rack", "cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one connection; n bytes take latency_s + n / bandwidth_bytes_per_s.

    `locality` says how far apart its ends are: behind one device switch, on one socket, in one
    node, in nodes of one rack, in other racks. `flows` were concurrent when it was measured, and
    the rate is what one of them got. `points` are the measured (bytes, seconds), kept beside the
    fit.

    Between devices of a node, the rate is what one device of a ring sends over all its links of the
    kind where the ring joins at most `ring_devices` devices in the order of their indices, None for
    all: a bridge joins 2, a socket's switches half of a node. Without `peer_to_peer` devices reach
    each other through host memory alone. `reduces` says that the switch between them adds and
    multicasts (NVLS). `achieved_ratio` is the share of a datasheet's rate that collectives get, if
    it is not the usual one of the kind.
    """

    kind: LinkKind
    locality: Locality = "node"
    latency_s: float
    bandwidth_bytes_per_s: float
    pinned: bool = False
    flows: int = 1
    points: tuple[tuple[float, float], ...] = ()
    ring_devices: int | None = None
    peer_to_peer: bool = True
    reduces: bool = False
    achieved_ratio: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(self, "latency_s")
        check_positive(self, "bandwidth_bytes_per_s", "flows", "ring_devices", "achieved_ratio")
        check_points(self, self.points)

    def transfer_time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes` bytes one way."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Measured size → time of one collective over one group shape.

    `size_bytes` follows nccl-tests: the whole buffer of one rank (for all-gather and
    reduce-scatter the gathered size). The group has `group_size` ranks on `nodes` nodes; `hosts`
    names the node of every rank, in rank order, where it was measured on a cluster. `pair_ratio`
    are (bytes, seconds of two such collectives at once / seconds of one). `blocking` are (seconds
    that each rank computes before, bytes, seconds) of one that ranks wait for before they go on, by
    the mean rank's entry; `points` may be of many in a row, some of which pass beside others.
    """

    op: CollectiveName
    backend: str
    group_size: int
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    points: tuple[tuple[float, float], ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    pair_ratio: tuple[tuple[float, float], ...] = ()
    blocking: tuple[tuple[float, float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_points(self, self.points)
        check_points(self, self.pair_ratio)
        check_points(self, [(size, seconds) for _, size, seconds in self.blocking])
        check_points(self, [(window_s, seconds) for window_s, _, seconds in self.blocking])
        check_not_negative(self, "latency_s")
        check_positive(self, "bandwidth_bytes_per_s", "group_size", "nodes")
        if self.nodes > self.group_size:
            raise ValueError(
                f"CollectiveCost of {self.group_size} ranks cannot span {self.nodes} nodes"
            )
        if self.hosts and len(self.hosts) != self.group_size:
            raise ValueError(
                f"CollectiveCost.hosts names {len(self.hosts)} nodes for {self.group_size} ranks"
            )

    @property
    def spans_nodes(self) -> bool:
        """Whether the group crosses the network."""
        return self.nodes > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMatrix:
    """Latency and bandwidth between every two nodes, one flow at a time.

    Row i, column j is what node `hosts[i]` sends to node `hosts[j]`; None where it was not measured
    and on the diagonal.
    """

    hosts: tuple[str, ...]
    latency_s: tuple[tuple[float | None, ...], ...]
    bandwidth_bytes_per_s: tuple[tuple[float | None, ...], ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            rows = getattr(self, name)
            if len(rows) != len(self.hosts) or any(len(row) != len(self.hosts) for row in rows):
                raise ValueError(f"PairMatrix.{name} must be square, one row per host")
            for value in (cell for row in rows for cell in row if cell is not None):
                if not LEAST <= value <= MOST:
                    raise ValueError(f"PairMatrix.{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCost:
    """What an all-reduce costs compute that runs beside it on the same devices, and the reverse.

    `exposed_ratio` = (compute and collective together − compute alone) / collective alone: 0 is
    perfect overlap, 1 is none, above 1 they get in each other's way; where both run on the same
    cores (gloo), the work that the collective is to them is part of it. `collective_slowdown_ratio`
    = time of a collective beside compute / alone (≥ 0). The group spans `nodes` nodes.
    `size_bytes` are those of all `in_flight` all-reduces that ran at once.
    """

    compute: Literal["compute_bound", "memory_bound"]
    backend: str
    group_size: int
    nodes: int = 1
    size_bytes: int
    in_flight: int = 1
    exposed_ratio: float
    collective_slowdown_ratio: float
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(self, "exposed_ratio", "collective_slowdown_ratio")
        check_positive(self, "group_size", "nodes", "size_bytes", "in_flight")


SCHEMA_VERSION = 2
# With the first tenth of the probe's kernel calls steps of eight models were off by up to 12 % from
# those with all of them, with 3 % of the calls by up to 27, with 2 % by up to 57.
_FEWEST_TIMED_RATIO = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Everything known of one machine type: one node with `devices`.

    `network` are the links that leave the node, by locality; those of several flows at once, which
    older probes measured, count for nothing. `pairs` holds the single links of the very cluster
    that was probed. `kernels_timed_ratio` is the share of the probe's kernel calls that it came to
    time; None: not known.

    >>> import estimator as est
    >>> len(est.load_profile("dgx-a100").devices)
    8
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    network: tuple[Link, ...] = ()
    pairs: PairMatrix | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    overlaps: tuple[OverlapCost, ...] = ()
    kernels: tuple[KernelCost, ...] = ()
    contentions: tuple[Contention, ...] = ()
    host: HostCost | None = None
    memory: MemoryCost | None = None
    input: InputCost | None = None
    updates: tuple[UpdateCost, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    canary_s: float | None = None
    rank_jitter_ratio: float | None = None
    kernels_timed_ratio: float | None = None
    missing: tuple[str, ...] = ()
    interference: Interference | None = None
    provenance: Provenance
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("MachineProfile.devices is empty; a machine has at least one device")
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"profile has schema version {self.schema_version}, this package reads "
                f"{SCHEMA_VERSION}; probe the machine again"
            )
        check_positive(self, "canary_s")
        check_not_negative(self, "rank_jitter_ratio", "kernels_timed_ratio")

    def __repr__(self) -> str:
        # The generated one would print every kernel that was timed.
        return f"MachineProfile({self.name}: {len(self.devices)} x {self.devices[0].name})"

    @property
    def kind(self) -> DeviceKind:
        """The kind of the machine's devices; all devices of a profile are of one kind."""
        return self.devices[0].kind

    @property
    def is_cut(self) -> bool:
        """Whether the probe timed so few kernels that estimates are to say so."""
        timed_ratio = self.kernels_timed_ratio
        return timed_ratio is not None and timed_ratio < _FEWEST_TIMED_RATIO

    @property
    def device_faults(self) -> tuple[str, ...]:
        """A sentence on every state of a GPU that held back the probe and should not last."""
        return tuple(
            f"GPU {device.index} {fault}"
            for device in self.devices
            for fault in _faults_of(device.details)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        plain: dict[str, Any] = _adapter().dump_python(self)
        return plain

    @classmethod
    def from_dict(
        cls, data: Any, *, origin: str = "profile", is_printable: bool = False
    ) -> MachineProfile:
        """Check and build a profile from plain JSON values; raises ProfileError naming `origin`.

        `is_printable` says that no text among them can have characters that move a cursor.
        """
        text = None if is_printable else unprintable(data)
        if text is not None:
            raise ProfileError(
                f"{origin} is not a machine profile ({quoted(text)} has unprintable characters); "
                "run 'estimator probe' to write a new one"
            )
        kind: Any = cls
        try:
            return _reader(kind)(data)  # type: ignore[no-any-return]
        except _NOT_JUST_SO:
            # What is amiss pydantic tells, which takes longer to import than a first answer takes.
            from pydantic import ValidationError
        try:
            return _adapter().validate_python(data)  # type: ignore[no-any-return]
        except ValidationError as error:
            raise ProfileError(
                f"{origin} is not a machine profile ({first_fault(error)[0]}); "
                "run 'estimator probe' to write a new one"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_text_atomically(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False))


# What slows a GPU's clocks down beyond its usual limit of power, by NVML's names.
_THROTTLES = {
    "HwSlowdown": "was slowed down by its hardware",
    "HwThermalSlowdown": "was slowed down by heat",
    "SwThermalSlowdown": "was slowed down by heat",
    "HwPowerBrakeSlowdown": "was slowed down by the power supply",
    "ApplicationsClocksSetting": "ran at clocks that someone has set",
}
# Limits differ by some watts between boards of one kind.
_LOWERED_POWER_RATIO = 0.97


def _faults_of(details: Mapping[str, str | int | float | bool | None]) -> Iterable[str]:
    """What is wrong with a device of such details."""
    reasons = f"{details.get('throttle_reasons_at_work') or details.get('throttle_reasons') or ''}"
    yield from dict.fromkeys(_THROTTLES[name] for name in reasons.split(", ") if name in _THROTTLES)
    limit, usual = details.get("power_limit_w"), details.get("power_limit_default_w")
    if limit and usual and float(limit) < _LOWERED_POWER_RATIO * float(usual):
        yield f"has a power limit of {limit:g} W, where {usual:g} W is usual"
    if details.get("other_processes"):
        yield "ran other programs too"
    if details.get("ecc_uncorrected_errors"):
        yield "had memory errors that could not be corrected"
    if remapping := details.get("row_remapping"):
        yield f"has memory rows whose replacement is {remapping}"
    width, most = details.get("pcie_width"), details.get("pcie_width_most")
    if width and most and width < most:  # type: ignore[operator]
        yield f"has {width} of {most} PCIe lanes"


_NOT_JUST_SO = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@lru_cache(maxsize=64)
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of this type of plain JSON that is just so; anything else it raises at."""
    origin, parts = get_origin(kind), get_args(kind)
    readers = [_reader(part) for part in parts if origin is not Literal and part is not ...]
    if kind is OpCall:
        return OpCall.decode
    if hasattr(kind, "__dataclass_fields__"):
        own = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda data: kind(**{n: own[n](value) for n, value in data.items() if n in own})
    if origin is tuple and parts[-1] is ...:
        return lambda data: tuple([readers[0](item) for item in _just(data, list, tuple)])
    if origin is tuple:
        return lambda data: tuple(
            [read(item) for read, item in zip(readers, _just(data, list, tuple), strict=True)]
        )
    if origin is Mapping:
        return lambda data: {readers[0](name): readers[1](each) for name, each in data.items()}
    if origin is Literal:
        return lambda data: parts[parts.index(data)]
    if parts:
        return lambda data: data if type(data) in parts else readers[0](data)
    if kind is float:
        return lambda data: float(_just(data, float, int))
    return lambda data: _just(data, kind)


def _just(data: Any, *kinds: type) -> Any:
    if type(data) not in kinds:
        raise TypeError(data)
    return data


@lru_cache(maxsize=1)
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(MachineProfile)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a profile file, with the dialect that it is written in."""
    from pydantic.json_schema import GenerateJsonSchema

    return {"$schema": GenerateJsonSchema.schema_dialect, **_adapter().json_schema()}
