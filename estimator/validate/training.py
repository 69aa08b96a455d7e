"""Train a model for real on this machine, sharded as asked, time its steps, and compare them with
what was predicted before.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from estimator.errors import ProbeError, StrategyError, TrainingError
from estimator.machines.profile import Device
from estimator.probe.devices.backend import CpuBackend, keep_memory_resident, touch_memory
from estimator.probe.devices.jobs import canary_s
from estimator.probe.devices.ranks import run_on_devices
from estimator.probe.devices.updates import optimizer_of
from estimator.probe.grid.kernels import noise_ratio
from estimator.units import MIB
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision
from estimator.workload.strategies import DDP, FSDP, Strategy, ZeRO1

if TYPE_CHECKING:
    from estimator.estimates.estimate import Estimate


def shard_model(model: Any, world_size: int, strategy: FSDP, *, kind: str) -> None:
    """FSDP2 on every repeated block that has parameters, and on the rest of `model`.

    With a number of shards, each group of that many successive ranks holds a whole model, and equal
    places in the groups hold the same (HSDP). Collectives are those of a device of `kind`. Raises
    StrategyError if the shards do not divide the ranks.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from estimator.graph.ir.op_graph import unit_path

    mesh, shard = None, strategy.shard
    if shard is not None and shard != world_size:
        if world_size % shard:
            raise StrategyError(
                f"{world_size} ranks cannot shard a model over {shard} each; choose a divisor of "
                f"{world_size}"
            )
        # The last axis goes fastest through the ranks.
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(kind, (world_size // shard, shard), mesh_dim_names=names)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[strategy.param] if strategy.param else None,
        reduce_dtype=dtypes[strategy.reduce] if strategy.reduce else None,
    )
    for path, module in list(model.named_modules()):
        if path and unit_path(path) == path and any(True for _ in module.parameters()):
            reshard = strategy.reshard_after_forward
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)


_AUTOCAST = {"bf16-amp": "bfloat16", "fp16-amp": "float16"}
_CAST = {"bf16": "bfloat16", "fp16": "float16"}
_CANARIES_BESIDE = 3
# Of what a rank holds after its warm-up: by how much its heap may yet grow.
_SPARE_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What one real training run showed, after its warm-up; tuples are in rank order.

    `step_s` is the wall time of the whole timed window over its steps, `step_times_s` each step by
    itself. `faults_per_step` are page faults; `peak_memory_bytes` is the most that one rank held
    (resident memory until the warm-up's end, or what torch allocated on an accelerator), `canary_s`
    a fixed matmul timed before. `canaries_s` are that matmul before the first step and after each,
    if asked for: no step contains it.
    """

    step_s: tuple[float, ...]
    step_times_s: tuple[tuple[float, ...], ...]
    faults_per_step: tuple[float, ...]
    peak_memory_bytes: int
    canary_s: float
    canaries_s: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> TrainingRun:
        """What `train_rank` returned on each rank."""
        return cls(
            step_s=tuple(rank["step_s"] for rank in ranks),
            step_times_s=tuple(tuple(rank["step_times_s"]) for rank in ranks),
            faults_per_step=tuple(rank["faults_per_step"] for rank in ranks),
            peak_memory_bytes=max(rank["peak_memory_bytes"] for rank in ranks),
            canary_s=statistics.median(rank["canary_s"] for rank in ranks),
            canaries_s=tuple(tuple(rank["canaries_s"]) for rank in ranks),
        )

    @property
    def slowest_step_s(self) -> float:
        """Seconds per step of the slowest rank."""
        return max(self.step_s)


def train(
    model: str,
    devices: Sequence[Device],
    *,
    batch: int | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    strategy: str | Strategy = "ddp",
    steps: int = 15,
    warmup_steps: int = 3,
    accumulation_steps: int = 1,
    seq_len: int | None = None,
    canaries: bool = False,
    timeout_s: float = 600.0,
) -> TrainingRun:
    """Train `model` (MODEL text) on `devices`, one fresh process each, DDP if there are several.

    A step is zero_grad, forward, loss, backward, update, with the inputs already there; ranks wait
    for each other before the timed window, not before each step. On glibc a rank keeps the memory
    it frees (as the probe does, and unlike the default allocator settings of a plain script).
    Raises TrainingError if a rank fails, dies or hangs, ModelError if the model cannot be loaded.
    """
    if steps < 1 or warmup_steps < 0 or accumulation_steps < 1:
        raise TrainingError(
            f"cannot train {steps} steps after {warmup_steps} with {accumulation_steps} "
            "micro-batches each; ask for at least one step of one micro-batch"
        )
    arguments = {
        "model": model,
        "batch": batch,
        "seq_len": seq_len,
        "kind": devices[0].kind if devices else "cpu",
        "optimizer": check_optimizer(optimizer),
        "precision": check_precision(precision),
        "strategy": str(Strategy.parse(strategy)),
        "steps": steps,
        "warmup_steps": warmup_steps,
        "accumulation_steps": accumulation_steps,
        "canaries": canaries,
    }
    try:
        ranks = run_on_devices(
            devices,
            f"{__name__}:train_rank",
            arguments,
            timeout_s=timeout_s,
            world=len(devices) > 1,
            imported=(
                "estimator.graph.models.functions",
                "estimator.graph.trace.trace",
                *transformers_modules(),
            ),
        )
    except ProbeError as error:
        raise TrainingError(f"training {model} for real failed: {error}") from None
    return TrainingRun.of(ranks)


def transformers_modules() -> tuple[str, ...]:
    """The transformers models that this process has imported: each costs every rank a second."""
    return tuple(
        name
        for name in sorted(sys.modules)
        if name.startswith("transformers.models.") and ".modeling_" in name
    )


def train_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of a training run; called in its own pinned process."""
    import torch

    # As the probe does; with glibc's defaults whether a tensor meets page faults is chaotic, and
    # equal runs of small convolutional networks differ by a third.
    keep_memory_resident()
    before_s = canary_s(CpuBackend())
    torch.manual_seed(0)
    training = Training(arguments, world_size)
    return {"canary_s": before_s, **time_steps(training, arguments, world_size)}


def time_steps(training: Training, arguments: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """What one rank of a training run shows in its timed window, after the warm-up."""
    import torch.distributed as dist

    # A forked rank owns a page only once it has written to it, and the first full collection
    # writes to every object: outside the timed window, please.
    gc.collect()
    for _ in range(arguments["warmup_steps"]):
        training.step()
    training.marks.clear()
    peak_memory_bytes = _peak_memory_bytes(arguments["kind"])
    spares_memory = arguments["kind"] == "cpu" and arguments["warmup_steps"] > 0
    if spares_memory:
        # For its first dozen steps a heap grows now and then, as freed blocks are split; where a
        # hypervisor has to find each page, 30 MB cost 100 ms.
        touch_memory(int(_SPARE_MEMORY_SHARE * peak_memory_bytes))
    if world_size > 1:
        dist.barrier()
    training.synchronize()
    times_canary = arguments.get("canaries", False)
    canaries_s = [canary_s(CpuBackend(), repeats=_CANARIES_BESIDE)] if times_canary else []
    faults, start = _page_faults(), time.perf_counter()
    training.mark("start")
    for _ in range(arguments["steps"]):
        training.step()
        if times_canary:
            training.synchronize()
            canaries_s.append(canary_s(CpuBackend(), repeats=_CANARIES_BESIDE))
            training.mark("start")
    training.synchronize()
    step_s = (time.perf_counter() - start) / arguments["steps"]
    return {
        "step_s": statistics.fmean(training.step_times_s()) if times_canary else step_s,
        "canaries_s": canaries_s,
        "step_times_s": training.step_times_s(),
        "faults_per_step": (_page_faults() - faults) / arguments["steps"],
        "peak_memory_bytes": (
            peak_memory_bytes if spares_memory else _peak_memory_bytes(arguments["kind"])
        ),
    }


class Training:
    """A model with its optimizer and batch on one device, ready to step.

    With `merges_gradients` False no micro-batch merges gradients (DDP's no_sync).
    """

    def __init__(self, arguments: Mapping[str, Any], world_size: int) -> None:
        import torch

        from estimator.graph.models import load_model
        from estimator.graph.trace.training_call import TrainingCall

        self.torch: Any = torch
        self.on_cuda = arguments["kind"] == "cuda"
        self.accumulation_steps = arguments["accumulation_steps"]
        self.autocast_dtype = _AUTOCAST.get(arguments["precision"])
        self.merges_gradients = True
        self.trains_itself = False
        self.marks: list[tuple[str, Any]] = []
        model, batch, loss, _ = load_model(
            arguments["model"], batch=arguments["batch"], seq_len=arguments["seq_len"]
        )
        if arguments["precision"] == "tf32":
            torch.set_float32_matmul_precision("high")
        strategy = Strategy.parse(arguments["strategy"])
        # Shards of another dtype are cast as they are gathered.
        shards = world_size > 1 and strategy.gathered_dtype is not None
        cast = None if shards else _CAST.get(arguments["precision"])
        dtype = getattr(torch, cast) if cast else None
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else None
        self.model: Any = model.to(device=device, dtype=dtype)
        self.call = TrainingCall.of(model, batch, loss)
        if self.call.by_training_step and world_size > 1:
            raise TrainingError(
                "a model is trained on several ranks by its forward(), found a training_step(); "
                "return (model, batch, loss)"
            )
        self.batch = _moved(self.call.batch, device, dtype)
        self.merges_each, self.world_size, self.kind = False, world_size, arguments["kind"]
        if world_size > 1:
            self._wrap(strategy)
        keeps = strategy.keeps
        shares_update = world_size > 1 and (keeps.parameters, keeps.state) == ("whole", "shard")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer_of(arguments["optimizer"], trained, shared=shares_update)

    def _wrap(self, strategy: Strategy) -> None:
        wraps: dict[type[Strategy], Callable[[Any], None]] = {
            DDP: self._replicate,
            ZeRO1: self._replicate,
            FSDP: self._shard,
        }
        wraps.get(type(strategy), _refuse)(strategy)

    def _shard(self, strategy: FSDP) -> None:
        # FSDP scatters the gradients of every micro-batch unless told otherwise.
        self.merges_each = strategy.gradient_sync
        shard_model(self.model, self.world_size, strategy, kind=self.kind)

    def _replicate(self, strategy: DDP) -> None:
        """Wrap the model in DDP; parameters without a gradient need find_unused_parameters."""
        if strategy.reduce or strategy.master:
            _refuse(strategy)
        self._micro_batch()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        has_unused = any(parameter.grad is None for parameter in parameters)
        self.model.zero_grad(set_to_none=True)
        self.model = self.torch.nn.parallel.DistributedDataParallel(
            self.model,
            bucket_cap_mb=_bucket_cap_mb(strategy),
            gradient_as_bucket_view=strategy.gradient_as_bucket_view,
            find_unused_parameters=has_unused,
        )

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for number in range(self.accumulation_steps):
            last = number == self.accumulation_steps - 1
            with self._merging(self.merges_gradients and (last or self.merges_each)):
                self._micro_batch()
        if not self.trains_itself:
            self.optimizer.step()
        self.mark("update")

    def _merging(self, merges: bool) -> contextlib.AbstractContextManager[Any]:
        """A micro-batch whose gradients the ranks merge, or add up each by itself."""
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(merges)
            return contextlib.nullcontext()
        no_sync = contextlib.nullcontext if merges else getattr(self.model, "no_sync", None)
        context: contextlib.AbstractContextManager[Any] = (no_sync or contextlib.nullcontext)()
        return context

    def _micro_batch(self) -> None:
        with self._autocast():
            losses, self.trains_itself = self.call.trained(self.model, self.batch)
            if self.trains_itself:
                return
            loss = self.call.loss_of(self.model, losses, self.batch)
        if self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        loss.backward()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        dtype = getattr(self.torch, self.autocast_dtype)
        context: contextlib.AbstractContextManager[Any] = self.torch.autocast(
            "cuda" if self.on_cuda else "cpu", dtype=dtype
        )
        return context

    def mark(self, what: str) -> None:
        """Note that `what` has just ended: on the host's clock, or in the accelerator's stream."""
        if self.on_cuda:
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((what, event))
        else:
            self.marks.append((what, time.perf_counter()))

    def synchronize(self) -> None:
        if self.on_cuda:
            self.torch.cuda.synchronize()

    def _between(self, one: Any, two: Any) -> float:
        # Event.elapsed_time is in milliseconds.
        return float(one.elapsed_time(two) * 1e-3 if self.on_cuda else two - one)

    def step_times_s(self) -> list[float]:
        return [
            self._between(one, two)
            for (_, one), (what, two) in itertools.pairwise(self.marks)
            if what == "update"
        ]


def _refuse(strategy: Strategy) -> NoReturn:
    raise StrategyError(
        f"this command cannot train with '{strategy}'; choose of ddp, zero1 and fsdp, without "
        "reduce= and master"
    )


def _bucket_cap_mb(strategy: DDP) -> float | None:
    """DDP's argument for a strategy's caps; None keeps DDP's default cap and first bucket."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    default = DDP()
    if not strategy.bucketed:
        # A bucket is closed once it is full: with this cap each gradient fills its own.
        return 1 / MIB
    if strategy.first_cap_bytes == strategy.bucket_cap_bytes:
        return strategy.bucket_cap_bytes / MIB
    if strategy.bucket_cap_bytes != default.bucket_cap_bytes:
        raise StrategyError(
            f"DDP cannot run '{strategy}': a first bucket of its own needs the default cap; "
            "leave out bucket= or first="
        )
    # DDP uses this constant together with its default cap, and offers no argument for it.
    dist._DEFAULT_FIRST_BUCKET_BYTES = strategy.first_cap_bytes
    return None


def _moved(batch: Any, device: Any, dtype: Any) -> Any:
    """The batch on its device, floating tensors cast where the precision asks for it."""
    from estimator.graph.trace.fake_tensors import map_tensors

    def move(_path: str, tensor: Any) -> Any:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return map_tensors(batch, move)


def _page_faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _peak_memory_bytes(kind: str) -> int:
    import resource

    if kind == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    # Linux counts in KiB, macOS in bytes (getrusage(2)).
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One prediction with the step times, one a fresh run, that were measured after it."""

    predicted: Estimate
    runs_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def noise_ratio(self) -> float:
        return noise_ratio(self.runs_s)

    @property
    def error_ratio(self) -> float:
        """How far the prediction is above (positive) or below the measurement, relative to it."""
        return self.predicted.step_time_s / self.measured_s - 1

    @property
    def is_within_interval(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "predicted": self.predicted.to_dict(),
            "runs_s": list(self.runs_s),
            "measured_s": self.measured_s,
            "noise_ratio": self.noise_ratio,
            "error_ratio": self.error_ratio,
            "is_within_interval": self.is_within_interval,
        }


def validate(
    predictions: Sequence[Estimate],
    train: Callable[[Estimate], float],
    *,
    repeats: int,
    report: Callable[[int, Estimate, float], None],
) -> tuple[Validation, ...]:
    """Call `train` for every prediction, `repeats` times over, and pair the step times with them.

    Repeats are interleaved, so that drift of the machine affects every prediction equally.
    `report` is told each run's number, its prediction and its step time.
    """
    runs_s: list[list[float]] = [[] for _ in predictions]
    for repeat in range(repeats):
        for index, predicted in enumerate(predictions):
            step_s = train(predicted)
            runs_s[index].append(step_s)
            report(repeat * len(predictions) + index + 1, predicted, step_s)
    return tuple(
        Validation(predicted=predicted, runs_s=tuple(seconds))
        for predicted, seconds in zip(predictions, runs_s, strict=True)
    )
