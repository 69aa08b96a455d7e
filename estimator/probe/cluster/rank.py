"""One rank of a probe of several nodes: it joins, measures with all others what rank 0 plans.

Each rank is one process. A thread of it says that it lives, and ends it once rank 0 says that the
probe is over or says nothing for long: nothing else ends a wait for a rank that is lost.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from estimator import __version__
from estimator.errors import EstimatorError, ProbeError, sentence
from estimator.machines.profile import DeviceKind
from estimator.probe.cluster.discovery import Place, interface_of, own_address_towards
from estimator.probe.cluster.findings import World
from estimator.probe.cluster.group import Group
from estimator.probe.cluster.signed_store import SignedStore, dist, open_session
from estimator.probe.cluster.steps import ProbePlan, run_steps
from estimator.probe.devices.inventory import choose_devices, pinned, read_cpu
from estimator.probe.devices.ranks import process_group

# Ranks start within this time of each other, file systems being slow.
START_S = 55.0
_BEAT_EVERY_S = 0.5
# How long a rank hears nothing of rank 0 before it ends, and how long its main thread has to say
# itself that rank 0's store is gone.
_LATE_S, _LAST_WORDS_S = 20, 2.0
_UNREACHABLE = 2


def take_part(place: Place, *, kind: DeviceKind | None = None) -> str:
    """Take part as `place` says; why rank 0 refused this rank.

    Ends this process once rank 0 says that it is over, or nothing was heard of it for long. Of
    `kind` "cpu" no GPU is looked for. Raises ProbeError where rank 0 is not to be reached.
    """
    store = open_session(place, START_S)
    rank, nonce = str(place.rank), secrets.token_hex(16)
    with Heartbeat(store, place.rank):
        store.post(f"facts/{rank}", {**own_facts(place, kind), "nonce": nonce})
        order = store.await_value("order")
        if reason := order["refused"].get(rank):
            return str(reason)
        if order["nonces"].get(rank) != nonce:
            raise ProbeError(
                f"rank {rank} was answered as another process of that rank; start every rank once"
            )
        store.post(f"ended/{rank}", run_share(place.rank, store, order, ProbePlan()))
        return str(store.await_value("never"))


def versions() -> dict[str, str]:
    """What must be equal on all nodes for them to work together."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "estimator": __version__,
        "torch": str(torch.__version__),
        **({"nccl": ".".join(map(str, nccl))} if nccl else {}),
    }


def own_facts(place: Place, kind: DeviceKind | None) -> dict[str, Any]:
    """What rank 0 chooses this rank's device by; `failure` says why it can have none."""
    cpu, failure = read_cpu(), ""
    try:
        gpus = [device for device in choose_devices(cpu, kind=kind) if device.kind == "cuda"]
    except ProbeError as error:
        gpus, failure = [], str(error)
    return {
        "host": socket.gethostname(),
        "address": own_address_towards(place.master_address),
        "local_rank": place.local_rank,
        "versions": versions(),
        # All threads of the node, of which this rank may use some.
        "cpu": asdict(replace(cpu, threads=os.cpu_count() or 1)),
        "gpus": [asdict(device) for device in gpus],
        "failure": failure,
    }


def run_share(rank: int, store: SignedStore, order: Mapping[str, Any], plan: ProbePlan) -> str:
    """Run the steps of `order` with the other members, on this rank's device; why they failed.

    The calling thread and those that it starts stay on the device's cores.
    """
    world = TypeAdapter(World).validate_python(order["world"])
    own = next((n for n, member in enumerate(world.members) if member.rank == rank), None)
    if own is None:
        return f"rank {rank} was taken for lost"
    host, device = world.members[own].host, world.members[own].device
    # Ranks of one node alone meet over the loopback.
    peer = next((member.address for member in world.members if member.host != host), None)
    if peer and (interface := interface_of(own_address_towards(peer))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Those of torch would stand between the sentences of the probe.
    warnings.simplefilter("ignore")
    try:
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
        # Its waits last as long as those of the process group.
        timeout_s, size = order["timeout_s"], len(world.members)
        addresses = dist.PrefixStore("world", store.clone(timeout_s))
        with (
            pinned(device.cores, threads=max(1, len(device.cores))),
            process_group(device.kind, addresses, rank=own, world_size=size, timeout_s=timeout_s),
        ):
            group = Group(store, world, own)
            run_steps(group, plan, seconds=order["left_s"], all_pairs=order["all_pairs"])
            # A rank that leaves first would end connections that others still use.
            dist.barrier()
    # What torch, gloo and NCCL raise where a peer is lost, memory runs out or an operator fails.
    except (EstimatorError, RuntimeError, LookupError, OSError, TypeError, ValueError) as error:
        return sentence(str(error)) or type(error).__name__
    return ""


class Heartbeat:
    """Says every half second that this rank lives.

    On all ranks but 0 it ends this process once rank 0 says that it is over, or is out of reach.
    """

    def __init__(self, store: SignedStore, rank: int) -> None:
        self._store, self._rank = store.clone(), rank
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._ended = threading.Event()
        self._silent_s = 0

    def __enter__(self) -> None:
        self._store.post(f"beat/{self._rank}", 0)
        self._beating.start()
        if self._rank != 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # A thread that asks torch's store would abort an orderly exit of this process.
        self._beating.join(_LAST_WORDS_S)

    def _beat(self) -> None:
        count, heard = 0, None
        try:
            while not self._ended.wait(_BEAT_EVERY_S):
                count += 1
                self._store.post(f"beat/{self._rank}", count)
                if self._rank == 0:
                    continue
                if self._store.read("over"):
                    self._store.post(f"left/{self._rank}", True)
                    os._exit(0)
                if (now := self._store.read("beat/0")) != heard:
                    heard, self._silent_s = now, 0
        except ProbeError as error:
            # The main thread meets the same and says it, unless it waits for a rank that is lost.
            if self._rank != 0 and not self._ended.wait(_LAST_WORDS_S):
                _end(str(error))

    def _watch(self) -> None:
        # Counted and not read from a clock: time during which this process was stopped is no time.
        while not self._ended.wait(1.0):
            self._silent_s += 1
            if self._silent_s > _LATE_S:
                _end("rank 0 has been out of reach for too long; check the links")


def _end(words: str) -> None:
    sys.stderr.write(f"estimator: {sentence(words)}\n")
    sys.stderr.flush()
    os._exit(_UNREACHABLE)
