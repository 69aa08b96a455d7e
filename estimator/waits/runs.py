"""Start a training script on some of this machine's devices and read what its hooks wrote down."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.errors import AllocationError, ModelError, UnknownMachineError
from estimator.machines.catalogue import named_profile
from estimator.placement.allocation import Allocation
from estimator.probe.devices.inventory import usable_threads


def cores_of(text: str) -> tuple[tuple[int, ...], ...]:
    """The cores of each device of an allocation such as ``1x2:local``, none of accelerators.

    Where this machine was never probed, its cores are shared evenly. Raises AllocationError.
    """
    allocation = Allocation.parse(text)
    (group, *others) = allocation.groups
    if others or group.nodes > 1 or not (group.machine or "").startswith("local"):
        raise AllocationError(
            f"'{text}' is not on this machine, where a script runs; write 1x2:local, and name a "
            "second node by --node"
        )
    wanted = group.devices_per_node
    try:
        devices = named_profile(group.machine or "local").devices
    except UnknownMachineError:
        return _shared_evenly(wanted, text)
    if wanted > len(devices):
        raise AllocationError(
            f"'{text}' asks for {wanted} devices of this machine, which has {len(devices)}; ask "
            "for fewer"
        )
    return tuple(device.cores for device in devices[:wanted])


def _shared_evenly(wanted: int, text: str) -> tuple[tuple[int, ...], ...]:
    from torch import cuda  # a probed machine needs no look at what there is

    accelerators, cores = cuda.device_count(), sorted(usable_threads())
    if wanted > (accelerators or len(cores)):
        raise AllocationError(
            f"'{text}' asks for {wanted} devices of this machine, which has "
            f"{accelerators or len(cores)}; ask for fewer"
        )
    if accelerators:
        return ((),) * wanted
    share = len(cores) // wanted
    return tuple(tuple(cores[rank * share : (rank + 1) * share]) for rank in range(wanted))


# Where a run writes the names of files that Python opens in it, in workers as well.
FILES_LOG = "ESTIMATOR_STALLS_FILES"
# What a run that was told to stop exits with.
STOPPED = 75
# What the line of its stdout begins with that holds a rank's record.
RECORD_MARK = "estimator-stalls-record "
# How long a run that is told to stop may take to write its record.
_PATIENCE_S = 10.0
_MOST_QUOTED = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script with its arguments, and how much of it is timed.

    `cores` are those of each device, none on accelerators; `node_commands` start a program on each
    of two nodes, as in ``ssh node2`` or ``ip netns exec n2``, `address` is that of the first.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ((),)
    steps: int = 30
    warmup: int = 5
    timeout_s: float = 600.0
    node_commands: tuple[str, ...] = ()
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: the slowest rank's seconds per step without copies of batches, and its waiting.

    `batches` were taken in all, `samples` is the size of one; `workers` are those of its loader.
    Its accelerator worked for `busy_s` of a step, where that was asked for.
    """

    step_s: float
    waited_s: float
    batches: int
    samples: int
    workers: int
    steps_s: tuple[float, ...]
    busy_s: float | None = None


def run(
    script: Script,
    folder: Path,
    *,
    devices: int,
    is_synthetic: bool,
    on_two_nodes: bool = False,
    is_profiled: bool = False,
    environment: Mapping[str, str] | None = None,
) -> RunRecord:
    """Run the script once on some devices; raises ModelError with one sentence where it fails."""
    started: list[subprocess.Popen[bytes]] = []
    port = str(_free_port())
    try:
        for rank in range(devices):
            options = {
                "script": str(script.path),
                "arguments": script.arguments,
                "folder": os.getcwd(),
                "steps": script.steps,
                "warmup": script.warmup,
                "is_synthetic": is_synthetic,
                "is_profiled": is_profiled,
                "cores": script.cores[rank],
            }
            node, local_rank, local_ranks = place_of(rank, devices, nodes=1 + on_two_nodes)
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(devices),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_ranks),
                "MASTER_ADDR": script.address if on_two_nodes else "127.0.0.1",
                "MASTER_PORT": port,
                **({"OMP_NUM_THREADS": str(len(script.cores[rank]))} if script.cores[rank] else {}),
                **(environment or {}),
            }
            prefix = script.node_commands[node] if on_two_nodes else ""
            started.append(_started(folder, rank, options, own, prefix))
        in_time = _wait(script, started)
    finally:
        _stop(started)
    what = f"{script.path} on {devices} device{'s' if devices > 1 else ''}"
    what += " with synthetic batches" if is_synthetic else ""
    what += "" if in_time else f" was stopped after {script.timeout_s:g} s:"
    return _record(script, folder, what, [process.returncode for process in started])


def place_of(rank: int, ranks: int, *, nodes: int) -> tuple[int, int, int]:
    """The node of a rank, its rank there, and how many ranks that node has: as even as can be.

    >>> place_of(1, 2, nodes=2)
    (1, 0, 1)
    """
    node_of = [rank * nodes // ranks for rank in range(ranks)]
    node = node_of[rank]
    return node, rank - node_of.index(node), node_of.count(node)


def _started(
    folder: Path, rank: int, options: Mapping[str, Any], own: Mapping[str, str], prefix: str
) -> subprocess.Popen[bytes]:
    # ssh has a shell read its words, other launchers do not: one word that neither changes.
    packed = base64.urlsafe_b64encode(json.dumps(options).encode()).decode()
    command = [sys.executable, "-m", "estimator.waits.hooks", packed]
    if prefix:
        # What a remote shell starts has no environment of ours.
        command = ["env", *(f"{name}={value}" for name, value in own.items()), *command]
    with (
        (folder / f"rank{rank}.out").open("wb") as output,
        (folder / f"rank{rank}.err").open("wb") as errors,
    ):
        return subprocess.Popen(
            [*shlex.split(prefix), *command],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def _wait(script: Script, started: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait for all ranks, no longer than for the first that fails; whether that was in time."""
    end_s = time.monotonic() + script.timeout_s
    while any(process.poll() is None for process in started) and time.monotonic() < end_s:
        if any(process.returncode for process in started):
            return True
        time.sleep(0.02)
    return all(process.poll() is not None for process in started)


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in started:
        # Workers of its loaders are in the session that the run began.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _record(script: Script, folder: Path, what: str, codes: Sequence[int | None]) -> RunRecord:
    rank_records: list[dict[str, Any]] = []
    for rank, code in enumerate(codes):
        records = [line for line in _lines(folder, rank, "out") if line.startswith(RECORD_MARK)]
        if records:
            rank_records.append(json.loads(records[-1].removeprefix(RECORD_MARK)))
        elif code not in (0, -signal.SIGTERM):
            raise ModelError(f"{what} ended with exit code {code}: {_last_line(folder, rank)}")
    if len(rank_records) < len(codes):
        raise ModelError(f"{what} wrote no times; raise --timeout")
    batches = min(record["batches"] for record in rank_records)
    steps = min(len(record["ended_s"]) for record in rank_records)
    if batches and steps >= script.steps:
        return _summary(script, rank_records)
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    why = "" if failed is None or STOPPED in codes else f" ({_last_line(folder, failed)})"
    if not batches:
        raise ModelError(
            f"{what} took no batch of a DataLoader{why}; wrap what gives its batches, as in "
            "for batch in estimator.watch_loader(batches)"
        )
    if not steps:
        raise ModelError(
            f"{what} took {batches} batches and made no step of an optimizer of torch.optim{why}; "
            "give a script that trains, or raise --timeout"
        )
    raise ModelError(
        f"{what} made {steps} steps{why}, and --warmup and --steps ask for {script.steps}; give it "
        "more data, lower --steps or raise --timeout"
    )


def _summary(script: Script, rank_records: Sequence[Mapping[str, Any]]) -> RunRecord:
    slowest = max(rank_records, key=lambda record: _mean_step_s(record, script)[0])
    step_s, waited_s = _mean_step_s(slowest, script)
    ended, copied = slowest["ended_s"], slowest["copied_s"]
    return RunRecord(
        step_s=step_s,
        waited_s=waited_s,
        batches=slowest["batches"],
        samples=slowest["samples"],
        workers=slowest["workers"],
        busy_s=slowest["busy_s"],
        steps_s=tuple(
            ended[step] - ended[step - 1] - copied[step]
            for step in range(script.warmup, script.steps)
        ),
    )


def _mean_step_s(record: Mapping[str, Any], script: Script) -> tuple[float, float]:
    """(seconds per step after the warm-up, of which it waited for batches).

    Workers that take turns end together: whole rounds of them are counted.
    """
    count = script.steps - script.warmup
    workers = max(int(record["workers"]), 1)
    count -= count % workers if count >= 2 * workers else 0
    ended, copied, waited = record["ended_s"], record["copied_s"], record["waited_s"]
    last = script.steps - 1
    window = slice(last - count + 1, last + 1)
    step_s = (ended[last] - ended[last - count] - sum(copied[window])) / count
    return step_s, sum(waited[window]) / count


def _last_line(folder: Path, rank: int) -> str:
    printed = [line for line in _lines(folder, rank, "out") if not line.startswith(RECORD_MARK)]
    lines = _lines(folder, rank, "err") or printed
    return lines[-1][:_MOST_QUOTED] if lines else "it printed nothing"


def _lines(folder: Path, rank: int, stream: str) -> list[str]:
    return (folder / f"rank{rank}.{stream}").read_text(errors="replace").strip().splitlines()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
