"""Copy the memory of tensors to the host and back while a step runs: by threads, or by streams."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from estimator.machines.profile import Link


class Host(Protocol):
    """Where what is swapped out goes; each step of a swap says what the operators wait for."""

    def __enter__(self) -> Host: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def send(self, storage: UntypedStorage) -> Any:
        """Begin to copy out what operators so far have written."""

    def free(self, sent: Any, storage: UntypedStorage) -> None:
        """Give the memory up when that copy has ended."""

    def fetch(self, sent: Any, storage: UntypedStorage) -> Any:
        """Take memory again and begin to copy back."""

    def use(self, fetched: Any) -> None:
        """Let what comes next wait until it is back."""


class Arena:
    """On a CPU: memory outside of torch's allocator, and a thread that copies for each direction,
    one copy after the other and no faster than the planned link."""

    def __init__(self, d2h: Link, h2d: Link) -> None:
        self._out, self._back = _Direction(d2h), _Direction(h2d)
        # What is back leaves memory that the next step takes: fresh pages cost more than copies.
        self._spare: defaultdict[int, list[Any]] = defaultdict(list)

    def __enter__(self) -> Arena:
        for each in (self._out, self._back):
            each.thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for each in (self._out, self._back):
            each.asked.put(None)
            each.thread.join()

    def send(self, storage: UntypedStorage) -> _Copy:
        spare = self._spare[storage.nbytes()]
        host = spare.pop() if spare else np.empty(storage.nbytes(), dtype=np.uint8)
        return self._out.copy(host, _block(storage))

    def free(self, sent: _Copy, storage: UntypedStorage) -> None:
        sent.done.wait()
        storage.resize_(0)

    def fetch(self, sent: _Copy, storage: UntypedStorage) -> _Copy:
        storage.resize_(sent.host.nbytes)
        return self._back.copy(sent.host, _block(storage), out=False)

    def use(self, fetched: _Copy) -> None:
        fetched.done.wait()
        self._spare[fetched.host.nbytes].append(fetched.host)


@dataclass(slots=True)
class _Copy:
    """`device` is None as soon as it is done: nothing may point into memory that is freed next."""

    host: Any
    device: Any
    out: bool
    done: threading.Event
    asked_s: float


class _Direction:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.asked: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def copy(self, host: Any, device: Any, *, out: bool = True) -> _Copy:
        asked = _Copy(host, device, out, threading.Event(), time.perf_counter())
        self.asked.put(asked)
        return asked

    def _run(self) -> None:
        # When the link is done with the copy before: the thread itself may wake later than asked.
        free_s = 0.0
        while (asked := self.asked.get()) is not None:
            begin_s = max(asked.asked_s, free_s)
            if asked.out:
                np.copyto(asked.host, asked.device)
            else:
                np.copyto(asked.device, asked.host)
            copied_s = time.perf_counter()
            free_s = max(begin_s + self.link.transfer_time_s(asked.host.nbytes), copied_s)
            time.sleep(free_s - copied_s)
            asked.device = None
            asked.done.set()


def _block(storage: UntypedStorage) -> Any:
    # A tensor's own numpy() would fix the size of its storage for good.
    block = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.ctypeslib.as_array(block)


class CudaStreams:
    """What a plan needs of torch.cuda."""

    def current(self) -> Any:
        """The stream that operators are issued to."""
        return torch.cuda.current_stream()

    def create(self) -> Any:
        """A stream beside it."""
        made: Any = torch.cuda.Stream
        return made()

    def pinned(self, size_bytes: int) -> Tensor:
        """Memory of the host that the device copies to by itself; torch keeps what is released."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Issue a copy to a stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


class PinnedHost:
    """On a GPU: pinned memory, and a stream for each direction.

    Nothing here waits: streams do. Memory that is given up goes back to the stream of operators,
    which by then waits for the copy, so that whatever takes it next comes after the copy.
    """

    def __init__(self, streams: CudaStreams | None = None) -> None:
        self._cuda = streams or CudaStreams()
        self._out, self._back = self._cuda.create(), self._cuda.create()

    def __enter__(self) -> PinnedHost:
        return self

    def __exit__(self, *_error: object) -> None:
        # A step that was broken off leaves copies on their way.
        for stream in (self._out, self._back):
            self._cuda.current().wait_stream(stream)

    def send(self, storage: UntypedStorage) -> tuple[Tensor, Any]:
        host = self._cuda.pinned(storage.nbytes())
        self._out.wait_stream(self._cuda.current())
        self._cuda.copy(self._out, host, _tensor(storage))
        return host, self._out.record_event()

    def free(self, sent: tuple[Tensor, Any], storage: UntypedStorage) -> None:
        self._cuda.current().wait_event(sent[1])
        storage.resize_(0)

    def fetch(self, sent: tuple[Tensor, Any], storage: UntypedStorage) -> Any:
        storage.resize_(sent[0].nbytes)
        # What had this memory before may still run; the copy out has ended by then as well.
        self._back.wait_stream(self._cuda.current())
        self._cuda.copy(self._back, _tensor(storage), sent[0])
        return self._back.record_event()

    def use(self, fetched: Any) -> None:
        self._cuda.current().wait_event(fetched)


def _tensor(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
