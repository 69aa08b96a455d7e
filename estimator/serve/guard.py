"""Let in only who has the token, asks this host, and sends no more than is taken."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.requests import cookie_parser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from estimator.errors import EstimatorError

try:
    from uvloop import Loop as _Loop
except ImportError:  # Windows has none
    from asyncio import SelectorEventLoop as _Loop

# An event loop accepts whatever waits: the worker that wakes first gets all connections of a
# client, and keeps them. Here each takes one at a time, later the more it holds, so that
# another worker that holds fewer comes first. Sockets of their own (SO_REUSEPORT) spread them by a
# hash, unevenly: p99 at half load 67 and 84 ms instead of 12 to 29.
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
        self._held = {transport for transport in self._held if not transport.is_closing()}
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


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refuse = Callable[[int, str, str], Any]

TOKEN = "ESTIMATOR_TOKEN"
# How the command tells its workers, which are processes of their own.
STORE, HOSTS = "ESTIMATOR_SERVE_STORE", "ESTIMATOR_SERVE_HOSTS"
COOKIE = "estimator_session"
LEAST_TOKEN = 16
# Of a body: a saved graph of Llama-70B takes less than a tenth of the first.
MOST_GRAPH_BYTES, MOST_BODY_BYTES = 32 << 20, 16 << 20
# Of who has not shown the token: a form that holds one.
MOST_LOGIN_BYTES = 4 << 10
_BODY_S = 20.0
_HOST = re.compile(r"([A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_SESSION_S = 12 * 3600.0
_OPEN = ("/health",)
# Of these a browser's session may be used: they change nothing.
_PAGES = ("/", "/login")


class TokenError(EstimatorError, ValueError):
    """The service has no token, or one that can be guessed."""


def check_token(token: str | None) -> str:
    """The token of the environment; raises TokenError."""
    if token is None or len(token) < LEAST_TOKEN:
        raise TokenError(
            f"{TOKEN} must hold a secret of at least {LEAST_TOKEN} characters, found "
            f"{'none' if not token else len(token)}; set it, as in {TOKEN}=$(openssl rand -hex 16)"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(f"{TOKEN} has characters that no header can carry; use letters and digits")
    return token


def session(token: str, *, now_s: float | None = None) -> str:
    """What a browser keeps of a login: until when, and the token's signature of that."""
    until = str(int((time.time() if now_s is None else now_s) + _SESSION_S))
    return f"{until}.{_signed(token, until)}"


def is_session(token: str, value: str) -> bool:
    """Whether a cookie was made by `session` and has not run out."""
    until, _, signature = value.partition(".")
    if not hmac.compare_digest(_signed(token, until).encode(), signature.encode()):
        return False
    return time.time() < int(until)


def _signed(token: str, until: str) -> str:
    return hmac.new(token.encode(), f"session {until}".encode(), hashlib.sha256).hexdigest()


class Guard:
    """An ASGI application before another one: hosts, token, size and time of bodies."""

    def __init__(self, app: App, *, token: str, hosts: Iterable[str], refuse: Refuse) -> None:
        self.app, self.token, self.hosts = app, token, frozenset(hosts)
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refused = self._refused(scope["path"], scope["method"], headers)
        if sum(name.lower() == b"host" for name, _ in scope["headers"]) > 1:
            refused = 400, "TwoHosts", "the request names two hosts; send one header 'Host'"
        if refused is None:
            most = MOST_GRAPH_BYTES if scope["path"] == "/graphs" else MOST_BODY_BYTES
            if not self._has_token(headers):
                most = MOST_LOGIN_BYTES
            body, refused = await _read(headers, receive, most)
            if refused is None:
                await self.app(scope, _replayed(body, receive), send)
                return
        response = self._refuse(*refused)
        await response(scope, receive, send)

    def _refused(
        self, path: str, method: str, headers: dict[bytes, bytes]
    ) -> tuple[int, str, str] | None:
        host = _hostname(headers.get(b"host", b"").decode("latin-1"))
        if host not in self.hosts:
            return 421, "UnknownHost", "this service is asked by another host name than its own"
        if path in _OPEN or path == "/login" or self._has_token(headers):
            return None
        is_page = path in _PAGES and method in ("GET", "HEAD")
        cookies = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
        if is_page and is_session(self.token, cookies.get(COOKIE, "")):
            return None
        if is_page and b"text/html" in headers.get(b"accept", b""):
            return 303, "NoSession", "log in at /login"
        return 401, "NoToken", f"send the header 'Authorization: Bearer TOKEN' with {TOKEN}"

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self.token.encode())


def _hostname(value: str) -> str:
    match = _HOST.fullmatch(value)
    return match[1].strip("[]").lower() if match else ""


async def _read(
    headers: dict[bytes, bytes], receive: Receive, most: int
) -> tuple[bytes, tuple[int, str, str] | None]:
    """The whole body, or why it is not taken."""
    too_much = 413, "TooMuch", f"a body has at most {most} bytes; send fewer rows or parts"
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or int(announced[:20]) > most:
        return b"", too_much
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return b"", (400, "CutOff", "the body ended early; send it whole")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    return b"", too_much
                if not message.get("more_body"):
                    return b"".join(parts), None
    except TimeoutError:
        return b"", (408, "TooSlow", f"the body took more than {_BODY_S:g} s; send it faster")


def _replayed(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
