"""Hold a traced training step as a graph of operators, at any batch size.

A graph holds no torch tensors and no torch nodes. Shapes are affine in the batch size: each call
and each tensor is kept at two batch sizes, and `OpGraph.at` gives them at any other.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from estimator.coefficients import JobContent
from estimator.errors import WorkloadError
from estimator.graph.files import read_graph, write_graph
from estimator.graph.ir.ops import (
    Execution,
    GraphInput,
    Op,
    OpTiming,
    Parameter,
    Value,
    ValueKind,
    with_calls,
)
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.tensors import MOST_ELEMENTS, OpCall, TensorSpec

# torch.nn.TransformerEncoderLayer has 12 parameter tensors: of a job known by summary, FSDP gathers
# that many at a time.
BLOCK_TENSORS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGraph:
    """A graph at one batch size: `calls[i]` belongs to `graph.ops[i]`, `specs[j]` to value j."""

    graph: OpGraph
    batch: int | None
    calls: Sequence[OpCall]
    specs: Sequence[TensorSpec]

    def __repr__(self) -> str:
        return f"BoundGraph({self.graph!r} at batch {self.batch})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """Forward, loss and backward of one training micro-batch, traced once for every batch size.

    `parameters` stand in the order in which their gradients become ready. `batch` is the traced
    batch size (samples per device and micro-batch), None where the model has a fixed batch.
    `execution` says how its calls are issued, `channels_last` that images were laid out so,
    `grad_scaler` that gradients are unscaled and checked before the update, `clip_grad_norm` that
    they are clipped by their norm. `checkpoint` is the form of activation checkpointing that was
    asked for; what it computes again is among `ops`, as is what `float8` casts. `recipe` is
    that of the framework whose kernels its operators are. A compiled step keeps its `eager` one,
    which is what a layout divides; `tp_plan` and `ep_plan` have the styles by name that its config
    says to divide layers and experts by.
    `function_calls` are those of ``torch.autograd.Function`` in the forward pass.
    A module that was divided over ranks before it was traced gives the graph of one of them, which
    has the `layout` and `strategy` that it was divided by. `timings` holds the calls measured on
    the machine `timed_on` when tracing asked for it. A graph made from a summary has `timed_on` if
    whole steps were timed there.
    """

    name: str
    target: DeviceKind
    precision: str
    optimizer: str
    batch: int | None
    other_batch: int | None
    tokens_per_sample: int | None = None
    execution: Execution = "eager"
    channels_last: bool = False
    grad_scaler: bool = False
    clip_grad_norm: bool = False
    checkpoint: str | None = None
    float8: str | None = None
    recipe: str | None = None
    ops: Sequence[Op]
    values: Sequence[Value]
    parameters: tuple[Parameter, ...]
    frozen_parameter_bytes: int = 0
    buffer_bytes: int = 0
    buffers: int = 0
    inputs: tuple[GraphInput, ...] = ()
    module_calls: int = 0
    function_calls: int = 0
    unknown_ops: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[OpCall, OpTiming] = field(default_factory=dict)
    timed_on: str | None = None
    eager: OpGraph | None = None
    tp_plan: tuple[tuple[str, str], ...] = ()
    ep_plan: tuple[tuple[str, str], ...] = ()
    layout: str | None = None
    strategy: str | None = None

    def __repr__(self) -> str:
        # The generated one would print every operator.
        return (
            f"OpGraph({self.name} for {self.target}: {len(self.ops)} ops, "
            f"{self.parameter_count:,} parameters)"
        )

    def __hash__(self) -> int:
        # Equal graphs have equal sizes; their thousands of operators need not be gone through.
        sizes = (len(self.ops), len(self.values), self.parameter_bytes)
        return hash((self.name, self.target, self.mode, self.optimizer, self.batch, sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        # Compressed, as a file of it is: the operators of a model are much alike.
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return _unpickled, (zlib.compress(pickle.dumps(own)),)

    @property
    def mode(self) -> str:
        """How a step is run, in words: its precision and what differs from plain eager training."""
        words = (
            self.precision,
            "" if self.execution == "eager" else self.execution,
            "channels last" * self.channels_last,
            "gradient scaler" * self.grad_scaler,
            "gradients clipped" * self.clip_grad_norm,
            f"checkpoint {self.checkpoint}" if self.checkpoint else "",
            f"float8 {self.float8}" if self.float8 else "",
            self.recipe,
        )
        return ", ".join(filter(None, words))

    @property
    def workload(self) -> str:
        """Under which name its steps are observed: another precision or mode is another job."""
        return workload_name(self.name, self.mode)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.spec.numel for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.spec.nbytes for parameter in self.parameters)

    @property
    def is_summary(self) -> bool:
        """Whether it was made from a summary: its calls stand for shares of the work."""
        return "summary" in self.versions

    @property
    def has_step_times(self) -> bool:
        """Whether its calls stand for shares of steps that were timed on `timed_on`."""
        return self.is_summary and self.timed_on is not None

    @property
    def knows_activations(self) -> bool:
        """Whether the memory of activations is known; a summary may leave it out."""
        return not self.is_summary or self.values[self.ops[0].outputs[0]].spec.numel > 0

    def timings_on(self, machine: str) -> Mapping[OpCall, OpTiming]:
        """The calls that were measured on this machine: none of another one's."""
        return self.timings if self.timed_on == machine else {}

    def at(self, batch: int | None = None) -> BoundGraph:
        """The graph's calls and shapes at a batch size (None: as traced); raises WorkloadError."""
        line = self.line(batch)
        return BoundGraph(
            graph=self,
            batch=self.batch if batch is None else batch,
            calls=tuple([line.at(*op.calls) for op in self.ops]),
            specs=tuple([line.at(*value.specs) for value in self.values]),
        )

    def line(self, batch: int | None) -> BatchLine:
        """What gives calls and shapes at a batch size; see `at`."""
        if batch is None or batch == self.batch:
            return BatchLine(0, 1, 0)
        if batch < 1:
            raise WorkloadError(f"batch size must be at least 1, found {batch}")
        if self.batch is None or self.other_batch is None:
            # Operators treat dimensions of 1 unlike others: the steps at 1 and at 2 do not match.
            again = "at a batch of 2 or more" if self.batch == 1 else "with the batch you want"
            because = ", perhaps because that was 1" if self.batch == 1 else ""
            raise WorkloadError(
                f"{self.name} was traced with a fixed batch{because}; trace it again {again}"
            )
        return BatchLine(self.batch, self.other_batch, batch)

    def save(self, path: str | Path) -> None:
        """Write the graph as compressed JSON, whole or not at all."""
        write_graph(self, path)

    @classmethod
    def load(cls, path: str | Path) -> OpGraph:
        """Read a saved graph; executes nothing from the file. Raises GraphFileError."""
        known = read_graph(path)
        eager = None if known["eager"] is None else cls(**known["eager"])
        return cls(**{**known, "eager": eager})

    @classmethod
    def from_summary(
        cls,
        *,
        target: DeviceKind | None = None,
        profile: MachineProfile | None = None,
        **known: Any,
    ) -> OpGraph:
        """The graph of a job without its model; `known` are the fields of `WorkloadSummary`.

        `target` is the kind of devices to be asked about: by default that of the machine on which
        steps were timed, else "cpu"; `profile` stands in for that machine. Raises WorkloadError,
        StrategyError, UnknownMachineError, ProfileError.

        >>> graph = OpGraph.from_summary(
        ...     name="bert", parameter_bytes=438_000_000, tensors=199, flops_per_sample=2.5e11
        ... )
        >>> graph.parameter_count, graph.knows_activations
        (109500000, False)
        """
        from estimator.graph.summary import summary_from, summary_graph

        return summary_graph(summary_from(known), target=target, profile=profile)


def _unpickled(content: bytes) -> OpGraph:
    return OpGraph(**pickle.loads(zlib.decompress(content)))


def workload_name(name: str, mode: str) -> str:
    """The name of a job: that of its model, and its mode unless it is plain fp32.

    >>> workload_name("gpt2", "fp32"), workload_name("gpt2", "bf16-amp, compiled")
    ('gpt2', 'gpt2, bf16-amp, compiled')
    """
    return name if mode == "fp32" else f"{name}, {mode}"


CallOrSpec = TypeVar("CallOrSpec", OpCall, TensorSpec)


class BatchLine(NamedTuple):
    """Inter- and extrapolates every integer of two equal-shaped trees along the batch size."""

    first: int
    second: int
    wanted: int

    def at(self, one: CallOrSpec, two: CallOrSpec) -> CallOrSpec:
        """A call or a shape at the wanted batch."""
        return one if one is two or self.wanted == self.first else _at(self, one, two)

    def tree(self, one: Any, two: Any) -> Any:
        if one is two or one == two:
            return one
        if isinstance(one, TensorSpec):
            strides = None if one.strides is None else self.tree(one.strides, two.strides)
            spec = TensorSpec(self.tree(one.shape, two.shape), one.dtype, strides)
            if min(spec.shape, default=0) < 0 or spec.numel > MOST_ELEMENTS:
                raise WorkloadError(
                    f"a tensor of {one.shape} at batch {self.first} would be one of {spec.shape} "
                    f"at batch {self.wanted}; ask for another batch"
                )
            return spec
        if isinstance(one, tuple):
            return tuple(self.tree(a, b) for a, b in zip(one, two, strict=True))
        if isinstance(one, OpCall):
            trees = ((c.arguments, c.keywords, c.outputs) for c in (one, two))
            return OpCall(one.target, *map(self.tree, *trees))
        if isinstance(one, int) and not isinstance(one, bool):
            return one + (two - one) * (self.wanted - self.first) // (self.second - self.first)
        if isinstance(one, float):
            # The only floats that depend on the batch are means: constants over the batch size.
            return one * self.first / self.wanted
        return one


# The stages of a graph, and the parts of it that ranks have, share most of their calls.
@lru_cache(maxsize=1 << 15)
def _at(line: BatchLine, one: Any, two: Any) -> Any:
    return line.tree(one, two)


# Digits of a constant that depends on the batch: enough to tell constants apart, too few for the
# rounding of one that was traced at another batch size.
_DIGITS = 9


def job_content(graph: OpGraph) -> JobContent:
    """The operators and shapes of a graph but for its batch, its parameters, optimizer and mode.

    Of an integer that depends on the batch its line over the batch counts, so that one model traced
    at two batch sizes is one job. Names of models, modules and parameters do not count.
    """
    lines = _Lines(graph.batch or 0, graph.other_batch or 0)
    digest = hashlib.sha256()
    about = (graph.target, graph.mode, graph.optimizer, graph.frozen_parameter_bytes)
    digest.update(repr((*about, graph.buffer_bytes, graph.timed_on)).encode())
    for op in graph.ops:
        digest.update(f"{op.phase}{lines.call(*op.calls)}".encode())
    for parameter in graph.parameters:
        own = (parameter.optimizer, parameter.updates)
        text = f"{parameter.spec.shape}{parameter.spec.dtype}{own if own != (None, 1) else ''}"
        digest.update(text.encode())
    counts = Counter(op.call.target for op in graph.ops if not op.is_view)
    total = max(sum(counts.values()), 1)
    return JobContent(
        fingerprint=digest.hexdigest()[:32],
        mode=graph.mode,
        optimizer=graph.optimizer,
        parameter_bytes=graph.parameter_bytes,
        op_shares={target: count / total for target, count in counts.items()},
    )


class _Lines:
    """Writes calls that are known at two batch sizes as lines over the batch."""

    def __init__(self, first: int, second: int) -> None:
        self.first, self.span = first, second - first
        self._calls: dict[tuple[int, int], str] = {}

    def call(self, one: OpCall, two: OpCall) -> str:
        """The text of a call; worked out once for the same two objects."""
        key = id(one), id(two)
        if key not in self._calls:
            parts = ((call.arguments, call.keywords, call.outputs) for call in (one, two))
            self._calls[key] = f"{one.target}{self._tree(next(parts), next(parts))}"
        return self._calls[key]

    def _tree(self, one: Any, two: Any) -> str:
        if one is two or one == two:
            return str(one)
        if isinstance(one, TensorSpec):
            return f"{one.dtype}{self._tree((one.shape, one.strides), (two.shape, two.strides))}"
        if isinstance(one, tuple):
            return f"({','.join(map(self._tree, one, two))})"
        if isinstance(one, float):
            # The only floats that depend on the batch are constants over the batch size.
            return f"{one * self.first:.{_DIGITS}g}/b"
        slope = (two - one) / self.span
        return f"{one - slope * self.first:.{_DIGITS + 3}g}+{slope:.{_DIGITS + 3}g}b"


class GraphChanges:
    """A graph with other values, operators `instead` of its own (None: left out) or `before` them.

    What no operator makes any longer is not held either.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self.values = list(graph.values)
        self.instead: dict[int, Op | None] = {}
        self.before: defaultdict[int, list[Op]] = defaultdict(list)

    def graph(self, **changes: Any) -> OpGraph:
        """The changed graph, with other fields too."""
        own = self._graph.ops
        lost = {value for index in self.instead for value in own[index].outputs}
        added = (*self.instead.values(), *chain(*self.before.values()))
        lost -= {value for op in added if op for value in op.outputs}
        ops: list[Op] = []
        place = []
        for index, op in enumerate(own):
            ops += self.before.get(index, ())
            changed = self.instead.get(index, op)
            if changed is not None:
                if not lost.isdisjoint(changed.holds):
                    kept = tuple([value for value in changed.holds if value not in lost])
                    changed = replace(changed, holds=kept)
                ops.append(changed)
            place.append(max(len(ops) - 1, 0))
        parameters = [
            p if p.ready_after is None else replace(p, ready_after=place[p.ready_after])
            for p in self._graph.parameters
        ]
        changes |= {"values": tuple(self.values), "parameters": tuple(parameters)}
        return replace(self._graph, ops=tuple(ops), **changes)

    def add(
        self, specs: Iterable[TensorSpec], base: int | None = None, kind: ValueKind = "activation"
    ) -> int:
        """A new value."""
        one, two = specs
        self.values.append(Value(spec=one, other_spec=two, kind=kind, base=base))
        return len(self.values) - 1

    def new(self, like: int, dtype: str | None = None) -> int:
        """A tensor as large as another one."""
        specs = self.values[like].specs
        return self.add(replace(spec, dtype=dtype or spec.dtype, strides=None) for spec in specs)

    def kernel(
        self, op: Op, target: str, inputs: Sequence[int], outputs: Sequence[int], **changes: Any
    ) -> Op:
        """A call beside an operator that reads and writes values."""
        keywords = tuple(changes.pop("keywords", {}).items())
        calls = []
        for side in (0, 1):
            given, made = (
                tuple(self.values[v].specs[side] for v in ends) for ends in (inputs, outputs)
            )
            calls.append(OpCall(target, given, keywords, made))
        changes = {"name": f"{target.split('.')[1]}_{outputs[0]}", "holds": (), **changes}
        changes = {"is_view": False, "enters_dtensor": False, **changes}
        return with_calls(op, calls, inputs=tuple(inputs), outputs=tuple(outputs), **changes)


@lru_cache(maxsize=1 << 16)
def unit_path(path: str) -> str:
    """The repeated block that a module path lies in: up to its first numbered part, else "".

    >>> unit_path("transformer.h.3.attn"), unit_path("lm_head")
    ('transformer.h.3', '')
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def parameter_unit(parameter: Parameter) -> str:
    """The path of the unit that a parameter belongs to."""
    return unit_path(parameter.name.rpartition(".")[0])


def frozen_unit_bytes(graph: OpGraph) -> dict[str, int]:
    """Bytes of parameters that are not trained, by the unit that reads them first.

    What no op reads counts as the rest of the model.
    """
    left = graph.frozen_parameter_bytes
    if not left:
        return {}
    read: dict[str, int] = {}
    seen: set[int] = set()
    for op in graph.ops:
        for value in op.inputs:
            # A compiled kernel reads a view that no operator makes.
            while (base := graph.values[value].base) is not None:
                value = base
            if graph.values[value].kind == "parameter" and value not in seen:
                seen.add(value)
                path = unit_path(op.module)
                read[path] = read.get(path, 0) + graph.values[value].spec.nbytes
    for parameter in graph.parameters:
        path = parameter_unit(parameter)
        read[path] = read.get(path, 0) - parameter.spec.nbytes
    frozen: dict[str, int] = {}
    for path, size in sorted(read.items(), reverse=True):
        frozen[path] = min(max(size, 0), left)
        left -= frozen[path]
    frozen[""] = frozen.get("", 0) + left
    return frozen
