"""Join stages into the public functions: trace a model, ask for its step time anywhere."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from estimator.errors import (
    ModelError,
    UnknownMachineError,
    WorkloadError,
    quoted,
)
from estimator.estimates.balance import balance
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest, Options
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.plan import read_plan
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.placement.topology import Cluster
from estimator.workload.optimizers import check_optimizer
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from estimator.advise.memory import MemoryReport
    from estimator.advise.scaling import Scaling, SweepRow
    from estimator.coefficients import Calibration
    from estimator.placement.allocation import Allocation
    from estimator.waits.predicted import PredictedStalls
    from estimator.workload.layouts import Layout
    from estimator.workload.loader import Loader
    from estimator.workload.recipe import Recipe


_EXECUTIONS: dict[bool | str, str] = {True: "compiled", "blocks": "compiled-blocks"}


def trace_model(
    model: nn.Module,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    optimizer: str | Optimizer | None = None,
    precision: str = "fp32",
    target: DeviceKind = "cpu",
    measure: bool = False,
    compiled: bool | Literal["cuda-graphs", "blocks"] | None = None,
    channels_last: bool = False,
    grad_scaler: bool = False,
    clip_grad_norm: bool = False,
    checkpoint: str | None = None,
    float8: str | None = None,
    recipe: str | Recipe | None = None,
    batch_dim: int | None = None,
    name: str | None = None,
    ranks: int | None = None,
    profile: MachineProfile | str = "local",
    report: Callable[[str, float], None] | None = None,
) -> OpGraph:
    """Trace one training step of `model` once, for every batch size.

    `batch` is what the model is called with: tensors, or a DataLoader or Dataset that gives them;
    `loss` is called with (output, batch), or with (output, targets) where the batch holds what
    ``forward()`` does not take, and defaults to the model's ``training_step(batch, batch_idx)``,
    else ``output.loss``, else the mean of the floating outputs; of a list of models it is
    step(models, batch). With `measure` distinct ops are timed here (`profile`) and kept.
    The optimizer, one of torch.optim or its name, is by default the step's own, else "adamw". The
    step is eager unless `compiled` (by default as `model` is): fused by `torch.compile`, by
    repeated blocks ("blocks"), or replayed as CUDA graphs ("cuda-graphs"). `channels_last` lays
    images and filters out so, `grad_scaler` adds a ``torch.amp.GradScaler``, `clip_grad_norm`
    ``clip_grad_norm_``. `checkpoint` recomputes blocks: "full", "selective:2" or "selective:op"
    (all but attention and every other matmul). `float8` casts a compiled model's linear layers, as
    torchao: "tensorwise", "rowwise". `recipe`, an `est.Recipe`, says all of
    these, a text a framework's kernels ("megatron:fp8=current"). `ranks` are those of a step's own
    collectives. Raises ModelError, TraceError, ProbeError, StrategyError.

    >>> import torch
    >>> trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), precision="bf16-amp").batch
    4
    """
    told = _told_by(
        recipe,
        optimizer=optimizer,
        precision=precision,
        compiled=compiled,
        channels_last=channels_last,
        grad_scaler=grad_scaler,
        clip_grad_norm=clip_grad_norm,
        checkpoint=checkpoint,
        float8=float8,
    )
    asked = {"target": target, "batch_dim": batch_dim, "name": name, "ranks": ranks}
    graph = _traced(model, batch, loss, told, str(recipe or "") or None, measure, **asked)
    return with_timings(graph, profile, report=report) if measure else graph


def _traced(
    model: Any,
    batch: Any,
    loss: Any,
    told: Mapping[str, Any],
    kernels: str | None,
    measure: bool,
    **options: Any,
) -> OpGraph:
    from estimator.graph.trace.checkpointing import checkpointed
    from estimator.graph.trace.trace import trace_graph

    model, loss, execution, assumed = _as_module(model, loss, told["compiled"])
    _check_options(measure and bool(execution), told["grad_scaler"], told["precision"])
    by_trace, by_graph = (
        {name: told[name] for name in names}
        for names in (
            ("optimizer", "precision", "channels_last"),
            ("grad_scaler", "clip_grad_norm", "checkpoint"),
        )
    )
    with checkpointed(model, told["checkpoint"]):
        graph = trace_graph(model, batch, loss=loss, **by_trace, **options)
    return _compiled(replace(graph, **by_graph), execution, told["float8"], assumed, kernels)


def _told_by(recipe: str | Recipe | None, **told: Any) -> dict[str, Any]:
    """Keywords of `trace_model` with what a recipe says; raises ModelError where both say it."""
    if recipe is None or isinstance(recipe, str):
        return told
    for name, value in (
        ("optimizer", recipe.optimizer),
        ("precision", recipe.precision),
        ("compiled", recipe.compile),
        ("channels_last", recipe.channels_last),
        ("grad_scaler", recipe.grad_scaler),
        ("clip_grad_norm", bool(recipe.clip)),
        ("checkpoint", recipe.checkpointing),
        ("float8", recipe.float8),
    ):
        beside = told[name]
        if value and beside not in (value, None, False, "fp32"):
            raise ModelError(
                f"the recipe says {name} {quoted(value)} and beside it stands {quoted(beside)}; "
                "say it once"
            )
        told[name] = value or beside
    return told


def with_recipe(
    graph: OpGraph,
    *,
    optimizer: str | None = None,
    precision: str | None = None,
    compiled: bool | str | None = None,
    grad_scaler: bool = False,
    clip_grad_norm: bool = False,
    float8: str | None = None,
    recipe: str | Recipe | None = None,
) -> OpGraph:
    """The graph that `trace_model` gives of the same model with other options, of those that its
    operators do not depend on; None and False leave it as it was traced.

    fp32 and tf32 stand for each other, no other precision does. Needs no torch. Raises ModelError.
    """
    changed: dict[str, Any] = {
        "optimizer": check_optimizer(optimizer or graph.optimizer),
        "precision": precision or graph.precision,
        "grad_scaler": grad_scaler or graph.grad_scaler,
        "clip_grad_norm": clip_grad_norm or graph.clip_grad_norm,
    }
    execution = _EXECUTIONS.get(compiled, compiled) if compiled else graph.execution
    float8, recipe = float8 or graph.float8, str(recipe) if recipe else graph.recipe
    is_cast = changed["precision"] != graph.precision
    if is_cast and (graph.timings or {graph.precision, changed["precision"]} != {"fp32", "tf32"}):
        raise ModelError(
            f"{graph.name} was traced in {graph.precision}, whose operators are not those of "
            f"{changed['precision']}; trace it again in that"
        )
    is_compiled = execution != "eager" or recipe is not None
    _check_options(
        bool(graph.timings) and is_compiled, changed["grad_scaler"], changed["precision"]
    )
    eager = None if graph.eager is None else replace(graph.eager, **changed)
    as_it_is = graph.execution, graph.float8, graph.recipe, False
    if (execution, float8, recipe, is_cast) == as_it_is:
        return replace(graph, **changed, eager=eager)
    base = eager or replace(graph, **changed)
    compiles = execution if execution != "eager" else None
    return _compiled(base, compiles, float8, None, recipe)


def _compiled(
    graph: OpGraph,
    compiled: bool | str | None,
    float8: str | None,
    assumed: str | None,
    recipe: str | None = None,
) -> OpGraph:
    if assumed is not None:
        graph = replace(graph, assumptions=(*graph.assumptions, assumed))
    if recipe is not None:
        from estimator.graph.compile.megatron import compiled_like

        if float8 is not None:
            raise ModelError("a recipe says itself what is in float8; leave float8 out")
        like = replace(graph, execution="compiled", recipe=recipe)
        return replace(compiled_like(graph, like), eager=graph)
    if compiled:
        from estimator.graph.compile.fusion import compile_graph

        fused = compile_graph(graph, _EXECUTIONS.get(compiled, compiled))  # type: ignore[arg-type]
        graph = replace(fused, eager=graph)
    if float8 is None:
        return graph
    from estimator.graph.compile.float8 import with_float8

    return with_float8(graph, float8)


def _as_module(
    model: Any, loss: Any, compiled: bool | Literal["cuda-graphs", "blocks"] | None
) -> tuple[Any, Any, bool | Literal["cuda-graphs", "blocks"] | None, str | None]:
    """One module, its loss, how its step is run, and what of that is assumed."""
    from torch import nn

    from estimator.graph.trace.checkpointing import compiled_as
    from estimator.graph.trace.training_call import as_phases

    model, loss = as_phases(model, loss)
    assumed = None
    if compiled is None and isinstance(model, nn.Module):
        compiled, assumed = compiled_as(model)
    return getattr(model, "_orig_mod", model), loss, compiled, assumed


def _check_options(measures_compiled: bool, grad_scaler: bool, precision: str) -> None:
    if measures_compiled:
        raise ModelError(
            "measure times operators one by one, which a compiled model does not run; leave out "
            "measure or compiled"
        )
    # torch/amp/grad_scaler.py, _unscale_grads_: gradients must not be float16 themselves.
    if grad_scaler and precision != "fp16-amp":
        raise ModelError(
            "a gradient scaler unscales float32 gradients of float16 work, found precision "
            f"{precision}; leave it out or use fp16-amp"
        )


def with_timings(
    graph: OpGraph,
    profile: MachineProfile | str = "local",
    *,
    report: Callable[[str, float], None] | None = None,
) -> OpGraph:
    """The graph with its distinct ops timed on this machine, at its traced batch size."""
    from estimator.probe.ops import measure_ops

    machine = profile if isinstance(profile, MachineProfile) else load_profile(profile)
    timings = measure_ops(graph, machine, report=report)
    return replace(graph, timings=timings, timed_on=machine.name)


def _as_graph(
    model: Any,
    batch: Any,
    strategy: str | Strategy,
    allocation: str | Allocation,
    cluster: Cluster | None,
    profile: MachineProfile | None,
) -> OpGraph:
    """A graph, or that of a module for the devices of an allocation."""
    if isinstance(model, OpGraph):
        return model
    placement = DEFAULT.place(allocation, cluster=cluster, profile=profile)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"what is estimated is an nn.Module or an OpGraph, found {reprlib.repr(model)}; names "
            "of models are for the command line, saved graphs for OpGraph.load"
        )
    target, dtype = placement.kinds[0].profile.kind, Strategy.parse(strategy).gathered_dtype
    return trace_model(
        model, batch, target=target, precision=dtype or "fp32", ranks=placement.ranks
    )


def estimate(
    model_or_graph: nn.Module | OpGraph,
    allocation: str | Allocation,
    *,
    batch_per_gpu: int | Sequence[int] | None = None,
    global_batch: int | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    cluster: Cluster | str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    batch: Any = None,
    profile: MachineProfile | None = None,
    loader: Loader | str | None = None,
    layout: Layout | str | None = None,
    tp_plan: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    strict: bool = False,
    neighbours: Sequence[Estimate | tuple[str | Allocation, float]] = (),
) -> Estimate:
    """Predict the step time of a model on an allocation such as ``1x2:local``.

    A graph is estimated as it is; a module is traced first, with `batch` and for the allocation's
    devices. `batch_per_gpu` is samples per device and micro-batch, by default what was traced, or
    one for each group of the allocation; `global_batch` is that summed over ranks, times
    `accumulation_steps`, split evenly over equal devices, by speed over unlike ones. Where it
    cannot be shared evenly (64 as 22, 21, 21) all wait for the largest, unless `strict` refuses it.
    `cluster` (or its file) has nodes and switches; without one, nodes hang on one. `profile` stands
    in for the machine named; `loader` (``prep=8ms,workers=4``) feeds each rank. `layout` has ranks
    share layers, tokens or experts (``tp=2,sp,dp=*``, ``cp=2,ep=8``; the batch is then per
    data-parallel rank). `tp_plan`: styles by module name, or a JSON file, else found. `neighbours`
    on the links are estimates, or (allocation, bytes per second of a node). Raises EstimatorError.

    >>> import torch
    >>> estimate(torch.nn.Linear(8, 8), "2x4:t4-g4dn", batch=torch.randn(4, 8)).global_batch
    32
    """
    key, words = None, (strategy, layout, loader, strict, id(calibration))
    if not neighbours and cluster is None and profile is None and tp_plan is None:
        counts = batch_per_gpu, global_batch, accumulation_steps
        key = DEFAULT.answers.key(model_or_graph, allocation, *counts, words=words)
        if known := DEFAULT.answers.find(key, model_or_graph, allocation, calibration):
            return known
    cluster = Cluster.given(cluster)
    graph = _as_graph(model_or_graph, batch, strategy, allocation, cluster, profile)
    request = EstimateRequest.of(
        graph,
        allocation,
        batch_per_gpu=batch_per_gpu,
        global_batch=global_batch,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        layout=layout,
        tp_plan=None if tp_plan is None else read_plan(tp_plan),
        loader=loader,
        cluster=cluster,
        profile=profile,
        calibration=calibration,
        strict=strict,
        neighbours=neighbours,
    )
    return DEFAULT.answers.keep(key, graph, calibration, balance(request).answer)


def memory(
    graph: OpGraph, allocation: str | Allocation, **options: Unpack[Options]
) -> MemoryReport:
    """Where the memory of the fullest rank goes over a step, and what is alive at its peak.

    `options` are those of `estimate`, texts or nouns. Raises what `estimate` raises, WorkloadError
    for a summary.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> est.memory(graph, "1x1:t4-g4dn", batch_per_gpu=2).answer.fits
    'yes'
    """
    from estimator.advise.memory import memory_of

    return memory_of(balance(EstimateRequest.of(graph, allocation, **options)).answer)


def stalls(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    against: str | Allocation | None = None,
    **options: Unpack[Options],
) -> PredictedStalls:
    """What a step waits for: its host, the devices of a node, other nodes.

    After Stash (Sharma et al., ICDCS 2023). `against` stands for one node; `options` are those of
    `estimate`. Raises what `estimate` raises.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> found = est.stalls(graph, "2x4:t4-g4dn")
    >>> found.one_node, found.network.stall_s > 0
    ('1x4:t4-g4dn', True)
    """
    from estimator.waits.predicted import predict_stalls

    return predict_stalls(EstimateRequest.of(graph, allocation, **options), against=against)


def scaling(
    graph: OpGraph, allocation: str | Allocation, **options: Unpack[Options]
) -> Scaling | None:
    """How an allocation scales against one of its devices, and the link that it would need.

    None for one rank, and for ranks that share layers. `options` are those of `estimate`. Raises
    what `estimate` raises.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> est.scaling(graph, "2x4:t4-g4dn").against
    '1x1:t4-g4dn'
    """
    from estimator.advise.scaling import scaling_of

    return scaling_of(balance(EstimateRequest.of(graph, allocation, **options)).answer)


def sweep(
    graph: OpGraph,
    patterns: str | Sequence[str],
    *,
    strategies: Sequence[str | Strategy] | None = None,
    executor: Executor | None = None,
    **options: Unpack[Options],
) -> list[SweepRow]:
    """Every allocation of patterns such as ``1..8x1,8:h100-sxm``, estimated on its own.

    With `strategies` each allocation has a row for each of them, the fastest first; ``["places"]``
    compares where gradients are merged and parameters updated: on devices, hosts, servers. Rows
    that cannot be answered keep their reason; `options` are those of `estimate`. Raises the first
    reason where none can be answered, AllocationError for a text that is no pattern.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> [row.allocation for row in est.sweep(graph, "1x1..2:t4-g4dn")]
    ['1x1:t4-g4dn', '1x2:t4-g4dn']
    """
    from estimator.advise.scaling import expand_pattern, rank_strategies
    from estimator.advise.scaling import sweep as sweep_of

    listed = [patterns] if isinstance(patterns, str) else patterns
    if strategies is not None:

        def answer_of(strategy: Strategy, text: str) -> Estimate:
            return _swept(graph, {**options, "strategy": strategy}, text)

        texts = [text for pattern in listed for text in expand_pattern(pattern)]
        return [
            row
            for text in texts
            for row in rank_strategies(text, strategies, partial(answer_of, text=text))
        ]
    return sweep_of(listed, partial(_swept, graph, options), executor=executor)


def _swept(graph: OpGraph, options: Options, allocation: str) -> Estimate:
    return balance(EstimateRequest.of(graph, allocation, **options)).answer


def prepare(
    graph: OpGraph,
    machines: Iterable[str | MachineProfile],
    *,
    batch_per_gpu: int | Sequence[int] | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
) -> None:
    """Compile a traced graph ahead for every number of devices of some machines.

    The first estimate of a graph, batch, strategy and number of devices in use on a node compiles
    its operators for that machine; later ones take microseconds. A scheduler does that here, when a
    job arrives and before it has to decide. `batch_per_gpu` is one batch or several, by default
    what was traced. What is compiled stays in this process: processes forked afterwards have it,
    others compile for themselves, which takes less time than sending it does. Raises ProfileError,
    UnknownMachineError, WorkloadError, StrategyError.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> est.prepare(graph, ["t4-g4dn", "a100-p4d"], batch_per_gpu=[4, 8])
    """
    if not isinstance(graph, OpGraph):
        raise WorkloadError(
            f"what is prepared is an OpGraph, found {type(graph).__name__}; make one with "
            "trace_model"
        )
    named = [machines] if isinstance(machines, str | MachineProfile) else machines
    if not isinstance(named, Iterable):
        raise UnknownMachineError(
            f"machines are names or profiles in a list, found {quoted(machines)}; write one such "
            "as ['h100-sxm']"
        )
    DEFAULT.prepare(
        graph,
        named,
        batch_per_gpu=batch_per_gpu,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
    )
