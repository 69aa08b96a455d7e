"""The HTTP application: endpoints, pages for browsers, and every refusal as problem JSON."""

from __future__ import annotations

import gc
import hmac
import os
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

import orjson
from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
    multiprocess,
)
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse

import estimator
from estimator.errors import EstimatorError, StoreError, printable
from estimator.files import home
from estimator.report.facts import heading
from estimator.report.page import template, zoom_hash
from estimator.report.sections import (
    Section,
    drawn_memory_sections,
    estimate_sections,
    scaling_section,
    smaller_allocations,
    timeline_section,
)
from estimator.serve.answers import (
    Answers,
    EstimateQuestion,
    ManyQuestion,
    Observed,
    PlanQuestion,
    Problem,
    UnknownGraphError,
    said,
)
from estimator.serve.guard import (
    COOKIE,
    HOSTS,
    STORE,
    TOKEN,
    App,
    Guard,
    Message,
    Receive,
    Scope,
    Send,
    check_token,
    session,
)

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'; script-src "
)
_MOST_GRAPHS = 200
_TITLE = "throughput-estimator"


def add_pages(app: FastAPI, answers: Answers, token: str) -> None:
    """Give an application its pages; the guard lets a session in for these alone."""

    @app.get("/", include_in_schema=False)
    async def front(request: Request) -> Response:
        query = request.query_params
        return await run_in_threadpool(
            _front, answers, query.get("graph", ""), query.get("on", ""), query.get("strategy", "")
        )

    @app.get("/login", include_in_schema=False)
    async def login() -> Response:
        return _page("login.html", title=_TITLE, sections=(), failed=False)

    @app.post("/login", include_in_schema=False)
    async def log_in(request: Request) -> Response:
        form = parse_qs((await request.body())[:4096].decode("latin-1"))
        given = form.get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), token.encode()):
            return _page("login.html", status=401, title=_TITLE, sections=(), failed=True)
        response = RedirectResponse("/", status_code=303)
        is_https = request.url.scheme == "https"
        response.set_cookie(
            COOKIE, session(token), httponly=True, samesite="strict", secure=is_https
        )
        return response


def _front(answers: Answers, graph: str, on: str, strategy: str) -> Response:
    title, sections, refusal = _TITLE, list[Section](), ""
    if graph and on:
        try:
            title, sections = _answered(answers, graph, on, strategy or "ddp")
        except (EstimatorError, ValidationError) as error:
            refusal = str(error) if isinstance(error, EstimatorError) else "that is no question"
    return _page(
        "front.html",
        title=title,
        sections=sections,
        refusal=refusal,
        graphs=answers.graphs.titles(_MOST_GRAPHS),
        machines=[machine["name"] for machine in answers.machines()],
        asked={"graph": graph, "on": on, "strategy": strategy or "ddp"},
    )


def _answered(answers: Answers, graph: str, on: str, strategy: str) -> tuple[str, list[Section]]:
    from estimator.advise.scaling import sweep

    def answer_of(text: str) -> Any:
        return answers.estimate(EstimateQuestion(graph=graph, on=text, strategy=strategy))

    answer = answer_of(on)
    rows = sweep(smaller_allocations(answer.allocation), answer_of)
    more = [timeline_section(answer), scaling_section(rows), *drawn_memory_sections(answer)]
    return heading(answer), estimate_sections(answer, more=more, verbose=True)


def _page(name: str, *, status: int = 200, **content: Any) -> Response:
    return HTMLResponse(
        str(template(name).render(**content)),
        status_code=status,
        headers={
            "Content-Security-Policy": f"{_POLICY}'{zoom_hash()}'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        },
    )


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


ARROW = "application/vnd.apache.arrow.stream"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}
_REFUSALS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 404, 408, 413, 421, 422, 503), _PROBLEM
)


def from_environment() -> App:
    """The application of a worker."""
    store = os.environ.get(STORE)
    hosts = tuple(filter(None, os.environ.get(HOSTS, "").split(",")))
    app = create_app(
        token=check_token(os.environ.get(TOKEN)),
        store=None if store is None else Path(store),
        hosts=(*LOCAL_HOSTS, *hosts),
    )
    # A full collection over all that is imported would stop every request for 0.1 s.
    gc.collect()
    gc.freeze()
    return app


def create_app(
    *,
    token: str,
    store: Path | None = None,
    graphs: Path | None = None,
    hosts: tuple[str, ...] = LOCAL_HOSTS,
) -> App:
    """The guarded application; `store` and `graphs` are by default the user's own."""
    answers = Answers(graphs or home() / "graphs", store)
    app = FastAPI(
        title="throughput-estimator",
        version=estimator.__version__,
        description="How fast would this model train on those devices?",
        # Their pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        responses=_REFUSALS,
    )
    _add_questions(app, answers)
    _add_uploads(app, answers)
    add_pages(app, answers, token)
    _add_problems(app)
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    return Metrics(Guard(app, token=token, hosts=hosts, refuse=problem), paths=paths)


def _add_questions(app: FastAPI, answers: Answers) -> None:
    @app.post("/estimate")
    async def estimate(question: EstimateQuestion) -> Response:
        """How fast, why, between which bounds, does it fit."""
        # What is warm takes less than handing it to a thread.
        if answers.is_warm(question):
            answer = answers.estimate(question)
        else:
            answer = await run_in_threadpool(answers.estimate, question)
        return _json(said(answer, reasons=question.reasons))

    @app.post("/estimate_many", responses={200: {"content": {ARROW: {}, "application/json": {}}}})
    def estimate_many(question: ManyQuestion, accept: Annotated[str, Header()] = "") -> Response:
        """Columns of many allocations, as JSON or as an Arrow stream."""
        columns = answers.estimate_many(question)
        return _arrow(columns) if ARROW in accept else _json(columns)

    @app.post("/plan")
    def plan(question: PlanQuestion) -> Response:
        """What to rent: the cheapest, the fastest, and all between."""
        return _json(answers.plan(question))

    @app.post("/observe", status_code=201)
    def observe(seen: Observed) -> Response:
        """Keep an observed step time; once acknowledged it is in the store."""
        return _json({"new": answers.observe(seen)}, status=201)


def _add_uploads(app: FastAPI, answers: Answers) -> None:
    body = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @app.post(
        "/graphs",
        status_code=201,
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )
    async def upload(request: Request) -> Response:
        """A graph saved by 'estimator trace', or a job's summary as JSON; answers with its hash."""
        content = await request.body()
        name, graph = await run_in_threadpool(answers.graphs.add, content)
        return _json({"graph": name, "name": graph.name, "batch": graph.batch}, status=201)

    @app.get("/graphs")
    def graphs() -> Response:
        """The hashes of all uploaded graphs, the latest first."""
        return _json({"graphs": answers.graphs.names()})

    @app.get("/machines")
    def machines() -> Response:
        """Every machine that can be named."""
        return _json({"machines": answers.machines()})

    @app.get("/health")
    async def health() -> Response:
        """That this worker answers."""
        return _json({"status": "ok", "version": estimator.__version__})

    @app.get("/metrics")
    def metrics() -> Response:
        """Counts and times of requests, for Prometheus."""
        return Response(exposition(), media_type=CONTENT_TYPE)


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(EstimatorError)
    async def refused(request: Request, error: EstimatorError) -> Response:
        status = 503 if isinstance(error, StoreError) else 422
        if isinstance(error, UnknownGraphError):
            status = 404
        return problem(status, type(error).__name__, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")[:80]
        why = str(first["msg"]).removeprefix("Value error, ")
        fault = printable(f"{where}: {why}" if where else why)
        return problem(422, "Invalid", f"{fault}; see /openapi.json")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return problem(error.status_code, "Http", f"{error.detail}; see /openapi.json", headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return problem(500, "Failed", "the service failed; its log says why")


def problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    """A refusal as RFC 9457 has it."""
    # Of a problem that has no type of its own the title is that of its status.
    title = HTTPStatus(status).phrase
    refusal = Problem(title=title, status=status, detail=detail, code=code)
    own = {303: {"Location": "/login"}, 401: {"WWW-Authenticate": "Bearer"}}
    more = dict(headers or {}) | own.get(status, {})
    return Response(
        orjson.dumps(refusal.model_dump()),
        status_code=status,
        headers=more,
        media_type="application/problem+json",
    )


def _json(content: Any, status: int = 200) -> Response:
    # NaN becomes null.
    text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, status_code=status, media_type="application/json")


def _arrow(columns: dict[str, Any]) -> Response:
    try:
        import pyarrow
    except ImportError:
        raise StoreError("an Arrow stream needs pyarrow; install it or accept JSON") from None
    table = pyarrow.table(columns)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(sink.getvalue().to_pybytes(), media_type=ARROW)
