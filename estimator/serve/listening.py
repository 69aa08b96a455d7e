"""Accept connections so that workers that share a listening socket hold about as many each."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

try:
    from uvloop import Loop as _Loop
except ImportError:  # Windows has none
    from asyncio import SelectorEventLoop as _Loop

# An event loop accepts whatever waits: the worker that wakes first gets all connections of a
# client, and keeps them. Here each takes one at a time, later the more it holds, so that
# another worker that holds fewer comes first. Sockets of their own (SO_REUSEPORT) spread them by a
# hash, unevenly: p99 at half load 67 and 84 ms instead of 12 to 29 (benchmarks/serve_speed.py).
_WAIT_S_EACH, _LONGEST_WAIT_S = 0.5e-3, 10e-3
# Where no descriptor is left.
_RETRY_S = 1.0


class SharingLoop(_Loop):
    """The event loop of one of several workers."""

    async def create_server(
        self, protocol_factory: Callable[[], Any], *words: Any, **options: Any
    ) -> Any:
        """As any loop's; a listening socket that is given is taken to be shared."""
        sock = options.get("sock")
        if sock is None or options.get("ssl"):
            return await super().create_server(protocol_factory, *words, **options)
        sock.setblocking(False)
        sock.listen(options.get("backlog", 100))
        return _Listener(self, sock, protocol_factory)


class _Listener:
    """Accepts from one socket until it is closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Callable[[], Any]
    ) -> None:
        self.sockets = (sock,)
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._held = set[asyncio.BaseTransport]()
        self._opening = set[asyncio.Task[None]]()
        self._later: asyncio.TimerHandle | None = None
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        self._later = None
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def _ready(self) -> None:
        self._held = {each for each in self._held if not each.is_closing()}
        held = len(self._held) + len(self._opening)
        self._loop.remove_reader(self._sock.fileno())
        wait_s = min(held * _WAIT_S_EACH, _LONGEST_WAIT_S)
        self._later = self._loop.call_later(wait_s, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            pass  # another worker was first, or the client is gone
        except OSError:
            self._later = self._loop.call_later(_RETRY_S, self._wait_for_next)
            return
        else:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._wait_for_next()

    async def _open(self, connection: socket.socket) -> None:
        transport, _ = await self._loop.connect_accepted_socket(self._protocol, connection)
        self._held.add(transport)

    def close(self) -> None:
        """Accept no more; connections stay."""
        if self._later is not None:
            self._later.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for once it is closed."""
