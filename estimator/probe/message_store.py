"""Pass messages between the ranks of a probe over torch's TCPStore, apart from what is measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.discovery import Place

BEAT_EVERY_S = 0.5
# A question to the store takes milliseconds, unless the way to it is broken.
_ANSWER_S = 20.0


class MessageStore:
    """Keys and JSON values that all ranks see; each thread needs a connection of its own."""

    def __init__(self, place: Place, *, serves: bool = False, timeout_s: float = _ANSWER_S) -> None:
        import torch.distributed as torch_distributed

        self.dist: Any = torch_distributed
        self.prefix = f"estimator/{place.attempt}"
        address, port = place.master_address, place.master_port
        try:
            self._server = self.dist.TCPStore(
                address,
                port,
                is_master=serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise ProbeError(_why_unreachable(address, port, serves, error)) from None
        self._server.set_timeout(timedelta(seconds=_ANSWER_S))
        self._store = self.dist.PrefixStore(self.prefix, self._server)

    def post(self, key: str, value: Any) -> None:
        """Set a key; raises ProbeError where rank 0 is gone."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError:
            raise _gone() from None

    def read(self, key: str) -> Any:
        """The value of a key that is there."""
        try:
            return json.loads(self._store.get(key))
        except RuntimeError:
            raise _gone() from None

    def has(self, *keys: str) -> bool:
        """Whether all the keys are there."""
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError:
            raise _gone() from None

    def await_value(self, key: str, timeout_s: float) -> Any:
        """The value of a key once it is there; None where it is not within `timeout_s`."""
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except self.dist.DistStoreError:
            return None
        except RuntimeError:
            raise _gone() from None
        return self.read(key)


def _why_unreachable(address: str, port: int, serves: bool, error: RuntimeError) -> str:
    reason = str(error).splitlines()[0][:200]
    if serves:
        return f"rank 0 cannot listen on port {port} ({reason}); choose a free one with MASTER_PORT"
    return (
        f"rank 0 does not answer at {address}:{port} ({reason}); check that it runs and that the "
        "port is open between the nodes"
    )


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

    def listen(self, rank: int, count: int, tick_s: float) -> bool:
        """Take note of a rank's count after `tick_s`; whether it is still taken for alive."""
        if count != self._seen[rank]:
            self._seen[rank], self._silent_s[rank] = count, 0.0
        else:
            # While this process itself was stopped, the others could not be heard.
            self._silent_s[rank] += min(tick_s, self._LONGEST_TICK_S)
        return self._silent_s[rank] < self.PATIENCE_S
