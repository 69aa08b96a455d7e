"""Give operators the outputs that real ones have, where torch's fake ones differ or are missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's own rule takes bfloat16 alone, the kernel every float dtype (the CPU's too)."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        groups = offsets.shape[0] if offsets is not None else 1
        shape: tuple[int, ...] = (groups, rows, columns)
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    dtype = out_dtype or left.dtype
    # aten/src/ATen/native/GroupedMMUtils.h: rows start at multiples of 16 bytes.
    step = max(1, 16 // dtype.itemsize)
    padded = (columns + step - 1) // step * step
    strides = (padded, 1) if len(shape) == 2 else (rows * padded, padded, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)


def _layer_norm_backward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """The kernel's input gradient is contiguous; torch's fake one follows the output gradient."""
    results = aten.native_layer_norm_backward.default(*args, **kwargs)
    return tuple(
        result
        if result is None or result.is_contiguous()
        else torch.empty(result.shape, dtype=result.dtype, device=result.device)
        for result in results
    )


def _fused_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The CPU has no such kernel; CUDA's keeps one number for each row."""
    kept = input.dim() - len(normalized_shape)
    shape = (*input.shape[:kept], *(1 for _ in normalized_shape))
    dtype = torch.promote_types(input.dtype, torch.float32)
    fresh = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return fresh, torch.empty(shape, dtype=dtype, device=input.device)


def _fused_rms_norm_backward(
    gradient: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    fresh = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return fresh, torch.empty_like(weight) if weight is not None and output_mask[1] else None


def _mkldnn_rnn_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The kernel keeps a workspace for backward, which torch's fake one leaves out."""
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer.default(*args, **kwargs)
    source, weight_ih, mode, hidden_size = args[0], args[1], args[9], args[10]
    steps, batch, features = source.shape
    has_biases, is_training = args[12], args[15]
    if is_training and source.dtype == torch.float32:
        gates = weight_ih.shape[0] // hidden_size
        size = _rnn_workspace_bytes(steps, batch, features, hidden_size, gates, mode, has_biases)
        workspace = torch.empty(size, dtype=torch.uint8, device=source.device)
    return output, hidden, cell, workspace


def _rnn_workspace_bytes(
    steps: int, batch: int, features: int, hidden: int, gates: int, mode: int, has_biases: bool
) -> int:
    """oneDNN's own answer; for long sequences four short ones, bilinear in steps and batch."""
    low, high = 16, 32
    if steps * batch <= high * high:
        return _ask_rnn_workspace(steps, batch, features, hidden, gates, mode, has_biases)
    corners = [
        _ask_rnn_workspace(rows, columns, features, hidden, gates, mode, has_biases)
        for rows in (low, high)
        for columns in (low, high)
    ]
    down, across = (steps - low) / (high - low), (batch - low) / (high - low)
    at_low = corners[0] + (corners[1] - corners[0]) * across
    at_high = corners[2] + (corners[3] - corners[2]) * across
    return max(0, round(at_low + (at_high - at_low) * down))


@lru_cache(maxsize=64)
def _ask_rnn_workspace(
    steps: int, batch: int, features: int, hidden: int, gates: int, mode: int, has_biases: bool
) -> int:
    # Without grad mode the kernel keeps no workspace.
    with _disable_current_modes(), torch.enable_grad():
        weights = [torch.zeros(gates * hidden, size) for size in (features, hidden)]
        weights += [torch.zeros(gates * hidden) for _ in range(2)]
        state = torch.zeros(batch, hidden)
        results = aten.mkldnn_rnn_layer.default(
            torch.zeros(steps, batch, features), *weights, state, state,
            False, [], mode, hidden, 1, has_biases, False, False, True,
        )  # fmt: skip
        return int(results[3].numel())


def _cudnn_rnn(*args: Any) -> tuple[Tensor, ...]:
    """torch's fake one leaves out reserve space and packed weights, which backward needs."""
    output, hidden, cell, _, _ = aten._cudnn_rnn.default(*args)
    source, weights, train = args[0], args[1], args[12]
    packed = source.new_empty(sum(weight.numel() for weight in weights))
    # cuDNN keeps what the gates and cells of each step and layer were, in the input's precision.
    gates = weights[0].shape[0] // args[7]
    kept = output.numel() * args[9] * (gates + 2) * source.element_size() if train else 0
    return output, hidden, cell, source.new_empty(kept, dtype=torch.uint8), packed


def _cudnn_rnn_backward(*args: Any) -> tuple[Any, ...]:
    source, weights, hidden, cell = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(source),
        torch.empty_like(hidden),
        None if cell is None else torch.empty_like(cell),
        [torch.empty_like(weight) for weight in weights],
    )


def _of_one_type(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's fake products take factors of unlike types, which its real ones refuse."""

    def product(*factors: Any, **named: Any) -> Tensor:
        kinds = [str(each.dtype).removeprefix("torch.") for each in factors]
        if len(set(kinds)) > 1:
            raise RuntimeError(f"a product's tensors must have one dtype, found {', '.join(kinds)}")
        return function(*factors, **named)

    return product


FAKE_RULES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _of_one_type(aten.mm.default),
    aten.addmm.default: _of_one_type(aten.addmm.default),
    aten._grouped_mm.default: _grouped_mm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
    aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}
