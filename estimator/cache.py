"""Keep what was worked out once, bounded in bytes and safe under threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

Value = TypeVar("Value")
_Key = tuple[str, tuple[int, ...], tuple[Hashable, ...]]

# What holds nothing else, as most of what is sized.
_ALONE = frozenset((bool, int, float, str, type(None)))
# An entry of the cache's own tables, and small objects whose parts are not looked at.
_ENTRY_BYTES = 1024
# What is left of a full cache, so that not every new value makes room for itself alone.
_KEPT_RATIO = 0.8


class _CacheEntry:
    """A value, kept with the objects that it was made of.

    `parts` are the entries whose values this one holds, `holders` is how many hold this one's.
    """

    __slots__ = ("holders", "owners", "parts", "size_bytes", "used", "value")

    def __init__(self, owners: tuple[object, ...], value: Any, parts: list[_CacheEntry]) -> None:
        self.owners = owners
        self.value = value
        self.parts = parts
        self.size_bytes = self.used = self.holders = 0


class Cache:
    """Values by the objects that they were made of; the least recently used leave first.

    Objects are told apart by identity, and kept alive as long as their values. A value is worked
    out once however many threads ask for it at a time, and one value at a time: threads that
    compute beside each other under Python's interpreter lock only hand it to and fro. Sizes are
    estimates: arrays count in full, what another value holds counts there, and leaves after all
    that hold it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.dropped = 0
        """How many values have left."""
        self._entries: dict[_Key, _CacheEntry] = {}
        self._of_value: dict[int, _CacheEntry] = {}
        self._making = threading.RLock()
        self._lock = threading.Lock()
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[type[Cache], tuple[int]]:
        # What holds a cache can be sent to another process, which fills its own.
        return Cache, (self.limit_bytes,)

    def get(
        self,
        kind: str,
        owners: tuple[object, ...],
        make: Callable[[], Value],
        *details: Hashable,
    ) -> Value:
        """The value of that kind for these objects and details, made if it is not known.

        What `make` raises is raised again, and nothing is kept.
        """
        key = _key(kind, owners, details)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._made(key, owners, make)
        entry.used = next(self._clock)
        return entry.value  # type: ignore[no-any-return]

    def _made(
        self, key: _Key, owners: tuple[object, ...], make: Callable[[], object]
    ) -> _CacheEntry:
        with self._making, collected_later():
            # Whoever waited finds it made, or makes it where the first one failed.
            entry = self._entries.get(key)
            if entry is None:
                value = make()
                with self._lock:
                    entry = self._entries[key] = self._kept(owners, value)
        return entry

    def _kept(self, owners: tuple[object, ...], value: object) -> _CacheEntry:
        sizes = _Sizes(self._of_value, owners)
        size_bytes = _ENTRY_BYTES + sizes.of(value)
        entry = _CacheEntry(owners, value, list(sizes.parts.values()))
        for part in entry.parts:
            part.holders += 1
        if _field_names(value) or isinstance(value, np.ndarray):
            self._of_value.setdefault(id(value), entry)
        self._charge(entry, size_bytes)
        return entry

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key)
        self.dropped += 1
        self.size_bytes -= entry.size_bytes
        for part in entry.parts:
            part.holders -= 1
        if self._of_value.get(id(entry.value)) is entry:
            del self._of_value[id(entry.value)]

    def grown(
        self, value: object, kind: str, owners: tuple[object, ...], *details: Hashable
    ) -> None:
        """Count what a kept value has come to hold since it was made."""
        with self._lock:
            entry = self._entries.get(_key(kind, owners, details))
            if entry is not None:
                sizes = _Sizes(self._of_value, owners)
                size_bytes = sizes.of(value)
                for part in sizes.parts.values():
                    part.holders += 1
                    entry.parts.append(part)
                self._charge(entry, size_bytes)

    def _charge(self, entry: _CacheEntry, size_bytes: int) -> None:
        entry.used = next(self._clock)
        entry.size_bytes += size_bytes
        self.size_bytes += size_bytes
        if self.size_bytes > self.limit_bytes:
            self._forget(_KEPT_RATIO * self.limit_bytes, but=entry)

    def _forget(self, limit_bytes: float, but: _CacheEntry | None = None) -> None:
        dropped = True
        while dropped:
            made = [(entry.used, key) for key, entry in self._entries.items()]
            dropped = False
            for _, key in sorted(made, key=itemgetter(0)):
                if self.size_bytes <= limit_bytes:
                    return
                # What others hold would stay in memory.
                if self._entries[key] is not but and not self._entries[key].holders:
                    self._drop(key)
                    dropped = True

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._forget(-1.0)


@contextmanager
def collected_later() -> Iterator[None]:
    """Put cyclic garbage collection off.

    The operators of a large graph are objects by the ten thousand that all stay: looking through
    them again and again for cycles is a third of the time that making them takes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _key(kind: str, owners: tuple[object, ...], details: tuple[Hashable, ...]) -> _Key:
    return kind, tuple(map(id, owners)), details


class _Sizes:
    """Roughly what objects hold: their arrays and the containers they are made of.

    `parts` are the entries met on the way, whose bytes are counted there. Owners count nowhere.
    """

    def __init__(self, of_value: Mapping[int, _CacheEntry], owners: Iterable[object]) -> None:
        self.parts: dict[int, _CacheEntry] = {}
        self._of_value = of_value
        self._owners = {id(owner) for owner in owners}

    def of(self, value: object, depth: int = 4) -> int:
        """Bytes of a value down to some depth."""
        if type(value) in _ALONE:
            return sys.getsizeof(value) if depth else 0
        names = _field_names(value)
        is_array = isinstance(value, np.ndarray)
        if names or is_array:
            if id(value) in self._owners:
                return 0
            held = self._of_value.get(id(value))
            if held is not None:
                self.parts[id(held)] = held
                return 0
        if is_array:
            return value.nbytes  # type: ignore[attr-defined, no-any-return]
        if depth == 0:
            return 0
        if names:
            return sum([self.of(getattr(value, name), depth - 1) for name in names])
        if isinstance(value, tuple | list):
            return sys.getsizeof(value) + self._of_many(value, depth)
        if isinstance(value, dict):
            return sys.getsizeof(value) + self._of_many(list(value.values()), depth)
        return sys.getsizeof(value, 64)

    def _of_many(self, values: Sequence[object], depth: int) -> int:
        # Long lists hold equals, many of them the same object: the first few stand for the others.
        some = values[:8]
        seen = sum([self.of(item, depth - 1) for item in some])
        if len(values) == len(some) or not seen:
            return seen
        return seen * len(set(map(id, values))) // len(some)


def _field_names(value: object) -> tuple[str, ...]:
    """The names of a dataclass's fields; none of any other value."""
    # What `dataclasses.fields` looks through; sizes are taken often.
    return tuple(getattr(type(value), "__dataclass_fields__", ()))
