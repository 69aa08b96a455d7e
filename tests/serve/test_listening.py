"""Workers share the connections of a socket; those that drip are closed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

import uvicorn

from estimator.serve import guard
from estimator.serve.guard import Connection, SharingLoop

YES = [(b"content-length", b"3")]
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Echo(asyncio.Protocol):
    """Sends back what comes, and counts its connections."""

    def __init__(self, counts: list[int], rank: int) -> None:
        self.counts, self.rank = counts, rank

    def connection_made(self, transport: Any) -> None:
        self.counts[self.rank] += 1
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.counts[self.rank] -= 1


@contextmanager
def workers(shared: socket.socket, counts: list[int]) -> Iterator[None]:
    """A loop in a thread for each count, as the processes of the service."""

    async def serve(rank: int, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stops.append((loop, stop))
        server = await loop.create_server(lambda: Echo(counts, rank), sock=shared.dup())
        await stop.wait()
        server.close()

    def run(rank: int) -> None:
        with asyncio.Runner(loop_factory=SharingLoop) as runner:
            runner.run(serve(rank, asyncio.Event()))

    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(counts))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for loop, stop in stops:
            loop.call_soon_threadsafe(stop.set)
        for thread in threads:
            thread.join()


@pytest.fixture
def shared() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_two_workers_hold_about_as_many_connections_each(shared: socket.socket) -> None:
    counts = [0, 0]
    # All wait before any worker starts: a plain loop would take every one at its first wake.
    lines = [socket.create_connection(shared.getsockname(), timeout=10) for _ in range(16)]
    with workers(shared, counts):
        for line in lines:
            line.sendall(b"here")
            assert line.recv(4) == b"here"
        assert sum(counts) == 16
        assert min(counts) >= 4, counts
        for line in lines:
            line.close()


def test_a_worker_whose_connections_ended_takes_new_ones(shared: socket.socket) -> None:
    counts = [0]
    address = shared.getsockname()
    with workers(shared, counts):
        for _ in range(3):
            lines = [socket.create_connection(address, timeout=10) for _ in range(4)]
            for line in lines:
                line.sendall(b"here")
                assert line.recv(4) == b"here"
                line.close()
        deadline = time.monotonic() + 30
        while counts != [0] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counts == [0]


@contextmanager
def answering(*, keep_alive_s: float = 30.0) -> Iterator[tuple[str, int]]:
    """The address of an application that says yes over connections of the service."""

    async def yes(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": YES})
        await send({"type": "http.response.body", "body": b"yes"})

    config = uvicorn.Config(
        yes, http=Connection, lifespan="off", ws="none", timeout_keep_alive=keep_alive_s
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def drip(line: socket.socket, content: bytes) -> bytes:
    """Send a byte every 50 ms until the other side closes; what came back."""
    for number in range(100):
        try:
            line.sendall(content[number % len(content) :][:1])
            line.settimeout(0.05)
            if said := line.recv(1 << 16):
                return said
            break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        pytest.fail("it is open after 5 s")
    return b""


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n" + b"X-Slow: 1\r\n" * 50, b"\r\n"])
def test_a_connection_that_drips_its_headers_is_closed(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_HEAD_S", 0.5)
    with answering() as address, socket.create_connection(address, timeout=10) as line:
        assert drip(line, content) in (b"", LATE)


def test_a_connection_that_drips_after_an_answer_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "_HEAD_S", 0.5)
    unread = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    for request in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", unread):
        with (
            answering(keep_alive_s=0.3) as address,
            socket.create_connection(address, timeout=10) as line,
        ):
            line.sendall(request)
            assert line.recv(1 << 16).endswith(b"yes")
            assert drip(line, b"GET / HTTP/1.1\r\n") in (b"", LATE)


def test_requests_one_after_another_and_at_once_are_answered_over_one_connection() -> None:
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    with answering() as address, socket.create_connection(address, timeout=10) as line:
        for requests in (request, request * 3, request):
            line.sendall(requests)
            said = b""
            while said.count(b"yes") < len(requests) // len(request):
                said += line.recv(1 << 16)
