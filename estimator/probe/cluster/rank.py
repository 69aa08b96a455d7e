"""One rank of a probe of several nodes: it joins, does what rank 0 orders with all others, leaves.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from estimator.errors import EstimatorError, ProbeError
from estimator.machines.profile import Device, DeviceKind, MachineProfile
from estimator.probe.cluster.discovery import Place, interface_of, own_address_towards
from estimator.probe.cluster.findings import device_from
from estimator.probe.cluster.signed_store import SignedStore, connect, dist, join_session, prefix_of
from estimator.probe.devices.inventory import choose_devices, read_cpu
from estimator.probe.devices.ranks import run_on_devices

# `estimator.probe.machine.probe_machine`.
ProbeMachine = Callable[..., MachineProfile]

# Ranks start within this time of each other, file systems being slow.
START_S = 55.0
_BEAT_EVERY_S = 0.5
# How long a rank hears nothing of rank 0 before it ends.
_LATE_S = 20
# Of a reason to fail.
_MOST_CHARACTERS = 1000
# What the process on the device runs.
_STEPS = "estimator.probe.cluster.steps"


def take_part(
    place: Place,
    *,
    host: str,
    versions: Mapping[str, str],
    probe_machine: ProbeMachine,
    kind: DeviceKind | None = None,
    on_report: Callable[[dict[str, Any]], None] = lambda message: None,
) -> str:
    """Take part as `place` says until rank 0 says it is over; why this rank left before, or "".

    `host` is what this rank's node is called, `probe_machine` measures it alone where rank 0 asks
    for that. Of `kind` "cpu" no GPU is looked for. `on_report` gets what this rank's steps report.
    Raises ProbeError where rank 0 is not to be reached; another rank ends its process, saying
    so, where nothing was heard of rank 0 for long.
    """
    store = join_session(_connect(place, START_S), place, START_S)
    # Another connection to the same store, for another thread.
    beats = SignedStore(dist.PrefixStore(prefix_of(place), _connect(place)), store.signer)
    nonce = secrets.token_hex(16)
    rank, number = place.rank, 0
    with _Heartbeat(beats, rank):
        store.post(f"facts/{rank}", {**own_facts(place, host, versions, kind), "nonce": nonce})
        while (order := _ordered(store, number))["members"]:
            if reason := order["refused"].get(str(rank)):
                return str(reason)
            if order["nonces"].get(str(rank)) != nonce:
                raise ProbeError(
                    f"rank {rank} was answered as another process of that rank; start every rank "
                    "once"
                )
            members = {member["rank"]: member for member in order["members"]}
            if rank not in members:
                return f"rank {rank} was taken for lost"
            if "machines" not in order:
                answer: Any = _run_world(place, store, number, members, order, on_report)
            elif arguments := order["machines"].get(str(rank)):
                answer = _probe_machine(probe_machine, store, number, arguments)
            else:
                answer = None
            if answer is not None:
                store.post(f"ended/{number}/{rank}", answer)
            number += 1
        store.post(f"leave/{rank}", True)
        return ""


def _ordered(store: SignedStore, number: int) -> Mapping[str, Any]:
    """What rank 0 orders next; the heart beat ends the wait where rank 0 is lost."""
    while (order := store.await_value(f"order/{number}", _LATE_S)) is None:
        pass
    return dict(order)


def own_facts(
    place: Place, host: str, versions: Mapping[str, str], kind: DeviceKind | None
) -> dict[str, Any]:
    """What rank 0 chooses this rank's device by; `failure` says why it can have none."""
    cpu, gpus, visible, failure = read_cpu(), list[Device](), 0, ""
    try:
        # From here on the process that ranks are forked from has imported torch.
        device = Device(kind="cpu", index=0, name="any", memory_bytes=1)
        _run_on(device, "nothing", {}, START_S)
        gpus = [device for device in choose_devices(cpu, kind=kind) if device.kind == "cuda"]
    except ProbeError as error:
        failure = _words(error)
    if gpus:
        import torch

        visible = torch.cuda.device_count()
    return {
        "host": host,
        "address": own_address_towards(place.master_address),
        "local_rank": place.local_rank,
        "versions": dict(versions),
        "cpu": {
            "model": cpu.model,
            "threads": os.cpu_count(),
            "memory_bytes": cpu.memory_bytes,
            "numa_cores": list(cpu.numa_cores.items()),
        },
        "gpus": [asdict(device) for device in gpus],
        "visible": visible,
        "failure": failure,
    }


def _words(error: EstimatorError) -> str:
    return " ".join(str(error).split())[:_MOST_CHARACTERS]


def _run_on(
    device: Device,
    step: str,
    arguments: Mapping[str, Any],
    timeout_s: float,
    on_report: Callable[[dict[str, Any]], None] = lambda message: None,
) -> None:
    run_on_devices(
        [device],
        f"{_STEPS}:{step}",
        arguments,
        timeout_s=timeout_s,
        on_report=lambda _rank, message: on_report(message),
        imported=(_STEPS,),
        trains=False,
    )


def _probe_machine(
    probe_machine: ProbeMachine, store: SignedStore, number: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    def poll(_part: str, _ratio: float) -> None:
        if store.read(f"given_up/{number}") is not None:
            raise KeyboardInterrupt

    try:
        # Ranks that wait for each other are busy themselves.
        profile = probe_machine(report=poll, patience_s=0.0, **arguments)
        return {"profile": profile.to_dict()}
    except EstimatorError as error:
        return {"failure": _words(error)}


def _run_world(
    place: Place,
    store: SignedStore,
    number: int,
    members: Mapping[int, Mapping[str, Any]],
    order: Mapping[str, Any],
    on_report: Callable[[dict[str, Any]], None],
) -> str:
    """Run the steps in a world with the other members; why that failed, or ""."""
    own = members[place.rank]
    arguments = {
        **order,
        "rank": list(members).index(place.rank),
        "name": f"world/{number}",
        "given_up": f"given_up/{number}",
        "address": place.master_address,
        "port": place.master_port,
        "prefix": prefix_of(place),
        "session_key": store.signer.secret.hex(),
        "interface": _interface(own, members.values()),
    }
    try:
        _run_on(device_from(own["device"]), "run_steps", arguments, order["timeout_s"], on_report)
    except EstimatorError as error:
        return _words(error)
    return ""


def _interface(own: Mapping[str, Any], members: Iterable[Mapping[str, Any]]) -> str | None:
    """Where the other nodes are; ranks of one node alone meet over the loopback."""
    peer = next((one["address"] for one in members if one["host"] != own["host"]), None)
    if peer is not None:
        return interface_of(own_address_towards(peer))
    return "lo" if sys.platform == "linux" else None


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
