"""Tell what an operator call costs, and by which features its time can be predicted.

A cost is the least that a call must compute and move; it knows no machine. Formulas are in
`matmuls` and `memory_bound`, one per operator; those of kernels fused by a compiler,
and of parts of a step known by their time, are here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from estimator.elementwise import Array
from estimator.errors import WorkloadError, printable
from estimator.graph.costs import matmuls, memory_bound
from estimator.graph.costs.matmuls import is_channels_last, matmul_layout, whole_attention_flops
from estimator.graph.costs.registry import Family, Formula, cost_of, formula_of, written
from estimator.graph.ir.ops import GraphColumns, OpCost
from estimator.machines.profile import Device
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.recipe import TF32_BY_DEFAULT, peak_dtype

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import BoundGraph

FusedFamily = Literal["elementwise", "reduction", "softmax", "normalization"]
FUSED = "fused."


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """What a fused kernel does, beside the tensors that it reads and writes.

    Each outside tensor is read once (`read_bytes`; of a table only the rows looked up) and each
    output written once. `rows` and `row_length` are those of its sums; without any it is one row.
    `members` are the targets of the operators in it.
    """

    family: FusedFamily
    flops: int
    read_bytes: int
    rows: int
    row_length: int
    members: tuple[str, ...]

    def call(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> OpCall:
        """The kernel as a call that reads and writes these tensors."""
        numbers = (self.flops, self.read_bytes, self.rows, self.row_length)
        arguments = (*inputs, *numbers, self.members)
        return OpCall(f"{FUSED}{self.family}.default", arguments, outputs=outputs)

    def share(self, ranks_ratio: float) -> FusedKernel:
        """What one rank of several does of it, by the share of its rows."""
        return replace(
            self,
            flops=round(self.flops * ranks_ratio),
            read_bytes=round(self.read_bytes * ranks_ratio),
            rows=max(round(self.rows * ranks_ratio), 1),
        )

    @classmethod
    def of(cls, call: OpCall) -> FusedKernel:
        """The kernel that a call stands for; raises ValueError or TypeError for any other call."""
        flops, read_bytes, rows, row_length, members = call.arguments[len(call.inputs) :]
        family = next((f for f in _FAMILIES if f == call.name), None)
        if family is None:
            raise ValueError(f"'{call.target}' is no fused kernel")
        if any(type(number) is not int for number in (flops, read_bytes, rows, row_length)):
            raise ValueError(f"'{call.target}' has sizes that are no whole numbers")
        return cls(
            family=family,
            flops=flops,
            read_bytes=read_bytes,
            rows=rows,
            row_length=row_length,
            members=tuple(str(member) for member in members),
        )


_FAMILIES: tuple[FusedFamily, ...] = ("elementwise", "reduction", "softmax", "normalization")


def _dims(call: OpCall) -> tuple[float, ...]:
    kernel = FusedKernel.of(call)
    return float(kernel.rows), float(kernel.row_length)


def _cost(call: OpCall) -> OpCost:
    kernel = FusedKernel.of(call)
    return OpCost(float(kernel.flops), float(kernel.read_bytes), written(call))


for _family in _FAMILIES:
    cost_of(f"{FUSED}{_family}", family=_family, dims=_dims)(_cost)

STEP_PART = "summary.step_part"
# Pollux's single-T4 step times of BERT, ResNet-18 and DeepSpeech2 (petuum/adaptdl, OSDI 2021
# artifact): from one batch size to the next the median of d log seconds / d log batch is 0.79.
_FIXED_RATIO = 0.2
# Of a coefficient or what it gains, beside rounding.
_NO_GAIN = 1e-12
# There, the median error for each e-fold of the batch beyond those fitted to (mean of the three
# models): of that rule from one step time 0.15, of the line through two 0.12.
_ERROR_PER_E_FOLD_OF_ONE, _ERROR_PER_E_FOLD = 0.15, 0.12
# Batches between two timed ones are off by 1 to 6 % there.
_LEAST_ERROR = 0.03


def known_peak(device: Device, precision: str) -> float | None:
    """A device's dense peak in a model's precision, in fp32 where it computes so instead."""
    peaks = device.peak_flops_per_s
    return peaks.get(peak_dtype(precision)) or peaks.get("float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Seconds of a whole step on one device: fixed_s + samples · per_sample_s, as fitted.

    `relative_error` is the median of what the line misses of the step times; those were at
    `low_batch` to `high_batch` samples, on a device with the peak `peak_flops_per_s` in the model's
    precision (None: not known).
    """

    fixed_s: float
    per_sample_s: float
    relative_error: float
    low_batch: int
    high_batch: int
    peak_flops_per_s: float | None

    def __post_init__(self) -> None:
        # Nobody waits for longer steps; an interval is e to the power of its error.
        most = {"fixed_s": 1e9, "per_sample_s": 1e9, "relative_error": 100.0}
        for name, value in most.items():
            if not 0 <= getattr(self, name) <= value:
                raise ValueError(f"{name} of a step line is no number from 0 to {value:g}")
        if self.peak_flops_per_s is not None and not 0 < self.peak_flops_per_s <= 1e30:
            raise ValueError(f"a device with a peak of {self.peak_flops_per_s!r} FLOP/s is none")
        if not 1 <= self.low_batch <= self.high_batch:
            raise ValueError(f"step times are from {self.low_batch} to {self.high_batch} samples")

    def step_s(self, batch: int) -> float:
        """Seconds of a step of `batch` samples."""
        return self.fixed_s + batch * self.per_sample_s

    def error_at(self, batch: int) -> float:
        """Median relative error at a batch size; it grows beyond the ones that were timed."""
        one = self.low_batch == self.high_batch
        per_e_fold = _ERROR_PER_E_FOLD_OF_ONE if one else _ERROR_PER_E_FOLD
        beyond = max(math.log(self.low_batch / batch), math.log(batch / self.high_batch), 0.0)
        return max(self.relative_error, _LEAST_ERROR) + per_e_fold * beyond


def nonnegative_fit(rows: Array, seconds: Array) -> Array:
    """Coefficients ≥ 0 that minimise the squared relative error of rows @ coefficients.

    Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23; importing scipy's takes
    longer than all fits of a machine.

    >>> nonnegative_fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 4.0])).round(9)
    array([2., 1.])
    """
    scaled = rows / seconds[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    scaled /= norms
    gram, goal, solution = scaled.T @ scaled, scaled.sum(axis=0), np.zeros(len(norms))
    free: list[int] = []
    # Where columns are all but alike, rounding may let one in and out again.
    for _ in range(50 * len(norms)):
        gradient = goal - gram @ solution
        gradient[free] = 0.0
        if gradient.max() <= _NO_GAIN * len(seconds):
            break
        free.append(int(gradient.argmax()))
        while (wanted := np.linalg.solve(gram[free][:, free], goal[free])).min() <= 0.0:
            # As far as the first of them becomes 0.
            known, below = solution[free], wanted <= 0.0
            change = wanted - known
            known -= (known[below] / change[below]).max() * change
            solution[free] = known = np.where(known > _NO_GAIN, known, 0.0)
            free = [place for place, value in zip(free, known.tolist(), strict=True) if value]
        solution[free] = wanted
    return np.asarray(solution / norms)


def fit_step_line(
    step_times: Sequence[tuple[int, float]], *, peak_flops_per_s: float | None = None
) -> StepLine:
    """The line with coefficients ≥ 0 that errs least in relative terms (Lawson and Hanson 1974).

    From times at a single batch size, a fifth of the step is taken not to depend on it.

    >>> line = fit_step_line([(8, 0.3), (16, 0.5)])
    >>> round(line.fixed_s, 6), round(line.per_sample_s, 6)
    (0.1, 0.025)
    """
    batches = np.array([batch for batch, _ in step_times], dtype=float)
    seconds = np.array([time_s for _, time_s in step_times])
    low, high = int(batches.min()), int(batches.max())
    rows = np.column_stack([np.ones(len(batches)), batches])
    if low == high:
        shape = np.array([_FIXED_RATIO, (1 - _FIXED_RATIO) / low])
        fitted = shape * float(np.median(seconds))
    else:
        fitted = nonnegative_fit(rows, seconds)
    return StepLine(
        fixed_s=float(fitted[0]),
        per_sample_s=float(fitted[1]),
        relative_error=float(np.median(np.abs(rows @ fitted / seconds - 1))),
        low_batch=low,
        high_batch=high,
        peak_flops_per_s=peak_flops_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """What one call of a graph made from step times stands for: a share of the step's compute."""

    share_ratio: float
    batch: int
    line: StepLine
    flops_per_sample: float | None

    def __post_init__(self) -> None:
        if not (0 <= self.share_ratio <= 1 and self.batch >= 1):
            raise ValueError(f"{self.share_ratio!r} of a step of {self.batch!r} samples is no part")

    def call(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> OpCall:
        """The part as a call that reads and writes these tensors."""
        numbers = (self.share_ratio, self.batch, self.flops_per_sample, *astuple(self.line))
        return OpCall(STEP_PART, (*inputs, *numbers), outputs=outputs)

    @classmethod
    def of(cls, call: OpCall) -> StepPart:
        """The part that a call stands for; raises ValueError or TypeError for any other call."""
        share, batch, flops, *numbers = call.arguments[len(call.inputs) :]
        names = [item.name for item in fields(StepLine)]
        line = StepLine(**dict(zip(names, numbers, strict=True)))
        return cls(share_ratio=share, batch=batch, line=line, flops_per_sample=flops)


@cost_of(STEP_PART, family="step")
def _step_part(call: OpCall) -> OpCost:
    part = StepPart.of(call)
    # A whole graph whose flops sum to zero does not know them: it has no MFU.
    return OpCost(flops=part.share_ratio * part.batch * (part.flops_per_sample or 0.0))


# Training the largest models takes some 1e26 flops in all; squares of it are floats still.
_MOST_WORK = 1e30
# Importing these registers their formulas.
FORMULAS = (matmuls, memory_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the time of a call depends on.

    `dims` by family: matmul (batch, m, n, k); convolution (images, channels in per group, channels
    out per group, groups, output positions, kernel elements, input positions, stride); attention
    (batch x heads, queries, keys, head size, 1 if causal); recurrent (steps x batch,
    multiplications per step and sample, recurrences one after another, as many at once, columns
    and rows of the weights that multiply a state, steps); index (rows touched, row length); every
    other (rows, row length), a row being what one mean, sum or softmax is taken over, one row of
    all elements where there is no such thing.
    `layout` is "nn", "nt", "tn" or "tt" for a matmul ("t": that factor is stored by columns),
    "channels last" for a convolution whose image or filters lie so, "contiguous" or "strided"
    otherwise. `innermost_run` is how many elements stand side by side in
    the memory of every tensor of the call.
    """

    target: str
    family: Family
    dtype: str
    cost: OpCost
    dims: tuple[float, ...]
    innermost_run: int
    layout: str


def family_of(target: str) -> Family:
    """The family of an operator, "other" if it has no formula.

    >>> family_of("aten.addmm.default"), family_of("aten.add_.Tensor")
    ('matmul', 'elementwise')
    """
    formula = formula_of(target)
    return "other" if formula is None else formula.family


def op_cost(call: OpCall) -> OpCost | None:
    """The least work of a call; None if its operator has no formula, never zero for that.

    >>> call = OpCall("aten.mm.default", (TensorSpec((2, 3)), TensorSpec((3, 4))),
    ...               outputs=(TensorSpec((2, 4)),))
    >>> op_cost(call)
    OpCost(flops=48.0, read_bytes=72.0, written_bytes=32.0)
    """
    formula = formula_of(call.target)
    return None if formula is None else formula.cost(call)


@lru_cache(maxsize=1 << 14)
def features_of(call: OpCall) -> Features | None:
    """The features of a call; None if its operator has no formula.

    Raises WorkloadError for a call that its formula cannot read: one of a file, or at a batch far
    from those traced.
    """
    formula = formula_of(call.target)
    if formula is None:
        return None
    try:
        features = _features(call, formula)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise WorkloadError(
            f"the arguments of {printable(call.target)} are none of its own ({reason}); trace the "
            "model again"
        ) from error
    work = (features.cost.flops, features.cost.moved_bytes, *features.dims)
    if not all(0 <= value <= _MOST_WORK for value in work):
        raise WorkloadError(
            f"the work of {printable(call.target)} is no number from 0 to {_MOST_WORK:g}; trace "
            "the model again"
        )
    return features


def _features(call: OpCall, formula: Formula) -> Features:
    run, length = innermost_run(call)
    if formula.family == "matmul" and "backward" not in call.target:
        layout = matmul_layout(call)
    elif formula.family == "convolution" and is_channels_last(call):
        layout = "channels last"
    else:
        layout = "contiguous" if run >= length else "strided"
    return Features(
        target=call.target,
        family=formula.family,
        dtype=call.dtype,
        cost=formula.cost(call),
        dims=formula.dims(call),
        innermost_run=run,
        layout=layout,
    )


def innermost_run(call: OpCall) -> tuple[int, int]:
    """(elements that stand side by side in every tensor of the call, elements of the largest one).

    Tensors of the largest one's shape are walked together, in the order of its own strides;
    tensors broadcast to it stand still or move with it; those of unlike shapes are walked alone.
    """
    sized = [(spec.numel, spec) for spec in (*call.outputs, *call.inputs)]
    sized = [dim for dim in sized if dim[0] > 1]
    if not sized:
        return 1, 1
    length, largest = max(sized, key=lambda dim: dim[0])
    if all(spec.strides is None and spec.shape == largest.shape for _, spec in sized):
        return length, length
    together, alone = [], []
    for numel, spec in sized:
        fitted = _broadcast_strides(spec, largest.shape)
        if fitted is None:
            alone.append((numel, spec))
        else:
            together.append(fitted)
    run = _common_run(largest.shape, together)
    for numel, spec in alone:
        own = _common_run(spec.shape, [_strides(spec)])
        # A small tensor in one piece does not cut the run of a large one.
        if own < numel:
            run = min(run, own)
    return run, length


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    if spec.strides is not None:
        return spec.strides
    strides, step = [], 1
    for size in reversed(spec.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _broadcast_strides(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a tensor seen in a larger shape, None if it does not broadcast to it."""
    missing = len(shape) - len(spec.shape)
    if missing < 0:
        return None
    strides = [0] * missing
    for size, wanted, stride in zip(spec.shape, shape[missing:], _strides(spec), strict=True):
        if size != wanted and size != 1:
            return None
        strides.append(0 if size == 1 else stride)
    return tuple(strides)


def _common_run(shape: tuple[int, ...], operands: list[tuple[int, ...]]) -> int:
    """Elements of the innermost loop after merging dimensions, as torch's TensorIterator does."""
    order = sorted(
        (axis for axis, size in enumerate(shape) if size > 1),
        key=lambda axis: [strides[axis] for strides in operands],
    )
    if not order:
        return 1
    inner = order[0]
    if any(strides[inner] not in (0, 1) for strides in operands):
        return 1
    run = shape[inner]
    for outer in order[1:]:
        if any(strides[outer] != strides[inner] * shape[inner] for strides in operands):
            break
        run *= shape[outer]
        inner = outer
    return run


# The FLOPs by which MFU and HFU are told are those of matmuls, convolutions, recurrent layers and
# attention, a multiply-add as 2, whether a kernel fuses them or not; look-ups, elementwise work
# and the update do not count. In attention every query counts with every key, also where a mask
# hides some: so do PaLM (Chowdhery et al. 2022, appendix B) and torchtitan
# (``12 * n_layers * n_heads * head_dim * seq_len`` a token).

# A part of a step known by its time carries the FLOPs that were given for the model.
_COUNTED = ("matmul", "convolution", "recurrent", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one micro-batch, forward and backward.

    `model` are those that the model needs, each matmul once: they give the MFU (model FLOPs
    utilization). `hardware` adds what is computed again in the backward phase, by activation
    checkpoints and inside attention kernels: they give the HFU (hardware FLOPs utilization;
    Korthikanti et al. 2022 tell the two apart so). `tf32_by_default` are those of the latter that a
    GPU rounds to TF32 unless told otherwise.
    """

    model: float
    hardware: float
    tf32_by_default: float = 0.0


def step_flops(bound: BoundGraph, columns: GraphColumns | None = None) -> StepFlops:
    """The FLOPs of a graph at one batch size; `columns` are its own where they are at hand."""
    columns = columns or GraphColumns.of(bound.graph)
    model = hardware = tf32 = 0.0
    calls = columns.distinct_calls(bound.calls)
    every = np.bincount(columns.call_of, minlength=len(calls)).tolist()
    again = np.bincount(columns.call_of[columns.is_repeated], minlength=len(calls)).tolist()
    for call, count, repeated in zip(calls, every, again, strict=True):
        needed, executed = op_flops(call)
        model += (count - repeated) * needed
        hardware += count * executed
        tf32 += count * executed if family_of(call.target) in TF32_BY_DEFAULT else 0.0
    return StepFlops(model=model, hardware=hardware, tf32_by_default=tf32)


def op_flops(call: OpCall) -> tuple[float, float]:
    """(flops that the model needs of a call, flops that the call executes)."""
    family = family_of(call.target)
    if family == "attention":
        return whole_attention_flops(call)
    cost = op_cost(call) if family in _COUNTED else None
    return (0.0, 0.0) if cost is None else (cost.flops, cost.flops)
