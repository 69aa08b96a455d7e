"""Hold the storages that a plan of memory names: move them, drop them, compute them again."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_flatten, tree_map

from estimator.advise.swap.plan import Recompute, SwapPlan
from estimator.advise.swap.problem import SwapProblem
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.machines.profile import Link


class Host(AbstractContextManager["Host"]):
    """Where what is swapped out goes; each step of a swap says what the operators wait for."""

    @abstractmethod
    def send(self, storage: UntypedStorage) -> Any:
        """Begin to copy out what operators so far have written."""

    @abstractmethod
    def free(self, sent: Any, storage: UntypedStorage) -> None:
        """Give the memory up when that copy has ended."""

    @abstractmethod
    def fetch(self, sent: Any, storage: UntypedStorage) -> Any:
        """Take memory again and begin to copy back."""

    @abstractmethod
    def use(self, fetched: Any) -> None:
        """Let what comes next wait until it is back."""


class Arena(Host):
    """On a CPU: memory outside of torch's allocator, and a thread that copies for each direction,
    one copy after the other and no faster than the planned link."""

    def __init__(self, d2h: Link, h2d: Link) -> None:
        self._out, self._back = _Direction(d2h), _Direction(h2d)
        # What is back leaves memory that the next step takes: fresh pages cost more than copies.
        self._spare: defaultdict[int, list[Any]] = defaultdict(list)

    def __enter__(self) -> Arena:
        for worker in (self._out, self._back):
            worker.thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in (self._out, self._back):
            worker.asked.put(None)
            worker.thread.join()

    def send(self, storage: UntypedStorage) -> _PendingCopy:
        spare = self._spare[storage.nbytes()]
        host = spare.pop() if spare else np.empty(storage.nbytes(), dtype=np.uint8)
        return self._out.copy(host, _block(storage))

    def free(self, sent: _PendingCopy, storage: UntypedStorage) -> None:
        sent.done.wait()
        storage.resize_(0)

    def fetch(self, sent: _PendingCopy, storage: UntypedStorage) -> _PendingCopy:
        storage.resize_(sent.host.nbytes)
        return self._back.copy(sent.host, _block(storage), out=False)

    def use(self, fetched: _PendingCopy) -> None:
        fetched.done.wait()
        self._spare[fetched.host.nbytes].append(fetched.host)


@dataclass(slots=True)
class _PendingCopy:
    """`device` is None as soon as it is done: nothing may point into memory that is freed next."""

    host: Any
    device: Any
    out: bool
    done: threading.Event
    asked_s: float


class _Direction:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.asked: queue.SimpleQueue[_PendingCopy | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def copy(self, host: Any, device: Any, *, out: bool = True) -> _PendingCopy:
        pending = _PendingCopy(host, device, out, threading.Event(), time.perf_counter())
        self.asked.put(pending)
        return pending

    def _run(self) -> None:
        # When the link is done with the copy before: the thread itself may wake later than asked.
        free_s = 0.0
        while (pending := self.asked.get()) is not None:
            begin_s = max(pending.asked_s, free_s)
            if pending.out:
                np.copyto(pending.host, pending.device)
            else:
                np.copyto(pending.device, pending.host)
            copied_s = time.perf_counter()
            free_s = max(begin_s + self.link.transfer_time_s(pending.host.nbytes), copied_s)
            time.sleep(free_s - copied_s)
            pending.device = None
            pending.done.set()


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


class PinnedHost(Host):
    """On a GPU: pinned memory, and a stream for each direction.

    Nothing here waits: streams do. Memory that is given up goes back to the stream of operators,
    which by then waits for the copy, so that whatever takes it next comes after the copy.
    """

    def __init__(self, streams: CudaStreams | None = None) -> None:
        self._cuda = streams or CudaStreams()
        self._out, self._back = self._cuda.create(), self._cuda.create()

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


_BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
# Where those take what they keep of the batches seen.
_RUNNING = (3, 4)
# What comes first before the same op.
KINDS = ("send", "drop", "forget", "free", "fetch", "use", "recompute")


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor argument of an op that runs again: of a numbered storage, or of a tensor's."""

    owner: int | Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class PlannedStorages:
    """The storages of one step by the numbers of the plan's tensors, and what happens to them.

    `events` says by op what happens before it, `results` which of an op's outputs are wanted, and
    `repeated` which ops run again; whoever follows the step registers storages and those ops' calls
    (`calls`).
    """

    def __init__(
        self, graph: OpGraph, problem: SwapProblem, plan: SwapPlan, host: Host, owners: list[Tensor]
    ) -> None:
        self.problem, self.plan, self._host = problem, plan, host
        wanted = self._wanted()
        self.results = _wanted_results(graph, problem, wanted)
        self.repeated = {op for recompute in plan.recomputes for op in recompute.ops}
        self.events = self._events(wanted)
        self.storages: dict[int, UntypedStorage] = {}
        self.numbers: dict[int, int] = {}
        self.calls: dict[int, tuple[Any, Any, Any]] = {}
        self.is_recomputing = False
        self._owners = {owner.untyped_storage()._cdata: owner for owner in owners}
        self._sent: dict[int, Any] = {}
        self._fetched: dict[int, Any] = {}

    def _wanted(self) -> set[int]:
        """Activations that are moved or made again, or that making them again touches."""
        wanted = {swap.tensor for swap in self.plan.swaps}
        for again in self.plan.recomputes:
            wanted.add(again.tensor)
            for op in again.ops:
                wanted.update(self.problem.reads[op], self.problem.writes[op])
        return {n for n in wanted if self.problem.tensors[n].kind == "activation"}

    def _events(self, wanted: Iterable[int]) -> dict[int, list[tuple[str, Any]]]:
        events: defaultdict[int, list[tuple[str, Any]]] = defaultdict(list)
        for swap in self.plan.swaps:
            events[swap.after + 1].append(("send", swap.tensor))
            events[swap.free_before].append(("free", swap.tensor))
            events[swap.fetch_before].append(("fetch", swap.tensor))
            events[swap.use].append(("use", swap.tensor))
        for recompute in self.plan.recomputes:
            events[recompute.after + 1].append(("drop", recompute.tensor))
            events[recompute.before].append(("recompute", recompute))
        for number in wanted:
            events[self.problem.tensors[number].dies + 1].append(("forget", number))
        for some in events.values():
            some.sort(key=lambda event: KINDS.index(event[0]))
        return dict(events)

    def clear(self) -> None:
        """A step is over."""
        for kept in (self.storages, self.numbers, self._sent, self._fetched):
            kept.clear()

    def register(self, number: int, tensor: Tensor) -> None:
        """An op has made a tensor of the plan."""
        if number not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[number] = storage
            self.numbers[storage._cdata] = number

    def keep_call(self, op: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """An op that runs again is called."""
        self.calls[op] = func, *tree_map(self._view, (args, dict(kwargs)))

    def _view(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        storage = leaf.untyped_storage()
        number = self.numbers.get(storage._cdata)
        return StorageView(
            owner=self._owners.get(storage._cdata, leaf.detach()) if number is None else number,
            size=tuple(leaf.shape),
            stride=tuple(leaf.stride()),
            offset=int(leaf.storage_offset()),
            dtype=leaf.dtype,
        )

    def is_owned(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer of the model, which every step has."""
        return any(tensor is owner for owner in self._owners.values())

    def run(self, place: int) -> None:
        """What happens before an op."""
        for kind, which in self.events.get(place, ()):
            getattr(self, kind)(which)

    def send(self, tensor: int) -> None:
        self._sent[tensor] = self._host.send(self.storages[tensor])

    def free(self, tensor: int) -> None:
        self._host.free(self._sent[tensor], self.storages[tensor])

    def fetch(self, tensor: int) -> None:
        self._fetched[tensor] = self._host.fetch(self._sent[tensor], self.storages[tensor])

    def use(self, tensor: int) -> None:
        self._host.use(self._fetched.pop(tensor))

    def drop(self, tensor: int) -> None:
        self.storages[tensor].resize_(0)

    def forget(self, tensor: int) -> None:
        storage = self.storages.pop(tensor, None)
        if storage is not None:
            self.numbers.pop(storage._cdata, None)
        self._sent.pop(tensor, None)

    def recompute(self, again: Recompute) -> None:
        fresh: dict[int, UntypedStorage] = {}

        def rebuilt(leaf: Any) -> Any:
            if not isinstance(leaf, StorageView):
                return leaf
            if isinstance(leaf.owner, Tensor):
                storage = leaf.owner.untyped_storage()
            else:
                storage = fresh.get(leaf.owner) or self.storages[leaf.owner]
            empty = torch.empty(0, dtype=leaf.dtype, device=storage.device)
            return empty.set_(storage, leaf.offset, leaf.size, leaf.stride)

        last_read = {t: op for op in again.ops for t in self.problem.reads[op]}
        self.is_recomputing = True
        # As in the forward pass: without gradients oneDNN's LSTM leaves nothing for its backward.
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            for op in again.ops:
                func, args, kwargs = self.calls[op]
                args, kwargs = tree_map(rebuilt, (args, kwargs))
                result = func(*_without_running(func, args), **kwargs)
                outputs = [
                    tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, Tensor)
                ]
                for index, number in self.results[op]:
                    if index < len(outputs) and self.problem.tensors[number].born == op:
                        fresh[number] = outputs[index].untyped_storage()
                del args, kwargs, result, outputs
                for number in [n for n in fresh if last_read.get(n, -1) <= op]:
                    if number != again.tensor:
                        del fresh[number]
            target = self.storages[again.tensor]
            target.resize_(fresh[again.tensor].nbytes())
            target.copy_(fresh[again.tensor])
        self.is_recomputing = False


def _wanted_results(
    graph: OpGraph, problem: SwapProblem, wanted: set[int]
) -> list[list[tuple[int, int]]]:
    """By op, which of its outputs are wanted tensors: (position, number)."""
    structure = GraphStructure.of(graph)
    of_root = {t.value: t.number for t in problem.tensors if t.value >= 0}
    tensor_of = [of_root.get(root, -1) for root in structure.roots[structure.storage_of].tolist()]
    return [
        [(i, tensor_of[value]) for i, value in enumerate(op.outputs) if tensor_of[value] in wanted]
        for op in graph.ops
    ]


def _without_running(func: Any, args: Any) -> Any:
    """The arguments of a batch norm without what it keeps of the batches seen: once is enough."""
    if func._schema.name.removeprefix("aten::") not in _BATCH_NORMS:
        return args
    return tuple(None if index in _RUNNING else argument for index, argument in enumerate(args))
