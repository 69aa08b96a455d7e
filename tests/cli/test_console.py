"""What a person sees on stderr while waiting."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

import estimator as est
from estimator.cli import console
from estimator.cli.main import main
from tests.synthetic import perceptron


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said_while_waiting(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on `stream` once anything is, or after a while."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    deadline_s = time.monotonic() + 5
    with console.waiting("looking at [m]"):
        while stream.isatty() and not stream.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    return stream.getvalue()


def test_a_terminal_is_told_what_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_MOMENT_S", 0.0)
    assert "looking at [m]" in said_while_waiting(Terminal(), monkeypatch)


def test_a_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_MOMENT_S", 0.0)
    assert said_while_waiting(io.StringIO(), monkeypatch) == ""


def wait_for(text: str, stream: Terminal) -> None:
    deadline_s = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, on which what takes any time is told; for this very test's call."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    # Long enough for what is waited for to have begun.
    monkeypatch.setattr(console, "_MOMENT_S", 0.2)
    return stream


def test_what_a_model_prints_while_a_terminal_is_told_leaves_stdout_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = open_terminal(monkeypatch)
    with console.waiting("tracing m"), console.printing_to_stderr():
        wait_for("tracing m", terminal)
        sys.stdout.write("of the model")
    sys.stdout.write("the answer")
    assert capsys.readouterr().out == "the answer"


def test_what_is_under_way_within_something_shown_is_not_shown_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = open_terminal(monkeypatch)
    with console.progress("training") as report:
        with console.waiting("estimating"), console.progress("layouts") as inner:
            inner("first", 0.5)
            time.sleep(0.5)
        report("1x1:m", 0.5)
    with console.waiting("drawing"):
        wait_for("drawing", terminal)
    assert "training: 1x1:m" in terminal.getvalue()
    assert "drawing" in terminal.getvalue()
    assert "estimating" not in terminal.getvalue()
    assert "layouts" not in terminal.getvalue()


def test_an_estimate_tells_a_terminal_when_it_traces_and_when_it_estimates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = open_terminal(monkeypatch)
    graph = replace(perceptron([64] * 3, batch=8), target="cuda")
    answer = est.estimate(graph, "1x1:t4")

    def traced(*_: Any, **__: Any) -> est.OpGraph:
        wait_for("tracing m.py:f", terminal)
        return graph

    def estimated(*_: Any, **__: Any) -> est.Estimate:
        wait_for("estimating", terminal)
        return answer

    monkeypatch.setattr("estimator.cli.request.Request.graph", traced)
    monkeypatch.setattr("estimator.api.estimate", estimated)
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "m.py:f", "--on", "1x1:t4", "--json"])
    assert ended.value.code == 0
    assert "tracing m.py:f" in terminal.getvalue()
    assert "estimating" in terminal.getvalue()
    assert json.loads(capsys.readouterr().out)["step_time_s"] == answer.step_time_s
