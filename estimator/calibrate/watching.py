"""Time the steps of a training loop and keep them, without warm-up, in a store.

Beside them the noise scale of gradients, tr(Σ) / |G|² in samples, above which more samples a step
add little: Σ is the covariance of one sample's gradient, G its mean. Gradients of b and of B > b
samples have E|g_b|² = |G|² + tr(Σ) / b, so that two of them estimate both: S. McCandlish et al.,
"An Empirical Model of Large-Batch Training" (2018), appendix A.1. It is Pollux's φ (Qiao et al.,
OSDI 2021, section 3.1) without a preconditioner.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from estimator.calibrate.database import PATIENCE_S
from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.calibrate.store import ObservationStore, opened
from estimator.errors import ObservationError, StoreError
from estimator.units import parse_whole
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import OpGraph


WARMUP_STEPS = 5
# Steady state: the medians of three durations and of the three before them agree within 10 %. Until
# then they may fall (caches fill, kernels are autotuned) or rise (the queue of an asynchronous
# device fills).
_COMPARED_DURATIONS = 3
_STEADY_RATIO = 0.1
# After so many durations without a steady state the loop's step time is taken to be variable.
_MOST_UNSTEADY_DURATIONS = 30
# A window ends at 50 steps or after 5 s; each later one lasts twice as long, up to 64 times, so
# that a day of training becomes some hundreds of observations.
WINDOW_STEPS, WINDOW_S = 50, 5.0
_LONGEST_WINDOW_RATIO = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive steps in steady state, and the median of their times."""

    steps: int
    step_time_s: float


class Windows:
    """Takes durations, each of one or several steps, and gives a window whenever one is full."""

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        if warmup_steps < 0:
            raise ObservationError(f"warmup_steps is 0 or more, found {warmup_steps}; leave it out")
        self.warmup_steps = warmup_steps
        self.dropped_steps = 0
        self._is_steady = False
        self._window_ratio = 1
        self._durations: list[tuple[float, int]] = []
        self._steps, self._seconds = 0, 0.0

    def add(self, seconds: float, steps: int) -> Window | None:
        """The window that these steps complete, if they complete one."""
        if self.dropped_steps < self.warmup_steps:
            self.dropped_steps += steps
            return None
        self._durations.append((seconds / steps, steps))
        self._steps += steps
        self._seconds += seconds
        if not self._is_steady:
            self._detect_steady_state()
        is_full = (
            self._steps >= WINDOW_STEPS * self._window_ratio
            or self._seconds >= WINDOW_S * self._window_ratio
        )
        return self.close() if self._is_steady and is_full else None

    def close(self) -> Window | None:
        """End the window that is being filled; None if there is nothing steady in it."""
        durations, steps = self._durations, self._steps
        self._durations, self._steps, self._seconds = [], 0, 0.0
        if not self._is_steady:
            self.dropped_steps += steps
            return None
        self._window_ratio = min(2 * self._window_ratio, _LONGEST_WINDOW_RATIO)
        step_time_s = statistics.median(s for s, _ in durations) if durations else 0.0
        if step_time_s <= 0:
            return None  # no steps, or steps below the resolution of the clock
        return Window(steps=steps, step_time_s=step_time_s)

    def _detect_steady_state(self) -> None:
        """Detect the steady state, and drop the durations before it."""
        count = len(self._durations)
        if count < 2 * _COMPARED_DURATIONS:
            return
        latest = self._durations[-_COMPARED_DURATIONS:]
        before = self._durations[-2 * _COMPARED_DURATIONS : -_COMPARED_DURATIONS]
        now_s, then_s = (statistics.median(s for s, _ in window) for window in (latest, before))
        is_steady = abs(now_s - then_s) <= _STEADY_RATIO * then_s
        if is_steady or count >= _MOST_UNSTEADY_DURATIONS:
            self._is_steady = True
            self._durations = before + latest
            kept = sum(steps for _, steps in self._durations)
            self.dropped_steps += self._steps - kept
            self._steps = kept
            self._seconds = sum(time_s * steps for time_s, steps in self._durations)


# Of so many steps one is measured, and so many measured ones are needed: each says little of |G|².
EVERY_STEPS, LEAST_MEASURED = 10, 20
# What a measured step keeps of its weight when the next one comes: the scale grows in training.
_KEPT = 0.99


class GradientNoise:
    """The gradient noise scale of a model while it trains, read from `scale_samples`.

    The gradient of one micro-batch on this rank, before it is added to others and averaged over
    ranks, is held against the one that the optimizer gets. Ranks send nothing for it.

    `batch_per_gpu` are the samples of a micro-batch, `ranks` those that average their gradients as
    DDP does. `step` follows every optimizer step, of which one in `every_steps` is measured (10).
    Without micro-batches and other ranks there is nothing to compare, and nothing is measured.
    """

    def __init__(
        self, model: Any, *, batch_per_gpu: int, ranks: int = 1, every_steps: int | None = None
    ) -> None:
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._batch, self._ranks = batch_per_gpu, ranks
        self._every = every_steps or EVERY_STEPS
        self._steps, self.measured = 0, 0
        self._squared_norm = self._trace = 0.0
        self._waiting: tuple[Any, Any, int] | None = None
        # Registered once: a compiled model would be compiled again for hooks that come and go.
        self._hooks: list[Any] = [
            parameter.register_hook(partial(self._arrived, number))
            for number, parameter in enumerate(self._parameters)
        ]
        self._begin(is_measured=True)

    @property
    def scale_samples(self) -> float | None:
        """tr(Σ) / |G|² over the last measured steps; None where these are too few to tell."""
        self._read()
        known = self.measured >= LEAST_MEASURED and self._squared_norm > 0 and self._trace > 0
        return self._trace / self._squared_norm if known else None

    def step(self) -> None:
        """An optimizer step is done: measure the next one if its turn has come."""
        if self._is_measured:
            self._end()
        self._steps += 1
        is_due = self._steps % self._every == 0
        if is_due:
            # By now the device has long worked these numbers out.
            self._read()
        self._begin(is_measured=is_due)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, *, is_measured: bool) -> None:
        self._is_measured = is_measured and bool(self._hooks)
        self._passes: Counter[int] = Counter()
        self._small: Any = 0.0
        self._large: Any = None
        self._is_queued = False

    def _arrived(self, number: int, gradient: Any) -> None:
        """One parameter has its gradient of one micro-batch, of this rank alone."""
        if not self._is_measured:
            return
        import torch

        self._passes[number] += 1
        self._small = self._small + _squared_norm(gradient)
        if not self._is_queued:
            self._is_queued = True
            # What ends the backward pass of DDP is queued during it; one queued then comes last.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._ended))

    def _ended(self) -> None:
        """A backward pass is over, and so are the sums over ranks: before clipping."""
        self._is_queued = False
        gradients = (self._parameters[number].grad for number in self._passes)
        self._large = sum(_squared_norm(one) for one in gradients if one is not None)

    def _end(self) -> None:
        """Keep what was measured, where every parameter took part in every pass."""
        counts = set(self._passes.values())
        if len(counts) != 1 or self._large is None:
            return
        (micro_batches,) = counts
        if micro_batches * self._ranks == 1:
            self.close()
            return
        self._waiting = self._small / micro_batches, self._large, micro_batches

    def _read(self) -> None:
        """Add what the last measured step showed."""
        if self._waiting is None:
            return
        (small, large, micro_batches), self._waiting = self._waiting, None
        # The gradient that is kept is a sum over micro-batches.
        small, large = float(small), float(large) / micro_batches**2
        if not (math.isfinite(small) and math.isfinite(large)):
            return
        few, many = self._batch, self._batch * micro_batches * self._ranks
        squared_norm = (many * large - few * small) / (many - few)
        trace = (small - large) / (1 / few - 1 / many)
        self.measured += 1
        self._squared_norm = _KEPT * self._squared_norm + (1 - _KEPT) * squared_norm
        self._trace = _KEPT * self._trace + (1 - _KEPT) * trace


def _squared_norm(gradient: Any) -> Any:
    import torch

    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.linalg.vector_norm(values, dtype=torch.float32).square()


logger = logging.getLogger(__name__)

# With `synchronize`, the device is synchronised once in this many steps, or in this many seconds
# if the steps take longer.
_SYNC_STEPS, _SYNC_S = 10, 0.5
# Training does not wait longer than this for another writer; what was seen is written later.
_PATIENCE_WHILE_TRAINING_S = 0.05
_MOST_WAITING = 1000
# After the backward pass each rank has the mean of all ranks' gradients, whole.
_WITH_MEAN_GRADIENTS = ("ddp", "zero1")


def observe(
    store: ObservationStore | str | os.PathLike[str] | None = None,
    *,
    workload: str | ObservedWorkload | OpGraph,
    allocation: str,
    batch_per_gpu: int,
    accumulation_steps: int = 1,
    strategy: str = "ddp",
    layout: str | None = None,
    source: str = "observed",
    warmup_steps: int = WARMUP_STEPS,
    synchronize: Callable[[], object] | None = None,
    rank: int | None = None,
    model: Any = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Watch:
    """Watch a loop that calls `step()` after every optimizer step, and keep its step time.

    `store` is an ObservationStore, a path, or None for the user's store. Of several ranks only rank
    0 (by `rank`, torch.distributed or $RANK) watches. The first `warmup_steps` are dropped, then
    more until steps are steady. What cannot be written is logged and tried again. Of a `model` with
    whole gradients (DDP, ZeRO-1) their noise is measured too: `GradientNoise`.

    On accelerators the host runs ahead. For a loop that does not read the loss in every step give
    ``synchronize=torch.cuda.synchronize``: it is called once in 10 steps or 0.5 s, and steps are
    timed between. Raises ObservationError, AllocationError, StrategyError, StoreError.

    >>> import itertools, tempfile
    >>> store = ObservationStore(tempfile.mkdtemp() + "/observations.db")
    >>> job = {"workload": "gpt2", "allocation": "1x2:local", "batch_per_gpu": 8}
    >>> with observe(store, **job, clock=itertools.count(0.0).__next__) as watch:
    ...     for _ in range(20):
    ...         watch.step()
    >>> {one.step_time_s for one in store}, sum(one.steps for one in store)
    ({1.0}, 15)
    """
    summary = ObservedWorkload.of(workload)
    observation = partial(
        Observation,
        workload=summary.name,
        fingerprint=summary.fingerprint,
        allocation=allocation,
        batch_per_gpu=batch_per_gpu,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        layout=layout,
        source=source,
    )
    # What makes no sense is refused before training starts.
    seen = observation(step_time_s=1.0)
    is_first = (own_rank() if rank is None else rank) == 0
    return Watch(
        store=opened(store) if is_first else None,
        noise=_noise_of(model if is_first else None, seen),
        summary=summary,
        observation=observation,
        windows=Windows(warmup_steps=warmup_steps),
        synchronize=synchronize,
        clock=clock,
    )


def _noise_of(model: Any, seen: Observation) -> GradientNoise | None:
    """None without a model, or where no rank has the mean of all ranks' gradients, whole."""
    is_whole = Strategy.parse(seen.strategy).name in _WITH_MEAN_GRADIENTS
    if model is None or seen.layout is not None or not is_whole:
        return None
    return GradientNoise(model, batch_per_gpu=seen.batch_per_gpu, ranks=seen.ranks)


class Watch:
    """Times the steps of one loop; made by `observe`, used in a ``with`` statement.

    `recorded` are its observations, of `recorded_steps` steps; `dropped_steps` were warm-up.
    Without a store (on other ranks) it does nothing.
    """

    def __init__(
        self,
        *,
        store: ObservationStore | None,
        summary: ObservedWorkload,
        observation: Callable[..., Observation],
        windows: Windows,
        synchronize: Callable[[], object] | None,
        clock: Callable[[], float],
        noise: GradientNoise | None = None,
    ) -> None:
        self._store, self._summary, self._observation = store, summary, observation
        self._windows, self._synchronize, self._clock = windows, synchronize, clock
        self._noise = noise
        self.recorded: list[Observation] = []
        self._waiting: list[Observation] = []
        self._has_complained = False
        self._untimed_steps, self._start_s = 0, clock()

    @property
    def recorded_steps(self) -> int:
        return sum(one.steps for one in self.recorded)

    @property
    def dropped_steps(self) -> int:
        return self._windows.dropped_steps

    def __enter__(self) -> Watch:
        self.skip()
        return self

    def step(self) -> None:
        """One optimizer step is done."""
        if self._store is None:
            return
        if self._noise is not None:
            self._noise.step()
        self._untimed_steps += 1
        now_s = self._clock()
        if self._synchronize is not None:
            if self._untimed_steps < _SYNC_STEPS and now_s - self._start_s < _SYNC_S:
                return
            self._synchronize()
            now_s = self._clock()
        window = self._windows.add(now_s - self._start_s, self._untimed_steps)
        self._untimed_steps, self._start_s = 0, now_s
        if window is not None:
            self._write(window, _PATIENCE_WHILE_TRAINING_S)
            self._start_s = self._clock()

    def skip(self) -> None:
        """Leave out the time since the last step: an evaluation, a checkpoint."""
        if self._store is None:
            return
        if self._synchronize is not None:
            self._synchronize()
        self._untimed_steps, self._start_s = 0, self._clock()

    def __exit__(self, *_: object) -> None:
        self._write(self._windows.close(), PATIENCE_S)
        if self._noise is not None:
            self._noise.close()
        if self._waiting:
            logger.warning("%d observations of %s are lost", len(self._waiting), self._summary.name)

    def _write(self, window: Window | None, patience_s: float) -> None:
        if window is not None:
            seen = self._observation(
                step_time_s=window.step_time_s,
                steps=window.steps,
                gradient_noise_samples=self._noise.scale_samples if self._noise else None,
            )
            self._waiting.append(seen)
            self.recorded.append(seen)
        if self._store is None or not self._waiting:
            return
        try:
            self._store.add_many(self._waiting, summaries=[self._summary], patience_s=patience_s)
        except StoreError as error:
            if not self._has_complained:
                logger.warning("observations cannot be written now: %s", error)
            self._has_complained = True
            del self._waiting[:-_MOST_WAITING]
        else:
            self._waiting.clear()


def own_rank() -> int:
    """The rank of this process, of torch.distributed, else of $RANK."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    try:
        return parse_whole(os.environ.get("RANK", "0"))
    except ValueError:
        return 0
