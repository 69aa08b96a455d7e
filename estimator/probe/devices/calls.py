"""Write down operator calls to be timed, and turn them into real ones, warm or cold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.devices.backend import Backend
from estimator.tensors import ITEM_BYTES, OpCall, TensorSpec


def spec_of(tensor: Any) -> TensorSpec:
    """Describe a torch tensor; strides are left out where it is contiguous."""
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), strides)


def torch_dtype(name: str) -> Any:
    """torch's dtype of a TensorSpec's dtype name; raises ProbeError."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProbeError(
            f"this torch has no dtype '{name}'; use the torch the graph was traced with"
        )
    return dtype


def find_operator(target: str) -> Callable[..., Any]:
    """The overload that ``aten.addmm.default`` names; raises ProbeError if this torch lacks it."""
    import torch

    operator: Any = torch.ops
    for name in target.split("."):
        operator = getattr(operator, name, None)
        if operator is None:
            raise ProbeError(f"this torch has no operator '{target}'; trace the model again")
    return operator


def output_tensors(result: Any) -> list[Any]:
    """Every tensor that an operator returned, in order; what it did not compute is left out."""
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in output_tensors(item)]
    return []


def real_arguments(
    call: OpCall, tensors: Iterator[Any], *, device: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments with `tensors` in place of the specs, in their order.

    A ``device`` keyword becomes `device`, so that a graph traced on fake tensors runs here.
    """
    positional = [decode_argument(_fill(argument, tensors)) for argument in call.arguments]
    keywords = {name: decode_argument(_fill(value, tensors)) for name, value in call.keywords}
    if device is not None and keywords.get("device") is not None:
        keywords["device"] = device
    return positional, keywords


def decode_argument(value: Any) -> Any:
    """The inverse of how a trace writes arguments down (`graph.trace.record`); lists for tuples.

    >>> decode_argument(("torch.float32", 2))
    [torch.float32, 2]
    """
    import torch

    if isinstance(value, tuple):
        return [decode_argument(item) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _fill(value: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(value, TensorSpec):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_fill(item, tensors) for item in value)
    return value


def span_elements(spec: TensorSpec) -> int:
    """Elements of memory from a tensor's first to its last element."""
    if spec.numel == 0:
        return 0
    if spec.strides is None:
        return spec.numel
    reach = zip(spec.shape, spec.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in reach)


def shaped(memory: Any, spec: TensorSpec, start: int = 0) -> Any:
    """The tensor of that shape and strides that begins at an element of a flat one."""
    if spec.strides is None:
        return memory[start : start + spec.numel].view(spec.shape)
    return memory.as_strided(spec.shape, spec.strides, start)


_MASK_TRUE_RATIO = 0.9


def whole_numbers(spec: TensorSpec, least: int, most: int, device: Any) -> Any:
    """A tensor of whole numbers within bounds, or of truth values."""
    import torch

    span = max(1, span_elements(spec))
    if spec.dtype == "bool":
        return shaped(torch.rand(span, device=device) < _MASK_TRUE_RATIO, spec)
    values = torch.randint(least, most + 1, (span,), device=device)
    return shaped(values.to(torch_dtype(spec.dtype)), spec)


_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCall:
    """One call of the grid; its outputs are not described yet.

    Integer tensors get values below `index_high`; the tensors numbered in `positive` (in argument
    order) get positive values, those in `counting` 0, 1, 2, …. A gradient that needs what only its
    forward call can make (a library's workspace) `follows` that call; its last tensor is then the
    one that call `handed` over, by default the last it returned. `math` is "tf32" where float32
    matmuls shall run on tensor cores. CUDA holds the inputs numbered in `statistics` in float32,
    whatever dtype the others are in.
    """

    call: OpCall
    index_high: int = 2
    positive: tuple[int, ...] = ()
    counting: tuple[int, ...] = ()
    follows: GridCall | None = None
    handed: int = -1
    math: str = ""
    statistics: tuple[int, ...] = ()

    @property
    def read_bytes(self) -> int:
        return sum(spec.storage_bytes for spec in self.call.inputs)


_MARKS = {option.name for option in fields(GridCall)} - {"call"}


def grid_call(target: str, *arguments: Any, **given: Any) -> GridCall:
    """A call of ``aten.<target>``, of its default overload if the target names none.

    Lists stand for lists of the operator. Of `given`, fields of a GridCall mark the call, all
    others are keywords of the operator.
    """
    marks = {name: _tree(given.pop(name)) for name in _MARKS & given.keys()}
    call = OpCall(
        target=f"aten.{target}" if "." in target else f"aten.{target}.default",
        arguments=tuple(_tree(argument) for argument in arguments),
        keywords=tuple((name, _tree(value)) for name, value in given.items()),
    )
    return GridCall(call=call, **marks)


def _tree(value: Any) -> Any:
    return tuple(_tree(item) for item in value) if isinstance(value, list) else value


def spread(calls: Sequence[GridCall]) -> list[GridCall]:
    """The same calls, reordered so that every prefix is spread evenly over the list."""
    ranked = sorted(range(len(calls)), key=lambda number: (number * _GOLDEN_RATIO) % 1.0)
    return [calls[number] for number in ranked]


def interleave(families: Iterable[Sequence[GridCall]]) -> list[GridCall]:
    """Take from each family in proportion to its length, spread each, drop repeated calls."""
    placed = [
        ((position + 0.5) / len(family), order, call)
        for order, family in enumerate(families)
        for position, call in enumerate(spread(family))
    ]
    placed.sort(key=lambda item: item[:2])
    return list({(call.call, call.math): call for _, _, call in placed}.values())


def thinned(grid_calls: Iterable[GridCall], step: int) -> list[GridCall]:
    """Every `step`-th call of each operator, its first one included: no operator is lost."""
    numbers: dict[str, int] = {}
    kept = []
    for grid_call in grid_calls:
        number = numbers.get(grid_call.call.target, 0)
        numbers[grid_call.call.target] = number + 1
        if number % step == 0:
            kept.append(grid_call)
    return kept


def in_dtype(
    grid_calls: Iterable[GridCall], dtype: str, *, on_cuda: bool = False
) -> list[GridCall]:
    """The same calls with every float32 tensor, and every mention of it, in another dtype.

    Those that name a dtype by a keyword are left out; `on_cuda` statistics stay in float32.
    """
    return [
        _retyped_call(grid_call, dtype, on_cuda=on_cuda)
        for grid_call in grid_calls
        if "dtype" not in dict(grid_call.call.keywords)
    ]


def _retyped_call(grid_call: GridCall, dtype: str, *, on_cuda: bool) -> GridCall:
    kept = grid_call.statistics if on_cuda else ()
    arguments = _retyped(grid_call.call.arguments, dtype, kept, itertools.count())
    follows = grid_call.follows and _retyped_call(grid_call.follows, dtype, on_cuda=on_cuda)
    return replace(grid_call, call=replace(grid_call.call, arguments=arguments), follows=follows)


def _retyped(tree: Any, dtype: str, kept: Sequence[int], numbers: Iterator[int]) -> Any:
    if isinstance(tree, TensorSpec):
        changes = next(numbers) not in kept and tree.dtype == "float32"
        return replace(tree, dtype=dtype) if changes else tree
    if isinstance(tree, tuple):
        return tuple(_retyped(item, dtype, kept, numbers) for item in tree)
    return f"torch.{dtype}" if tree == "torch.float32" else tree


_ALIGNMENT_BYTES = 64
_PATTERN_ELEMENTS = 1 << 20
_SMALLEST_BLOCK_BYTES = 128 << 20
# Caches do not replace strictly the oldest line; this much more than their size empties them: an
# L3 of 480 MiB still held a twentieth of 16 MiB after 480 MiB of others, and none after 720.
_FLUSH_FACTOR = 1.5


class TensorSource:
    """Makes the input tensors of calls; one block of memory per dtype and sign.

    Tensors are cut one after the other around the block, so that by the time one is cut from the
    same place again a whole block (more than the last-level cache holds) has been walked over.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.emptying_bytes = int(_FLUSH_FACTOR * backend.last_level_cache_bytes())
        self.block_bytes = max(self.emptying_bytes, _SMALLEST_BLOCK_BYTES)
        self._blocks: dict[tuple[str, bool], Any] = {}
        self._places: dict[tuple[str, bool], int] = {}
        self._flusher: Any = None

    def arguments(self, grid_call: GridCall) -> list[Any]:
        """Fresh tensors for one call, in argument order."""
        private = is_in_place(grid_call.call.target)
        tensors = []
        for position, spec in enumerate(grid_call.call.inputs):
            if position in grid_call.counting:
                tensors.append(self._counting(spec))
            elif "float" in spec.dtype:
                cut = self._cut(spec, positive=position in grid_call.positive)
                tensors.append(cut.clone() if private and position == 0 else cut)
            else:
                high = max(0, grid_call.index_high - 1)
                tensors.append(whole_numbers(spec, 0, high, self.backend.device))
        return tensors

    def is_cheap(self, grid_call: GridCall) -> bool:
        """Whether arguments are cut out of blocks, cold each time, without writing any memory."""
        return not is_in_place(grid_call.call.target) and all(
            "float" in spec.dtype for spec in grid_call.call.inputs
        )

    def flush(self, most_bytes: int | None = None) -> None:
        """Read more memory than the last-level cache holds, so that nothing else is left in it.

        No more than `most_bytes`, if given: what was used last is then that far back.
        """
        import torch

        size = min(self.emptying_bytes, most_bytes or self.emptying_bytes)
        if self._flusher is None or self._flusher.nbytes < 4 * (size // 4):
            self._flusher = torch.ones(size // 4, device=self.backend.device)
        self._flusher[: size // 4].sum()

    def _block(self, dtype: str, positive: bool) -> Any:
        import torch

        key = (dtype, positive)
        if key not in self._blocks:
            # Positive tensors are few beside others; a smaller block is walked over as well.
            count = self.block_bytes // (2 if positive else 1) // ITEM_BYTES[dtype]
            pattern = torch.randn(_PATTERN_ELEMENTS, device=self.backend.device)
            if positive:
                pattern = pattern.abs_().add_(0.5)
            repeats = -(-count // _PATTERN_ELEMENTS)
            self._blocks[key] = pattern.to(torch_dtype(dtype)).repeat(repeats)
            self._places[key] = 0
        return self._blocks[key]

    def _cut(self, spec: TensorSpec, *, positive: bool) -> Any:
        import torch

        block = self._block(spec.dtype, positive)
        key, step = (spec.dtype, positive), _ALIGNMENT_BYTES // ITEM_BYTES[spec.dtype]
        span = span_elements(spec)
        if span > block.numel():
            plain = torch.randn(
                spec.shape, device=self.backend.device, dtype=torch_dtype(spec.dtype)
            )
            return plain.abs_().add_(0.5) if positive else plain
        if self._places[key] + span > block.numel():
            self._places[key] = 0
        place = self._places[key]
        self._places[key] = place + -(-span // step) * step
        return shaped(block, spec, place)

    def _counting(self, spec: TensorSpec) -> Any:
        import torch

        count = torch.arange(spec.numel, device=self.backend.device)
        return count.to(torch_dtype(spec.dtype)).view(spec.shape)


def is_in_place(target: str) -> bool:
    """Whether an operator writes into its first argument, as ``aten.add_.Tensor`` does.

    >>> is_in_place("aten.add_.Tensor"), is_in_place("aten.add.Tensor")
    (True, False)
    """
    return target.split(".")[1].endswith("_")
