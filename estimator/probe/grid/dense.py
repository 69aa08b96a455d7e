"""Grid families that multiply: matmuls, attention, recurrent layers, convolutions.

Each is a function of the sizes that data/grid.json lists for a kind of device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from estimator.machines.profile import DeviceKind
from estimator.probe.devices.calls import (
    GridCall,
    channels_innermost,
    grid_call,
    heads_inside,
    tensor,
    transposed,
)
from estimator.probe.grid.tables import sizes
from estimator.tensors import TensorSpec

Calls = Iterator[GridCall]


def matmuls(kind: DeviceKind) -> Calls:
    """Linear layers as training runs them: forward x·Wᵀ + b, then grad·W and gradᵀ·x."""
    for number, (rows, inner, columns) in enumerate(sizes("linear", kind)):
        flops = 2.0 * rows * inner * columns
        x, grad, bias = tensor(rows, inner), tensor(rows, columns), tensor(columns)
        weight, weight_t = tensor(columns, inner), transposed(inner, columns)
        if number % 4 == 3:
            yield grid_call("mm", x, weight_t, flops=flops)
        else:
            yield grid_call("addmm", bias, x, weight_t, flops=flops)
        yield grid_call("mm", grad, weight, flops=flops)
        yield grid_call("mm", transposed(columns, rows), x, flops=flops)
        if number % 8 == 5:
            yield grid_call("addmm", bias, x, tensor(inner, columns), flops=flops)


def batched_matmuls(kind: DeviceKind) -> Calls:
    """bmm in its three layouts, in the proportions that attention and mixing layers have."""
    for number, (batch, rows, inner, columns) in enumerate(sizes("batched", kind)):
        flops = 2.0 * batch * rows * inner * columns
        left, right = tensor(batch, rows, inner), tensor(batch, inner, columns)
        left_t = replace(left, strides=(rows * inner, 1, rows))
        right_t = replace(right, strides=(inner * columns, 1, inner))
        yield grid_call("bmm", left, right, flops=flops)
        yield grid_call("bmm", left, right_t, flops=flops)
        if number % 2:
            yield grid_call("bmm", left_t, right, flops=flops)
        if number % 5 == 4:
            yield grid_call("baddbmm", tensor(batch, rows, columns), left, right, flops=flops)


def matmuls_in_float8() -> Calls:
    """Linear layers of float8 with one scale for each matrix, as Hopper and later run them."""
    for rows, inner, columns in sizes("linear", "cuda"):
        if rows % 16 or inner % 16 or columns % 16:
            continue
        x = tensor(rows, inner, dtype="float8_e4m3fn")
        weight = tensor(inner, columns, dtype="float8_e4m3fn", strides=(1, inner))
        yield grid_call(
            "_scaled_mm",
            *(x, weight, tensor(), tensor(), None, None, "torch.bfloat16"),
            flops=2.0 * rows * inner * columns,
            positive=(2, 3),
        )


def attention(kind: DeviceKind) -> Calls:
    """Fused attention and its gradient: a CPU's, or each of CUDA's three implementations."""
    for number, (batch, heads, length, width, causal) in enumerate(sizes("attention", kind)):
        x = heads_inside(batch, heads, length, width)
        flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
        if kind == "cpu":
            sums = tensor(batch, heads, length, strides=(heads * length, 1, heads))
            gradient = (x, x, x, x, x, sums, 0.0, causal)
            yield from _fused("flash", (x, x, x, 0.0, causal), gradient, flops, "_for_cpu")
            continue
        half = replace(x, dtype="bfloat16")
        yield from _flash(half, causal, flops)
        yield from _by_cudnn(half, causal, flops)
        yield from _memory_efficient(x, causal, flops)
        if number % 3 == 0:
            yield from _memory_efficient(half, causal, flops)
            yield from _flash(replace(x, dtype="float16"), causal, flops)


def _flash(x: TensorSpec, causal: bool, flops: float) -> Calls:
    length, seed = x.shape[2], (TensorSpec((2,), "uint64"), TensorSpec((), "uint64"))
    sums = tensor(*x.shape[:3])
    gradient = (x, x, x, x, x, sums, None, None, length, length, 0.0, causal, *seed)
    return _fused("flash", (x, x, x, 0.0, causal), gradient, flops)


def _memory_efficient(x: TensorSpec, causal: bool, flops: float) -> Calls:
    # Its sums of exponentials come in rows that are multiples of 32 (kAlignLSE of
    # aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h).
    batch, heads, length = x.shape[:3]
    sums = tensor(batch, heads, -(-length // 32) * 32)
    offsets, wanted = TensorSpec((), "int64"), [True, True, True, False]
    gradient = (x, x, x, x, None, x, sums, offsets, offsets, 0.0, wanted, causal)
    return _fused("efficient", (x, x, x, None, True, 0.0, causal), gradient, flops)


def _by_cudnn(x: TensorSpec, causal: bool, flops: float) -> Calls:
    length, offsets = x.shape[2], TensorSpec((), "int64")
    # Where there is no mask its sums are one more dimension deep.
    sums = tensor(*x.shape[:3], 1)
    gradient = (x, x, x, x, x, sums, offsets, offsets, None, None, None, length, length, 0.0)
    return _fused("cudnn", (x, x, x, None, True, 0.0, causal), (*gradient, causal), flops)


def _fused(
    name: str, forward: tuple[Any, ...], gradient: tuple[Any, ...], flops: float, ending: str = ""
) -> Calls:
    """One implementation of attention; its gradient makes 5 matmuls where forward makes 2."""
    target = f"_scaled_dot_product_{name}_attention{ending}"
    yield grid_call(target, *forward, flops=flops)
    yield grid_call(f"{target}_backward", *gradient, flops=2.5 * flops, positive=(5,))


_LSTM_MODE = 2


def recurrent_on_cpu() -> Calls:
    """One LSTM layer over a whole sequence (oneDNN), forward and gradient, as nn.LSTM runs it."""
    for _, steps, batch, inputs, hidden in sizes("recurrent", "cpu"):
        gates, state = 4 * hidden, tensor(batch, hidden)
        flops = 2.0 * steps * batch * gates * (inputs + hidden)
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        weights = (tensor(gates, inputs), tensor(gates, hidden), tensor(gates), tensor(gates))
        forward = grid_call(
            "mkldnn_rnn_layer",
            *(x, *weights, state, state, False, [], _LSTM_MODE, hidden, 1),
            *(True, False, True, True),
            flops=flops,
        )
        yield forward
        yield grid_call(
            "mkldnn_rnn_layer_backward",
            *(x, *weights, state, state, out, state, state, out, None, None),
            *(False, _LSTM_MODE, hidden, 1, True, True, False, [], True, TensorSpec((0,), "uint8")),
            flops=2 * flops,
            follows=forward,
        )


def recurrent_on_cuda() -> Calls:
    """LSTM layers over whole sequences by cuDNN, forward and gradient, weights in one piece."""
    for layers, steps, batch, inputs, hidden in sizes("recurrent", "cuda"):
        gates, weights = 4 * hidden, list[TensorSpec]()
        for width in (inputs, *[hidden] * (layers - 1)):
            weights += [tensor(gates, width), tensor(gates, hidden), tensor(gates), tensor(gates)]
        buffer = tensor(sum(weight.numel for weight in weights))
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        state = tensor(layers, batch, hidden)
        flops = 2.0 * steps * batch * sum(w.numel for w in weights if len(w.shape) == 2)
        how: tuple[Any, ...] = (_LSTM_MODE, hidden, 0, layers, False, 0.0, True, False, [], None)
        given = (x, weights, 4, buffer, state, state)
        forward = grid_call("_cudnn_rnn", *given, *how, flops=flops)
        yield forward
        yield grid_call(
            "_cudnn_rnn_backward",
            *(*given, out, out, state, state, *how, TensorSpec((0,), "uint8"), [True] * 4),
            flops=2 * flops,
            follows=forward,
            handed=3,
        )


# Sizes beyond those, which networks on small images and with wide layers have: from so much to so
# much, log-uniform: images, side, channels in, channels out.
_RANGES = {
    "pointwise": ((1, 24), (1, 40), (24, 2400), (24, 2400)),
    "dense": ((1, 16), (3, 64), (16, 640), (16, 640)),
    "depthwise": ((1, 20), (3, 64), (32, 2400), (3, 7)),
    "scaling": ((1, 12), (3, 24), (64, 1600), (1, 1)),
}
_SPREAD_CALLS = {"pointwise": 40, "dense": 12, "depthwise": 18, "scaling": 8}
# So long, and so large, a call may be.
_MOST_FLOPS, _MOST_ELEMENTS = 6e8, 2_500_000
# A depthwise filter reads each of its numbers for few multiplications.
_MOST_DEPTHWISE_FLOPS = 1e8
# Steps of the Kronecker sequence of the golden ratio's kin in four dimensions (Roberts 2018): any
# number of points from it is spread evenly.
_STEPS = (0.8566748838545, 0.7338918566271, 0.6287067210378, 0.5385972572236)


def spread_shapes() -> Iterator[tuple[int, ...]]:
    """Convolutions, as data/grid.json describes them, spread evenly over `_RANGES`."""
    for kind, wanted in _SPREAD_CALLS.items():
        number = 0
        most_flops = _MOST_DEPTHWISE_FLOPS if kind == "depthwise" else _MOST_FLOPS
        while wanted:
            number += 1
            images, side, channels, last = (
                round(low * (high / low) ** ((0.5 + number * step) % 1.0))
                for (low, high), step in zip(_RANGES[kind], _STEPS, strict=True)
            )
            channels = -(-channels // 8) * 8
            filters, kernel, stride, groups = -(-last // 8) * 8, 3 if kind == "dense" else 1, 1, 1
            if kind in ("depthwise", "scaling"):
                filters, kernel, groups = channels, last // 2 * 2 + 1, channels
                stride = 1 + (number % 3 == 0 and kernel > 1)
            weights = filters * (channels // groups) * kernel**2
            flops = 2.0 * images * side**2 * weights
            if flops <= most_flops and max(images * channels * side**2, weights) <= _MOST_ELEMENTS:
                wanted -= 1
                yield images, channels, side, filters, kernel, stride, groups


def _convolution(
    shape: tuple[int, ...], *, gradient: bool, bias: bool, channels_last: bool
) -> GridCall:
    batch, channels, side, filters, kernel, stride, groups = shape
    images = channels_innermost if channels_last else _images
    padding = 0 if stride == kernel else kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    weight = tensor(filters, channels // groups, kernel, kernel)
    return _forward_or_gradient(
        *(images(batch, channels, side), weight, images(batch, filters, out)),
        bias=bias,
        tail=([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups),
        flops=2.0 * batch * filters * out * out * (channels // groups) * kernel * kernel,
        gradient=gradient,
    )


def _images(batch: int, channels: int, side: int) -> TensorSpec:
    return tensor(batch, channels, side, side)


def _upward(shape: tuple[int, ...], *, gradient: bool) -> GridCall:
    batch, channels, side, filters = shape
    return _forward_or_gradient(
        *(_images(batch, channels, side), tensor(channels, filters, 2, 2)),
        _images(batch, filters, 2 * side),
        bias=True,
        tail=([2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        flops=8.0 * batch * channels * side * side * filters,
        gradient=gradient,
    )


def _forward_or_gradient(
    x: TensorSpec,
    weight: TensorSpec,
    out: TensorSpec,
    *,
    bias: bool,
    tail: tuple[Any, ...],
    flops: float,
    gradient: bool,
) -> GridCall:
    filters, channels = out.shape[1], x.shape[1]
    if not gradient:
        of_filters = tensor(filters) if bias else None
        return grid_call("convolution", x, weight, of_filters, *tail, flops=flops)
    # The first layer of a network has no use for the gradient of its input.
    wanted = [channels > 3, True, bias]
    return grid_call(
        "convolution_backward",
        *(out, x, weight, [filters] if bias else None, *tail, wanted),
        flops=flops * sum(wanted[:2]),
    )


def convolutions(kind: DeviceKind, *, gradient: bool = False) -> Calls:
    """Dense, strided, patch-wise, depthwise, grouped and transposed convolutions, or gradients.

    Gradients of input and weight come in one call, as autograd asks.
    """
    spread = spread_shapes() if kind == "cpu" else ()
    layouts = {
        False: [*sizes("convolutions", kind), *spread],
        True: sizes("convolutions channels last", kind),
    }
    for is_last, shapes in layouts.items():
        for number, shape in enumerate(shapes):
            has_bias = number % 3 == 1
            yield _convolution(shape, gradient=gradient, bias=has_bias, channels_last=is_last)
    for shape in sizes("transposed convolutions", kind):
        yield _upward(shape, gradient=gradient)
