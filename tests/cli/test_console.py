"""What a person sees on stderr while waiting."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.cli import console
from estimator.cli.main import main
from estimator.errors import WorkloadError, sentence
from estimator.estimates.balance import Balance
from estimator.report.sections import Section, Table
from tests.synthetic import perceptron


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said_while_waiting(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on `stream` once anything is, or after a while."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    deadline_s = time.monotonic() + 30
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


HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]\r\x9b"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_a_file_holds_moves_no_cursor(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    table = Table(("name", "value"), [(HOSTILE,)], numbers=1)
    console.print_sections([Section(table=table)])
    console.print_text(f"a\t{HOSTILE}\nb")
    printed = stream.getvalue()
    assert "\\x1b]0;owned\\x07\\x1b[2J[red]" in printed
    assert "\nb\n" in printed
    # What is left are the colours that rich gives a terminal.
    left = re.sub(r"\x1b\[[0-9;]*m", "", printed) if stream.isatty() else printed
    assert all(c.isprintable() or c in "\n\t" for c in left)


OFFER = (
    "4x8:a100-p4d\n  data parallel, fsdp",
    "compute 94 %",
    "1",
    "34.8 min (26.4–45.8)",
    "87.83",
)


@pytest.mark.parametrize("columns", [30, 60, 64, 68, 72, 80, 110])
def test_a_table_has_whole_figures_and_words_however_narrow_a_terminal_is(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", f"{columns}")
    monkeypatch.setattr(sys, "stdout", stream)
    names = ("allocation, layout, strategy", "bottleneck", "micro-batches", "time", "USD per hour")
    console.print_sections([Section("offers", table=Table(names, [OFFER] * 2, numbers=3))])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    lines = [line.rstrip() for line in printed.splitlines()]
    # Its widest words and figures: 12, 10, 8 ("batches"), 21 and 5, two spaces apart.
    assert max(map(len, lines)) <= max(columns, 12 + 10 + 8 + 21 + 5 + 4 * 2)
    for words in OFFER:
        assert all(printed.count(word) >= 2 for word in words.split())
    assert sum("34.8 min (26.4–45.8)  87.83" in re.sub("   +", "  ", line) for line in lines) == 2


def test_what_is_under_way_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_MOMENT_S", 0.0)
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with console.progress(HOSTILE) as report:
        report("[/nothing]", 0.5)
    console.remark(HOSTILE)
    assert "\x07" not in stream.getvalue()
    assert "\x1b]" not in stream.getvalue()
    assert "[/nothing]" in stream.getvalue()


def test_all_that_commands_print_goes_through_one_place() -> None:
    for path in Path(console.__file__).parent.glob("*.py"):
        printing = re.search(
            r"click\.s?echo|(?<![\w.])print\(|std(out|err)\.write", path.read_text()
        )
        assert printing is None or path.name == "console.py", path


def test_a_sentence_has_both_ends_of_what_is_long() -> None:
    said = sentence(f"cannot read /tmp/{'a/' * 3000}b.json ({'x ' * 3000}); check the path")
    assert len(said) <= 1003
    assert said.startswith("cannot read /tmp/a/a")
    assert said.endswith("; check the path")
    assert "a/b.json (x x" in said
    said = str(WorkloadError(f"'{'two words ' * 400}' is no model; write one's name"))
    assert len(said) < 130
    assert said.endswith("two words ' is no model; write one's name")
    assert str(WorkloadError("one\x1b[31m\ntwo")) == "one\\x1b[31m two"


def wait_for(text: str, stream: Terminal) -> None:
    deadline_s = time.monotonic() + 30
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
    graph = perceptron([64] * 3, batch=8, target="cuda")
    answer = est.estimate(graph, "1x1:t4")

    def traced(*_: Any, **__: Any) -> est.OpGraph:
        wait_for("tracing m.py:f", terminal)
        return graph

    def estimated(*_: Any, **__: Any) -> Balance:
        wait_for("estimating", terminal)
        return Balance(answer=answer, even=answer)

    monkeypatch.setattr("estimator.cli.request.Request.graph", traced)
    monkeypatch.setattr("estimator.estimates.balance.balance", estimated)
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "m.py:f", "--on", "1x1:t4", "--json"])
    assert ended.value.code == 0
    assert "tracing m.py:f" in terminal.getvalue()
    assert "estimating" in terminal.getvalue()
    assert json.loads(capsys.readouterr().out)["step_time_s"] == answer.step_time_s
