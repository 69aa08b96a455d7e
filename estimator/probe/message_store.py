"""Pass signed messages between the ranks of a probe over torch's TCPStore."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.discovery import Place, is_loopback
from estimator.probe.launch_secret import VARIABLE
from estimator.probe.messages import Session, checked
from estimator.probe.signing import Signer, from_json, to_json

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
