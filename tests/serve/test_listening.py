"""Workers that share a listening socket share its connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from estimator.serve.listening import SharingLoop


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
def workers(listening: socket.socket, counts: list[int]) -> Iterator[None]:
    """A loop in a thread for each count, as the processes of the service."""

    async def serve(rank: int, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stops.append((loop, stop))
        server = await loop.create_server(lambda: Echo(counts, rank), sock=listening.dup())
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
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_two_workers_hold_about_as_many_connections_each(listening: socket.socket) -> None:
    counts = [0, 0]
    # All wait before any worker starts: a plain loop would take every one at its first wake.
    lines = [socket.create_connection(listening.getsockname(), timeout=10) for _ in range(16)]
    with workers(listening, counts):
        for line in lines:
            line.sendall(b"here")
            assert line.recv(4) == b"here"
        assert sum(counts) == 16
        assert min(counts) >= 4, counts
        for line in lines:
            line.close()


def test_a_worker_whose_connections_ended_takes_new_ones(listening: socket.socket) -> None:
    counts = [0]
    address = listening.getsockname()
    with workers(listening, counts):
        for _ in range(3):
            lines = [socket.create_connection(address, timeout=10) for _ in range(4)]
            for line in lines:
                line.sendall(b"here")
                assert line.recv(4) == b"here"
                line.close()
        deadline = time.monotonic() + 10
        while counts != [0] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counts == [0]
