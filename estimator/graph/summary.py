"""Make the graph of a training job of which only a summary is known, given as JSON.

A summary has the sizes of parameters and either FLOPs or a few step times. The graph has one part
of the forward and one of the backward pass for each parameter tensor, so that buckets, updates,
memory and everything else follow from it as from a traced graph.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from estimator.errors import EstimatorError, ModelError, WorkloadError, first_fault, quoted
from estimator.files import parse_json, read_text
from estimator.graph.costs.call_costs import StepLine, StepPart, fit_step_line, known_peak
from estimator.graph.ir.op_graph import BLOCK_TENSORS, OpGraph
from estimator.graph.ir.ops import Op, Parameter, Phase, Value, ValueKind
from estimator.machines.catalogue import named_profile
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.tensors import ITEM_BYTES, OpCall, TensorSpec
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision

# The backward pass computes two matmuls for each one of the forward pass.
_FORWARD_RATIO = 1 / 3
_PARAMETER_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_PRODUCT_DTYPES = _PARAMETER_DTYPES | {"bf16-amp": "bfloat16", "fp16-amp": "float16"}
# More than any job has; a graph has some operators for each tensor.
_MOST_TENSORS = 100_000


def _number(value: Any) -> Any:
    """Refuse what pydantic would take for a number: JSON has numbers of its own."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number, found {quoted(value)}")
    return value


_Count = Annotated[int, BeforeValidator(_number), Field(gt=0, le=10**9)]
_Bytes = Annotated[int, BeforeValidator(_number), Field(gt=0, le=10**18)]
_Ratio = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
_Flops = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e30)]
_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=1e-9, le=1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSummary:
    """What is known of a training job without its model; `summary_from` reads and checks one.

    `parameter_bytes` are spread evenly over `tensors` parameter tensors, unless `tensor_bytes` has
    the size of each, in the order of the forward pass. In that order `ready_ratios` say after which
    share (above 0, up to 1) of the backward pass each one's gradient is final; without them the
    gradients come evenly, the last tensor's first.
    `flops_per_sample` counts forward and backward pass, a multiply-add as 2: for a transformer
    6 x parameters x tokens. `step_times` are (samples, seconds) of whole steps, update included, on
    one device of `machine`; they go before FLOPs, which then only tell the MFU.
    `activation_bytes_per_sample` is what activations take at the end of the forward pass. `batch`
    are samples per device and micro-batch where none are asked for: by default the first one timed,
    else 1.
    """

    name: Annotated[str, Field(min_length=1)] = "job"
    parameter_bytes: _Bytes | None = None
    tensors: Annotated[_Count, Field(le=_MOST_TENSORS)] | None = None
    tensor_bytes: tuple[_Bytes, ...] = ()
    ready_ratios: tuple[_Ratio, ...] = ()
    flops_per_sample: _Flops | None = None
    step_times: tuple[tuple[_Count, _Seconds], ...] = ()
    machine: Annotated[str, Field(min_length=1)] | None = None
    activation_bytes_per_sample: _Bytes | None = None
    tokens_per_sample: _Count | None = None
    batch: _Count | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", check_optimizer(self.optimizer))
        check_precision(self.precision)
        for field, text in (("name", self.name), ("machine", self.machine or "local")):
            if not text.isprintable():
                raise WorkloadError(
                    f"a summary's {field} must be printable, found {quoted(text)}; correct it"
                )
        if self.step_times and not self.machine:
            raise WorkloadError(
                "step_times were given without the machine that they were measured on; "
                "add machine, such as 'local'"
            )
        if not self.step_times and self.flops_per_sample is None:
            raise WorkloadError(
                "the summary has neither flops_per_sample nor step_times, so nothing says how long "
                "a step computes; give one of them"
            )
        self._check_sizes()
        if self.ready_ratios and len(self.ready_ratios) != len(self.numels):
            raise WorkloadError(
                f"ready_ratios has {len(self.ready_ratios)} entries for {len(self.numels)} tensors"
                "; give one for each, or none"
            )

    def _check_sizes(self) -> None:
        if len(self.tensor_bytes) > _MOST_TENSORS:
            raise WorkloadError(
                f"tensor_bytes has {len(self.tensor_bytes)} entries, more than any model has "
                f"tensors ({_MOST_TENSORS}); give parameter_bytes and tensors"
            )
        if self.tensor_bytes:
            for field, total in (
                ("parameter_bytes", sum(self.tensor_bytes)),
                ("tensors", len(self.tensor_bytes)),
            ):
                if getattr(self, field) not in (None, total):
                    raise WorkloadError(
                        f"{field} is {getattr(self, field)} but tensor_bytes make {total}; "
                        f"leave out {field} or correct it"
                    )
        elif self.parameter_bytes is None or self.tensors is None:
            raise WorkloadError(
                "the summary does not say how large its parameters are; give parameter_bytes and "
                "tensors, or the tensor_bytes of each"
            )
        item = ITEM_BYTES[self.parameter_dtype]
        if self.tensor_bytes and min(self.tensor_bytes) < item:
            raise WorkloadError(
                f"tensor_bytes has a tensor of {min(self.tensor_bytes)} bytes, less than one "
                f"{self.parameter_dtype}; leave out empty tensors"
            )
        if self.parameter_bytes is not None and not self.tensor_bytes:
            parameters = self.parameter_bytes // item
            if self.tensors is not None and self.tensors > parameters:
                raise WorkloadError(
                    f"tensors is {self.tensors} but parameter_bytes hold {parameters} parameters "
                    f"of {self.parameter_dtype}; a tensor has at least one, correct either"
                )

    @property
    def parameter_dtype(self) -> str:
        """What parameters are kept in; automatic mixed precision keeps float32."""
        return _PARAMETER_DTYPES.get(self.precision, "float32")

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of every parameter tensor, in the order of the forward pass."""
        item = ITEM_BYTES[self.parameter_dtype]
        if self.tensor_bytes:
            return tuple(size // item for size in self.tensor_bytes)
        return _spread((self.parameter_bytes or 0) // item, self.tensors or 1)


def _spread(total: int, parts: int) -> tuple[int, ...]:
    """A whole number in equal parts, the first ones larger by one where it does not divide.

    >>> _spread(11, 4)
    (3, 3, 3, 2)
    """
    share, more = divmod(total, parts)
    return tuple(share + (index < more) for index in range(parts))


def summary_graph(
    summary: WorkloadSummary,
    *,
    target: DeviceKind | None = None,
    profile: MachineProfile | None = None,
) -> OpGraph:
    """The graph of a job known by summary, to be estimated like any other.

    `target` is the kind of devices to be asked about: by default that of the machine with step
    times, else "cpu". `profile` stands in for the machine that the step times name. Calls stand for
    work; the memory of a step is that of the graph's values. Raises UnknownMachineError,
    ProfileError.
    """
    line = None
    if summary.step_times:
        profile = profile or named_profile(summary.machine or "local")
        peak = known_peak(profile.devices[0], summary.precision)
        line = fit_step_line(summary.step_times, peak_flops_per_s=peak)
        target = target or profile.kind
    first_batch = summary.step_times[0][0] if summary.step_times else 1
    batch = summary.batch or first_batch
    parts = _Parts(summary, line, (batch, 2 * batch))
    parameters = parts.step()
    return OpGraph(
        name=summary.name,
        target=target or "cpu",
        precision=summary.precision,
        optimizer=summary.optimizer,
        batch=batch,
        other_batch=2 * batch,
        tokens_per_sample=summary.tokens_per_sample,
        ops=tuple(parts.ops),
        values=tuple(parts.values),
        parameters=parameters,
        assumptions=tuple(_assumptions(summary)),
        versions={"summary": "1"},
        timed_on=profile.name if line is not None and profile is not None else None,
    )


def _assumptions(summary: WorkloadSummary) -> list[str]:
    """What a graph made from a summary takes for granted wherever it runs."""
    tensors = len(summary.numels)
    sizes = "" if summary.tensor_bytes else " of equal size"
    ready = "as listed" if summary.ready_ratios else "evenly, the last one's first"
    listed = [
        f"known by summary alone: {tensors} parameter tensors{sizes}, their gradients ready "
        f"{ready}, over a backward pass twice as long as the forward pass"
    ]
    if not summary.step_times:
        listed.append(
            "FLOPs are charged as matmuls, one forward and two backward for each tensor: "
            "the model's other operators come on top"
        )
    elif len({batch for batch, _ in summary.step_times}) == 1:
        listed.append(
            f"step times are known at batch {summary.step_times[0][0]} alone: a fifth of the step "
            "is taken not to depend on the batch"
        )
    if summary.activation_bytes_per_sample is None:
        listed.append("memory of activations is not known: peak memory is given without it")
    return listed


class _Parts:
    """The values and calls of a summary's step, at two batch sizes.

    Tensors whose size is not known (the batch, what flows between parts) are empty values, so that
    they count neither as memory nor as traffic.
    """

    def __init__(
        self, summary: WorkloadSummary, line: StepLine | None, batches: tuple[int, int]
    ) -> None:
        self.summary, self.line, self.batches = summary, line, batches
        self.numels = summary.numels
        self.average_numel = sum(self.numels) / len(self.numels)
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.flow = self._value("input", *(TensorSpec((batch, 0)) for batch in batches))

    def step(self) -> tuple[Parameter, ...]:
        """Write the whole step down; the parameters, in the order in which gradients are ready."""
        numels, ratios = self.numels, self.summary.ready_ratios
        tensors = len(numels)
        specs = [TensorSpec((numel,), self.summary.parameter_dtype) for numel in numels]
        weights = [self._value("parameter", spec, spec) for spec in specs]
        saved_bytes = _spread(self.summary.activation_bytes_per_sample or 0, tensors)
        saved = [
            self._value("activation", *(TensorSpec((b, size), "uint8") for b in self.batches))
            for size in saved_bytes
        ]
        for index in range(tensors):
            ends = (self.flow, weights[index], saved[index])
            self._part("forward", _FORWARD_RATIO / tensors, ends, index)
        ready = ratios or [(tensors - index) / tensors for index in range(tensors)]
        done, parameters = 0.0, []
        for index in sorted(range(tensors), key=lambda index: (ready[index], -index)):
            gradient = self._value("activation", specs[index], specs[index])
            share = (1 - _FORWARD_RATIO) * (ready[index] - done)
            weight = weights[index]
            if self.line is not None:
                self._part("backward", share, (saved[index], weight, gradient), index)
            else:
                # A matmul's gradients are those of both factors.
                self._part("backward", share / 2, (self.flow, weight, self.flow), index)
                self._part("backward", share / 2, (saved[index], self.flow, gradient), index)
            done = ready[index]
            parameters.append(
                Parameter(
                    name=f"{_block(index)}.{index % BLOCK_TENSORS}",
                    spec=specs[index],
                    gradient=gradient,
                    ready_after=len(self.ops) - 1,
                )
            )
        if done < 1:
            rest = (self.flow, weights[0], self.flow)
            self._part("backward", (1 - _FORWARD_RATIO) * (1 - done), rest, 0)
        return tuple(parameters)

    def _value(self, kind: ValueKind, spec: TensorSpec, other_spec: TensorSpec) -> int:
        self.values.append(Value(spec=spec, other_spec=other_spec, kind=kind))
        return len(self.values) - 1

    def _part(self, phase: Phase, share: float, ends: tuple[int, int, int], index: int) -> None:
        """One call with a share of the step's compute, which reads two values and writes one."""
        first, second, written = ends
        calls = [self._call(share, ends, other=other) for other in (False, True)]
        self.ops.append(
            Op(
                name=f"{phase}_{len(self.ops)}",
                call=calls[0],
                other_call=calls[1],
                phase=phase,
                module=_block(index),
                inputs=(first, second),
                outputs=(written,),
            )
        )

    def _call(self, share: float, ends: tuple[int, int, int], *, other: bool) -> OpCall:
        batch, flops = self.batches[other], self.summary.flops_per_sample
        if self.line is None:
            return self._matmul(share * (flops or 0.0), batch)
        values = [self.values[value] for value in ends]
        *read, written = (value.other_spec if other else value.spec for value in values)
        part = StepPart(share_ratio=share, batch=batch, line=self.line, flops_per_sample=flops)
        return part.call(tuple(read), (written,))

    def _matmul(self, flops_per_sample: float, batch: int) -> OpCall:
        """A matmul by a square matrix as large as the average tensor, as often as FLOPs ask."""
        rows = max(round(flops_per_sample / (2 * self.average_numel)), 1)
        inner = max(round(math.sqrt(flops_per_sample / (2 * rows))), 1)
        columns = max(round(flops_per_sample / (2 * rows * inner)), 1)
        dtype = _PRODUCT_DTYPES.get(self.summary.precision, "float32")
        left, right, out = (
            TensorSpec(shape, dtype)
            for shape in ((batch * rows, inner), (inner, columns), (batch * rows, columns))
        )
        return OpCall("aten.mm.default", (left, right), outputs=(out,))


def _block(index: int) -> str:
    """The module that a tensor belongs to, as FSDP's units are told apart."""
    return f"block.{index // BLOCK_TENSORS}"


def load_summary(path: str | os.PathLike[str]) -> WorkloadSummary:
    """Read a summary, a JSON object of `WorkloadSummary`'s fields.

    Raises ModelError where there is none to read, WorkloadError or StrategyError naming the file
    where it says what cannot be. Its name is the file's unless it has one.
    """
    try:
        data = parse_json(read_text(path))
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; check the path of the summary") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path} cannot be read as JSON ({reason}); correct the summary") from None
    return summary_from(data, str(path), name=Path(path).stem)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[WorkloadSummary]:
    return TypeAdapter(WorkloadSummary)


def summary_from(data: Any, where: str = "the summary", *, name: str = "job") -> WorkloadSummary:
    """The summary that JSON values are, called `name` unless it has one; errors name `where`.

    Raises ModelError, WorkloadError or StrategyError.
    """
    known = [item.name for item in fields(WorkloadSummary)]
    if not isinstance(data, dict):
        raise ModelError(f"{where} holds no JSON object; write one with {', '.join(known)}")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise WorkloadError(
            f"{where} has {quoted(unknown[0])}, which is no part of a summary; its parts are "
            f"{', '.join(known)}"
        )
    try:
        return _adapter().validate_python({"name": name, **data})
    except ValidationError as error:
        reason, own = first_fault(error)
        if isinstance(own, EstimatorError):
            raise type(own)(f"{where}: {own}") from None
        raise WorkloadError(f"{where}: {reason}; correct it") from None
