"""Functions run once per device, in pinned processes that end with the call."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import AllocationError, ProbeError
from estimator.machines.profile import Device
from estimator.probe.devices.ranks import report, run_on_devices

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
DEVICES = tuple(
    Device(kind="cpu", index=rank, name="core", memory_bytes=1 << 30, cores=tuple(CORES[rank:][:1]))
    for rank in range(2)
)


@pytest.fixture(autouse=True)
def _ranks_can_import_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks search modules where their caller does.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _run(function: str, *, world: bool = False, timeout_s: float = 60.0, **more: Any) -> list[Any]:
    arguments = more.pop("arguments", {})
    return run_on_devices(
        DEVICES, f"test_ranks:{function}", arguments, timeout_s=timeout_s, world=world, **more
    )


def describe(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    cores = sorted(os.sched_getaffinity(0)) if CORES else []
    square = np.ones((600, 600))
    assert (square @ square)[0, 0] == 600.0
    tasks = Path("/proc/self/task")
    return {
        "started": len(list(tasks.iterdir())) if tasks.is_dir() else 1,
        "pid": os.getpid(),
        "rank": rank,
        "of": world_size,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "echo": arguments["word"],
    }


def test_each_rank_is_its_own_process_pinned_to_its_device() -> None:
    found = _run("describe", arguments={"word": "hello"})
    assert [one["rank"] for one in found] == [0, 1]
    assert [one["of"] for one in found] == [2, 2]
    assert [one["cores"] for one in found] == [list(device.cores) for device in DEVICES]
    assert [one["threads"] for one in found] == [1, 1]
    # Nor has a library started others.
    assert [one["started"] for one in found] == [1, 1]
    assert [one["echo"] for one in found] == ["hello", "hello"]
    assert len({os.getpid(), *(one["pid"] for one in found)}) == 3


def summed(rank: int, world_size: int, arguments: Mapping[str, Any]) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(10**rank)])
    dist.all_reduce(value)
    return float(value)


def test_a_world_can_communicate() -> None:
    assert _run("summed", world=True) == [11.0, 11.0]


def report_then_die(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    import torch.distributed as dist

    report({"rank": rank})
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_what_was_reported_before_a_death_is_kept_and_the_others_end() -> None:
    kept: list[tuple[int, Any]] = []
    with pytest.raises(ProbeError, match="process of rank 1 died"):
        _run("report_then_die", world=True, on_report=lambda *got: kept.append(got))
    assert (1, {"rank": 1}) in kept


def refuse(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    import torch.distributed as dist

    if rank == 1:
        if arguments["own"]:
            raise AllocationError("no such\ndevice")
        raise KeyError("what\nis this")
    dist.barrier()


@pytest.mark.parametrize(
    ("own", "kind", "text"),
    [(True, AllocationError, "no such device"), (False, ProbeError, "rank 1 failed with KeyError")],
)
def test_an_error_in_a_rank_arrives_as_one_line(own: bool, kind: type, text: str) -> None:
    with pytest.raises(kind) as caught:
        _run("refuse", world=True, arguments={"own": own})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def hang(rank: int, world_size: int, arguments: Mapping[str, Any]) -> None:
    report(os.getpid())
    time.sleep(600)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").is_file() or ") Z " not in _status(pid)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ") Z "


def _ended(pids: list[int]) -> bool:
    end = time.monotonic() + 5
    while any(map(_is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(_is_alive, pids))


def test_ranks_that_hang_are_stopped_and_gone_at_the_time_limit() -> None:
    _run("describe", arguments={"word": ""})
    pids: list[int] = []
    begin = time.monotonic()
    with pytest.raises(ProbeError, match="did not end within 4 s"):
        _run("hang", timeout_s=4.0, on_report=lambda _, pid: pids.append(pid))
    assert time.monotonic() - begin < 12
    assert len(pids) == 2
    assert _ended(pids)


def test_an_interrupt_ends_the_ranks_at_once() -> None:
    pids: list[int] = []

    def interrupt(_rank: int, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run("hang", on_report=interrupt)
    assert _ended(pids)


def test_no_device_is_refused() -> None:
    with pytest.raises(ProbeError, match="name at least one"):
        run_on_devices((), "test_ranks:describe", {}, timeout_s=1)
