"""Time the steps of an unchanged training script, and replace its batches by copies of the first.

Installed in the process that runs the script: on DataLoader's iterator, on what `watch_loader`
wraps, and after the step of the first optimizer. After the steps asked for it writes a record and
ends the script.

``python -m estimator.waits.hooks OPTIONS`` runs a script so, as its own main program; the options
are one JSON object in URL-safe base64. The record goes to stdout, which also comes back from
another node.
"""

from __future__ import annotations

import base64
import json
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import profiler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from estimator.graph.trace.fake_tensors import map_tensors
from estimator.probe.devices.inventory import pinned
from estimator.waits.runs import FILES_LOG, RECORD_MARK, STOPPED

ACTIVITY = profiler.ProfilerActivity.CUDA
# Real batches whose copies stand for all of them.
_KEPT_BATCHES = 2


@dataclass(kw_only=True)
class Record:
    """What one rank's run found: when each step ended, and of each what was spent for its batches.

    `copied_s` is what copying synthetic batches took, which is no part of the script. `samples` is
    the leading size of a batch's tensors. `busy_s` is how long the accelerator worked in a step,
    where that was asked for.
    """

    ended_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    copied_s: list[float] = field(default_factory=list)
    batches: int = 0
    samples: int = 0
    workers: int = 0
    busy_s: float | None = None


class ScriptEndsError(SystemExit):
    """Enough steps were timed."""


class Watched:
    """The steps and batches of this process while a script runs; `out` is where its record goes."""

    def __init__(
        self, *, steps: int, warmup: int, is_synthetic: bool, out: int, is_profiled: bool = False
    ) -> None:
        self._steps, self._out, self._is_synthetic = steps, out, is_synthetic
        # An accelerator is waited for where the time is taken, and not in every step.
        self._waits_at = {warmup, steps}
        self.record = Record()
        self._profiler = profiler.profile(activities=[ACTIVITY]) if is_profiled else None
        self._optimizer: Optimizer | None = None
        self._waited_s = self._copied_s = 0.0
        self._first: dict[int, tuple[object, list[Any]]] = {}

    def batches(self, source: Iterable[Any], real: Iterator[Any]) -> Iterator[Any]:
        """The batches of `source` as the script gets them, timed; `real` gives the real ones."""
        self.record.workers = max(self.record.workers, int(getattr(source, "num_workers", 0)))
        given = self._copies(source, real) if self._is_synthetic else real
        while True:
            began = time.perf_counter()
            copied_s = self._copied_s
            batch = next(given, _NONE)
            # What a copy took is told apart.
            self._waited_s += time.perf_counter() - began - (self._copied_s - copied_s)
            if batch is _NONE:
                return
            self.record.batches += 1
            self.record.samples = self.record.samples or leading_size(batch)
            yield batch

    def _copies(self, source: Iterable[Any], real: Iterator[Any]) -> Iterator[Any]:
        # Held with its source, so that no other object gets the same id.
        _, first = self._first.setdefault(id(source), (source, list(islice(real, _KEPT_BATCHES))))
        stop = getattr(real, "_shutdown_workers", None)
        if stop is not None:
            stop()
        number, count = 0, _length(source)
        while first and (count is None or number < count):
            began = time.perf_counter()
            batch = copied(first[number % len(first)])
            self._copied_s += time.perf_counter() - began
            number += 1
            yield batch

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer step is done; a script with several is timed by its first one."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        record = self.record
        if len(record.ended_s) + 1 in self._waits_at and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._profile(len(record.ended_s) + 1)
        record.ended_s.append(time.perf_counter())
        record.waited_s.append(self._waited_s)
        record.copied_s.append(self._copied_s)
        self._waited_s = self._copied_s = 0.0
        if len(record.ended_s) >= self._steps:
            self.write()
            raise ScriptEndsError(0)

    def _profile(self, step: int) -> None:
        """Between the warm-up and the last step, of which the accelerator has done all."""
        if self._profiler is None or step not in self._waits_at:
            return
        if step < self._steps:
            self._profiler.start()
            return
        self._profiler.stop()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events() or ()  # type: ignore[no-untyped-call]
            if event.device_type.name == "CUDA"
        ]
        self.record.busy_s = 1e-6 * covered(spans) / (self._steps - min(self._waits_at))

    def write(self) -> None:
        """Put the record where the parent process looks for it, on a line of its own."""
        line = f"\n{RECORD_MARK}{json.dumps(asdict(self.record))}\n".encode()
        while line:
            line = line[os.write(self._out, line) :]


_NONE = object()
_active: Watched | None = None


def active() -> Watched | None:
    """What times the script of this process, if any does."""
    return _active


def install(watched: Watched) -> None:
    """Put the hooks in place; they stay for the life of the process."""
    global _active
    _active = watched
    plain = DataLoader.__iter__

    def timed(loader: DataLoader[Any]) -> Any:
        return watched.batches(loader, plain(loader))

    DataLoader.__iter__ = timed  # type: ignore[method-assign]
    register_optimizer_step_post_hook(watched.stepped)
    log = os.environ.get(FILES_LOG)
    if log:
        _log_files(log)


def copied(batch: Any) -> Any:
    """A batch with tensors of its own, whatever holds them."""

    def twin(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor.clone()
        return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)

    return map_tensors(batch, twin)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what spans cover together."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order, whatever holds them."""
    tensors: list[torch.Tensor] = []

    def note(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(batch, note)
    return tensors


def leading_size(batch: Any) -> int:
    """How many samples a batch has, by the first of its tensors."""
    sizes = (int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.ndim)
    return next(filter(None, sizes), 0)


def _length(source: Iterable[Any]) -> int | None:
    try:
        return len(source) if isinstance(source, Sized) else None
    except TypeError:  # a DataLoader over an iterable without a length
        return None


def _log_files(log: str) -> None:
    """Write down every file that Python opens to read, also in workers."""
    stream = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def opened(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], str) and not details[2] & os.O_ACCMODE:
            os.write(stream, os.path.abspath(details[0]).encode(errors="surrogateescape") + b"\n")

    sys.addaudithook(opened)


def run_script() -> None:
    """Run the script to the last step asked for, or to its end."""
    options = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    script = options["script"]
    os.chdir(options["folder"])
    watched = Watched(
        steps=options["steps"],
        warmup=options["warmup"],
        is_synthetic=options["is_synthetic"],
        is_profiled=options["is_profiled"],
        out=os.dup(1),  # also where the script puts another in its place
    )
    install(watched)

    def stop(*_: object) -> None:
        watched.write()
        os._exit(STOPPED)

    signal.signal(signal.SIGTERM, stop)
    sys.argv = [script, *options["arguments"]]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with pinned(options["cores"]):
            runpy.run_path(script, run_name="__main__")
    except ScriptEndsError:
        # Nothing of the script is left to do, and process groups may wait for each other.
        os._exit(0)
    watched.write()


if __name__ == "__main__":
    # The module that the script's own imports find, not a second one of its name.
    from estimator.waits import hooks

    hooks.run_script()
