"""Run one function in a fresh process on the node of every rank of a testbed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from estimator.errors import ProbeError, TrainingError
from estimator.machines.profile import Device
from estimator.placement.allocation import Allocation
from estimator.probe.devices.ranks import run_on_devices

from .launch import MASTER_PORT, TIMEOUT_S, place
from .network import Testbed

# What trains paced models starts with.
PACED = f"{__package__}.paced"
# sched.h
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def run_ranks(
    bed: Testbed,
    allocation: str | Allocation,
    function: str,
    arguments: Mapping[str, Any],
    *,
    what: str,
    imported: Sequence[str] = (),
    alone: bool = False,
    trains: bool = True,
    port: int = MASTER_PORT,
) -> list[Any]:
    """What ``function(rank, count, arguments)`` returned, by rank; it works in `joined`.

    Every rank has the core of its device, as while its node is probed, and shares it with that
    device of the other nodes; `alone` gives rank r core r to itself. What is `imported` beside the
    function's module is there when ranks start. `what` says in an error what was going on. Raises
    TrainingError if a rank fails, dies or hangs.
    """
    placed, cores, devices = place(bed, allocation, port=port), os.cpu_count() or 1, []
    for rank, each in enumerate(placed):
        core = (rank if alone else int(each.environment["LOCAL_RANK"])) % cores
        about = {"index": rank, "name": "testbed", "memory_bytes": 1}
        devices.append(Device(kind="cpu", cores=(core,), **about))
    where = {
        "namespaces": [bed.namespace(rank.node) for rank in placed],
        "hosts": [rank.node for rank in placed],
        "environments": [dict(rank.environment) for rank in placed],
        "timeout_s": TIMEOUT_S,
    }
    try:
        return run_on_devices(
            devices,
            function,
            {**arguments, **where},
            timeout_s=TIMEOUT_S,
            imported=(function.partition(":")[0], *imported),
            trains=trains,
        )
    except ProbeError as error:
        raise TrainingError(f"{what} failed: {error}") from None


@contextlib.contextmanager
def joined(rank: int, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """This process of `run_ranks` on its node, with one thread, in gloo's group of all ranks."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    torch.set_num_threads(1)
    _enter_node(arguments["namespaces"][rank], arguments["hosts"][rank])
    os.environ.update(arguments["environments"][rank])
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments["timeout_s"]))
    yield dist
    dist.barrier()
    dist.destroy_process_group()


def timed_steps(dist: Any, step: Callable[[], None], *, warmup: int, steps: int) -> list[float]:
    """Seconds of each step after the first few; all ranks begin together."""
    times = []
    for _ in range(warmup + steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times[warmup:]


def _enter_node(namespace: str, host: str) -> None:
    """Move this process into a node's network namespace, under the node's name.

    As ``ip netns exec`` and ``unshare --uts`` do, but for a process that already runs.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        failed = library.setns(descriptor, _CLONE_NEWNET) or library.unshare(_CLONE_NEWUTS)
    finally:
        os.close(descriptor)
    if failed:
        code = ctypes.get_errno()
        raise ProbeError(f"cannot enter node '{host}' ({os.strerror(code)}); run as root")
    socket.sethostname(host)
