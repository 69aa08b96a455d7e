"""Pages for a browser: log in, pick a graph and machines, see the answer."""

from __future__ import annotations

import hmac
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse

from estimator.errors import EstimatorError
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
from estimator.serve.answers import Answers
from estimator.serve.guard import COOKIE, session
from estimator.serve.questions import EstimateQuestion

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
