"""Grid families of convolutions: dense, strided, depthwise, grouped, transposed, and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from estimator.probe.grid_calls import GridCall, channels_innermost, grid_call, tensor
from estimator.tensors import TensorSpec

Shapes = Sequence[tuple[int, ...]]

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
