"""Watch one training: trace its first batch, time its steps by hooks, compare both at the end."""

from __future__ import annotations

import atexit
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.calibrate.observed import ObservedWorkload, latest_noise_samples
from estimator.calibrate.store import ObservationStore
from estimator.calibrate.watching import Watch, observe, own_rank
from estimator.errors import EstimatorError
from estimator.files import check_writable, write_text_atomically
from estimator.placement.allocation import Allocation
from estimator.units import format_interval, format_ratio, format_seconds
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was predicted of a training's step before it was timed, and what was measured.

    `measured_s` is the median over `steps` steady steps, None where there were too few. Without a
    prediction `refusal` says why; `remark` says what the prediction does not know of.
    `gradient_noise_samples` is the noise scale of its gradients at the end, None where it could not
    be measured.
    """

    workload: str
    allocation: str
    predicted: Estimate | None
    measured_s: float | None
    steps: int
    refusal: str = ""
    remark: str = ""
    gradient_noise_samples: float | None = None

    @property
    def error_ratio(self) -> float | None:
        """How far the prediction is above (positive) or below the measurement."""
        if self.predicted is None or self.measured_s is None:
            return None
        return self.predicted.step_time_s / self.measured_s - 1

    def __str__(self) -> str:
        predicted = self.predicted
        prediction = f"no prediction ({self.refusal})"
        if predicted is not None:
            interval = format_interval(predicted.step_time_s, predicted.low_s, predicted.high_s)
            prediction = f"predicted {interval}"
        seen = "too few steady steps to measure"
        if self.measured_s is not None:
            seen = f"measured {format_seconds(self.measured_s)} over {self.steps} steps"
        if self.error_ratio is not None:
            seen += f", {format_ratio(abs(self.error_ratio))} "
            seen += "too slow" if self.error_ratio > 0 else "too fast"
        remark = f"; {self.remark}" if self.remark else ""
        if self.gradient_noise_samples is not None:
            remark += f"; gradient noise scale {self.gradient_noise_samples:,.0f} samples"
        return f"{self.workload} on {self.allocation}: {prediction}, {seen}{remark}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "predicted": None if self.predicted is None else self.predicted.to_dict(),
            "error_ratio": self.error_ratio,
            "refusal": self.refusal or None,
            "remark": self.remark or None,
        }


@dataclass(slots=True, kw_only=True)
class Settings:
    """What a user may say of a training; None is found out from the framework.

    `store` is a path, None the user's store. `report` is a file for the comparison as JSON. `say`
    is told the comparison in a line, by default on stderr. Raises StoreError, AllocationError,
    StrategyError: before training, which a callback never ends.
    """

    store: str | os.PathLike[str] | None = None
    allocation: str | None = None
    strategy: str | None = None
    graph: OpGraph | None = None
    report: str | os.PathLike[str] | None = None
    say: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if self.report is not None:
            check_writable(Path(self.report))
        if self.allocation is not None:
            Allocation.parse(self.allocation)
        if self.strategy is not None:
            Strategy.parse(self.strategy)
        if own_rank() == 0:
            ObservationStore(self.store)


@dataclass(slots=True, kw_only=True)
class WatchedTraining:
    """One training that is watched, on rank 0 alone.

    A failure to trace, to predict or to keep what was seen is told at the end, and never ends the
    training.
    """

    settings: Settings
    comparison: Comparison | None = None
    _watch: Watch | None = None
    _expected: Comparison | None = None

    @property
    def has_begun(self) -> bool:
        return self._watch is not None

    def begin(
        self,
        model: Any,
        batch: Any,
        *,
        ranks: int,
        nodes: int | None = None,
        accumulation_steps: int = 1,
        strategy: str = "ddp",
        **recipe: Any,
    ) -> None:
        """Trace a model on its first batch, predict its step, and begin to time steps.

        Without `nodes` they are told by what torchrun says of this one. `recipe` goes to
        `trace_model`: optimizer, precision, clipping.
        """
        from torch import cuda

        from estimator.waits.hooks import leading_size

        settings = self.settings
        nodes = nodes or max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        allocation = settings.allocation or f"{nodes}x{ranks // nodes}:local"
        strategy = settings.strategy or strategy
        graph, refusal = settings.graph, ""
        if graph is None:
            recipe["target"] = "cuda" if cuda.is_available() else "cpu"
            graph, refusal = _traced(model, batch, recipe)
        summary = ObservedWorkload.of(type(model).__name__ if graph is None else graph)
        batch_per_gpu = leading_size(batch) if graph is None else graph.batch
        predicted, remark = None, ""
        if graph is not None:
            predicted, refusal = _predicted(
                graph, allocation, accumulation_steps=accumulation_steps, strategy=strategy
            )
            remark = "" if predicted is None else _threads_remark(predicted)
        self._expected = Comparison(
            workload=summary.name,
            allocation=allocation,
            predicted=predicted,
            measured_s=None,
            steps=0,
            refusal=refusal,
            remark=remark,
        )
        self._watch = observe(
            settings.store,
            workload=summary,
            allocation=allocation,
            batch_per_gpu=batch_per_gpu or 1,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
            source="callback",
            synchronize=cuda.synchronize if cuda.is_available() else None,
            rank=0,
            model=model,
        )
        self._watch.skip()

    def step(self) -> None:
        """One optimizer step is done."""
        if self._watch is not None:
            self._watch.step()

    def skip(self) -> None:
        """Leave out the time since the last step: an evaluation, a checkpoint."""
        if self._watch is not None:
            self._watch.skip()

    def end(self) -> Comparison | None:
        """Say what was predicted and what measured; None where nothing was trained."""
        if self._watch is None or self._expected is None:
            return None
        self._watch.__exit__(None, None, None)
        recorded, self._watch = self._watch.recorded, None
        # The median of windows, each counted by its steps.
        times_s = [one.step_time_s for one in recorded for _ in range(one.steps)]
        self.comparison = replace(
            self._expected,
            measured_s=statistics.median(times_s) if times_s else None,
            steps=len(times_s),
            gradient_noise_samples=latest_noise_samples(recorded),
        )
        say = self.settings.say or _say
        say(str(self.comparison))
        if self.settings.report is not None:
            content = json.dumps(self.comparison.to_dict(), indent=1, allow_nan=False)
            write_text_atomically(Path(self.settings.report), content + "\n")
        return self.comparison


def _traced(model: Any, batch: Any, recipe: Mapping[str, Any]) -> tuple[OpGraph | None, str]:
    from estimator.api import trace_model

    try:
        return trace_model(model, batch, **recipe), ""
    except EstimatorError as error:
        return None, str(error)


def _predicted(graph: OpGraph, allocation: str, **options: Any) -> tuple[Estimate | None, str]:
    from estimator.api import estimate

    try:
        return estimate(graph, allocation, **options), ""
    except EstimatorError as error:
        return None, str(error)


def _threads_remark(predicted: Estimate) -> str:
    """On CPUs a rank should compute with as many threads as its device has cores."""
    from torch import get_num_threads

    device = predicted.plan.kinds[0].program.profile.devices[0]
    if device.kind != "cpu" or len(device.cores) == get_num_threads():
        return ""
    return (
        f"this training computes with {get_num_threads()} threads, a device of "
        f"'{predicted.allocation}' has {len(device.cores)} cores"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"estimator: {line}\n")


class HookedTraining:
    """Watches from the first call of the model on; ends with its ``with`` block, or the program.

    The first batch is what the model is called with; a step is what the optimizer says is one.
    """

    def __init__(self, model: Any, optimizer: Any, settings: Settings, **about: Any) -> None:
        self.training = WatchedTraining(settings=settings)
        self._model, self._optimizer, self._about = model, optimizer, about
        self._batch: Any = None
        self._handles: list[Any] = []
        if own_rank() == 0:
            self._handles = [
                model.register_forward_pre_hook(self._called, with_kwargs=True),
                optimizer.register_step_post_hook(self._stepped),
            ]
            atexit.register(self.end)

    def __enter__(self) -> HookedTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> Comparison | None:
        """Say what was predicted and what measured."""
        atexit.unregister(self.end)
        while self._handles:
            self._handles.pop().remove()
        return self.training.end()

    def _called(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None:
            self._batch = dict(kwargs) if kwargs and not args else args

    def _stepped(self, *_: Any) -> None:
        if self.training.has_begun:
            self.training.step()
        elif self._batch is not None:
            self._handles.pop(0).remove()
            batch, self._batch = self._batch, None
            self.training.begin(self._model, batch, optimizer=self._optimizer, **self._about)


def precision_of(model: Any, mixed: str | None) -> str:
    """The precision of a training: what is mixed with fp32, else that of the parameters.

    >>> precision_of(None, "bf16")
    'bf16-amp'
    """
    if mixed in ("bf16", "fp16"):
        return f"{mixed}-amp"
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    first = next(iter(model.parameters()), None)
    return "fp32" if first is None else names.get(first.dtype, "fp32")


def watch(accelerator: Any, model: Any, optimizer: Any, **settings: Any) -> HookedTraining:
    """Watch a training of what ``accelerator.prepare`` returned.

    `settings` are those of `Settings`: `store`, `allocation`, `strategy`, `graph`, `report`, `say`.
    """
    plain = accelerator.unwrap_model(model)
    is_sharded = str(accelerator.distributed_type).endswith("FSDP")
    return HookedTraining(
        plain,
        getattr(optimizer, "optimizer", optimizer),
        Settings(**{"say": accelerator.print, **settings}),
        ranks=int(accelerator.num_processes),
        accumulation_steps=int(accelerator.gradient_accumulation_steps),
        strategy="fsdp" if is_sharded else "ddp",
        precision=precision_of(plain, accelerator.mixed_precision),
    )
