"""Do what rank 0 asks of a rank: join measurements in fresh processes, and report."""

from __future__ import annotations

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import Device
from estimator.probe.discovery import Place, interface_of, own_address_towards
from estimator.probe.inventory import core_groups, read_cpu, read_gpus
from estimator.probe.launch_secret import await_secret_of_this_host
from estimator.probe.members import Member
from estimator.probe.message_store import Heartbeat, MessageStore, connect, join_session
from estimator.probe.messages import Assignment, Rendezvous, Round, TaskMessage, checked
from estimator.probe.rank_functions import function_named
from estimator.probe.ranks import run_on_devices
from estimator.probe.worlds import MODULES

# Ranks start within this time of each other, file systems being slow.
START_S = 120.0
# How long a rank may hear nothing beyond what rank 0 has announced.
_LATE_S = 20.0
_TICK_S = 1.0
# Rank 0 shares the secret of a host as soon as it listens.
_SECRET_S = 20.0
# How long one wait for the next round is; then it waits again.
_PATIENCE_S = 5.0
# Of a reason to fail.
_MOST_CHARACTERS = 1000


def run_worker(place: Place, *, host: str, versions: Mapping[str, str]) -> str:
    """Take part as `place` says until rank 0 says it is over; why this rank left before, or "".

    `host` is what this rank's node is called. Raises ProbeError where rank 0 is not to be reached;
    a rank other than 0 ends its process, saying so, where rank 0 has been out of reach for longer
    than it had announced.
    """
    watchdog = Watchdog(is_needed=place.rank != 0)
    watchdog.renew(2 * START_S)
    store = _join(place)
    nonce = secrets.token_hex(16)
    rendezvous = {
        "host": host,
        "address": own_address_towards(place.master_address),
        "local_rank": place.local_rank,
        "cores": sorted(read_cpu().cores),
        "versions": dict(versions),
        "nonce": nonce,
    }
    checked(Rendezvous, rendezvous, f"rank {place.rank}")
    store.post(f"rendezvous/{place.rank}", rendezvous)
    beating = MessageStore(_connect(place), place.attempt, store.signer)
    with Heartbeat(beating, place.rank):
        found = store.await_value(f"assignment/{place.rank}", START_S)
        if found is None:
            raise ProbeError(
                f"rank {place.rank} waited {START_S:g} s for all others to start; start them "
                "together"
            )
        assignment = checked(Assignment, found, "rank 0")
        if assignment.nonce != nonce:
            raise ProbeError(
                f"rank {place.rank} was answered as another process of that rank; start every rank "
                "once"
            )
        if assignment.refused:
            return assignment.refused
        reason = _Worker(place, store, assignment, watchdog).work(host, versions)
    watchdog.stop()
    return reason


def _join(place: Place) -> MessageStore:
    """Reach rank 0, and make sure that it has the secret of this launch."""
    tcp_store = _connect(place, START_S)
    if place.secret is None:
        # A store of the launcher's answers before rank 0 has started.
        timeout_s = START_S if place.has_store else _SECRET_S
        secret = await_secret_of_this_host(place.master_port, place.attempt, timeout_s)
        place = replace(place, secret=secret)
    return join_session(tcp_store, place, START_S)


def _connect(place: Place, timeout_s: float = _LATE_S) -> Any:
    return connect(place.master_address, place.master_port, timeout_s=timeout_s)


class Watchdog:
    """Ends this process unless renewed: nothing else ends a wait on a broken connection."""

    def __init__(self, *, is_needed: bool) -> None:
        self._count, self._last_count = 0, math.inf
        if is_needed:
            threading.Thread(target=self._watch, daemon=True).start()

    def renew(self, seconds: float) -> None:
        """From now on this process may take so long, and some more, until the next word."""
        self._last_count = self._count + (seconds + _LATE_S) / _TICK_S

    def stop(self) -> None:
        """It is over in good order."""
        self._last_count = math.inf

    def _watch(self) -> None:
        # Counted and not read from a clock: time during which this process was stopped is no time.
        while self._count <= self._last_count:
            time.sleep(_TICK_S)
            self._count += 1
        sys.stderr.write("estimator: rank 0 has been out of reach for too long; check the links\n")
        sys.stderr.flush()
        os._exit(2)


class _Worker:
    """One assigned rank: its device, and the rounds it takes part in."""

    def __init__(
        self, place: Place, store: MessageStore, assignment: Assignment, watchdog: Watchdog
    ) -> None:
        self.place, self.store, self.assignment, self.watchdog = place, store, assignment, watchdog
        # Ranks of one node alone meet over the loopback.
        self.interface: str | None = "lo" if sys.platform == "linux" else None
        if assignment.peer is not None:
            self.interface = interface_of(own_address_towards(assignment.peer))

    def work(self, host: str, versions: Mapping[str, str]) -> str:
        """Say which device this is, then do round after round until the end.

        Where there is no device for it, why.
        """
        rank = self.place.rank
        try:
            self.device = own_device(self.assignment)
            run_on_devices(
                [self.device],
                "estimator.probe.worlds:nothing",
                {},
                timeout_s=START_S,
                imported=MODULES,
                trains=False,
            )
        except ProbeError as error:
            reason = f"rank {rank} on node {host} has no device: {error}"
            self.store.post(f"member/{rank}", {"failure": reason[:_MOST_CHARACTERS]})
            return reason
        member = Member(
            rank=rank,
            host=host,
            address=own_address_towards(self.place.master_address),
            local_rank=self.assignment.local_rank,
            device=self.device,
            machine=machine_words(self.device),
            versions=versions,
        )
        self.store.post(f"member/{rank}", member.to_dict())
        number = 0
        while True:
            found = self.store.await_value(f"round/{number}", _PATIENCE_S)
            if found is None:
                continue
            tasks = checked(Round, found, "rank 0").tasks
            if not tasks:
                self.store.post(f"leave/{rank}", True)
                return ""
            # Rank 0 speaks again once the round is over.
            self.watchdog.renew(max(task.timeout_s for task in tasks))
            for index, task in enumerate(tasks):
                if rank in task.ranks:
                    self._run_task(f"{number}/{index}", task)
            number += 1

    def _run_task(self, key: str, task: TaskMessage) -> None:
        """Run one task; every report and the end of it go to the store."""
        rank, count = self.place.rank, 0

        def post_report(_rank: int, value: Any) -> None:
            nonlocal count
            self.store.post(f"report/{key}/{rank}/{count}", value)
            count += 1

        failure, result = None, None
        try:
            result = self._call(key, task, post_report)
        except EstimatorError as error:
            failure = " ".join(str(error).split())[:_MOST_CHARACTERS]
        self.store.post(
            f"done/{key}/{rank}", {"reports": count, "failure": failure, "result": result}
        )

    def _call(self, key: str, task: TaskMessage, on_report: Callable[[int, Any], None]) -> Any:
        """The result of a task, which is one of the listed functions or refused."""
        function = function_named(task.function)
        checked(function.arguments, task.arguments, "rank 0")
        if function.alone:
            return function.call(
                task.arguments, lambda: self.store.read(f"cancel/{key}") is not None
            )
        (result,) = run_on_devices(
            [self.device],
            "estimator.probe.worlds:in_world",
            self._world(key, task),
            timeout_s=task.timeout_s,
            on_report=on_report,
            imported=MODULES,
            trains=False,
        )
        return result

    def _world(self, key: str, task: TaskMessage) -> dict[str, Any]:
        return {
            "function": task.function,
            "arguments": {**task.arguments, "kind": self.device.kind},
            "world": {
                "rank": task.ranks.index(self.place.rank),
                "world_size": len(task.ranks),
                "address": self.place.master_address,
                "port": self.place.master_port,
                "attempt": self.place.attempt,
                "prefix": self.store.prefix,
                "group": f"world/{key}",
                "cancel": f"cancel/{key}",
                "session_key": self.store.signer.secret.hex(),
                "timeout_s": task.timeout_s,
                "kind": self.device.kind,
                "interface": self.interface,
            },
        }


def own_device(assignment: Assignment) -> Device:
    """The device of this rank, by its number on the node.

    Groups of cores: those of the base profile, if this rank may use them; else
    all its cores where the launcher gave each rank its own, or its part of them.
    """
    from estimator.probe.machine import choose_devices

    local_rank, local_size = assignment.local_rank, assignment.local_size
    cpu = read_cpu()
    if assignment.kind != "cpu":
        devices = choose_devices(cpu, kind=assignment.kind)
        if devices[0].kind == "cuda":
            return _own_gpu(devices, local_rank, local_size)
    named = tuple(assignment.cores)
    if named and set(named) <= set(cpu.cores):
        return _core_device(cpu, local_rank, named)
    if assignment.has_own_cores:
        return _core_device(cpu, local_rank, cpu.cores[: len(named) or None])
    return core_groups(cpu, local_size)[local_rank]


def _own_gpu(devices: Sequence[Device], local_rank: int, local_size: int) -> Device:
    import torch

    visible = torch.cuda.device_count()
    if local_size > 1 and visible == 1:
        # The launcher shows each rank its own GPU alone (srun --gpus-per-task).
        return replace(devices[min(local_rank, len(devices) - 1)], index=0)
    if local_rank >= min(visible, len(devices)):
        raise ProbeError(
            f"{local_size} ranks were started on a node with {visible} GPUs; start at most "
            f"{visible} there"
        )
    return devices[local_rank]


def _core_device(cpu: Any, index: int, cores: tuple[int, ...]) -> Device:
    return Device(
        kind="cpu",
        index=index,
        name=f"{cpu.model}, {len(cores)} core{'s' if len(cores) > 1 else ''}",
        memory_bytes=cpu.memory_bytes,
        cores=cores,
        numa_node=next((node for node, own in cpu.numa_cores.items() if cores[0] in own), None),
    )


def machine_words(device: Device) -> str:
    """The node's hardware in words, alike for nodes of one type however many ranks each has."""
    cpu = read_cpu()
    words = f"{cpu.model}, {os.cpu_count()} threads, {round(cpu.memory_bytes / (1 << 30))} GiB"
    if device.kind == "cuda":
        words = f"{words}, {len(read_gpus())} × {device.name}"
    return words
