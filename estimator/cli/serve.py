"""The command that answers over HTTP."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import click

from estimator.cli.console import remark
from estimator.errors import ModelError, quoted
from estimator.probe.option_types import Count

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command(epilog="Example: estimator serve --port 8000")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, help="Default 8321.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; default 127.0.0.1.")
@click.option("--name", "names", multiple=True, help="A host name that it is asked by; repeat.")
@click.option("--workers", type=Count(most=64), default=1, help="Processes; default 1.")
@click.option(
    "--store", type=click.Path(path_type=Path, dir_okay=False), help="Not the user's store."
)
def serve(host: str, port: int, names: tuple[str, ...], workers: int, store: Path | None) -> None:
    """Answer estimates over HTTP to who has the token in ESTIMATOR_TOKEN.

    Graphs are uploaded once and named by the hash of their content; nothing is traced or read by
    path here. /openapi.json describes all that can be asked; / is a page for a browser, which logs
    in with the token at /login.
    """
    uvicorn = _uvicorn()
    from estimator.serve.guard import HOSTS, STORE, TOKEN, check_token

    check_token(os.environ.get(TOKEN))
    port = _free_port(host, port)
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    remark(f"listening on {where}; log in at {where}/login with the token in {TOKEN}")
    if host not in _LOOPBACK:
        remark(f"listening on {host}: put TLS before it, since the token is sent with each request")
    os.environ[HOSTS] = ",".join((host, *names))
    if store is not None:
        os.environ[STORE] = str(store.absolute())
    with tempfile.TemporaryDirectory() as folder:
        if workers > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        uvicorn.run(
            "estimator.serve.app:from_environment",
            factory=True,
            host=host,
            port=port,
            workers=workers,
            loop="estimator.serve.guard:SharingLoop" if workers > 1 else "auto",
            http="estimator.serve.guard:Connection",
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=30,
            limit_concurrency=512,
        )


def _free_port(host: str, port: int) -> int:
    """The port to listen on, one that is free for 0; uvicorn would end with a raw error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((host, port))
            number: int = free.getsockname()[1]
            return number
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {quoted(host)}, port {port} ({error.strerror}); choose another "
            "with --host or --port"
        ) from None


def _uvicorn() -> Any:
    try:
        import fastapi
        import orjson
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise ModelError(
            f"the service needs {error.name}; install throughput-estimator[serve]"
        ) from None
    return uvicorn if fastapi and orjson and prometheus_client else None
