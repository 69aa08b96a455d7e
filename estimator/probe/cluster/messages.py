"""Pass signed messages of bounded schemas between the ranks of a probe, over a TCPStore."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from estimator.errors import ProbeError
from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.probe.cluster.discovery import VARIABLE, Place, is_loopback
from estimator.units import GIB, MIB

# The longest message is the profile of a machine, about a megabyte.
MAX_MESSAGE_BYTES = 16 * MIB
MAX_DEPTH = 32
_DIGEST = "sha256"
_MAC_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Signer:
    """HMAC-SHA256 (RFC 2104) over a message and the key of the store under which it stands.

    A key names the speaker and the number of the message, and the secret is of one session: bytes
    copied to another key or kept from another session do not verify, so that replays are refused.
    """

    secret: bytes = field(repr=False)

    def derived(self, *names: str) -> Signer:
        """A signer for one purpose, unlike that for any other."""
        # Signed texts begin with a length, whose first byte is 0.
        text = b"\xff" + json.dumps(names).encode()
        return Signer(hmac.digest(self.secret, text, _DIGEST))

    def sign(self, key: str, body: bytes) -> bytes:
        """The signature in hexadecimal digits, then the body."""
        return self._mac(key, body) + body

    def verified(self, key: str, signed: bytes) -> bytes | None:
        """The body; None where it was not signed by this secret for this key."""
        mac, body = signed[:_MAC_CHARACTERS], signed[_MAC_CHARACTERS:]
        return body if hmac.compare_digest(mac, self._mac(key, body)) else None

    def _mac(self, key: str, body: bytes) -> bytes:
        name = key.encode()
        text = len(name).to_bytes(8, "big") + name + body
        return hmac.digest(self.secret, text, _DIGEST).hex().encode()


def to_json(value: Any) -> bytes:
    """A message as JSON; raises ProbeError where it is too long to be read."""
    body = json.dumps(value, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProbeError(
            f"a message of {len(body)} bytes is longer than the {MAX_MESSAGE_BYTES} that ranks "
            "read; probe with a smaller --budget"
        )
    return body


def from_json(body: bytes) -> Any:
    """The value of a message; raises ProbeError where it is too long, too deep or no JSON."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProbeError(f"a message has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProbeError(f"a message is no JSON ({str(error)[:100]})") from None
    if _depth(value, MAX_DEPTH + 1) > MAX_DEPTH:
        raise ProbeError(f"a message is nested more than {MAX_DEPTH} levels deep")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _depth(value: Any, most: int) -> int:
    """Levels of lists and objects; counted as far as `most`."""
    if most == 0 or not isinstance(value, (list, dict)):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, most - 1) for item in items), default=0)


# More ranks than any cluster starts, and more repeats than a measurement makes.
_MOST_RANKS, _MOST_ROWS = 1 << 20, 1 << 20
_MOST_CORES = 1 << 16

# Printable: some of it is shown on a terminal.
Word = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
# A part of the name of a file.
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")]
Rank = Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=GIB)]
Sizes = Annotated[list[Size], Field(min_length=1, max_length=64)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=_MOST_RANKS)]
Cores = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_CORES)]
Versions = Annotated[dict[Word, Word], Field(max_length=32)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Flow = Annotated[list[Rank], Field(min_length=2, max_length=2)]
# (bytes, seconds), and (bytes, entered, left) by a clock that may start anywhere.
Points = Annotated[
    list[Annotated[list[Number], Field(min_length=2, max_length=2)]], Field(max_length=_MOST_ROWS)
]
Windows = Annotated[
    list[Annotated[list[Number], Field(min_length=3, max_length=3)]], Field(max_length=_MOST_ROWS)
]
_Checked = TypeVar("_Checked", bound=BaseModel)


class _Message(BaseModel):
    """JSON values of exactly these types under exactly these names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# Joining.


class Session(_Message):
    """Rank 0's random number: every later signature holds for this run alone."""

    nonce: Nonce


class Rendezvous(_Message):
    """A rank comes: where it runs, what it may use, and its own random number."""

    host: Host
    address: Word
    local_rank: Rank | None
    cores: Cores
    versions: Versions
    nonce: Nonce


class Assignment(_Message):
    """Rank 0's answer, with the number that the rank sent, so that it is no older one.

    `refused` says why the rank has no part; the rest is then left out.
    """

    nonce: Nonce
    refused: Word = ""
    local_rank: Rank = 0
    local_size: Rank = 1
    kind: DeviceKind | None = None
    cores: Cores = Field(default_factory=list)
    has_own_cores: bool = False
    peer: Word | None = None


class DeviceMessage(_Message):
    """The device of a rank, as `estimator.machines.profile.Device` has it."""

    kind: DeviceKind
    index: Rank
    name: Word
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Positive | None
    peak_flops_per_s: Annotated[dict[Word, Positive], Field(max_length=64)]
    cores: Cores
    numa_node: int | None
    details: Annotated[dict[Word, Word | int | float | bool | None], Field(max_length=256)]


class MemberMessage(_Message):
    """A rank is ready, with this device."""

    rank: Rank
    host: Host
    address: Word
    local_rank: Rank
    device: DeviceMessage
    machine: Word
    versions: Versions


class NotReady(_Message):
    """A rank has no device, or none that works."""

    failure: Word


# Measuring.


class TaskMessage(_Message):
    """Run this function of `estimator.probe.cluster.worker` on these ranks."""

    ranks: Ranks
    function: Word
    arguments: dict[Word, Any]
    timeout_s: Positive


class Round(_Message):
    """Tasks to be run at the same time; none where the probe is over."""

    tasks: Annotated[list[TaskMessage], Field(max_length=_MOST_RANKS)]


class End(_Message):
    """A rank has ended a task: how many reports there are, and its result or why it failed."""

    reports: Annotated[int, Field(ge=0, le=_MOST_ROWS)]
    failure: Word | None
    result: dict[str, Any] | None


class CanaryArguments(_Message):
    """The fixed matmul needs no arguments."""


class PairsArguments(_Message):
    """For `estimator.probe.links.network.time_pairs`."""

    pairs: Annotated[
        list[Annotated[list[Flow], Field(max_length=_MOST_RANKS)]], Field(max_length=_MOST_RANKS)
    ]
    sizes_bytes: Sizes
    budget_s: Number


class FlowsArguments(_Message):
    """For `estimator.probe.links.network.time_flows`."""

    flows: Annotated[list[Flow], Field(min_length=1, max_length=_MOST_RANKS)]
    sizes_bytes: Sizes
    budget_s: Number


class ShapeArguments(_Message):
    """For `estimator.probe.cluster.shapes.time_shape`."""

    ops: Annotated[list[CollectiveName], Field(min_length=1, max_length=8)]
    sizes_bytes: Sizes
    budget_s: Number
    pairs: bool = False
    groups: Annotated[list[Ranks], Field(max_length=_MOST_RANKS)] | None = None


class OverlapArguments(_Message):
    """For `estimator.probe.links.overlap.time_rank`: cases are [bytes, all-reduces at once]."""

    budget_s: Number
    cases: Annotated[
        list[Annotated[list[Size], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=16),
    ]
    compute_ratio: Positive


class MachineArguments(_Message):
    """For `estimator.probe.machine.probe_machine`."""

    name: Word
    devices: Annotated[int, Field(gt=0, lt=_MOST_RANKS)] | None
    budget_s: Positive
    kind: DeviceKind | None


class PairReport(_Message):
    """What the sender of a pair measured."""

    source: Rank = Field(alias="from")
    target: Rank = Field(alias="to")
    latency_s: Number
    points: Points


class FlowReport(_Message):
    """What one sender of several measured."""

    latency_s: Number
    windows: Windows


class ShapeReport(_Message):
    """A collective at one size, or one of it and two at once, or why the backend has none."""

    op: CollectiveName
    windows: Windows | None = None
    one: Windows | None = None
    two: Windows | None = None
    unsupported: Word | None = None

    @model_validator(mode="after")
    def _is_one_of_three(self) -> ShapeReport:
        given = self.model_fields_set - {"op"}
        if given not in ({"windows"}, {"one", "two"}, {"unsupported"}):
            raise ValueError("windows, one and two, or unsupported must be given")
        return self


class OverlapRound(_Message):
    """Number of compute and of all-reduces, apart and together."""

    compute_s: Number
    collective_s: Number
    both_s: Number
    beside_s: Number


class OverlapReport(_Message):
    """The rounds of one case beside one kind of compute."""

    compute: Literal["compute_bound", "memory_bound"]
    size_bytes: Size
    in_flight: Size
    rounds: Annotated[list[OverlapRound], Field(min_length=1, max_length=_MOST_ROWS)]


def checked(schema: type[_Checked], value: Any, sender: str) -> _Checked:
    """`value` as a message of this schema; raises ProbeError saying what is wrong with it."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise ProbeError(_what_is_wrong(error, schema.__name__, sender)) from None


def checked_answers(schema: TypeAdapter[Any], values: Sequence[Any], sender: str) -> None:
    """Raise ProbeError where a report or a result is not of this schema."""
    for value in values:
        try:
            schema.validate_python(value)
        except ValidationError as error:
            raise ProbeError(_what_is_wrong(error, "report", sender)) from None


def _what_is_wrong(error: ValidationError, schema: str, sender: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])[:100]
    return (
        f"{sender} sent a {schema} that cannot be used ({where or 'all of it'}: {first['msg']}); "
        "install the same version on all nodes"
    )


BEAT_EVERY_S = 0.5
# A question to the store takes milliseconds, unless the way to it is broken.
_ANSWER_S = 20.0
# How often a key is read again that holds a message nobody of this launch has signed.
_POLL_S = 0.05


def connect(
    address: str,
    port: int,
    *,
    listener: socket.socket | None = None,
    timeout_s: float = _ANSWER_S,
) -> Any:
    """torch's TCPStore at `address`: the one served here on `listener`, or rank 0's.

    Raises ProbeError where there is none. Each thread needs a connection of its own.
    """
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise ProbeError(
            f"rank 0 does not answer at {address}:{port} ({reason}); check that it runs and that "
            "the port is open between the nodes"
        ) from None
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    return store


def listen(place: Place) -> socket.socket:
    """A socket that listens where the other ranks look for rank 0, and on no other interface.

    On all interfaces only where the address is none of this host's own, as behind a forwarded
    port, or where this host alone takes its own name for the loopback.
    """
    last: OSError | None = None
    for family, address in _own_addresses(place):
        try:
            return socket.create_server((address, place.master_port), family=family, backlog=4096)
        except OSError as error:
            last = error
    raise ProbeError(
        f"rank 0 cannot listen on port {place.master_port} ({last}); choose a free one with "
        "MASTER_PORT"
    )


def _own_addresses(place: Place) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Addresses to listen at: the first that can be bound is taken."""
    try:
        found = socket.getaddrinfo(place.master_address, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    own = [
        (family, str(where[0]))
        for family, _, _, _, where in found
        if (place.is_local or not is_loopback(str(where[0]))) and _is_own(family, str(where[0]))
    ]
    yield from own
    if not own:
        yield socket.AF_INET, ""


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


class MessageStore:
    """JSON values under keys that all ranks see, signed: others' messages are as if not there.

    `forged` holds the keys under which something was that nobody of this launch had signed.
    """

    def __init__(self, store: Any, attempt: str, signer: Signer) -> None:
        import torch.distributed as torch_distributed

        self.dist: Any = torch_distributed
        self.prefix = f"estimator/{attempt}"
        self.signer = signer
        self.forged: set[str] = set()
        self._store = self.dist.PrefixStore(self.prefix, store)

    def post(self, key: str, value: Any) -> None:
        """Set a key; raises ProbeError where rank 0 is gone."""
        try:
            self._store.set(key, self.signer.sign(key, to_json(value)))
        except RuntimeError:
            raise _gone() from None

    def read(self, key: str) -> Any:
        """The value of a key; None where no message of this launch is there."""
        try:
            signed = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            raise _gone() from None
        if signed is None:
            return None
        body = self.signer.verified(key, signed)
        if body is None:
            self.forged.add(key)
            return None
        return from_json(body)

    def await_value(self, key: str, timeout_s: float) -> Any:
        """The value of a key once it is there; None where it is not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([key], timedelta(seconds=left_s))
            except self.dist.DistStoreError:
                return None
            except RuntimeError:
                raise _gone() from None
            value = self.read(key)
            if value is not None:
                return value
            time.sleep(_POLL_S)
        return None


def begin_session(store: Any, place: Place) -> MessageStore:
    """Rank 0 draws the number of this run, which every later signature holds for."""
    nonce = secrets.token_hex(16)
    launch = MessageStore(store, place.attempt, _launch_signer(place))
    launch.post("session", {"nonce": nonce})
    return MessageStore(store, place.attempt, launch.signer.derived("session", nonce))


def join_session(store: Any, place: Place, timeout_s: float) -> MessageStore:
    """The store of the run that rank 0 leads; raises ProbeError where it has another secret.

    That it is this run and no earlier one shows in rank 0's answer to the rank's own number.
    """
    launch = MessageStore(store, place.attempt, _launch_signer(place))
    deadline = time.monotonic() + timeout_s
    while (found := launch.read("session")) is None:
        if launch.forged:
            raise ProbeError(
                f"rank 0 at {place.master_address}:{place.master_port} has another secret than "
                f"rank {place.rank}; give all ranks of this launch the same {VARIABLE}"
            )
        if time.monotonic() > deadline:
            raise ProbeError(
                f"rank {place.rank} heard nothing of rank 0 for {timeout_s:g} s; start all ranks "
                "together"
            )
        time.sleep(_POLL_S)
    nonce = checked(Session, found, "rank 0").nonce
    return MessageStore(store, place.attempt, launch.signer.derived("session", nonce))


def _launch_signer(place: Place) -> Signer:
    if place.secret is None:
        raise ProbeError(f"rank {place.rank} has no secret of its launch; set {VARIABLE}")
    return Signer(place.secret)


def _gone() -> ProbeError:
    return ProbeError("rank 0's store is gone, so this rank ends too; see what rank 0 said")


class Heartbeat:
    """Says every half second that this rank lives, from a thread of its own."""

    def __init__(self, store: MessageStore, rank: int) -> None:
        self._store, self._key = store, f"beat/{rank}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._store.post(self._key, 0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_EVERY_S):
            count += 1
            try:
                self._store.post(self._key, count)
            except ProbeError:
                # The main thread meets the same, and says it.
                return


class HeartbeatMonitor:
    """Which ranks have stopped beating, by the clock of a listener that may itself be paused."""

    # Longer than a busy machine holds a thread up.
    PATIENCE_S = 4.0
    _LONGEST_TICK_S = 0.2

    def __init__(self, ranks: Sequence[int]) -> None:
        self._seen: dict[int, int] = dict.fromkeys(ranks, -1)
        self._silent_s: dict[int, float] = dict.fromkeys(ranks, 0.0)

    def listen(self, rank: int, count: int | None, tick_s: float) -> bool:
        """Take note of a rank's count after `tick_s`; whether it is still taken for alive.

        Only a count above all before it is a sign of life: an earlier one may be a replay.
        """
        if count is not None and count > self._seen[rank]:
            self._seen[rank], self._silent_s[rank] = count, 0.0
        else:
            # While this process itself was stopped, the others could not be heard.
            self._silent_s[rank] += min(tick_s, self._LONGEST_TICK_S)
        return self._silent_s[rank] < self.PATIENCE_S
