"""One process on a device runs job after job; what they find, or why they fail, comes as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import ProbeError
from estimator.machines.profile import Device
from estimator.probe.devices.jobs import run_job
from estimator.probe.devices.ranks import DeviceProcesses

CORE = Device(kind="cpu", index=0, name="core", memory_bytes=1)


def tells_where(_backend: Any, emit: Any, *, budget_s: float, word: str = "") -> None:
    emit({"pid": os.getpid(), "budget_s": budget_s, "word": word})


def fails(_backend: Any, emit: Any, *, budget_s: float) -> None:
    emit({"before": True})
    raise RuntimeError("no such\nkernel")


def dies(_backend: Any, _emit: Any, *, budget_s: float) -> None:
    os._exit(3)


def test_jobs_of_one_process_are_prepared_once_and_a_dead_one_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found: list[dict[str, Any]] = []
    with DeviceProcesses([CORE], trains=False) as processes:

        def run(function: str, **more: Any) -> None:
            run_job(processes, f"test_jobs:{function}", found.append, budget_s=2.0, **more)

        run_job(processes, "estimator.probe.devices.jobs:emit_canary", found.append)
        run("tells_where")
        run("fails")
        run("tells_where", arguments={"word": "two"})
        with pytest.raises(ProbeError, match="died without a result"):
            run("dies")
        run("tells_where", prepares=False)
    prepared, canary, first, before, failed, second, third = found
    assert 0 < canary["canary_s"] < 1
    assert "memory_resident" in prepared
    assert (before, failed) == ({"before": True}, {"failed": "RuntimeError: no such"})
    assert first == {"pid": first["pid"], "budget_s": 2.0, "word": ""}
    assert second == {**first, "word": "two"}
    assert third["pid"] != first["pid"]
