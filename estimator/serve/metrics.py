"""Count requests and their times for Prometheus, over all workers where there are several."""

from __future__ import annotations

import os
import time

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
    multiprocess,
)

from estimator.serve.guard import App, Message, Receive, Scope, Send

_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Paths are few: what was asked of no endpoint is counted as one.
_REQUESTS = Counter("estimator_requests", "Requests by endpoint and status.", ("path", "status"))
_SECONDS = Histogram("estimator_request_seconds", "Time of requests.", ("path",), buckets=_BOUNDS_S)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """An ASGI application around another one that counts."""

    def __init__(self, app: App, *, paths: frozenset[str]) -> None:
        self.app, self.paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"
        status, begun_s = "500", time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            _REQUESTS.labels(path, status).inc()
            _SECONDS.labels(path).observe(time.perf_counter() - begun_s)


def exposition() -> bytes:
    """All counts as Prometheus reads them."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return bytes(generate_latest())
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return bytes(generate_latest(registry))
