"""Keep what was worked out once, bounded in bytes and safe under threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np

Value = TypeVar("Value")
_Key = tuple[str, int | tuple[int, ...], tuple[Hashable, ...]]

# An entry of the cache's own tables, and small objects whose parts are not looked at.
_ENTRY_BYTES = 1024
# What is left of a full cache, so that not every new value makes room for itself alone.
_KEPT_RATIO = 0.8


class _Entry:
    """A value, or the lock behind which the first thread that asks for it works it out."""

    __slots__ = ("lock", "owners", "size_bytes", "used", "value")

    def __init__(self, owners: tuple[object, ...]) -> None:
        self.lock: threading.Lock | None = threading.Lock()
        self.owners = owners
        self.size_bytes = self.used = 0
        self.value: Any = None


class Cache:
    """Values by the objects that they were made of; the least recently used leave first.

    Objects are told apart by identity, and kept alive as long as their values. A value is worked
    out once however many threads ask for it at a time. Sizes are estimates: arrays count in full.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: dict[_Key, _Entry] = {}
        self._lock = threading.Lock()
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._entries)

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
        if entry is None or entry.lock is not None:
            entry = self._made(key, owners, make)
        entry.used = next(self._clock)
        return entry.value  # type: ignore[no-any-return]

    def _made(self, key: _Key, owners: tuple[object, ...], make: Callable[[], object]) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(owners))
            lock = entry.lock
        if lock is None:
            return entry
        with lock:
            # Whoever waited finds it made, or makes it where the first one failed.
            if entry.lock is not None:
                try:
                    entry.value = make()
                except BaseException:
                    with self._lock:
                        self._entries.pop(key, None)
                    raise
                with self._lock:
                    entry.lock = None
                    self._entries[key] = entry
                    self._charge(entry, _ENTRY_BYTES + rough_size_bytes(entry.value))
        return entry

    def grown(
        self, size_bytes: int, kind: str, owners: tuple[object, ...], *details: Hashable
    ) -> None:
        """Count bytes that a value has taken up since it was made."""
        with self._lock:
            entry = self._entries.get(_key(kind, owners, details))
            if entry is not None:
                self._charge(entry, size_bytes)

    def _charge(self, entry: _Entry, size_bytes: int) -> None:
        entry.used = next(self._clock)
        entry.size_bytes += size_bytes
        self.size_bytes += size_bytes
        if self.size_bytes > self.limit_bytes:
            self._forget(_KEPT_RATIO * self.limit_bytes, but=entry)

    def _forget(self, limit_bytes: float, but: _Entry | None = None) -> None:
        made = [(entry.used, key) for key, entry in self._entries.items() if entry.lock is None]
        for _, key in sorted(made):
            if self.size_bytes <= limit_bytes:
                return
            if self._entries[key] is not but:
                self.size_bytes -= self._entries.pop(key).size_bytes

    def clear(self) -> None:
        """Forget everything that no thread is working out."""
        with self._lock:
            self._forget(-1.0)


def _key(kind: str, owners: tuple[object, ...], details: tuple[Hashable, ...]) -> _Key:
    if len(owners) == 1:
        return kind, id(owners[0]), details
    return kind, tuple([id(each) for each in owners]), details


def rough_size_bytes(value: object, depth: int = 4) -> int:
    """About what an object holds: its arrays and the containers that it is made of."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if depth == 0:
        return 0
    if isinstance(value, tuple | list):
        # Long lists hold equals: the first few stand for all.
        some = value[:8]
        inner = sum(rough_size_bytes(each, depth - 1) for each in some)
        return sys.getsizeof(value) + inner * len(value) // max(len(some), 1)
    if isinstance(value, dict):
        some_values = list(value.values())[:8]
        inner = sum(rough_size_bytes(each, depth - 1) for each in some_values)
        return sys.getsizeof(value) + inner * len(value) // max(len(some_values), 1)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(rough_size_bytes(getattr(value, item.name), depth - 1) for item in fields(value))
    return sys.getsizeof(value, 64)
