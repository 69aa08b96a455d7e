"""Let only the ranks of one launch be heard: sign all that goes through the store they share."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from estimator.errors import ProbeError
from estimator.probe.cluster.discovery import VARIABLE, Place, is_loopback

dist: Any = torch_distributed
_DIGEST = "sha256"
_MAC_CHARACTERS = 64
# A question to the store takes milliseconds, unless the way to it is broken.
_ANSWER_S = 20.0
_FOREVER = timedelta(days=1)
# How often a key is read again that holds what nobody of this launch has signed.
_POLL_S = 0.02


def signed(secret: bytes, key: str, body: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of a body and the key under which it stands, then the body.

    In hexadecimal digits. A key names the speaker and the number of the message, and the secret is
    of one session: bytes copied to another key or kept from another session do not verify, so that
    replays are refused.
    """
    name = key.encode()
    text = len(name).to_bytes(8, "big") + name + body
    return hmac.digest(secret, text, _DIGEST).hex().encode() + body


def verified(secret: bytes, key: str, text: bytes) -> bytes | None:
    """The body of what was signed; None where it was not by this secret for this key."""
    body = text[_MAC_CHARACTERS:]
    return body if hmac.compare_digest(text, signed(secret, key, body)) else None


class SignedStore(dist.Store):  # type: ignore[misc]
    """A store whose values carry a signature: what others wrote is as if it were not there.

    The ranks' JSON messages go through it, and the addresses that gloo and NCCL exchange. A value
    that is not signed is waited past, up to the store's timeout; `forged` holds the keys of those
    met. Counters are not signed: a forged one makes a rank wait, or not wait, and nothing else.
    Whoever makes one keeps it as long as its process group lasts, as C++ does not hold on to what
    Python overrides.
    """

    def __init__(self, store: Any, secret: bytes) -> None:
        super().__init__()
        self._store, self._secret = store, secret
        self.forged: set[str] = set()
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: bytes) -> None:
        """Sign a value and set it."""
        self._store.set(key, signed(self._secret, key, value))

    def get(self, key: str) -> bytes:
        """The value of a key once one is there that was signed."""
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while (body := verified(self._secret, key, self._store.get(key))) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody of this launch has signed '{key}'")
            time.sleep(_POLL_S)
        return body

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether something is there under all the keys."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until something is there under all the keys."""
        self._store.wait(list(keys), timeout or self._store.timeout)

    def clone(self, timeout_s: float | None = None) -> SignedStore:
        """Another connection to the same store, as each thread and NCCL's watchdog want it."""
        own = self._store.clone()
        if timeout_s is not None:
            own.set_timeout(timedelta(seconds=timeout_s))
        self._clones.append(SignedStore(own, self._secret))
        return self._clones[-1]

    def post(self, key: str, value: Any) -> None:
        """Set a key to a JSON value; raises ProbeError where the store is gone."""
        with _reached():
            self.set(key, json.dumps(value, allow_nan=False).encode())

    def read(self, key: str) -> Any:
        """The JSON value of a key; None where no message of this launch is there."""
        with _reached():
            text = self._store.get(key) if self._store.check([key]) else None
        if text is None:
            return None
        if (body := verified(self._secret, key, text)) is None:
            self.forged.add(key)
            return None
        return json.loads(body)

    def await_value(self, key: str) -> Any:
        """The JSON value of a key once it is there.

        Whoever waits is ended by its heartbeat, or by whoever started it.
        """
        while True:
            with _reached():
                self._store.wait([key], _FOREVER)
            if (value := self.read(key)) is not None:
                return value
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Around what the store is asked: raises ProbeError where that is gone."""
    try:
        yield
    except RuntimeError:
        raise ProbeError(
            "rank 0's store is gone, so this rank ends too; see what rank 0 said"
        ) from None


def _connected(place: Place, timeout_s: float) -> Any:
    """torch's TCPStore where the ranks meet, which rank 0 serves where the launcher does not."""
    serves = place.rank == 0 and not place.has_store
    listener = listen(place) if serves else None
    try:
        store = dist.TCPStore(
            place.master_address,
            place.master_port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach() if listener else None,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise ProbeError(
            f"rank 0 does not answer at {place.master_address}:{place.master_port} ({reason}); "
            "check that it runs and that the port is open between the nodes"
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
        if is_loopback(address) and not is_loopback(place.master_address):
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
    """The store of this run; rank 0 draws its number, for which all later signatures hold.

    That others hear this run's and no earlier one shows in rank 0's answer to a number of theirs.
    Raises ProbeError where rank 0 has another secret than they, or says nothing so long.
    """
    own = dist.PrefixStore(f"estimator/{place.attempt}", _connected(place, timeout_s))
    launch, nonce = SignedStore(own, place.secret), None
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
    # Unlike all that is signed, which begins with a length whose first byte is 0.
    return SignedStore(own, hmac.digest(place.secret, b"\xff" + nonce.encode(), _DIGEST))
