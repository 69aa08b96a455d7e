"""Trace a model once: record one training step on fake tensors, for every batch size."""

from __future__ import annotations

import platform
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from estimator.errors import EstimatorError, ModelError, TraceError, UserCode
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import GraphInput, Parameter, Value
from estimator.graph.partition.plan import expert_styles_of_config, styles_of_config
from estimator.graph.trace.fake_tensors import (
    FakeTensors,
    check_batch,
    checked_dim,
    kept_as_it_was,
    laid_out,
    map_tensors,
    put_fake_tensors,
    sample_count,
    seed_all,
    tokens_per_sample,
    value_range,
    with_samples,
)
from estimator.graph.trace.functions import (
    CUDA_ASSUMPTION,
    CudaFunctions,
    EagerFunctions,
    quiet_fakes,
    unlike_tracing,
)
from estimator.graph.trace.own_steps import DEFAULT_OPTIMIZER, RecordedStep
from estimator.graph.trace.process_groups import as_one_of
from estimator.graph.trace.record import Recorder, join_runs, unknown_ops, watched_calls
from estimator.graph.trace.training_call import SUMMED, Loss, Phases, TrainingCall, packed_as_padded
from estimator.machines.profile import DeviceKind
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision

if TYPE_CHECKING:
    from estimator.graph.trace.parallel_modules import Division

_CAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST_DTYPES = {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}
_HELD_AS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MEAN_AS_LOSS = "no loss was given: the mean of the model's floating outputs is taken for it"
_DATA_DECIDES = "what the model decides by the values of its batch is decided as this batch does"


def trace_graph(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    precision: str = "fp32",
    target: DeviceKind = "cpu",
    channels_last: bool = False,
    batch_dim: int | None = None,
    name: str | None = None,
    ranks: int | None = None,
) -> OpGraph:
    """Record forward, loss and backward of `model` on `batch` as a graph that holds no tensors.

    Runs the model's own Python twice on fake tensors (at the batch given and at twice that), which
    gives the operators that eager training dispatches, at every batch size. `batch` is a tensor, a
    tuple (``model(*batch)``) or a mapping (``model(**batch)``), or a DataLoader or Dataset that
    gives one; `loss(output, batch)` defaults to the model's ``training_step(batch, batch_idx)``,
    else ``output.loss``, else the mean of the floating outputs; a step may call backward() itself.
    The optimizer is by default what that or ``configure_optimizers()`` has, else "adamw". What
    forward() does not take of a batch, such as the targets of ``(inputs, targets)``, is what
    ``loss(output, targets)`` gets. A sample is one index of dimension 0 (`batch_dim`: of that one)
    of the inputs that share the commonest size there. `channels_last` lays parameters and inputs of
    four dimensions out so. A model that asks torch.distributed itself is traced as one of `ranks`.
    The model is left as it was. Raises ModelError, TraceError.

    >>> graph = trace_graph(nn.Linear(3, 2), torch.randn(4, 3))
    >>> graph.batch, [parameter.name for parameter in graph.parameters]
    (4, ['bias', 'weight'])
    """
    wanted = None if optimizer is None else check_optimizer(optimizer)
    check_precision(precision)
    _check_model(model, target, name := name or type(model).__name__)
    call = TrainingCall.of(model, batch, loss)
    precision, unusual = _held_precision(model, precision)
    division = _division(model, name)
    tracer = _Tracer(
        model=model,
        call=call,
        precision=precision if division is None else division.precision(precision),
        target=target,
        channels_last=channels_last,
        name=f"{name}, {unusual}" if unusual else name,
        division=division,
    )
    traced = partial(_traced, tracer, checked_dim(batch_dim), optimizer=wanted, unusual=unusual)
    return as_one_of(ranks, tracer.name, target, traced)


def _traced(tracer: _Tracer, dim: int, *, optimizer: str | None, unusual: str | None) -> OpGraph:
    """The graph of the step at two batch sizes.

    `unusual` names the type of parameters that no precision stands for.
    """
    batch = tracer.call.batch
    check_batch(batch)
    samples = sample_count(batch, dim)
    if samples == 0:
        raise ModelError(f"the batch of {tracer.name} has no sample; give at least one")
    with kept_as_it_was(tracer.model), quiet_fakes():
        first = tracer.run(batch)
        second, fixed_because = tracer.run_at_twice(batch, dim, samples)
    ops, values, difference = join_runs(first.recorder, None if second is None else second.recorder)
    fixed_because = fixed_because or difference
    optimizer, parameters, recorded = _updated(tracer, first, values, optimizer)
    assumptions = [
        *((CUDA_ASSUMPTION,) if tracer.target == "cuda" else ()),
        *tracer.call.assumptions,
        *recorded,
        *first.recorder.constants.assumptions,
    ]
    if unusual:
        assumptions.append(f"parameters are {unusual}, for which no peak of a device is known")
    if tracer.channels_last and not any("convolution" in op.call.target for op in ops):
        assumptions.append("channels last changes nothing: the model has no convolution")
    if fixed_because is not None:
        assumptions.append(f"the batch is fixed as traced: {fixed_because}")
    graph = OpGraph(
        name=tracer.name,
        target=tracer.target,
        precision=tracer.precision,
        optimizer=optimizer,
        batch=samples,
        # A fixed batch keeps its size as `batch`, but has no second one to draw a line through.
        other_batch=None if samples is None or fixed_because is not None else 2 * samples,
        tokens_per_sample=tokens_per_sample(batch, samples),
        channels_last=tracer.channels_last,
        ops=ops,
        values=values,
        parameters=parameters,
        frozen_parameter_bytes=sum(
            each.nbytes for each in first.fakes.parameters.values() if not each.requires_grad
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in first.fakes.buffers.values()),
        buffers=len(first.fakes.buffers),
        inputs=first.inputs,
        module_calls=first.recorder.module_calls,
        function_calls=first.recorder.function_calls,
        unknown_ops=unknown_ops(ops),
        assumptions=tuple(dict.fromkeys(assumptions)),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        tp_plan=styles_of_config(tracer.model),
        ep_plan=expert_styles_of_config(tracer.model),
    )
    return graph if tracer.division is None else tracer.division.marked(graph)


def _division(model: nn.Module, name: str) -> Division | None:
    """How a model is divided over ranks, None where its parameters are whole."""
    if not any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return None
    from estimator.graph.trace.parallel_modules import division_of

    return division_of(model, name)


def _updated(
    tracer: _Tracer, first: _RecordedRun, values: Sequence[Value], optimizer: str | None
) -> tuple[str, tuple[Parameter, ...], tuple[str, ...]]:
    """(the optimizer, the parameters with what updates them, what is assumed of that)."""
    updates, assumptions = first.recorded.updates, first.recorded.assumptions
    configured = tracer.call.configured
    if not assumptions and isinstance(tracer.model, Phases):
        assumptions = (SUMMED,)
    elif not assumptions and optimizer is None and configured is not None:
        updates = configured.updates(tracer.model)
        assumptions = tuple(updates.assumptions)
    parameters = first.recorded.parameters(values)
    if updates.counts:
        optimizer, parameters = updates.of(parameters, optimizer)
    return optimizer or DEFAULT_OPTIMIZER, parameters, assumptions


def _check_model(model: Any, target: str, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"a model to be traced is an nn.Module, found {reprlib.repr(model)}; names of models "
            "are for the command line"
        )
    if target not in get_args(DeviceKind):
        kinds = " or ".join(f"'{kind}'" for kind in get_args(DeviceKind))
        raise ModelError(f"'{target}' is no kind of device to trace for; use {kinds}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{name} has no trainable parameter; there is nothing to train")


def _held_precision(model: nn.Module, precision: str) -> tuple[str, str | None]:
    """The precision that a model is in, and the type of its parameters where none names it.

    A model kept in half is trained as such, whether it was asked for or not.
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if precision == "fp32" and len(kinds) == 1 and kinds <= set(_HELD_AS):
        precision = _HELD_AS[kinds.pop()]
    wide = sorted(
        str(kind).removeprefix("torch.")
        for kind in kinds
        if kind is torch.float64 or kind.is_complex
    )
    return precision, ", ".join(wide) if precision == "fp32" and wide else None


@dataclass(slots=True)
class _RecordedRun:
    recorder: Recorder
    fakes: FakeTensors
    recorded: RecordedStep
    inputs: tuple[GraphInput, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Tracer:
    """How the model is run on fake tensors, the same way at both batch sizes."""

    model: nn.Module
    call: TrainingCall
    precision: str
    target: DeviceKind
    channels_last: bool
    name: str
    division: Division | None = None

    def run(self, batch: Any) -> _RecordedRun:
        """One step at one batch size; the model is put back by the caller and between runs."""
        dtype = _CAST_DTYPES.get(self.precision)
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        made = Recorder if self.division is None else self.division.recorder
        recorder = made(self.model, fake_mode, self.target)
        fake = UserCode(
            f"{self.name} or its batch cannot stand without data",
            advice="check its parameters and inputs",
            error=TraceError,
        )
        padded = packed_as_padded(recorder.constants.assumptions)
        with fake, kept_as_it_was(self.model), unlike_tracing(), padded, fake_mode:
            seed_all(0)
            if self.division is not None:
                self.division.gather(self.model)
            fakes = put_fake_tensors(self.model, dtype=dtype, channels_last=self.channels_last)
            run = _RecordedRun(recorder, fakes, RecordedStep(recorder, fakes))
            for parameter in fakes.parameters.values():
                recorder.place(parameter, "parameter")
            for name, buffer in fakes.buffers.items():
                recorder.place(buffer, "buffer")
                recorder.constants.give(buffer, fakes.real_buffers[name])
            fake_batch = self._place_batch(run, batch, dtype)
            with run.recorded.watching(), watched_calls(recorder), torch.enable_grad():
                self._step(run, fake_batch)
        return run

    def run_at_twice(
        self, batch: Any, dim: int, samples: int | None
    ) -> tuple[_RecordedRun | None, str | None]:
        """The same step at twice the batch, or why there is none."""
        if samples is None:
            return None, "its inputs share no size along the batch dimension"
        try:
            return self.run(with_samples(batch, dim, samples)), None
        except EstimatorError as error:
            failed = error
        try:
            return self.run(with_samples(batch, dim, samples, packed=True)), None
        except EstimatorError:
            return None, f"twice that fails ({failed})"

    def _place_batch(self, run: _RecordedRun, batch: Any, dtype: torch.dtype | None) -> Any:
        inputs: list[GraphInput] = []

        def change(path: str, real: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and real.is_floating_point() else real.dtype
            fake = laid_out(real, wanted, self.channels_last)
            fake.requires_grad_(real.requires_grad)
            index = run.recorder.place(fake, "input")
            # Token ids and masks decide by what they are; samples by what they happen to be.
            by_chance = _DATA_DECIDES if real.is_floating_point() else None
            run.recorder.constants.give(fake, real, by_chance)
            with unset_fake_temporarily():
                low, high = value_range(real)
            inputs.append(GraphInput(name=path, value=index, low=low, high=high))
            return fake

        fake_batch = map_tensors(batch, change)
        run.inputs = tuple(inputs)
        return fake_batch

    def _step(self, run: _RecordedRun, batch: Any) -> None:
        recorder, recorded = run.recorder, run.recorded
        user_code = UserCode(
            f"{self.name} cannot run on this batch",
            advice=self.call.advice,
            error=TraceError,
        )
        functions = CudaFunctions if self.target == "cuda" else EagerFunctions
        with recorder, functions(recorder.constants), user_code:
            value = self._loss(recorder, recorded, batch)
            if recorded.backwards:
                return
            if not isinstance(value, Tensor) or value.numel() != 1:
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ModelError(f"the loss of {self.name} must be one number, found {shown}")
            if not value.requires_grad:
                raise ModelError(
                    f"the loss of {self.name} does not depend on any trainable parameter"
                )
            recorded.run_backward((value,))

    def _loss(self, recorder: Recorder, recorded: RecordedStep, batch: Any) -> Any:
        """The loss of the step, None of one that has called backward() itself."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = self.call.called(self.model, batch, recorded.fake_of)
            if recorded.backwards:
                return None
            if self.call.is_loss_assumed(self.model, output):
                recorder.constants.assumptions[_MEAN_AS_LOSS] = None
            return self.call.loss_of(self.model, output, batch)
