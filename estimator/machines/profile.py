"""Hold what was measured of one machine type, as checked values and as JSON.

A profile stores measurements and simple fits; everything derived from them (kernel-cost fits,
collective costs on a topology) is derived where it is used, so a better formula needs no new probe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from estimator.errors import (
    MOST_QUOTED,
    ProfileError,
    StoreError,
    UnknownMachineError,
    printable,
    quoted,
)
from estimator.files import parse_json, read_text, write_file
from estimator.tensors import OpCall

SCHEMA_VERSION = 1

DeviceKind = Literal["cpu", "cuda"]
Source = Literal["measured", "imported", "fitted", "datasheet"]
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
Reach = Literal["device_switch", "socket", "node", "rack", "cluster"]


# Beyond any quantity of a machine, and few enough digits that products stay finite.
_LEAST, _MOST = 1e-30, 1e30


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not _LEAST <= value <= _MOST:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be positive, at most {_MOST:g}, found "
                f"{quoted(value)}"
            )


def _check_not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 <= value <= _MOST:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be 0 or more, at most {_MOST:g}, found "
                f"{quoted(value)}"
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
        _check_not_negative(self, "samples", "relative_error")


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
        _check_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")
        for dtype, rate in self.peak_flops_per_s.items():
            if not _LEAST <= rate <= _MOST:
                raise ValueError(
                    f"Device.peak_flops_per_s[{quoted(dtype)}] must be positive, found {rate}"
                )

    @property
    def compute_capability(self) -> float | None:
        """NVIDIA's number for what a chip can do, such as 8.0; None where it is not known."""
        text = str(self.details.get("compute_capability", ""))
        # AMD's are names, such as gfx90a.
        return float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", text) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one connection; n bytes take latency_s + n / bandwidth_bytes_per_s.

    `reach` says how far apart its ends are: behind one device switch, on one socket, in one node,
    in nodes of one rack, in other racks. `streams` such links were in use at once when it was
    measured (between nodes: flows through one NIC), and the rate is what one of them got. `points`
    are the measured (bytes, seconds), kept beside the fit.
    """

    kind: LinkKind
    reach: Reach = "node"
    latency_s: float
    bandwidth_bytes_per_s: float
    pinned: bool = False
    streams: int = 1
    points: tuple[tuple[float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_not_negative(self, "latency_s")
        _check_positive(self, "bandwidth_bytes_per_s", "streams")
        _check_points(self, self.points)

    def transfer_time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes` bytes one way."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def _check_points(owner: object, points: Iterable[tuple[float, float]]) -> None:
    for size, seconds in points:
        if not (0 <= size <= _MOST and _LEAST <= seconds <= _MOST):
            raise ValueError(
                f"{type(owner).__name__}.points must be (bytes >= 0, seconds > 0), "
                f"found ({size}, {seconds})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Measured size → time of one collective over one group shape.

    `size_bytes` follows nccl-tests: the whole buffer of one rank (for all-gather and
    reduce-scatter the gathered size). The group has `group_size` ranks on `nodes` nodes; `hosts`
    names the node of every rank, in rank order, where it was measured on a cluster. `pair_ratio`
    are (bytes, seconds of two such collectives at once / seconds of one).
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
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_points(self, self.points)
        _check_points(self, self.pair_ratio)
        _check_not_negative(self, "latency_s")
        _check_positive(self, "bandwidth_bytes_per_s", "group_size", "nodes")
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
                if not _LEAST <= value <= _MOST:
                    raise ValueError(f"PairMatrix.{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCost:
    """What an all-reduce costs compute that runs beside it on the same devices, and the reverse.

    `exposed_ratio` = (compute and collective together − compute alone) / collective alone: 0 is
    perfect overlap, 1 is none, above 1 they get in each other's way; where both run on the same
    cores (gloo), the work that the collective is to them is part of it. `collective_slowdown_ratio`
    = time of a collective beside compute / alone (≥ 0). The group spans `nodes` nodes.
    """

    compute: Literal["compute_bound", "memory_bound"]
    backend: str
    group_size: int
    nodes: int = 1
    size_bytes: int
    exposed_ratio: float
    collective_slowdown_ratio: float
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_not_negative(self, "exposed_ratio", "collective_slowdown_ratio")
        _check_positive(self, "group_size", "nodes", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """One probed kernel call: `call` is `OpCall.encode()`.

    `warm_s`: inputs as the previous op left them (in cache where they fit), output memory already
    touched. `cold_s`: inputs read from main memory; None where the device has no such difference.
    Neither includes the host's dispatch cost beyond the bare operator call. `spread_ratio` is half
    the 10–90 % range of the repeats over their median.
    """

    call: Mapping[str, Any]
    warm_s: float
    cold_s: float | None = None
    spread_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "warm_s", "cold_s")
        _check_not_negative(self, "spread_ratio")
        try:
            OpCall.decode(dict(self.call))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"KernelPoint.call is no call of an operator: {error}") from None


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
        _check_positive(self, "devices_busy")
        _check_points(self, self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds of host work: what a step costs when kernels take no time at all.

    forward_op_s: one differentiable op called from Python, recorded by autograd, beyond the bare
    operator call that `KernelPoint` times; forward_view_s: the same for a view; backward_op_s: one
    backward node beyond its kernels; bare_op_s: the bare call of the smallest kernel;
    module_call_s: one `nn.Module.__call__`; step_s: an empty training step (zero_grad, backward
    entry, update entry). ddp_step_s / ddp_bucket_s: what DDP adds per step and per bucket.
    shard_unit_s: what FSDP adds per step and unit that it gathers; shard_update_tensor_s: what an
    update adds per sharded tensor.
    """

    forward_op_s: float
    forward_view_s: float
    backward_op_s: float
    bare_op_s: float
    module_call_s: float
    step_s: float = 0.0
    ddp_step_s: float = 0.0
    ddp_bucket_s: float = 0.0
    shard_unit_s: float = 0.0
    shard_update_tensor_s: float = 0.0
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_not_negative(
            self, *(item.name for item in dataclasses.fields(self) if item.name != "provenance")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """What the probe saw of memory: page faults, caches, allocator settings.

    `first_touch_s_per_byte` is the cost of memory the process has not touched since it got it from
    the operating system; `mmap_threshold_bytes` the size from which an allocation always is such
    memory (glibc: 32 MiB once warmed up). `cold_read_s_per_byte` is what a byte read from main
    memory costs beyond one read from cache. Cache sizes are those that one device can use alone.
    """

    first_touch_s_per_byte: float = 0.0
    page_bytes: int = 4096
    allocator: str = "unknown"
    mmap_threshold_bytes: int | None = None
    cold_read_s_per_byte: float = 0.0
    private_cache_bytes: int = 0
    shared_cache_bytes: int = 0
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_not_negative(
            self,
            "first_touch_s_per_byte",
            "cold_read_s_per_byte",
            "private_cache_bytes",
            "shared_cache_bytes",
        )
        _check_positive(self, "page_bytes", "mmap_threshold_bytes")


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
        _check_not_negative(
            self, "launch_s", "per_tensor_s", "per_parameter_s", "per_idle_parameter_s"
        )
        for tensors, parameters, seconds in self.points:
            if not all(_LEAST <= value <= _MOST for value in (tensors, parameters, seconds)):
                raise ValueError("UpdateCost.points must be (tensors, parameters, seconds) > 0")
        if not all(0 <= value <= _MOST for lane in self.lanes for value in lane):
            raise ValueError("UpdateCost.lanes must be numbers from 0 on")

    def update_time_s(self, *, tensors: int, parameters: int, idle: float = 0.0) -> float:
        """Seconds of a step; `idle` of the `parameters` elements in `tensors` tensors are idle."""
        busy_s = self.launch_s + tensors * self.per_tensor_s + parameters * self.per_parameter_s
        return busy_s + idle * self.per_idle_parameter_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Everything known of one machine type: one node with `devices`.

    `network` are the links that leave the node, by reach and by flows through the NIC at once;
    `pairs` holds the single links of the very cluster that was probed.
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
    updates: tuple[UpdateCost, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    canary_s: float | None = None
    rank_spread_ratio: float | None = None
    missing: tuple[str, ...] = ()
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
        _check_positive(self, "canary_s")
        _check_not_negative(self, "rank_spread_ratio")

    def __repr__(self) -> str:
        # The generated one would print every kernel that was timed.
        return f"MachineProfile({self.name}: {len(self.devices)} x {self.devices[0].name})"

    @property
    def kind(self) -> DeviceKind:
        """The kind of the machine's devices; all devices of a profile are of one kind."""
        return self.devices[0].kind

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any, *, origin: str = "profile") -> MachineProfile:
        """Check and build a profile from plain JSON values; raises ProfileError naming `origin`."""
        from pydantic import ValidationError

        text = _unprintable(data)
        if text is not None:
            raise ProfileError(
                f"{origin} is not a machine profile ({quoted(text)} has unprintable characters); "
                "run 'estimator probe' to write a new one"
            )
        try:
            return _adapter().validate_python(_of_this_version(data))  # type: ignore[no-any-return]
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = printable(".".join(str(part) for part in first["loc"])) or "top level"
            raise ProfileError(
                f"{origin} is not a machine profile ({where}: {printable(_reason(first))}); "
                "run 'estimator probe' to write a new one"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_text_atomically(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False))


def _unprintable(data: Any) -> str | None:
    """A text in JSON values that would move a terminal's cursor, or None."""
    left = [data]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if not value.isprintable():
                return value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return None


def _reason(error: Mapping[str, Any]) -> str:
    """What pydantic found wrong, in the words of a file rather than of Python."""
    text = str(error["msg"]).removeprefix("Value error, ")
    for name, meant in (("valid tuple", "list"), ("valid dictionary", "table of names and values")):
        text = text.replace(f"should be a {name}", f"should be a {meant}")
    return text


@lru_cache(maxsize=1)
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(MachineProfile)


def _of_this_version(data: Any) -> Any:
    """A profile's values without contentions of first touches, which earlier versions measured.

    A step that keeps its memory, as all that is timed here, touches nothing for the first time.
    Keys that have gone need nothing: unknown ones are passed over.
    """
    contentions = data.get("contentions") if isinstance(data, dict) else None
    if not isinstance(contentions, list | tuple):
        return data
    kept = [
        item
        for item in contentions
        if not (isinstance(item, dict) and item.get("bound") == "first_touch")
    ]
    return {**data, "contentions": kept}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a profile file, with the dialect that it is written in."""
    from pydantic.json_schema import GenerateJsonSchema

    return {"$schema": GenerateJsonSchema.schema_dialect, **_adapter().json_schema()}


def check_writable(path: Path) -> None:
    """Refuse a place that cannot be written before the work starts, not after it."""
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():  # a device or a pipe is written to as it is
        if not os.access(path, os.W_OK):
            raise StoreError(f"{path} cannot be written to; choose another place")
        return
    path = Path(os.path.realpath(path))
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise StoreError(f"{folder} is no folder that can be written to; choose another place")


def check_machine_name(name: str) -> str:
    """The name of a machine type, if it can stand in an allocation; raises ProfileError."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name):
        raise ProfileError(
            f"{quoted(name)} cannot stand in an allocation; use letters, digits, '.', '_' and '-'"
        )
    return name


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all; raises StoreError."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all; raises StoreError."""
    try:
        write_file(path, content)
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror}); choose another place with --out or "
            "ESTIMATOR_HOME"
        ) from None
    _fresh.clear()


def home() -> Path:
    """The user's store: $ESTIMATOR_HOME, by default the platform's user-data folder."""
    chosen = os.environ.get("ESTIMATOR_HOME")
    if chosen:
        return Path(chosen)
    return _platform_home(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME"))


@lru_cache(maxsize=8)
def _platform_home(*_environment: str | None) -> Path:
    from platformdirs import user_data_path

    return user_data_path("throughput-estimator", appauthor=False)


@lru_cache(maxsize=4)
def shipped_data(folder: str) -> Path:
    """A folder of the data that ships: inside the package once installed, else beside it."""
    packaged = Path(str(resources.files("estimator"))) / "data" / folder
    checkout = Path(__file__).resolve().parents[2] / "data" / folder
    return packaged if packaged.is_dir() else checkout


def machine_folders() -> tuple[Path, ...]:
    """Where machines are looked up by name: the user's store first, then the shipped catalogue."""
    return tuple(map(Path, _folder_names()))


def _folder_names() -> tuple[str, str]:
    # As text: every estimate asks whether its machines have changed, and paths are slow to join.
    chosen = os.environ.get("ESTIMATOR_HOME") or str(home())
    return f"{chosen}{os.sep}machines", str(shipped_data("machines"))


def known_machines() -> dict[str, Path]:
    """Every machine that can be named, with its file; the user's own hide shipped ones."""
    found: dict[str, Path] = {}
    for folder in machine_folders():
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stem) if folder.is_dir() else ()
        for path in paths:
            found.setdefault(path.stem, path)
    return found


# (modification time, size, inode) of a file's last version, and what it held.
_FileState = tuple[int, int, int]
_loaded: OrderedDict[str, tuple[_FileState, MachineProfile]] = OrderedDict()
_MOST_LOADED = 256
# What was asked for a moment ago, and until when its file is not looked at again: a scheduler's
# questions come by the thousand. What this process writes is seen at once.
_FRESH_S = 0.02
_fresh: dict[tuple[str, str | None], tuple[float, MachineProfile]] = {}
_reading = threading.Lock()
_MOST_NAMED = 5


def load_profile(name_or_path: str | os.PathLike[str]) -> MachineProfile:
    """Load a profile by machine name (user's store, then shipped catalogue) or by path.

    A file is read again only once it has changed, of which other processes' changes are seen after
    20 ms. Raises UnknownMachineError if nothing goes by that name, ProfileError if the file is
    damaged.
    """
    text, now = os.fspath(name_or_path), time.monotonic()
    key = text, os.environ.get("ESTIMATOR_HOME")
    fresh = _fresh.get(key)
    if fresh is not None and now < fresh[0]:
        return fresh[1]
    path, state = _find_profile(text)
    known = _loaded.get(path)
    if known is not None and known[0] == state:
        profile = known[1]
    else:
        profile = _read_once(path, state)
    if len(_fresh) >= _MOST_LOADED:
        _fresh.clear()
    _fresh[key] = now + _FRESH_S, profile
    return profile


def _read_once(path: str, state: _FileState | None) -> MachineProfile:
    """Read a file that is not known in this state; threads that ask at once get one object."""
    with _reading:
        # What is compiled belongs to an object.
        known = _loaded.get(path)
        if known is not None and known[0] == state:
            return known[1]
        profile = _read_profile(Path(path))
        if state is not None:
            _loaded[path] = (state, profile)
            while len(_loaded) > _MOST_LOADED:
                _loaded.popitem(last=False)
        return profile


def _find_profile(text: str) -> tuple[str, _FileState | None]:
    """(path, state) of a profile's file; the state is None where there is no such file."""
    if os.sep not in text:
        for folder in _folder_names():
            path = f"{folder}{os.sep}{text}.json"
            state = _file_state(path)
            if state is not None:
                return path, state
    if text.endswith(".json") or os.sep in text:
        return text, _file_state(text)
    if text.startswith("local"):
        store = home()
        hint = "run 'estimator probe' first"
        if store.exists() and not store.is_dir():
            hint = f"ESTIMATOR_HOME is {store}, no folder: name one, then run 'estimator probe'"
    else:
        hint = _close_to(text)
    raise UnknownMachineError(f"no machine profile is called {quoted(text)}; {hint}")


def _close_to(text: str) -> str:
    """What to do about a name that no machine has: those it may have meant, at most five."""
    from difflib import get_close_matches

    known, asked = list(known_machines()), text[:MOST_QUOTED].lower()
    within = [name for name in known if asked and asked in name]
    within.sort(key=lambda name: (not name.startswith(asked), len(name)))
    alike = get_close_matches(asked, known, n=_MOST_NAMED)
    close = list(dict.fromkeys([*within, *alike]))[:_MOST_NAMED]
    everything = "run 'estimator profile list' for all that are known"
    return f"close to it are {', '.join(close)}; {everything}" if close else everything


def _file_state(path: str) -> _FileState | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_profile(path: Path) -> MachineProfile:
    try:
        content = read_text(path)
    except FileNotFoundError:
        raise UnknownMachineError(
            f"there is no profile file {path}; run 'estimator probe --out {path}'"
        ) from None
    except OSError as error:
        raise ProfileError(
            f"cannot read profile {path} ({error.strerror}); check the file, or run "
            "'estimator probe' to write a new one"
        ) from None
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ProfileError(
            f"{path} is damaged ({error}); run 'estimator probe' to write a new one"
        ) from None
    return MachineProfile.from_dict(data, origin=str(path))
