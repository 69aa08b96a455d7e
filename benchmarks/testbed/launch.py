"""Start one process per rank on the nodes of a testbed, as torchrun would, and watch them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    bed: Testbed, allocation: str | Allocation, command: Sequence[str], *, pinned: bool = False
) -> list[str]:
    """Run `command` once per rank, each on its node; what each printed, in rank order.

    With `pinned` rank r has core r modulo the cores to itself. Kills every rank when one fails or
    the time is over, and raises TrainingError with the last line of its stderr.
    """
    cores = os.cpu_count() or 1

    async def run_all() -> list[str]:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            tasks = []
            for rank, placed in enumerate(place(bed, allocation)):
                pinning = ("taskset", "--cpu-list", str(rank % cores)) if pinned else ()
                # A rank does not outlive this process, however that ends.
                leash = ("setpriv", "--pdeathsig", "KILL")
                whole = (*bed.entering(placed.node), *pinning, *leash, *command)
                tasks.append(group.create_task(_run(rank, placed, whole)))
        return [task.result() for task in tasks]

    try:
        return asyncio.run(run_all())
    except* TrainingError as errors:
        raise errors.exceptions[0] from None
    except* TimeoutError:
        raise TrainingError(
            f"{' '.join(command)} on {allocation} had not ended after {TIMEOUT_S:g} s; see what it "
            "was to run"
        ) from None


async def _run(rank: int, placed: Placed, command: Sequence[str]) -> str:
    """What one rank printed; raises TrainingError where it fails, and ends it when cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **placed.environment},
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        last = lines[-1][:300] if lines else "nothing on stderr"
        raise TrainingError(
            f"rank {rank} on node '{placed.node}' ended with {process.returncode}, saying: {last}; "
            "see what it was to run"
        )
    return out.decode(errors="replace")
