"""Grid families that multiply: matmuls, attention, recurrent layers, convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from estimator.probe.devices.calls import (
    GridCall,
    channels_innermost,
    grid_call,
    tensor,
    transposed,
)
from estimator.tensors import TensorSpec

Shapes = Sequence[tuple[int, ...]]

# (rows, inner, columns) of a linear layer: from one skinny row to many, narrow to wide.
_LINEAR = (
    (1, 512, 512),
    (1, 4000, 1100),
    (2, 96, 96),
    (4, 800, 800),
    (8, 2000, 1000),
    (8, 320, 1280),
    (16, 240, 960),
    (20, 3200, 800),
    (32, 1000, 4000),
    (40, 64, 64),
    # The head of a language model: its weights alone are beyond any cache.
    (48, 550, 60000),
    (64, 700, 500),
    (100, 800, 3200),
    (128, 128, 128),
    (144, 1600, 400),
    (200, 192, 16000),
    (224, 480, 480),
    (256, 3200, 800),
    (300, 32, 128),
    (320, 300, 1200),
    (400, 1200, 1200),
    (512, 64, 320),
    (640, 640, 160),
    (800, 800, 800),
    (1200, 112, 448),
    (1600, 400, 400),
    (2400, 160, 480),
    (3200, 360, 90),
    (4800, 96, 300),
    (6400, 40, 160),
    (8000, 200, 200),
    (8192, 24, 24),
    (120, 1024, 1040),
    (260, 768, 3000),
    (480, 256, 1000),
    (576, 384, 1500),
    (580, 1536, 384),
    (1000, 256, 256),
    (1500, 64, 256),
)


def matmuls(shapes: Shapes = _LINEAR) -> list[GridCall]:
    """Linear layers as training runs them: forward x·Wᵀ + b, then grad·W and gradᵀ·x."""
    calls = []
    for number, (rows, inner, columns) in enumerate(shapes):
        flops = 2.0 * rows * inner * columns
        x, grad = tensor(rows, inner), tensor(rows, columns)
        forward = grid_call(
            "addmm.default", tensor(columns), x, transposed(inner, columns), flops=flops
        )
        plain = grid_call("mm.default", x, transposed(inner, columns), flops=flops)
        by_input = grid_call("mm.default", grad, tensor(columns, inner), flops=flops)
        by_weight = grid_call("mm.default", transposed(columns, rows), x, flops=flops)
        calls += [plain if number % 4 == 3 else forward, by_input, by_weight]
        if number % 8 == 5:
            calls.append(
                grid_call("addmm.default", tensor(columns), x, tensor(inner, columns), flops=flops)
            )
    return calls


# (batch, rows, inner, columns)
_BATCHED = (
    (4, 1000, 48, 1000),
    (8, 64, 64, 64),
    (8, 500, 500, 80),
    (12, 20, 20, 20),
    (16, 400, 80, 400),
    (24, 300, 300, 32),
    (32, 12, 200, 12),
    (40, 128, 40, 128),
    (48, 100, 64, 100),
    (64, 200, 200, 64),
    (96, 250, 32, 250),
    (100, 32, 64, 500),
    (200, 50, 32, 50),
    (384, 50, 50, 32),
    (800, 48, 24, 48),
)


def batched_matmuls(shapes: Shapes = _BATCHED) -> list[GridCall]:
    """bmm in its three layouts, in the proportions that attention and mixing layers have."""
    calls = []
    for number, (batch, rows, inner, columns) in enumerate(shapes):
        flops = 2.0 * batch * rows * inner * columns
        left, right = tensor(batch, rows, inner), tensor(batch, inner, columns)
        left_t = TensorSpec(left.shape, "float32", (rows * inner, 1, rows))
        right_t = TensorSpec(right.shape, "float32", (inner * columns, 1, inner))
        calls.append(grid_call("bmm.default", left, right, flops=flops))
        calls.append(grid_call("bmm.default", left, right_t, flops=flops))
        if number % 2:
            calls.append(grid_call("bmm.default", left_t, right, flops=flops))
        if number % 5 == 4:
            out = tensor(batch, rows, columns)
            calls.append(grid_call("baddbmm.default", out, left, right, flops=flops))
    return calls


# (batch, heads, length, head width, causal)
_ATTENTION = (
    (1, 4, 64, 32, False),
    (2, 6, 500, 64, True),
    (4, 8, 120, 64, True),
    (4, 10, 250, 40, False),
    (1, 8, 800, 80, True),
    (16, 3, 50, 32, False),
    (8, 12, 32, 64, True),
    (1, 4, 1500, 32, True),
    (32, 4, 100, 48, False),
)


def heads_inside(batch: int, heads: int, length: int, width: int) -> TensorSpec:
    """(batch, heads, length, width), a view of the (batch, length, heads·width) of a projection."""
    strides = (length * heads * width, width, heads * width, 1)
    return TensorSpec((batch, heads, length, width), "float32", strides)


def attention_on_cpu() -> list[GridCall]:
    """Fused attention and its gradient, as scaled_dot_product_attention runs them on a CPU."""
    calls = []
    for batch, heads, length, width, causal in _ATTENTION:
        flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
        x = heads_inside(batch, heads, length, width)
        sums = TensorSpec((batch, heads, length), "float32", (heads * length, 1, heads))
        name = "_scaled_dot_product_flash_attention_for_cpu"
        calls.append(grid_call(f"{name}.default", x, x, x, 0.0, causal, flops=flops))
        calls.append(
            grid_call(
                f"{name}_backward.default",
                *(x, x, x, x, x, sums, 0.0, causal),
                flops=2.5 * flops,
                positive=(5,),
            )
        )
    return calls


# (steps, batch, inputs, hidden)
_RECURRENT = ((12, 4, 40, 64), (24, 16, 100, 200), (40, 8, 300, 120), (40, 24, 200, 320))


def recurrent_on_cpu() -> list[GridCall]:
    """One LSTM layer over a whole sequence (oneDNN), forward and gradient, as nn.LSTM runs it."""
    calls = []
    for steps, batch, inputs, hidden in _RECURRENT:
        gates, state = 4 * hidden, tensor(batch, hidden)
        flops = 2.0 * steps * batch * gates * (inputs + hidden)
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        weights = (tensor(gates, inputs), tensor(gates, hidden), tensor(gates), tensor(gates))
        forward = grid_call(
            "mkldnn_rnn_layer.default",
            *(x, *weights, state, state, False, [], 2, hidden, 1, True, False, True, True),
            flops=flops,
        )
        workspace = TensorSpec((0,), "uint8")
        backward = grid_call(
            "mkldnn_rnn_layer_backward.default",
            *(x, *weights, state, state, out, state, state, out, None, None),
            *(False, 2, hidden, 1, True, True, False, [], True, workspace),
            flops=2 * flops,
            follows=forward,
        )
        calls += [forward, backward]
    return calls


# (batch, channels in, side, channels out, kernel, stride, groups)
_CONVOLUTIONS = (
    (1, 3, 200, 40, 7, 2, 1),
    (8, 3, 120, 48, 7, 2, 1),
    (16, 3, 32, 24, 3, 1, 1),
    (4, 3, 160, 32, 3, 2, 1),
    (8, 3, 128, 96, 4, 4, 1),
    (8, 3, 192, 320, 16, 16, 1),
    (2, 32, 112, 32, 3, 1, 1),
    (8, 48, 48, 48, 3, 1, 1),
    (16, 80, 28, 80, 3, 1, 1),
    (8, 160, 16, 160, 3, 1, 1),
    (16, 320, 7, 320, 3, 1, 1),
    (1, 480, 10, 480, 3, 1, 1),
    (32, 16, 24, 16, 3, 1, 1),
    (4, 64, 60, 128, 3, 2, 1),
    (8, 160, 24, 320, 3, 2, 1),
    (1, 24, 90, 24, 3, 1, 1),
    (4, 24, 64, 96, 1, 1, 1),
    (2, 72, 96, 72, 1, 1, 1),
    (8, 120, 36, 480, 1, 1, 1),
    (16, 240, 20, 64, 1, 1, 1),
    (8, 480, 12, 960, 1, 1, 1),
    (32, 640, 6, 160, 1, 1, 1),
    (1, 300, 14, 1000, 1, 1, 1),
    (8, 128, 40, 256, 1, 2, 1),
    (16, 1000, 1, 40, 1, 1, 1),
    (8, 24, 40, 40, 5, 1, 1),
    (32, 6, 14, 16, 5, 1, 1),
    (2, 16, 100, 16, 5, 1, 1),
    (2, 24, 112, 24, 3, 1, 24),
    (8, 96, 56, 96, 3, 1, 96),
    (16, 200, 28, 200, 3, 1, 200),
    (32, 480, 10, 480, 3, 1, 480),
    (8, 120, 60, 120, 3, 2, 120),
    (8, 64, 48, 64, 5, 2, 64),
    (8, 240, 14, 240, 5, 1, 240),
    (16, 640, 7, 640, 7, 1, 640),
    (8, 160, 28, 160, 3, 1, 32),
    (16, 320, 12, 320, 3, 1, 32),
    (4, 64, 48, 64, 3, 1, 4),
    (10, 32, 30, 32, 3, 1, 1),
    (10, 64, 15, 64, 3, 1, 1),
    (8, 128, 8, 128, 3, 1, 1),
    (10, 256, 4, 256, 3, 1, 1),
    (6, 64, 30, 64, 3, 2, 1),
    (5, 16, 90, 16, 3, 1, 1),
    (5, 32, 50, 64, 3, 1, 1),
    (4, 128, 12, 64, 3, 1, 1),
    (5, 96, 40, 48, 3, 1, 1),
    (8, 960, 4, 240, 1, 1, 1),
    (10, 240, 4, 960, 1, 1, 1),
    (4, 480, 7, 120, 1, 1, 1),
    (8, 120, 7, 480, 1, 1, 1),
    (8, 224, 30, 64, 1, 1, 1),
    (2, 40, 60, 160, 1, 1, 1),
    (6, 160, 14, 40, 1, 1, 1),
    (12, 80, 14, 320, 1, 1, 1),
    (4, 320, 8, 320, 1, 1, 1),
    (4, 16, 56, 64, 1, 1, 1),
    (8, 240, 14, 480, 1, 2, 1),
    (10, 480, 8, 960, 1, 2, 1),
    (16, 56, 28, 112, 1, 2, 1),
    (16, 32, 60, 16, 1, 1, 1),
    (16, 16, 60, 96, 1, 1, 1),
    (24, 144, 30, 24, 1, 1, 1),
    (20, 24, 30, 144, 1, 1, 1),
    (16, 64, 15, 384, 1, 1, 1),
    (16, 384, 15, 64, 1, 1, 1),
    (24, 96, 7, 576, 1, 1, 1),
    (16, 320, 8, 1280, 1, 1, 1),
    (16, 96, 60, 96, 3, 2, 96),
    (16, 32, 60, 32, 3, 1, 32),
    (20, 192, 30, 192, 3, 2, 192),
    (16, 384, 14, 384, 3, 1, 384),
    (20, 576, 7, 576, 3, 1, 576),
    (20, 576, 15, 576, 3, 2, 576),
    (12, 80, 15, 80, 3, 2, 80),
    (10, 240, 9, 240, 3, 2, 240),
    (8, 400, 7, 400, 3, 2, 400),
    (10, 160, 14, 160, 3, 1, 160),
    (8, 640, 4, 640, 3, 1, 640),
    (10, 24, 18, 120, 1, 1, 1),
    (8, 120, 18, 24, 1, 1, 1),
    (10, 56, 9, 320, 1, 1, 1),
    (20, 24, 18, 120, 1, 1, 1),
    (24, 160, 9, 40, 1, 1, 1),
    (6, 96, 30, 96, 7, 1, 96),
    (6, 384, 8, 384, 7, 1, 384),
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
    """Convolutions (as listed above) spread evenly over `_RANGES`."""
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
            if kind in ("depthwise", "scaling"):
                kernel = last // 2 * 2 + 1
                stride = 1 + (number % 3 == 0 and kernel > 1)
                shape = (images, channels, side, channels, kernel, stride, channels)
                flops = 2.0 * images * channels * side**2 * kernel**2
                weights = channels * kernel**2
            else:
                out, kernel = -(-last // 8) * 8, 3 if kind == "dense" else 1
                shape = (images, channels, side, out, kernel, 1, 1)
                flops = 2.0 * images * channels * side**2 * kernel**2 * out
                weights = channels * out * kernel**2
            if flops <= most_flops and max(images * channels * side**2, weights) <= _MOST_ELEMENTS:
                wanted -= 1
                yield shape


# The same for images whose channels lie innermost, as blocks that end in a linear layer leave them.
_CHANNELS_LAST = (
    (8, 3, 96, 32, 3, 2, 1),
    (8, 64, 28, 64, 3, 1, 1),
    (4, 128, 14, 256, 3, 2, 1),
    (4, 40, 48, 80, 2, 2, 1),
    (8, 80, 20, 160, 2, 2, 1),
    (5, 240, 10, 480, 2, 2, 1),
    (8, 64, 28, 256, 1, 1, 1),
    (20, 320, 8, 80, 1, 1, 1),
    (8, 144, 28, 144, 3, 1, 144),
    (16, 96, 30, 96, 3, 2, 96),
    (10, 288, 7, 288, 3, 1, 288),
    (8, 240, 15, 240, 5, 1, 240),
    (2, 64, 30, 64, 7, 1, 64),
    (4, 80, 56, 80, 7, 1, 80),
    (16, 160, 24, 160, 7, 1, 160),
    (4, 320, 12, 320, 7, 1, 320),
    (6, 640, 5, 640, 7, 1, 640),
)
# (batch, channels in, side, channels out) of 2×2 stride-2 transposed convolutions.
_TRANSPOSED = (
    (2, 40, 48, 20),
    (4, 80, 24, 40),
    (5, 32, 50, 16),
    (5, 128, 12, 64),
    (8, 240, 12, 120),
    (8, 400, 6, 200),
)


def _images(batch: int, channels: int, side: int, *, channels_last: bool) -> TensorSpec:
    if channels_last:
        return channels_innermost(batch, channels, side)
    return tensor(batch, channels, side, side)


def _convolution(
    shape: tuple[int, ...], *, gradient: bool, bias: bool, channels_last: bool = False
) -> GridCall:
    batch, channels, side, filters, kernel, stride, groups = shape
    padding = 0 if stride == kernel else kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    flops = 2.0 * batch * filters * out * out * (channels // groups) * kernel * kernel
    x = _images(batch, channels, side, channels_last=channels_last)
    weight = tensor(filters, channels // groups, kernel, kernel)
    tail = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups)
    if not gradient:
        with_bias = tensor(filters) if bias else None
        return grid_call("convolution.default", x, weight, with_bias, *tail, flops=flops)
    # The first layer of a network has no use for the gradient of its input.
    mask = [channels > 3, True, bias]
    sizes = [filters] if bias else [0]
    grad = _images(batch, filters, out, channels_last=channels_last)
    return grid_call(
        "convolution_backward.default",
        *(grad, x, weight, sizes if bias else None, *tail, mask),
        flops=flops * sum(mask[:2]),
    )


def _upward(shape: tuple[int, ...], *, gradient: bool) -> GridCall:
    batch, channels, side, filters = shape
    flops = 8.0 * batch * channels * side * side * filters
    x, weight = tensor(batch, channels, side, side), tensor(channels, filters, 2, 2)
    tail = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    if not gradient:
        return grid_call("convolution.default", x, weight, tensor(filters), *tail, flops=flops)
    grad = tensor(batch, filters, 2 * side, 2 * side)
    return grid_call(
        "convolution_backward.default",
        *(grad, x, weight, [filters], *tail, [True, True, True]),
        flops=2 * flops,
    )


def _has_bias(number: int) -> bool:
    return number % 3 == 1


def convolutions(
    shapes: Shapes | None = None,
    channels_last: Shapes = _CHANNELS_LAST,
    transposed: Shapes = _TRANSPOSED,
    *,
    gradient: bool = False,
) -> list[GridCall]:
    """Dense, strided, patch-wise, depthwise, grouped and transposed convolutions, or gradients.

    Gradients of input and weight come in one call, as autograd asks.
    """
    plain = (*_CONVOLUTIONS, *spread_shapes()) if shapes is None else shapes
    layouts = ((plain, False), (channels_last, True))
    calls = [
        _convolution(shape, gradient=gradient, bias=_has_bias(number), channels_last=last)
        for listed, last in layouts
        for number, shape in enumerate(listed)
    ]
    return calls + [_upward(shape, gradient=gradient) for shape in transposed]
