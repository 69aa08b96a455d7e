"""Give operators the outputs of real ones where torch's fake ones differ or are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from estimator.errors import TraceError
from estimator.graph.trace.constant_propagation import Constants, balanced_choice

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
        kinds = [str(factor.dtype).removeprefix("torch.") for factor in factors]
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

# How many elements these return is how many a mask holds.
_SELECTIONS = frozenset({aten.index.Tensor, aten.masked_select.default, aten.nonzero.default})
_HALF = "masks that the model computes from activations select every second element"
_LOGGED = "losses that the step reads, as with .item(), are read as 1"
_UNLIKE = "activations that the model compares as a whole are unlike"


def resolve(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    constants: Constants,
    fake_mode: Any,
    module: str,
) -> Any:
    """The result of an operator that fake tensors cannot give; raises TraceError if none can."""
    if func is aten.index.Tensor:
        return _boolean_index(func, args, constants, fake_mode, module)
    if func is aten.masked_select.default:
        mask = _real(args[1], func, constants, module)
        with _disable_current_modes():
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            kept = int(mask.expand(shape).sum())
        return args[0].new_empty((kept,))
    if func is aten.equal.default and any(constants.of(leaf) is None for leaf in args):
        return _are_one(args[0], args[1], constants)
    if func is aten._ctc_loss.Tensor:
        return _ctc_loss(func, args, constants, module)
    if func is aten._ctc_loss_backward.Tensor:
        return torch.empty_like(args[1])
    real_args = tree_map(lambda leaf: _real(leaf, func, constants, module), args)
    real_kwargs = tree_map(lambda leaf: _real(leaf, func, constants, module), dict(kwargs))
    with _disable_current_modes(), torch.no_grad():
        result = func(*real_args, **real_kwargs)
    return tree_map(
        lambda leaf: _fake(leaf, fake_mode) if isinstance(leaf, Tensor) else leaf, result
    )


def _fake(real: Tensor, fake_mode: Any) -> Tensor:
    with fake_mode:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


def _real(leaf: Any, func: Any, constants: Constants, module: str) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    value = constants.read(leaf)
    if value is None and func in _SELECTIONS and leaf.dtype is torch.bool:
        shape = tuple(leaf.shape)
        constants.assume(
            leaf, lambda: (torch.arange(math.prod(shape)) % 2 == 0).reshape(shape), _HALF
        )
        value = constants.read(leaf)
    is_read = func is aten._local_scalar_dense.default
    if value is None and is_read and constants.reads_are_logs and leaf.is_floating_point():
        shape = tuple(leaf.shape)
        constants.assume(leaf, lambda: torch.ones(shape), _LOGGED)
        value = constants.read(leaf)
    if value is None:
        change = (
            "leave out what reads it, such as .item(), float() or an if"
            if is_read
            else "trace a variant of the model whose shapes do not depend on values"
        )
        raise TraceError(
            f"{func} in module '{module or 'the model itself'}' needs the value of a tensor that "
            f"depends on weights, which a trace does not have; {change}"
        )
    return value


def _boolean_index(func: Any, args: Any, constants: Constants, fake_mode: Any, module: str) -> Any:
    source, indices = args
    plain: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            with _disable_current_modes():
                places = _real(index, func, constants, module).nonzero(as_tuple=True)
            plain.extend(_fake(place, fake_mode) for place in places)
        else:
            plain.append(index)
    with fake_mode:
        return func(source, plain)


def _are_one(one: Tensor, other: Tensor, constants: Constants) -> bool:
    """Whether two unknown tensors are views of the same numbers; if not, they are unlike."""
    places = [
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        for tensor in (one, other)
    ]
    same = places[0] == places[1]
    if not same:
        constants.assumptions[_UNLIKE] = None
    return same


def _ctc_loss(func: Any, args: Any, constants: Constants, module: str) -> tuple[Tensor, Tensor]:
    """The losses, and log_alpha: a blank before, between and after the labels at every step."""
    steps, samples, _ = args[0].shape
    lengths = _real(args[3], func, constants, module)
    with _disable_current_modes():
        longest = int(lengths.max())
    losses = args[0].new_empty((samples,))
    return losses, args[0].new_empty((samples, steps, 2 * longest + 1))


def assume_choice(
    func: Any, args: Any, kwargs: Mapping[str, Any], outputs: list[Tensor], constants: Constants
) -> None:
    """Take indices chosen by unknown scores to be spread evenly, unknown floats to be finite."""
    finite = _whether_finite(func, args)
    if finite is not None:
        shape = tuple(outputs[0].shape)
        constants.assume(
            outputs[0],
            lambda: torch.full(shape, finite, dtype=torch.bool),
            "all activations are finite",
        )
    elif func is _ASSERTED:
        constants.assume(outputs[0], lambda: torch.tensor(True), _PASSES)
    elif func in _CHECKS:
        constants.expect_check(outputs[0], _CHECKS[func])
    elif func in _REDUCED_CHECKS and (passes := constants.expected_check(args[0])) is not None:
        # A check of activations: all(a >= b), or not any(a < b).
        if passes is _REDUCED_CHECKS[func]:
            constants.assume(
                outputs[0],
                lambda: torch.full(tuple(outputs[0].shape), passes, dtype=torch.bool),
                _PASSES,
            )
    elif func in _CHOICES:
        index_output, dim_argument, reduces = _CHOICES[func]
        scores, indices = args[0], outputs[index_output]
        if not scores.dim():
            return
        dim = args[dim_argument] if len(args) > dim_argument else kwargs.get("dim")
        is_of_all = reduces and dim is None
        dim = -1 if dim is None else dim
        options = scores.numel() if is_of_all else scores.shape[dim]
        shape = tuple(indices.shape)
        kept = len(shape) == scores.dim() and not reduces
        constants.assume(
            indices,
            lambda: (
                balanced_choice(shape, dim, options)
                if kept
                else balanced_choice((*shape, 1), -1, options).squeeze(-1)
            ),
            "what the model chooses by scores is spread evenly (balanced routing)",
        )


def _whether_finite(func: Any, args: Any) -> bool | None:
    """What a test for infinities or NaN finds in finite numbers; None for any other operator.

    torch.isfinite is ``(x == x) * (abs(x) != inf)``, torch.isinf ``abs(x) == inf``.
    """
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return func is aten.eq.Tensor
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] in (math.inf, -math.inf):
        return func is aten.ne.Scalar
    return None


# What a comparison of activations is expected to find, and the reduction that reads it so.
_CHECKS = {
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar, aten.le.Tensor, aten.le.Scalar), True),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar, aten.lt.Tensor, aten.lt.Scalar), False),
}
_REDUCED_CHECKS = {aten.all.default: True, aten.any.default: False}
# torch.distributions reads it before it raises, and nothing else does.
_ASSERTED = aten._is_all_true.default
_PASSES = "checks that the model makes on its activations pass"
# Which output holds the indices, which argument is `dim`, and whether that dimension goes.
_CHOICES = {
    aten.topk.default: (1, 2, False),
    aten.sort.default: (1, 1, False),
    aten.sort.stable: (1, 2, False),
    aten.max.dim: (1, 1, True),
    aten.min.dim: (1, 1, True),
    aten.argmax.default: (0, 1, True),
    aten.argmin.default: (0, 1, True),
    aten.multinomial.default: (0, 9, False),
}
