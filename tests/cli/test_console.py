"""What a person sees on stderr while waiting."""

from __future__ import annotations

import io
import sys
import time

import pytest

from estimator.cli import console


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
