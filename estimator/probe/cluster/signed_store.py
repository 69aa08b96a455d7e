"""Let only the ranks of one launch be heard: sign all that goes through the store they share."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from estimator.errors import ProbeError
from estimator.probe.cluster.discovery import VARIABLE, Place, is_loopback
from estimator.units import MIB

dist: Any = torch_distributed
# The longest message is what a rank says of every pair of some thousand nodes, some megabytes.
MAX_MESSAGE_BYTES = 16 * MIB
_DIGEST = "sha256"
_MAC_CHARACTERS = 64
# A question to the store takes milliseconds, unless the way to it is broken.
_ANSWER_S = 20.0
_FOREVER = timedelta(days=1)
# How often a key is read again that holds what nobody of this launch has signed.
_POLL_S = 0.02


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


class SignedStore(dist.Store):  # type: ignore[misc]
    """A store whose values carry a signature: what others wrote is as if it were not there.

    The ranks' JSON messages go through it, and the addresses that gloo and NCCL exchange. A value
    that is not signed is waited past, up to the store's timeout; `forged` holds the keys of those
    met. Counters are not signed: a forged one makes a rank wait, or not wait, and nothing else.
    Whoever makes one keeps it as long as its process group lasts, as C++ does not hold on to what
    Python overrides.
    """

    def __init__(self, store: Any, signer: Signer) -> None:
        super().__init__()
        self._store, self.signer = store, signer
        self.forged: set[str] = set()
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Sign a value and set it."""
        body = value.encode() if isinstance(value, str) else value
        self._store.set(key, self.signer.sign(key, body))

    def get(self, key: str) -> bytes:
        """The value of a key once one is there that was signed."""
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while True:
            body = self.signer.verified(key, self._store.get(key))
            if body is not None:
                return body
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody of this launch has signed '{key}'")
            time.sleep(_POLL_S)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether something is there under all the keys."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until something is there under all the keys."""
        self._store.wait(list(keys), timeout or self._store.timeout)

    def clone(self) -> SignedStore:
        """Another connection to the same store, as NCCL's watchdog wants it."""
        self._clones.append(SignedStore(self._store.clone(), self.signer))
        return self._clones[-1]

    def part(self, name: str, *, timeout_s: float) -> SignedStore:
        """Another connection to what stands under a name, whose signatures hold there alone."""
        own = self._store.clone()
        own.set_timeout(timedelta(seconds=timeout_s))
        return SignedStore(dist.PrefixStore(name, own), self.signer.derived(name))

    def post(self, key: str, value: Any) -> None:
        """Set a key to a JSON value; raises ProbeError where the store is gone."""
        body = json.dumps(value, allow_nan=False)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProbeError(
                f"a message of {len(body)} bytes is longer than the {MAX_MESSAGE_BYTES} that ranks "
                "read; probe with a smaller --budget"
            )
        try:
            self.set(key, body)
        except RuntimeError:
            raise _gone() from None

    def read(self, key: str) -> Any:
        """The JSON value of a key; None where no message of this launch is there."""
        try:
            signed = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            raise _gone() from None
        if signed is None:
            return None
        body = self.signer.verified(key, signed) if len(signed) <= 2 * MAX_MESSAGE_BYTES else None
        if body is None:
            self.forged.add(key)
            return None
        return json.loads(body)

    def await_value(self, key: str) -> Any:
        """The JSON value of a key once it is there.

        Whoever waits is ended by its heartbeat, or by whoever started it.
        """
        while True:
            try:
                self._store.wait([key], _FOREVER)
            except RuntimeError:
                raise _gone() from None
            if (value := self.read(key)) is not None:
                return value
            time.sleep(_POLL_S)


def _gone() -> ProbeError:
    return ProbeError("rank 0's store is gone, so this rank ends too; see what rank 0 said")


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
    addresses: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(place.master_address, None, type=socket.SOCK_STREAM)
        addresses = [(family, str(where[0])) for family, _, _, _, where in found]
    last: OSError | None = None
    for family, address in (*addresses, (socket.AF_INET, "")):
        if is_loopback(address) and not place.is_local:
            continue
        try:
            return socket.create_server((address, place.master_port), family=family, backlog=4096)
        except OSError as error:
            last = error
            if error.errno == errno.EADDRINUSE:
                break
    raise ProbeError(
        f"rank 0 cannot listen on port {place.master_port} ({last}); choose a free one with "
        "MASTER_PORT"
    )


def open_session(place: Place, timeout_s: float) -> SignedStore:
    """The store of this run, which rank 0 serves where the launcher does not; raises ProbeError."""
    serves = place.rank == 0 and not place.has_store
    store = connect(
        place.master_address,
        place.master_port,
        listener=listen(place) if serves else None,
        timeout_s=timeout_s,
    )
    return session_of(store, place, timeout_s)


def session_of(store: Any, place: Place, timeout_s: float) -> SignedStore:
    """What is this run's of a store: rank 0 draws its number, for which all later signatures hold.

    That others hear this run's and no earlier one shows in rank 0's answer to a number of theirs.
    Raises ProbeError where rank 0 has another secret than they, or says nothing so long.
    """
    own = dist.PrefixStore(f"estimator/{place.attempt}", store)
    launch, nonce = SignedStore(own, Signer(place.secret)), None
    if place.rank == 0:
        nonce = secrets.token_hex(16)
        launch.post("session", nonce)
    deadline = time.monotonic() + timeout_s
    while nonce is None and (nonce := launch.read("session")) is None:
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
    return SignedStore(own, launch.signer.derived("session", nonce))
