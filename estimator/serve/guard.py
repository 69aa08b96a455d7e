"""Let in only who has the token, asks this host, and sends no more than is taken."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from estimator.errors import EstimatorError

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
        if is_page and is_session(self.token, _cookie(headers)):
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


def _cookie(headers: dict[bytes, bytes]) -> str:
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


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
