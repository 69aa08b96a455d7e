"""Run the same steps on all ranks: what they agree on, and what each measured, goes through here.

Every rank of a world calls the same methods of its `Group` in the same order; nothing is called by
a name from the network. What is measured comes together on rank 0 of the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from estimator.probe.cluster.findings import World
from estimator.probe.cluster.signed_store import SignedStore, dist


class Group:
    """One rank's side of a world in which all do the same at the same time."""

    def __init__(self, store: SignedStore, world: World, rank: int) -> None:
        self.store, self.world, self.rank = store, world, rank
        self.kind = world.home.device.kind
        # Of all ranks torch has made one.
        self._handles: dict[tuple[int, ...], Any] = {tuple(range(len(world.members))): None}
        self._count = 0

    @property
    def is_home(self) -> bool:
        """Whether everything comes together on this rank."""
        return self.world.members[self.rank] is self.world.home

    def agreed(self, value: Any = None) -> Any:
        """The JSON value that the home rank gives, on all ranks."""
        key = self._next_key()
        if self.is_home:
            self.store.post(key, value)
            return value
        return self.store.await_value(key)

    def handle(self, ranks: Sequence[int]) -> Any:
        """The process group of some ranks, which all ranks of the world make together."""
        ranks = tuple(ranks)
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
        return [self.store.await_value(f"{key}/{rank}") for rank in ranks]

    def _next_key(self) -> str:
        self._count += 1
        return f"step/{self._count}"
