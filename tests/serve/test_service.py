"""The service answers as the package does, to whom it should, and every refusal is one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("prometheus_client", reason="the extra [serve] is not installed")
pytest.importorskip("orjson", reason="the extra [serve] is not installed")

from starlette.testclient import TestClient

from estimator.advise.rent.offers import rent
from estimator.advise.rent.revocations import Revocations
from estimator.advise.rent.transient import Spot
from estimator.api import estimate
from estimator.calibrate.store import ObservationStore
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.serve import guard
from estimator.serve.app import create_app
from tests.synthetic import in_blocks, perceptron

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOKEN = "a-secret-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
NAME = "<b>net</b> & co"
LOCAL = "http://localhost:8321"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "net.graph"
    replace(perceptron([256, 256, 256], target="cuda"), name=NAME).save(path)
    return path


@pytest.fixture
def client(tmp_path: Path, store: Path) -> TestClient:
    app = create_app(token=TOKEN, store=tmp_path / "seen.db", graphs=tmp_path / "graphs")
    return TestClient(app, LOCAL, headers=BEARER, raise_server_exceptions=False)


@pytest.fixture
def graph(client: TestClient, saved: Path) -> str:
    found = client.post("/graphs", content=saved.read_bytes())
    assert found.status_code == 201
    name: str = found.json()["graph"]
    return name


def refusal(response: Any, status: int) -> str:
    """The sentence of a problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert "\n" not in problem["detail"]
    detail: str = problem["detail"]
    return detail


def test_an_answer_is_that_of_the_package(client: TestClient, graph: str, saved: Path) -> None:
    question = {"graph": graph, "on": "2x4:t4-g4dn", "strategy": "zero1", "batch_per_gpu": 32}
    expected = estimate(OpGraph.load(saved), "2x4:t4-g4dn", strategy="zero1", batch_per_gpu=32)
    for _ in ("cold", "warm"):
        found = client.post("/estimate", json=question)
        assert found.status_code == 200
        assert found.json() == json.loads(json.dumps(expected.to_dict()))


def test_without_reasons_an_answer_has_the_same_figures(client: TestClient, graph: str) -> None:
    question = {"graph": graph, "on": "2x4:t4-g4dn"}
    whole = client.post("/estimate", json=question).json()
    brief = client.post("/estimate", json=question | {"reasons": False}).json()
    assert brief.pop("bottleneck") == whole["bottleneck"]["part"]
    assert {name: whole[name] for name in brief} == brief
    assert "assumptions" not in brief


def test_an_answer_for_stages_is_that_of_the_package(client: TestClient, tmp_path: Path) -> None:
    deep = in_blocks(perceptron([64] * 8, batch=8, target="cuda"))
    deep.save(tmp_path / "deep.graph")
    graph = client.post("/graphs", content=(tmp_path / "deep.graph").read_bytes()).json()["graph"]
    asked = {"layout": "pp=2,dp=*", "accumulation_steps": 4}
    found = client.post("/estimate", json={"graph": graph, "on": "1x4:t4-g4dn"} | asked)
    assert found.status_code == 200, found.text
    expected = estimate(deep, "1x4:t4-g4dn", layout="pp=2,dp=*", accumulation_steps=4)
    assert found.json() == json.loads(json.dumps(expected.to_dict()))


def test_columns_are_those_of_a_table(client: TestClient, graph: str, saved: Path) -> None:
    on = ["1x1:t4-g4dn", "1x9:t4-g4dn", "2x4:t4-g4dn"]
    expected = estimate_many(OpGraph.load(saved), on)
    found = client.post("/estimate_many", json={"graph": graph, "on": on}).json()
    assert list(found) == ["step_time_s", "low_s", "high_s", "samples_per_s"]
    for name, column in found.items():
        values = [np.nan if value is None else value for value in column]
        np.testing.assert_array_equal(values, getattr(expected, name))
    assert found["step_time_s"][1] is None, "a node has four devices"


def test_columns_come_as_arrow_where_that_is_accepted(client: TestClient, graph: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    question = {"graph": graph, "on": ["1x1:t4-g4dn"] * 3, "columns": ["step_time_s", "ranks"]}
    accept = {"Accept": "application/vnd.apache.arrow.stream"}
    found = client.post("/estimate_many", json=question, headers=accept)
    table = pyarrow.ipc.open_stream(found.content).read_all()
    assert table.column_names == ["step_time_s", "ranks"]
    assert table["ranks"].to_pylist() == [1, 1, 1]


def test_plans_say_what_to_rent(client: TestClient, graph: str) -> None:
    question = {"graph": graph, "machines": ["t4-g4dn", "a100-p4d"], "samples": 1e9}
    found = client.post("/plan", json=question).json()
    assert found["cheapest"] in found["front"]


def test_plans_count_revocations_and_layouts_as_rent_does(
    client: TestClient, graph: str, saved: Path
) -> None:
    more: dict[str, Any] = {"samples": 1e9, "max_nodes": 2, "global_batch": 64}
    more |= {"strategies": ["ddp", "fsdp"], "loader": "prep=1ms,workers=2"}
    asked = {"graph": graph, "machines": ["t4-g4dn"], **more}
    rates = {"per_hour": [0.0] * 12 + [1.0] * 12, "lifetime_s": 86400.0}
    taken = {"revocations": {"t4-g4dn": rates}, "warning_s": 30.0, "start_hour": 9.0}
    found = client.post("/plan", json=asked | {"taken": taken, "layouts": True}).json()
    spot = Spot(
        revocations={"t4-g4dn": Revocations(per_hour=tuple(rates["per_hour"]), lifetime_s=86400.0)},
        warning_s=30.0,
        start_hour=9.0,
    )
    loaded = OpGraph.load(saved)
    expected = rent(loaded, ["t4-g4dn"], **more, spot=spot, layouts_of=[loaded])
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert found["assumptions"][0] == "training starts at 09:00"
    steady = client.post("/plan", json=asked | {"spot": True}).json()
    assert steady["cheapest"]["duration_s"] < found["cheapest"]["duration_s"]


def test_a_summary_is_a_graph_too(client: TestClient) -> None:
    known = {"parameter_bytes": 438000000, "tensors": 199, "flops_per_sample": 2.5e11}
    found = client.post("/graphs", json={"name": "bert", "target": "cuda"} | known)
    assert found.status_code == 201, found.text
    again = client.post("/graphs", json={"name": "bert", "target": "cuda"} | known)
    assert found.json() == again.json()
    asked = {"graph": found.json()["graph"], "on": "1x1:t4-g4dn", "batch_per_gpu": 8}
    assert client.post("/estimate", json=asked).json()["step_time_s"] > 0


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"target": "tpu"}, "the target of a summary is cpu or cuda"),
        ({"colour": 1}, "the upload has 'colour', which is no part of a summary"),
        ({"tensors": 0}, "the upload: tensors: must be greater than 0"),
    ],
)
def test_a_summary_that_cannot_be_is_one_sentence(
    client: TestClient, part: dict[str, Any], said: str
) -> None:
    known = {"parameter_bytes": 438000000, "tensors": 199, "flops_per_sample": 2.5e11}
    assert said in refusal(client.post("/graphs", json=known | part), 422)


def test_what_is_acknowledged_is_in_the_store(
    client: TestClient, graph: str, tmp_path: Path
) -> None:
    seen = {"graph": graph, "on": "1x2:t4-g4dn", "step_time_s": 0.01, "batch_per_gpu": 16}
    assert client.post("/observe", json=seen | {"identity": "12345678"}).json() == {"new": 1}
    assert client.post("/observe", json=seen | {"identity": "12345678"}).json() == {"new": 0}
    (one,) = ObservationStore(tmp_path / "seen.db")
    assert (one.allocation, one.step_time_s, one.source) == ("1x2:t4-g4dn", 0.01, "service")
    assert one.fingerprint is not None


def test_another_worker_finds_the_graph_on_disk(
    client: TestClient, graph: str, tmp_path: Path
) -> None:
    other = create_app(token=TOKEN, store=tmp_path / "seen.db", graphs=tmp_path / "graphs")
    asked = {"graph": graph, "on": "1x1:t4-g4dn"}
    found = TestClient(other, LOCAL, headers=BEARER).post("/estimate", json=asked)
    assert found.json() == client.post("/estimate", json=asked).json()


def test_machines_health_and_metrics(client: TestClient, graph: str) -> None:
    machines = {each["name"]: each for each in client.get("/machines").json()["machines"]}
    assert machines["t4-g4dn"]["devices"] == 4
    assert client.get("/graphs").json() == {"graphs": [graph]}
    assert client.get("/health").json()["status"] == "ok"
    client.post("/nowhere")
    text = client.get("/metrics").text
    assert 'estimator_requests_total{path="/graphs",status="201"}' in text
    assert 'estimator_requests_total{path="other",status="404"}' in text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/machines"),
        ("GET", "/graphs"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("POST", "/estimate"),
        ("POST", "/graphs"),
        ("POST", "/observe"),
        ("GET", "/nowhere"),
    ],
)
@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN} "])
def test_without_the_token_only_health_is_open(
    client: TestClient, method: str, path: str, given: str | None
) -> None:
    del client.headers["Authorization"]
    headers = {} if given is None else {"Authorization": given}
    found = client.request(method, path, headers=headers)
    assert "Authorization: Bearer TOKEN" in refusal(found, 401)
    assert found.headers["www-authenticate"] == "Bearer"
    assert client.get("/health").status_code == 200


def test_other_host_names_are_refused(client: TestClient) -> None:
    for host in ("evil.example", "localhost.evil.example", "", "localhost:1:2", "testserver"):
        found = client.get("/health", headers={"Host": host})
        assert "another host name" in refusal(found, 421)
    assert client.get("/health", headers={"Host": "localhost:8321"}).status_code == 200


def test_no_page_of_another_origin_may_read(client: TestClient) -> None:
    found = client.get("/health", headers={"Origin": "http://evil.example"})
    assert not [name for name in found.headers if name.startswith("access-control")]


def test_bodies_that_are_too_large_are_refused(
    client: TestClient, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_BODY_BYTES", 1000)
    assert "at most 1000 bytes" in refusal(client.post("/estimate", content=b" " * 1001), 413)

    def unannounced() -> Any:
        for _ in range(11):
            yield b" " * 100

    assert "at most 1000 bytes" in refusal(client.post("/estimate", content=unannounced()), 413)


@pytest.mark.parametrize("path", ["/login", "/health"])
def test_without_the_token_no_more_is_read_than_a_login_takes(
    client: TestClient, path: str
) -> None:
    del client.headers["Authorization"]

    def unannounced() -> Any:
        yield from [b" " * (1 << 20)] * 15

    for content in (b" " * 5000, unannounced()):
        found = client.post(path, content=content)
        assert "at most 4096 bytes" in refusal(found, 413)


def test_a_graph_that_unpacks_to_gigabytes_is_refused(client: TestClient) -> None:
    import zlib

    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(1024)) + packer.flush()
    assert len(bomb) < 2 << 20
    assert "the upload is damaged" in refusal(client.post("/graphs", content=bomb), 422)


@pytest.mark.parametrize(
    ("path", "asked", "status", "said"),
    [
        ("/estimate", {"on": "1x1:t4-g4dn"}, 422, "graph: Field required"),
        ("/estimate", {"graph": "../../etc/passwd", "on": "1x1:t4-g4dn"}, 422, "graph: "),
        ("/estimate", {"graph": "0" * 64, "on": "1x1:t4-g4dn"}, 404, "no graph 000000000000"),
        ("/estimate", {"graph": "hf:gpt2", "on": "1x1:t4-g4dn"}, 422, "graph: "),
        ("/estimate", {"on": "1x1:profile.json"}, 422, "there is no machine 'profile.json'"),
        ("/estimate", {"on": "a1[0,1]"}, 422, "hosts need a cluster file"),
        ("/estimate", {"on": "1x1:/etc/passwd"}, 422, "/etc/passwd"),
        ("/estimate", {"on": "1x1:t4-g4dn", "tp_plan": "plan.json"}, 422, "tp_plan: Extra inputs"),
        ("/estimate", {"on": "1x1:t4-g4dn", "batch_per_gpu": 0}, 422, "batch_per_gpu: "),
        ("/estimate", {"on": "1x1:t4-g4dn", "strategy": "magic"}, 422, "magic"),
        ("/estimate_many", {"on": []}, 422, "on: "),
        ("/estimate_many", {"on": ["1x1:profile.json"]}, 422, "there is no machine"),
        ("/plan", {"machines": ["profile.json"], "samples": 1.0}, 422, "there is no machine"),
        ("/plan", {"machines": ["dgx-a100"], "samples": 1.0}, 422, "no price of 'dgx-a100'"),
        (
            "/plan",
            {
                "machines": ["t4-g4dn"],
                "samples": 1.0,
                "taken": {"revocations": {"per_hour": [1.0, 2.0]}},
            },
            422,
            ": revocations an hour are (1.0, 2.0); give one number",
        ),
        (
            "/observe",
            {"on": "1x1:t4-g4dn", "step_time_s": 0.0, "batch_per_gpu": 1},
            422,
            "step_time_s: ",
        ),
    ],
)
def test_wrong_questions_are_one_sentence(
    client: TestClient, graph: str, path: str, asked: dict[str, Any], status: int, said: str
) -> None:
    is_about_graphs = "graph" in asked or said.startswith("graph")
    question = asked if is_about_graphs else {"graph": graph} | asked
    assert said in refusal(client.post(path, json=question), status)


def test_no_file_is_read_by_its_path(
    client: TestClient, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = (store / "machines" / "local.json").read_text()
    (tmp_path / "here.json").write_text(profile)
    (tmp_path / "here").write_text(profile)
    (tmp_path / "t4-g4dn@").mkdir()
    (tmp_path / "t4-g4dn@here.json").write_text(profile)
    for name in ("here.json", "here"):
        found = client.post("/estimate", json={"graph": graph, "on": f"1x1:{name}"})
        assert "there is no machine" in refusal(found, 422)
        timed = {"machine": name, "step_times": [[4, 0.4]], "parameter_bytes": 4000, "tensors": 2}
        assert "there is no machine" in refusal(client.post("/graphs", json=timed), 422)
    # What follows @ limits a machine; it is no path either.
    for name in ("t4-g4dn@here.json", "t4-g4dn@/../here.json", "t4-g4dn@500W/../../here.json"):
        found = client.post("/plan", json={"graph": graph, "machines": [name], "samples": 1e9})
        assert "limit '" in refusal(found, 422)
        timed = {"machine": name, "step_times": [[4, 0.4]], "parameter_bytes": 4000, "tensors": 2}
        assert "limit '" in refusal(client.post("/graphs", json=timed), 422)
        for path, on in (("/estimate", f"1x1:{name}"), ("/estimate_many", [f"1x1:{name}"])):
            found = client.post(path, json={"graph": graph, "on": on})
            assert found.status_code == 422 or found.json()["step_time_s"] == [None], found.text


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError, OverflowError, RecursionError])
def test_what_fails_inside_is_told_without_its_insides(
    client: TestClient, graph: str, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise kind("secret path")

    monkeypatch.setattr("estimator.serve.answers.estimate", broken)
    found = client.post("/estimate", json={"graph": graph, "on": "1x1:t4-g4dn"})
    assert "secret" not in refusal(found, 500)


def test_the_page_needs_a_login_and_shows_an_answer_with_names_escaped(
    client: TestClient, graph: str
) -> None:
    pytest.importorskip("matplotlib")
    del client.headers["Authorization"]
    refused = client.post("/login", data={"token": "wrong"})
    assert refused.status_code == 401
    found = client.post("/login", data={"token": TOKEN}, follow_redirects=False)
    assert found.status_code == 303
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    asked = {"graph": graph, "on": "2x2:t4-g4dn", "strategy": "ddp"}
    page = client.get("/", params=asked)
    assert page.status_code == 200
    assert "Where the time goes" in page.text
    assert NAME not in page.text
    assert "&lt;b&gt;net&lt;/b&gt; &amp; co on 2x2:t4-g4dn" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    hostile = client.get("/", params=asked | {"on": "<script>alert(1)</script>"})
    assert "<script>alert" not in hostile.text
    # A session changes nothing and asks nothing but pages.
    assert client.post("/estimate", json=asked).status_code == 401
    assert client.get("/machines").status_code == 401


def test_a_browser_without_a_session_is_led_to_the_login(client: TestClient) -> None:
    del client.headers["Authorization"]
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    found = client.get("/", headers=browser, follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, "/login")
    assert 'name="token"' in client.get("/", headers=browser).text
    assert "Bearer TOKEN" in refusal(client.get("/", headers={"Accept": "application/json"}), 401)
    # Of the page alone: what else a browser asks for is refused.
    assert client.get("/graphs", headers=browser).status_code == 401


def test_the_page_lists_graphs_without_reading_them(
    client: TestClient, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graphs" / f"{'0' * 64}.graph").write_bytes(b"cut off")
    other = create_app(token=TOKEN, store=tmp_path / "seen.db", graphs=tmp_path / "graphs")
    monkeypatch.setattr(OpGraph, "load", None)
    page = TestClient(other, LOCAL, headers=BEARER).get("/")
    assert page.status_code == 200
    assert f"&lt;b&gt;net&lt;/b&gt; &amp; co ({graph[:8]})" in page.text
    assert "(00000000)" in page.text


def test_a_fault_behind_the_page_is_not_said_to_be_a_wrong_question(
    client: TestClient, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("operands could not be broadcast together")

    asked = {"graph": graph, "on": "2x2:t4-g4dn"}
    assert "that is no question" in client.get("/", params=asked | {"graph": "hf:gpt2"}).text
    monkeypatch.setattr("estimator.serve.answers.estimate", broken)
    assert client.get("/", params=asked).status_code == 500


def test_a_session_runs_out_and_cannot_be_made_up() -> None:
    assert guard.is_session(TOKEN, guard.session(TOKEN))
    assert not guard.is_session(TOKEN, guard.session(TOKEN, now_s=0.0)), "of 1970"
    assert not guard.is_session("another-secret-of-16", guard.session(TOKEN))
    until, _, signature = guard.session(TOKEN).partition(".")
    assert not guard.is_session(TOKEN, f"{int(until) + 1}.{signature}")
    for made_up in ("", ".", "99999999999", "é.é", f"{until}."):
        assert not guard.is_session(TOKEN, made_up)


@pytest.mark.parametrize("token", [None, "", "short", "has a space in its middle", "é" * 20])
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(token: str | None) -> None:
    with pytest.raises(guard.TokenError, match="ESTIMATOR_TOKEN"):
        guard.check_token(token)


def test_the_description_has_examples_and_problems(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    assert {"/estimate", "/estimate_many", "/plan", "/observe", "/graphs"} <= set(found["paths"])
    assert found["components"]["schemas"]["EstimateQuestion"]["examples"]
    assert (
        "application/problem+json" in found["paths"]["/plan"]["post"]["responses"]["422"]["content"]
    )
