"""Measure what a loader costs a sample, and let any iterable be timed as a DataLoader is."""

from __future__ import annotations

import ctypes
import io
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from estimator.errors import ModelError
from estimator.probe.devices.inventory import pinned, usable_threads
from estimator.waits.hooks import active, leading_size, tensors_of
from estimator.workload.loader import Loader

Batch = TypeVar("Batch")

# Passes over the same samples; the first one brings their pages into the cache.
_PASSES = 3
# A batch is taken from workers when they have had this many times its making to get ahead.
_AHEAD = 2.0
_PAGE_BYTES = 4096


class WatchedLoader(Generic[Batch]):
    """An iterable whose batches are timed and replaced under the hooks; else it is as given."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        watched, real = active(), iter(self._batches)
        if watched is None or isinstance(self._batches, DataLoader):
            return real  # a DataLoader is watched already
        return watched.batches(self._batches, real)

    def __len__(self) -> int:
        if isinstance(self._batches, Sized):
            return len(self._batches)
        raise TypeError(f"{type(self._batches).__name__} has no length")


def watch_loader(batches: Iterable[Batch]) -> WatchedLoader[Batch]:
    """Make any iterable of batches one whose stalls can be measured.

    >>> for batch in watch_loader([1, 2]):
    ...     print(batch)
    1
    2
    """
    return WatchedLoader(batches)


def measure_loader(loader: DataLoader[Any], *, batches: int = 8) -> Loader:
    """What a DataLoader costs: bytes, seconds and core-seconds of a sample, its workers and queue.

    Makes up to `batches` batches in this process, and several times the same ones, so that their
    files are in the page cache; then takes some from the loader's own workers. Random numbers are
    left as they were. Raises ModelError for a loader without a batch.

    >>> measure_loader(DataLoader(torch.ones(64, 100), batch_size=8)).sample_bytes
    400.0
    """
    states = torch.random.get_rng_state(), random.getstate()
    try:
        # As many threads as DataLoader's workers have.
        with pinned(threads=1 if loader.num_workers else None):
            return _measured(loader, batches)
    finally:
        torch.random.set_rng_state(states[0])
        random.setstate(states[1])


def _measured(loader: DataLoader[Any], batches: int) -> Loader:
    make = _batches_in_this_process(loader, batches)
    read_before = _bytes_read()
    samples, sample_bytes = _size_of(make())
    if not samples:
        raise ModelError("the loader gave no batch of tensors; give it at least one batch of data")
    stored_bytes = (_bytes_read() - read_before) / samples
    passes = []
    for _ in range(_PASSES - 1):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in make():
            pass
        passes.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    wall_s, cpu_s = min(passes)
    workers, take_s = loader.num_workers, 0.0
    if workers:
        take_s, worker_s = _handing_over(loader, batches, wall_s / batches)
        # What a worker does more than make a batch: memory that is shared, and the queue.
        more_s = max(batches * worker_s - cpu_s, 0.0)
        wall_s, cpu_s = wall_s + more_s, cpu_s + more_s
    return Loader(
        sample_bytes=sample_bytes / samples,
        stored_bytes=stored_bytes,
        prep_s=wall_s / samples,
        cpu_ratio=min(cpu_s / wall_s, 1.0),
        workers=workers,
        pinned=loader.pin_memory,
        take_s=take_s,
        relative_error=0.05,
        source="measured",
    )


def _batches_in_this_process(loader: DataLoader[Any], batches: int) -> Callable[[], Iterator[Any]]:
    """A function that makes the same batches again each time, as one worker would."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        size = loader.batch_size

        def streamed() -> Iterator[Any]:
            samples = iter(dataset)
            for _ in range(batches):
                if size is None:
                    yield from (collate(sample) for sample in islice(samples, 1))
                elif some := list(islice(samples, size)):
                    yield collate(some)

        return streamed
    chosen: Any = loader.batch_sampler if loader.batch_size is not None else loader.sampler
    indices = list(islice(chosen or loader.batch_sampler or loader.sampler, batches))
    fetch = getattr(dataset, "__getitems__", None)

    def indexed() -> Iterator[Any]:
        for some in indices:
            if not isinstance(some, list | tuple):
                yield collate(dataset[some])
            else:
                yield collate(fetch(some) if fetch else [dataset[index] for index in some])

    return indexed


def _size_of(made: Iterable[Any]) -> tuple[int, int]:
    """(samples, bytes of tensors) of some batches."""
    samples = size_bytes = 0
    for batch in made:
        samples += leading_size(batch)
        size_bytes += sum(tensor.nbytes for tensor in tensors_of(batch))
    return samples, size_bytes


def _bytes_read() -> int:
    """Bytes that this process has read by system calls, also from the page cache; 0 if unknown."""
    try:
        fields = io.StringIO(Path("/proc/self/io").read_text())
    except OSError:
        return 0
    return int(next(fields).split()[1])


def _handing_over(loader: DataLoader[Any], batches: int, made_s: float) -> tuple[float, float]:
    """Core-seconds of this process and of workers for a batch; 0 for what is not known.

    Each batch is taken when all workers have made theirs and wait, so that each makes one more.
    """
    taken = iter(loader)
    processes = getattr(taken, "_workers", ())
    try:
        next(taken)
        at_once = max(loader.num_workers / len(usable_threads()), 1.0)
        time.sleep(_AHEAD * made_s * at_once * ((loader.prefetch_factor or 2) + 1))
        each_s = []
        before_s = _worked_s(processes)
        for _ in range(batches - 1):
            begun_s = time.process_time()
            batch = next(taken, None)
            if batch is None:
                break
            _touch(batch)
            del batch
            each_s.append(time.process_time() - begun_s)
            time.sleep(_AHEAD * made_s)
        worked_s = _worked_s(processes) - before_s
    finally:
        stop = getattr(taken, "_shutdown_workers", None)
        if stop is not None:
            stop()
    return min(each_s, default=0.0), worked_s / len(each_s) if each_s else 0.0


def _touch(batch: Any) -> None:
    """Look at every page of a batch, as a model does, for the first time in this process."""
    for tensor in tensors_of(batch):
        if tensor.layout == torch.strided:
            tensor.reshape(-1)[:: max(_PAGE_BYTES // tensor.element_size(), 1)].sum()


def _worked_s(processes: Iterable[Any]) -> float:
    """Core-seconds of all threads of processes so far; 0 where the system does not say."""
    clock_of = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    clock = ctypes.c_int()
    if clock_of is None:
        return 0.0
    return sum(
        time.clock_gettime(clock.value)
        for process in processes
        if clock_of(process.pid, ctypes.byref(clock)) == 0
    )
