"""What ranks answer is taken only in the form that was asked for."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from estimator.errors import ProbeError
from estimator.probe.cluster.discovery import Place
from estimator.probe.cluster.leader import Leader, RankTask, TaskOutcome
from estimator.probe.cluster.messages import (
    MachineArguments,
    PairsArguments,
    ShapeArguments,
    begin_session,
    checked,
    connect,
    listen,
)
from estimator.probe.cluster.worker import FUNCTIONS, function_named

GOOD = {"from": 0, "to": 1, "latency_s": 1e-5, "points": [[1024, 2e-5]]}


@pytest.fixture
def leader() -> Leader:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    place = Place(
        launcher="torchrun",
        rank=0,
        world_size=2,
        master_address="127.0.0.1",
        master_port=port,
        is_local=True,
        secret=b"0123456789abcdef" * 2,
    )
    store = connect("127.0.0.1", port, listener=listen(place), timeout_s=10.0)
    return Leader(begin_session(store, place), 2, threading.Event())


def answered(leader: Leader, reports: list[Any], end: dict[str, Any]) -> TaskOutcome:
    """What the leader makes of rank 1's reports, which are there before it asks."""
    for count, report in enumerate(reports):
        leader.store.post(f"report/0/0/1/{count}", report)
    message = {"reports": len(reports), "failure": None, "result": None} | end
    leader.store.post("done/0/0/1", message)
    task = RankTask(ranks=(1,), function="time_pairs")
    (outcome,) = leader.run([task], timeout_s=5.0, tell=lambda: None)
    return outcome


def test_reports_of_the_right_form_are_taken(leader: Leader) -> None:
    outcome = answered(leader, [GOOD, GOOD], {})
    assert outcome.reports == {1: [GOOD, GOOD]}
    assert (outcome.failures, leader.lost) == ({}, {})


@pytest.mark.parametrize(
    ("reports", "end", "words"),
    [
        ([GOOD, {**GOOD, "latency_s": "0"}], {}, r"a report that cannot be used \(latency_s: "),
        ([{"op": "all_reduce", "windows": []}], {}, r"cannot be used \(from: Field required\)"),
        ([GOOD], {"reports": 2}, "sent 2 reports, 1 of them signed"),
        ([GOOD], {"reports": -1}, r"End .*reports"),
        ([GOOD], {"more": 1}, r"End .*more"),
        ([], {"result": {"name": "x"}}, "rank 1 sent a report"),
    ],
)
def test_a_rank_whose_answer_has_another_form_has_failed(
    leader: Leader, reports: list[Any], end: dict[str, Any], words: str
) -> None:
    outcome = answered(leader, reports, end)
    with pytest.raises(ProbeError, match=words) as raised:
        raise ProbeError(outcome.failures[1])
    assert "\n" not in str(raised.value)
    assert not any(outcome.reports.values())
    assert outcome.results == {}


def test_a_task_without_time_left_ends_at_once(leader: Leader) -> None:
    task = RankTask(ranks=(1,), function="time_pairs")
    leader.stop.set()
    (outcome,) = leader.run([task], timeout_s=-1.0, tell=lambda: None)
    assert outcome.failures == {1: "did not end in time"}


@pytest.mark.parametrize(
    "name", ["os:system", "estimator.probe.cluster.shapes:time_shape", "", "__doc__"]
)
def test_only_listed_functions_are_found(name: str) -> None:
    assert function_named("time_shape") is FUNCTIONS["time_shape"]
    with pytest.raises(ProbeError, match="none of the probe's functions"):
        function_named(name)


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (PairsArguments, {"pairs": [[[0, 1]]], "sizes_bytes": [1 << 40], "budget_s": 1.0}),
        (PairsArguments, {"pairs": [[[0, 1, 2]]], "sizes_bytes": [8], "budget_s": 1.0}),
        (ShapeArguments, {"ops": ["__init__"], "sizes_bytes": [8], "budget_s": 1.0}),
        (
            MachineArguments,
            {"name": "x", "devices": 0, "budget_s": 1.0, "kind": None},
        ),
    ],
)
def test_arguments_out_of_bounds_are_refused(schema: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ProbeError, match="rank 0 sent"):
        checked(schema, arguments, "rank 0")
