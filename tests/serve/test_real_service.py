"""The command as it runs: workers, a token of the environment, kills, a browser, odd requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import Command, free_port

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
pytest.importorskip("orjson", reason="the extra [serve] is not installed")

from estimator.calibrate.store import ObservationStore
from tests.browser import browser_page
from tests.synthetic import in_blocks, perceptron

TOKEN = "a-secret-of-the-tests"
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def service(port: int, home: Path, *, workers: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """A running service, killed with all its workers at the end."""
    environment = os.environ | {
        "ESTIMATOR_TOKEN": TOKEN,
        "ESTIMATOR_HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    words = ("serve", "--port", str(port), "--workers", str(workers))
    command = [sys.executable, "-m", "estimator.cli.main", *words]
    home.mkdir(exist_ok=True)
    with (home / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while ask(port, "GET", "/health")[0] != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the service does not answer"
            time.sleep(0.1)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """(status, body) of a request; (0, b"") where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, body=content, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """(port, home) of a service that several tests ask."""
    port, home = free_port(), tmp_path_factory.mktemp("service")
    with service(port, home, workers=1):
        yield port, home


def said_to(port: int, content: bytes) -> bytes:
    """All that comes back for these bytes, until the other side closes."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        # The other side may close before all is sent, and then what it said can be lost.
        with contextlib.suppress(ConnectionError):
            line.sendall(content)
        with contextlib.suppress(ConnectionError):
            while part := line.recv(1 << 16):
                said += part
    return said


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    path = tmp_path / "net.graph"
    perceptron([256, 256, 256], target="cuda").save(path)
    return path.read_bytes()


def test_no_acknowledged_observation_is_lost_when_workers_are_killed_under_load(
    port: int, tmp_path: Path, saved: bytes
) -> None:
    home, acknowledged = tmp_path / "home", []
    is_over = threading.Event()

    def train(rank: int) -> None:
        number = 0
        while not is_over.is_set():
            identity = f"rank-{rank}-step-{number}"
            seen = {
                "graph": graph,
                "on": "1x2:t4-g4dn",
                "step_time_s": 0.01,
                "batch_per_gpu": 16,
                "identity": identity,
            }
            # Sent again until it is acknowledged: with an identity that does no harm.
            if ask(port, "POST", "/observe", seen)[0] == 201:
                acknowledged.append(identity)
                number += 1

    with service(port, home):
        status, body = ask(port, "POST", "/graphs", saved)
        assert status == 201
        graph = json.loads(body)["graph"]
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(2.0)
    killed_after = len(acknowledged)
    with service(port, home):
        time.sleep(2.0)
        is_over.set()
        for thread in threads:
            thread.join()
        status, body = ask(port, "GET", "/metrics")
        assert b'estimator_requests_total{path="/observe",status="201"}' in body
    kept = [one.identity for one in ObservationStore(home / "observations.db")]
    assert 0 < killed_after < len(acknowledged), "both services took observations"
    assert set(acknowledged) <= set(kept)
    assert len(kept) == len(set(kept))


def test_without_a_token_it_does_not_start(command: Command) -> None:
    assert "ESTIMATOR_TOKEN must hold a secret" in command("serve").sentence


def test_it_says_where_it_listens_and_where_to_log_in_but_not_its_token(
    running: tuple[int, Path],
) -> None:
    port, home = running
    said = (home / "stderr").read_text()
    assert f"http://127.0.0.1:{port}/login with the token in ESTIMATOR_TOKEN" in said
    assert TOKEN not in said


def test_a_port_that_is_taken_is_one_sentence(
    running: tuple[int, Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_TOKEN", TOKEN)
    answer = command("serve", "--port", running[0])
    assert answer.code == 2
    assert "Address already in use); choose another with --host or --port" in answer.sentence


def test_a_request_of_two_hosts_is_refused(running: tuple[int, Path]) -> None:
    two = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n"
    said = said_to(running[0], two)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"send one header 'Host'" in said


def test_headers_of_20_megabytes_are_not_read(running: tuple[int, Path]) -> None:
    port, _ = running
    begun = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    # An answer in time means that the end of the headers was not waited for.
    for length in (20 << 20, 200 << 10):
        said = said_to(port, begun + b"x" * length)
        assert not said or said.startswith(b"HTTP/1.1 431 ")
    assert ask(port, "GET", "/health")[0] == 200


@pytest.mark.parametrize("width", [1280, 400])
def test_a_person_logs_in_and_sees_an_answer_without_errors_other_hosts_or_scrolling_sideways(
    port: int, tmp_path: Path, saved: bytes, width: int
) -> None:
    pytest.importorskip("matplotlib")
    with (
        service(port, tmp_path / "home", workers=1),
        browser_page(tmp_path / "b", width=width) as browser,
    ):
        assert ask(port, "POST", "/graphs", saved)[0] == 201
        browser.run(f"location = 'http://127.0.0.1:{port}/login'")
        browser.wait_for("document.querySelector('[name=token]') !== null")
        browser.run(f"document.querySelector('[name=token]').value = '{TOKEN}'")
        browser.run("document.querySelector('button').click()")
        browser.wait_for("document.querySelector('[name=on]') !== null")
        browser.run("document.querySelector('[name=on]').value = '2x2:t4-g4dn'")
        browser.run("document.querySelector('button').click()")
        browser.wait_for("document.querySelector('#assumptions') !== null")
        assert "on 2x2:t4-g4dn" in browser.run("document.querySelector('h1').textContent")
        browser.run("document.querySelector('[data-zoom=\"2\"]').click()")
        view = browser.run("document.querySelector('.timeline svg').getAttribute('viewBox')")
        assert view.startswith("250 0 500 "), "the page's script is allowed by its hash"
        assert browser.run("window.innerWidth") == width
        assert browser.beyond_width() == 0
        assert browser.errors() == []
        asked = browser.requested()
        assert f"http://127.0.0.1:{port}/login" in asked
        assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{port}"}


def test_ten_thousand_odd_requests_get_no_5xx(tmp_path: Path, store: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from starlette.testclient import TestClient

    from estimator.serve.app import create_app

    app = create_app(token=TOKEN, store=tmp_path / "seen.db", graphs=tmp_path / "graphs")
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    client = TestClient(app, "http://localhost", headers=headers, raise_server_exceptions=False)
    in_blocks(perceptron([64] * 9, target="cuda")).save(tmp_path / "deep.graph")
    content = (tmp_path / "deep.graph").read_bytes()
    graph = client.post("/graphs", content=content).json()["graph"]
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    requests = int(os.environ.get("ESTIMATOR_FUZZ", "400"))
    operations = [found.ok() for found in schema.get_all_operations()]
    # Of a request without parameters and body there is one only.
    varied = [each for each in operations if each.method == "post"]
    # Texts that no schema leads to: half of the bodies have them, and their numbers are looked at.
    sizes = ("1", "2", "8", "0", "-1", "1e9", "9" * 300)
    size = st.sampled_from(sizes)
    on = st.builds("{}x{}:{}".format, size, size, st.sampled_from(("t4-g4dn", "a100-p4d", "x")))
    plausible = {
        "on": on,
        "machines": st.just(["t4-g4dn", "a100-p4d"]),
        "strategy": st.builds("{}={}".format, st.sampled_from(("fsdp:shard", "ddp:bucket")), size)
        | st.sampled_from(("ddp", "zero1", "ps:2")),
        "layout": st.none() | st.builds("{}={},dp=*".format, st.sampled_from(("tp", "pp")), size),
        "accumulation_steps": st.sampled_from((1, 4, 8)),
        "loader": st.none() | st.builds("sample=1kB,{}={}".format, st.just("workers"), size),
    }
    asked = 0
    for operation in operations:

        @given(case=operation.as_strategy(), words=st.none() | st.fixed_dictionaries(plausible))
        @settings(
            max_examples=-(-requests // len(varied)),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any, words: dict[str, Any] | None) -> None:
            nonlocal asked
            body = case.body
            if isinstance(body, dict) and "graph" in body:
                body = body | {"graph": graph}
                for name in body.keys() & (words or {}).keys():
                    is_many = name == "on" and isinstance(body[name], list)
                    body[name] = [words[name]] if is_many else words[name]
            is_bytes = isinstance(body, bytes)
            found = client.request(
                case.method,
                case.formatted_path,
                content=body if is_bytes else json.dumps(body, default=str),
            )
            asked += 1
            assert found.status_code < 500, (case.method, case.path, body, found.text)
            if found.status_code >= 400:
                assert found.headers["content-type"] == "application/problem+json"
                assert not (isinstance(body, dict) and "valid dictionary" in found.text), "unread"

        check()
    assert asked >= requests
