"""Cut tensors for timed calls out of large blocks of random numbers, warm or cold at will."""

from __future__ import annotations

from typing import Any

from estimator.probe.backend import Backend
from estimator.probe.calls import span_elements, torch_dtype
from estimator.probe.grid_calls import GridCall
from estimator.tensors import ITEM_BYTES, TensorSpec

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
                tensors.append(self._whole_numbers(spec, grid_call.index_high))
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
        if spec.strides is None:
            return block[place : place + span].view(spec.shape)
        return block.as_strided(spec.shape, spec.strides, place)

    def _whole_numbers(self, spec: TensorSpec, high: int) -> Any:
        import torch

        device, span = self.backend.device, max(1, span_elements(spec))
        if spec.dtype == "bool":
            values = torch.rand(span, device=device) < 0.9
        else:
            values = torch.randint(0, max(1, high), (span,), device=device)
            values = values.to(torch_dtype(spec.dtype))
        if spec.strides is None:
            return values[: spec.numel].view(spec.shape)
        return values.as_strided(spec.shape, spec.strides)

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
