"""Run the same steps on all ranks: what they agree on, and what each measured, goes through here.

Every rank of a world calls the same methods of its `Group` in the same order; nothing is called by
a name from the network. What is measured comes together on rank 0 of the launch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.cluster.findings import Member, World, device_from
from estimator.probe.cluster.signed_store import SignedStore, Signer, connect, dist

# How often a rank looks whether this world has been given up.
_POLL_S = 0.25
_GIVEN_UP = 3
# Nothing here is waited for so long: whoever watches over the ranks ends the world before.
_FOREVER_S = 86_400.0


class Group:
    """One rank's side of a world in which all do the same at the same time."""

    def __init__(self, store: SignedStore, world: World, rank: int, name: str) -> None:
        self.store, self.world, self.rank, self.name = store, world, rank, name
        self.home = world.members.index(world.home)
        self.kind = world.device_kind
        self._handles: dict[tuple[int, ...], Any] = {}
        self._count = 0

    @property
    def is_home(self) -> bool:
        """Whether everything comes together on this rank."""
        return self.rank == self.home

    def agreed(self, value: Any = None) -> Any:
        """The JSON value that the home rank gives, on all ranks."""
        key = self._next_key()
        if self.is_home:
            self.store.post(key, value)
            return value
        return self._awaited(key)

    def handle(self, ranks: Sequence[int]) -> Any:
        """The process group of some ranks, which all ranks of the world make together."""
        ranks = tuple(ranks)
        if ranks == tuple(range(len(self.world.members))):
            return None
        if ranks not in self._handles:
            self._handles[ranks] = dist.new_group(list(ranks))
        return self._handles[ranks]

    def measured(
        self, ranks: Sequence[int], measure: Callable[..., Iterable[Any]]
    ) -> list[list[Any]]:
        """What each of `ranks` found in ``measure(kind=…, group=…)``; [] but at home.

        They begin together, as each counts the time that it has from there on.
        """
        group, key = self.handle(ranks), self._next_key()
        if self.rank in ranks:
            dist.barrier(group)
            self.store.post(f"{key}/{self.rank}", list(measure(kind=self.kind, group=group)))
        if not self.is_home:
            return []
        return [self._awaited(f"{key}/{rank}") for rank in ranks]

    def _next_key(self) -> str:
        self._count += 1
        return f"{self.name}/{self._count}"

    def _awaited(self, key: str) -> Any:
        value = self.store.await_value(key, _FOREVER_S)
        if value is None:
            raise ProbeError(f"nothing was heard of {key}; start all ranks together")
        return value


_own_group: Group | None = None


def group_of_node(devices: Sequence[Mapping[str, Any]]) -> Group:
    """This rank's side of the world of one node's `devices`, whose process group is up.

    It is the same in every call of a process: the world's keys are used once.
    """
    global _own_group
    if _own_group is None:
        members = tuple(
            Member(rank=rank, host="", device=device_from(device), machine="")
            for rank, device in enumerate(devices)
        )
        # The group's own store is a file that no other user can read.
        own = dist.PrefixStore("steps", dist.distributed_c10d._get_default_store())
        store = SignedStore(own, Signer(b""))
        _own_group = Group(store, World(members=members), dist.get_rank(), "node")
    return _own_group


def run_in_world(rank: int, order: Mapping[str, Any], run: Callable[[Group], None]) -> None:
    """Call `run` in the world that `order` describes; for a fresh process pinned to its device.

    Ends the process when the world is given up, or the store is gone: gloo may otherwise wait for
    a lost peer until its timeout.
    """
    import torch

    world = World(
        members=tuple(Member.from_dict(member) for member in order["members"]),
        has_racks=order["has_racks"],
    )
    if order["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", order["interface"])
    signer = Signer(bytes.fromhex(order["session_key"]))
    timeout = timedelta(seconds=order["timeout_s"])
    _watch(order["given_up"], _store(order, signer))
    on_cuda = world.device_kind == "cuda"
    name = order["name"]
    # One connection for the process group, one for the messages: a wait holds a connection.
    addresses = _store(order, signer.derived(name), name, timeout)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=addresses,
        rank=rank,
        world_size=len(world.members),
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    run(Group(_store(order, signer), world, rank, name))
    # A rank that leaves first would end connections that others still use.
    dist.barrier()
    dist.destroy_process_group()


def _store(
    order: Mapping[str, Any], signer: Signer, name: str = "", timeout: timedelta | None = None
) -> SignedStore:
    store = connect(order["address"], order["port"], timeout_s=order["timeout_s"])
    if timeout is not None:
        store.set_timeout(timeout)
    prefix = f"{order['prefix']}/{name}" if name else order["prefix"]
    return SignedStore(dist.PrefixStore(prefix, store), signer)


def _watch(key: str, store: SignedStore) -> None:
    def poll() -> None:
        with contextlib.suppress(ProbeError):
            while store.read(key) is None:
                time.sleep(_POLL_S)
        os._exit(_GIVEN_UP)

    threading.Thread(target=poll, daemon=True).start()
