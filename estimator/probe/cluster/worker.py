"""Do what rank 0 asks of a rank, from a fixed list of functions, and report."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import Device
from estimator.probe.cluster import messages
from estimator.probe.cluster.discovery import (
    Place,
    await_secret_of_this_host,
    interface_of,
    own_address_towards,
)
from estimator.probe.cluster.findings import Member
from estimator.probe.cluster.messages import (
    Assignment,
    Heartbeat,
    MessageStore,
    Rendezvous,
    Round,
    Signer,
    TaskMessage,
    checked,
    connect,
    join_session,
)
from estimator.probe.cluster.shapes import time_shape
from estimator.probe.devices.inventory import core_groups, read_cpu, read_gpus
from estimator.probe.devices.ranks import run_on_devices
from estimator.probe.links.network import time_flows, time_pairs
from estimator.probe.links.overlap import time_rank

FunctionName = Literal[
    "time_canary", "time_pairs", "time_flows", "time_shape", "time_overlap", "probe_own_machine"
]
# Longer than the period in which Linux rations CPU time, 0.1 s by default.
_CANARY_TURNS, _CANARY_TURN_S = 3, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFunction:
    """What is called, the schemas of its arguments, and of each report or of the result.

    In a process group it is called with ``(rank, world_size, arguments)``; one that runs `alone`,
    in the rank's own process, with ``(arguments, is_called_off)``.
    """

    call: Callable[..., Any]
    arguments: type[BaseModel]
    answer: TypeAdapter[Any]
    alone: bool = False


def time_canary(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> None:
    """Report how long this rank's device takes for the probe's fixed matmul.

    On average and not in the middle: a node whose CPU time is rationed computes at full speed most
    of the time, and not at all in between.
    """
    import torch

    from estimator.probe.devices.backend import open_backend
    from estimator.probe.devices.jobs import canary_s
    from estimator.probe.devices.ranks import report

    on_cuda = arguments["kind"] == "cuda"
    backend = open_backend(arguments["kind"], torch.cuda.current_device() if on_cuda else 0)
    means_s = []
    for _ in range(_CANARY_TURNS):
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + _CANARY_TURN_S:
            canary_s(backend)
            count += 1
        means_s.append((time.perf_counter() - began) / count)
    # Other programs only ever add to it.
    report(min(means_s))


def probe_own_machine(
    arguments: Mapping[str, Any], is_called_off: Callable[[], bool]
) -> dict[str, Any]:
    """The profile of the machine this is called on, as JSON values; called off, what there is."""
    from estimator.probe.machine import probe_machine

    def poll(_part: str, _ratio: float) -> None:
        if is_called_off():
            raise KeyboardInterrupt

    return probe_machine(
        name=arguments["name"],
        devices=arguments["devices"],
        budget_s=arguments["budget_s"],
        kind=arguments["kind"],
        report=poll,
        # Ranks that wait for each other are busy themselves.
        patience_s=0.0,
    ).to_dict()


FUNCTIONS: Mapping[FunctionName, RankFunction] = {
    "time_canary": RankFunction(
        call=time_canary,
        arguments=messages.CanaryArguments,
        answer=TypeAdapter(messages.Positive),
    ),
    "time_pairs": RankFunction(
        call=time_pairs,
        arguments=messages.PairsArguments,
        answer=TypeAdapter(messages.PairReport),
    ),
    "time_flows": RankFunction(
        call=time_flows,
        arguments=messages.FlowsArguments,
        answer=TypeAdapter(messages.FlowReport),
    ),
    "time_shape": RankFunction(
        call=time_shape,
        arguments=messages.ShapeArguments,
        answer=TypeAdapter(messages.ShapeReport),
    ),
    "time_overlap": RankFunction(
        call=time_rank,
        arguments=messages.OverlapArguments,
        answer=TypeAdapter(messages.OverlapReport),
    ),
    "probe_own_machine": RankFunction(
        call=probe_own_machine,
        arguments=messages.MachineArguments,
        answer=TypeAdapter(dict[str, Any]),
        alone=True,
    ),
}


def function_named(name: str) -> RankFunction:
    """The listed function of that name; raises ProbeError where there is none."""
    for known, function in FUNCTIONS.items():
        if known == name:
            return function
    raise ProbeError(
        f"rank 0 asks for '{name[:100]}', which is none of the probe's functions; install the same "
        "version on all nodes"
    )


# How often a rank sees whether its measurement was called off because another rank was lost.
_POLL_S = 0.25
_CALLED_OFF = 3
# What measurements need, imported once per rank and not once per measurement.
MODULES = ("estimator.probe.cluster.signed_store", "estimator.probe.cluster.worker")


def in_world(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> Any:
    """Join the group that `arguments` describes, call its function there, leave.

    Called in a fresh process pinned to its device. Ends the process when the key `cancel` appears
    in the store, or the store is gone: gloo may otherwise wait for a lost peer until its timeout.
    """
    import torch
    import torch.distributed as torch_distributed

    from estimator.probe.cluster.signed_store import SignedStore

    dist: Any = torch_distributed
    order = arguments["world"]
    timeout = timedelta(seconds=order["timeout_s"])
    signer = Signer(bytes.fromhex(order["session_key"]))
    if order["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", order["interface"])
    on_cuda = order["kind"] == "cuda"
    store = connect(order["address"], order["port"], timeout_s=order["timeout_s"])
    store.set_timeout(timeout)
    _end_when_called_off(order, signer)
    prefix = f"{order['prefix']}/{order['group']}"
    signed = SignedStore(dist.PrefixStore(prefix, store), signer.derived(order["group"]))
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=signed,
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    function = function_named(arguments["function"])
    result = function.call(order["rank"], order["world_size"], arguments["arguments"])
    # A rank that leaves first would end connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return result


def nothing(_rank: int, _world_size: int, _arguments: Mapping[str, Any]) -> None:
    """What a rank runs first, so that its server has imported torch before anything is timed."""


def _end_when_called_off(order: Mapping[str, Any], signer: Signer) -> None:
    store = connect(order["address"], order["port"], timeout_s=order["timeout_s"])
    messages = MessageStore(store, order["attempt"], signer)

    def poll() -> None:
        with contextlib.suppress(ProbeError):
            while messages.read(order["cancel"]) is None:
                time.sleep(_POLL_S)
        os._exit(_CALLED_OFF)

    threading.Thread(target=poll, daemon=True).start()


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
                "estimator.probe.cluster.worker:nothing",
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
            "estimator.probe.cluster.worker:in_world",
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
