"""One rank of a probe of several nodes: it joins, runs the steps with all others, and leaves.

A rank's own process keeps in touch with rank 0 through the store, and has one more process on its
device, which runs the steps in a world with those of the other ranks. That world is given up on all
ranks where one is lost or a step fails; the rest goes on in another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import Device, MachineProfile
from estimator.probe.cluster.discovery import (
    Place,
    await_secret_of_this_host,
    interface_of,
    own_address_towards,
)
from estimator.probe.cluster.findings import Member
from estimator.probe.cluster.signed_store import SignedStore, connect, dist, join_session, prefix_of
from estimator.probe.devices.inventory import (
    choose_devices,
    core_device,
    core_groups,
    read_cpu,
    read_gpus,
)
from estimator.probe.devices.ranks import run_on_devices

# `estimator.probe.machine.probe_machine`.
ProbeMachine = Callable[..., MachineProfile]

# Ranks start within this time of each other, file systems being slow.
START_S = 55.0
# Rank 0 shares the secret of a host as soon as it listens.
_SECRET_S = 20.0
_BEAT_EVERY_S = 0.5
# How long a rank hears nothing of rank 0 before it ends.
_LATE_S = 20
# Of a reason to fail.
_MOST_CHARACTERS = 1000
# What the process on the device needs, imported once.
_MODULES = ("estimator.probe.cluster.steps",)


def take_part(
    place: Place,
    *,
    host: str,
    versions: Mapping[str, str],
    probe_machine: ProbeMachine,
    on_report: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """Take part as `place` says until rank 0 says it is over; why this rank left before, or "".

    `host` is what this rank's node is called, `probe_machine` measures it alone where rank 0 asks
    for that. `on_report` gets what this rank's steps report.
    Raises ProbeError where rank 0 is not to be reached; another rank ends its process, saying
    so, where nothing was heard of rank 0 for long.
    """
    store = _join(place)
    nonce = secrets.token_hex(16)
    facts = {
        "host": host,
        "address": own_address_towards(place.master_address),
        "local_rank": place.local_rank,
        "cores": sorted(read_cpu().cores),
        "versions": dict(versions),
        "nonce": nonce,
    }
    store.post(f"facts/{place.rank}", facts)
    with _Heartbeat(_messages(place, store), place.rank):
        roster = store.await_value("roster", START_S)
        if roster is None:
            raise ProbeError(
                f"rank {place.rank} waited {START_S:g} s for all others to start; start them "
                "together"
            )
        reason = _why_left_out(place.rank, nonce, roster)
        member = _Member(place, store, roster, probe_machine, on_report)
        return reason or member.work(host, versions)


def _why_left_out(rank: int, nonce: str, roster: Mapping[str, Any]) -> str:
    if reason := roster["refused"].get(str(rank)):
        return str(reason)
    accepted = roster["facts"].get(str(rank))
    if accepted is None:
        return f"rank {rank} came after the probe had begun without it; start all ranks together"
    if accepted["nonce"] != nonce:
        raise ProbeError(
            f"rank {rank} was answered as another process of that rank; start every rank once"
        )
    return ""


def _join(place: Place) -> SignedStore:
    """Reach rank 0, and make sure that it has the secret of this launch."""
    tcp_store = _connect(place, START_S)
    if place.secret is None:
        # A store of the launcher's answers before rank 0 has started.
        timeout_s = START_S if place.has_store else _SECRET_S
        secret = await_secret_of_this_host(place.master_port, place.attempt, timeout_s)
        place = replace(place, secret=secret)
    return join_session(tcp_store, place, START_S)


def _messages(place: Place, store: SignedStore) -> SignedStore:
    """Another connection to the same store, for another thread."""
    return SignedStore(dist.PrefixStore(prefix_of(place), _connect(place)), store.signer)


def _connect(place: Place, timeout_s: float = _LATE_S) -> Any:
    return connect(place.master_address, place.master_port, timeout_s=timeout_s)


class _Heartbeat:
    """Says every half second that this rank lives, and ends this process where rank 0 does not.

    Nothing else ends a wait on a broken connection.
    """

    def __init__(self, store: SignedStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._ended = threading.Event()
        self._silent_s = 0

    def __enter__(self) -> None:
        self._store.post(f"beat/{self._rank}", 0)
        threading.Thread(target=self._beat, daemon=True).start()
        if self._rank != 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        count, heard = 0, None
        # Where the store has ended, the main thread meets the same, and says it.
        with contextlib.suppress(ProbeError):
            while not self._ended.wait(_BEAT_EVERY_S):
                count += 1
                self._store.post(f"beat/{self._rank}", count)
                now = self._store.read("beat/0")
                if now != heard:
                    heard, self._silent_s = now, 0

    def _watch(self) -> None:
        # Counted and not read from a clock: time during which this process was stopped is no time.
        while not self._ended.wait(1.0):
            self._silent_s += 1
            if self._silent_s > _LATE_S:
                sys.stderr.write(
                    "estimator: rank 0 has been out of reach for too long; check the links\n"
                )
                sys.stderr.flush()
                os._exit(2)


class _Member:
    """One rank that takes part: its device, and the worlds it is in one after the other."""

    def __init__(
        self,
        place: Place,
        store: SignedStore,
        roster: Mapping[str, Any],
        probe_machine: ProbeMachine,
        on_report: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.place, self.store, self.roster = place, store, roster
        self.probe_machine, self.on_report = probe_machine, on_report

    def work(self, host: str, versions: Mapping[str, str]) -> str:
        """Say which device this is, then be in world after world until the end.

        Where there is no device for it, why.
        """
        rank = self.place.rank
        try:
            self.device = own_device(rank, self.roster)
            self._run_on_device("estimator.probe.cluster.steps:nothing", {}, START_S)
        except ProbeError as error:
            reason = f"rank {rank} on node {host} has no device: {error}"
            self.store.post(f"member/{rank}", {"failure": reason[:_MOST_CHARACTERS]})
            return reason
        member = Member(
            rank=rank,
            host=host,
            device=self.device,
            machine=machine_words(self.device),
            versions=versions,
        )
        self.store.post(f"member/{rank}", member.to_dict())
        machines = self._awaited("machines")
        if str(rank) in machines:
            self._probe_machine(machines[str(rank)])
        number = 0
        while (order := self._awaited(f"order/{number}")) is not None and order["members"]:
            ranks = [member["rank"] for member in order["members"]]
            if rank not in ranks:
                return f"rank {rank} was taken for lost"
            self._run_world(number, ranks.index(rank), order)
            number += 1
        self.store.post(f"leave/{rank}", True)
        return ""

    def _awaited(self, key: str) -> Any:
        while (value := self.store.await_value(key, _LATE_S)) is None:
            pass
        return value

    def _probe_machine(self, arguments: Mapping[str, Any]) -> None:
        def poll(_part: str, _ratio: float) -> None:
            if self.store.read("machines_end") is not None:
                raise KeyboardInterrupt

        try:
            # Ranks that wait for each other are busy themselves.
            profile = self.probe_machine(report=poll, patience_s=0.0, **arguments).to_dict()
            self.store.post(f"machine/{self.place.rank}", {"profile": profile})
        except EstimatorError as error:
            reason = " ".join(str(error).split())[:_MOST_CHARACTERS]
            self.store.post(f"machine/{self.place.rank}", {"failure": reason})

    def _run_world(self, number: int, rank: int, order: Mapping[str, Any]) -> None:
        place = self.place
        arguments = {
            **order,
            "rank": rank,
            "name": f"world/{number}",
            "given_up": f"order/{number + 1}",
            "address": place.master_address,
            "port": place.master_port,
            "prefix": prefix_of(place),
            "session_key": self.store.signer.secret.hex(),
            "interface": self._interface(),
        }
        failure = ""
        try:
            self._run_on_device(
                "estimator.probe.cluster.steps:run_steps", arguments, order["timeout_s"]
            )
        except EstimatorError as error:
            failure = " ".join(str(error).split())[:_MOST_CHARACTERS]
        self.store.post(f"ended/{number}/{place.rank}", failure)

    def _run_on_device(self, function: str, arguments: dict[str, Any], timeout_s: float) -> None:
        def take(_rank: int, message: dict[str, Any]) -> None:
            if self.on_report is not None:
                self.on_report(message)

        run_on_devices(
            [self.device],
            function,
            arguments,
            timeout_s=timeout_s,
            on_report=take,
            imported=_MODULES,
            trains=False,
        )

    def _interface(self) -> str | None:
        """Where the other nodes are; ranks of one node alone meet over the loopback."""
        facts = self.roster["facts"]
        own = facts[str(self.place.rank)]["host"]
        peer = next((one["address"] for one in facts.values() if one["host"] != own), None)
        if peer is not None:
            return interface_of(own_address_towards(peer))
        return "lo" if sys.platform == "linux" else None


def numbered(facts: Mapping[str, Mapping[str, Any]], rank: int) -> tuple[int, int, bool]:
    """A rank's number on its node, of how many, and whether each has cores of its own there.

    Ranks of one node are numbered in order where the launcher does not say.
    """
    own = facts[str(rank)]
    peers = [one for one in sorted(map(int, facts)) if facts[str(one)]["host"] == own["host"]]
    cores = [core for one in peers for core in facts[str(one)]["cores"]]
    local_rank = peers.index(rank) if own["local_rank"] is None else own["local_rank"]
    return local_rank, len(peers), len(set(cores)) == len(cores)


def own_device(rank: int, roster: Mapping[str, Any]) -> Device:
    """The device of this rank, by its number on the node.

    Groups of cores: those of the base profile, if this rank may use them; else
    all its cores where the launcher gave each rank its own, or its part of them.
    """
    local_rank, local_size, has_own_cores = numbered(roster["facts"], rank)
    cpu, base_cores = read_cpu(), roster["base_cores"]
    if roster["kind"] != "cpu":
        devices = choose_devices(cpu, kind=roster["kind"])
        if devices[0].kind == "cuda":
            return _own_gpu(devices, local_rank, local_size)
    named = tuple(base_cores[local_rank]) if base_cores else ()
    if named and set(named) <= set(cpu.cores):
        return core_device(cpu, local_rank, named, memory_bytes=cpu.memory_bytes)
    if has_own_cores:
        own = cpu.cores[: len(named) or None]
        return core_device(cpu, local_rank, own, memory_bytes=cpu.memory_bytes)
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


def machine_words(device: Device) -> str:
    """The node's hardware in words, alike for nodes of one type however many ranks each has."""
    cpu = read_cpu()
    words = f"{cpu.model}, {os.cpu_count()} threads, {round(cpu.memory_bytes / (1 << 30))} GiB"
    if device.kind == "cuda":
        words = f"{words}, {len(read_gpus())} × {device.name}"
    return words
