"""Sign what a process group puts into its store, so that it connects to its own ranks alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from estimator.probe.cluster.messages import Signer

dist: Any = torch_distributed
_POLL_S = 0.02


class SignedStore(dist.Store):  # type: ignore[misc]
    """A store whose values carry a signature: gloo and NCCL exchange addresses through it.

    A value that is not signed is waited past, up to the store's timeout. Counters are not signed:
    a forged one makes a rank wait, or not wait, and nothing else. Whoever makes one keeps it as
    long as its process group lasts, as C++ does not hold on to what Python overrides.
    """

    def __init__(self, store: Any, signer: Signer) -> None:
        super().__init__()
        self._store, self._signer = store, signer
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Sign a value and set it."""
        body = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._signer.sign(key, body))

    def get(self, key: str) -> bytes:
        """The value of a key once one is there that was signed."""
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while True:
            body = self._signer.verified(key, self._store.get(key))
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
        self._clones.append(SignedStore(self._store.clone(), self._signer))
        return self._clones[-1]
