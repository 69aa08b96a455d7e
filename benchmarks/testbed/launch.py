"""Start one process per rank on the nodes of a testbed, as torchrun would, and watch them."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from estimator.errors import TrainingError
from estimator.placement.allocation import Allocation
from estimator.probe.cluster.discovery import VARIABLE

from .network import INTERFACE, Testbed

MASTER_PORT = 29500
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where one rank runs, and the environment that tells it so."""

    node: str
    environment: Mapping[str, str]


def place(
    bed: Testbed, allocation: str | Allocation, *, port: int = MASTER_PORT
) -> tuple[Placed, ...]:
    """Every rank of an allocation with torchrun's environment variables, in rank order.

    Jobs that run at once have a `port` each.
    """
    where = [node.name for node, _ in bed.description.placement(allocation)]
    hosts = list(dict.fromkeys(where))
    # What a launcher of ranks on several nodes hands out, as the probe asks for one.
    secret = secrets.token_hex(32)
    placed = []
    for rank, node in enumerate(where):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": len(where),
            "LOCAL_RANK": where[:rank].count(node),
            "LOCAL_WORLD_SIZE": where.count(node),
            "GROUP_RANK": hosts.index(node),
            "GROUP_WORLD_SIZE": len(hosts),
            "MASTER_ADDR": bed.address(where[0]),
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TORCHELASTIC_RUN_ID": bed.prefix.rstrip("-"),
            VARIABLE: secret,
        }
        placed.append(
            Placed(node=node, environment={name: str(value) for name, value in environment.items()})
        )
    return tuple(placed)


def launch(
    bed: Testbed,
    allocation: str | Allocation,
    command: Sequence[str],
    *,
    pinned: bool = False,
) -> list[str]:
    """Run `command` once per rank, each on its node; what each printed, in rank order.

    With `pinned` rank r has core r modulo the cores to itself. Kills every rank when one fails or
    the time is over, and raises TrainingError with the last line of its stderr.
    """
    ranks = place(bed, allocation)
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        outputs = [Path(folder, f"out{rank}") for rank in range(len(ranks))]
        errors = [Path(folder, f"err{rank}") for rank in range(len(ranks))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, placed in enumerate(ranks):
                core = rank % (os.cpu_count() or 1)
                pinning = ("taskset", "--cpu-list", str(core)) if pinned else ()
                # A rank does not outlive this process, however that ends.
                leash = ("setpriv", "--pdeathsig", "KILL")
                with outputs[rank].open("wb") as out, errors[rank].open("wb") as err:
                    processes.append(
                        subprocess.Popen(
                            [*bed.entering(placed.node), *pinning, *leash, *command],
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            env={**os.environ, **placed.environment},
                            start_new_session=True,
                        )
                    )
            failed = _wait(processes, time.monotonic() + TIMEOUT_S)
        finally:
            _kill(processes)
        if failed is not None:
            raise TrainingError(_obituary(failed, ranks[failed].node, processes, errors))
        return [path.read_text(errors="replace") for path in outputs]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Wait for every rank; the number of one that failed or was too slow, None if all went well."""
    descriptors = [os.pidfd_open(process.pid) for process in processes]
    try:
        with selectors.DefaultSelector() as selector:
            for rank, descriptor in enumerate(descriptors):
                selector.register(descriptor, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    if processes[key.data].wait() != 0:
                        return int(key.data)
                    selector.unregister(key.fileobj)
                if not ready and time.monotonic() >= deadline:
                    return min(key.data for key in selector.get_map().values())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _obituary(
    rank: int,
    node: str,
    processes: Sequence[subprocess.Popen[bytes]],
    errors: Sequence[Path],
) -> str:
    lines = errors[rank].read_text(errors="replace").strip().splitlines()
    last = lines[-1][:300] if lines else "nothing on stderr"
    code = processes[rank].returncode
    how = f"ended with {code}" if code != -signal.SIGKILL else f"was killed after {TIMEOUT_S:g} s"
    return f"rank {rank} on node '{node}' {how}, saying: {last}; see what it was to run"
