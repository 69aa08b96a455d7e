"""Accept connections: about as many for each worker, and none whose requests never begin."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
# Of a request line and headers: a browser's take a few KiB, and come in one packet or two.
_MOST_HEAD_BYTES, _HEAD_S = 64 << 10, 10.0


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


class Connection(HttpToolsProtocol):
    """One client's connection, closed where the head of its next request is too long or too slow.

    uvicorn bounds neither where httptools parses, and its own wait ends with the first byte.
    """

    _late: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head(_HEAD_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is None:  # what came may be of a body
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._forget_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # no other request waits already
            self._await_head(self.timeout_keep_alive + _HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_wait()
        super().connection_lost(exc)

    def _await_head(self, wait_s: float) -> None:
        self._forget_wait()
        self._late = self.loop.call_later(wait_s, self._refuse, b"408 Request Timeout")

    def _forget_wait(self) -> None:
        self._head_bytes = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head)
            self.transport.close()
