"""Grid families whose calls follow from their sizes by more than products: convolutions, LSTMs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from estimator.machines.profile import DeviceKind
from estimator.probe.devices.calls import GridCall, grid_call, tensor
from estimator.probe.grid.tables import sizes
from estimator.tensors import TensorSpec

Calls = Iterator[GridCall]

_LSTM_MODE = 2


def recurrent_on_cuda() -> Calls:
    """LSTM layers over whole sequences by cuDNN, forward and gradient, weights in one piece."""
    for layers, steps, batch, inputs, hidden in sizes("recurrent", "cuda"):
        gates, weights = 4 * hidden, list[TensorSpec]()
        for width in (inputs, *[hidden] * (layers - 1)):
            weights += [tensor(gates, width), tensor(gates, hidden), tensor(gates), tensor(gates)]
        buffer = tensor(sum(weight.numel for weight in weights))
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        state = tensor(layers, batch, hidden)
        how: tuple[Any, ...] = (_LSTM_MODE, hidden, 0, layers, False, 0.0, True, False, [], None)
        given = (x, weights, 4, buffer, state, state)
        forward = grid_call("_cudnn_rnn", *given, *how)
        yield forward
        yield grid_call(
            "_cudnn_rnn_backward",
            *(*given, out, out, state, state, *how, TensorSpec((0,), "uint8"), [True] * 4),
            follows=forward,
            handed=3,
        )


def _convolution(
    shape: tuple[int, ...], *, gradient: bool, bias: bool, channels_last: bool
) -> GridCall:
    batch, channels, side, filters, kernel, stride, groups = shape
    images = partial(_images, channels_last=channels_last)
    padding = 0 if stride == kernel else kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    weight = tensor(filters, channels // groups, kernel, kernel)
    return _forward_or_gradient(
        *(images(batch, channels, side), weight, images(batch, filters, out)),
        bias=bias,
        tail=([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups),
        gradient=gradient,
    )


def _images(batch: int, channels: int, side: int, *, channels_last: bool = False) -> TensorSpec:
    strides = (channels * side * side, 1, side * channels, channels) if channels_last else None
    return tensor(batch, channels, side, side, strides=strides)


def _upward(shape: tuple[int, ...], *, gradient: bool) -> GridCall:
    batch, channels, side, filters = shape
    return _forward_or_gradient(
        *(_images(batch, channels, side), tensor(channels, filters, 2, 2)),
        _images(batch, filters, 2 * side),
        bias=True,
        tail=([2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        gradient=gradient,
    )


def _forward_or_gradient(
    x: TensorSpec,
    weight: TensorSpec,
    out: TensorSpec,
    *,
    bias: bool,
    tail: tuple[Any, ...],
    gradient: bool,
) -> GridCall:
    filters, channels = out.shape[1], x.shape[1]
    if not gradient:
        return grid_call("convolution", x, weight, tensor(filters) if bias else None, *tail)
    # The first layer of a network has no use for the gradient of its input.
    wanted = [channels > 3, True, bias]
    return grid_call(
        "convolution_backward", out, x, weight, [filters] if bias else None, *tail, wanted
    )


def convolutions(kind: DeviceKind, *, gradient: bool = False) -> Calls:
    """Dense, strided, patch-wise, depthwise, grouped and transposed convolutions, or gradients.

    Gradients of input and weight come in one call, as autograd asks.
    """
    for is_last, name in enumerate(("convolutions", "convolutions channels last")):
        for number, shape in enumerate(sizes(name, kind)):
            has_bias = number % 3 == 1
            yield _convolution(shape, gradient=gradient, bias=has_bias, channels_last=bool(is_last))
    for shape in sizes("transposed convolutions", kind):
        yield _upward(shape, gradient=gradient)
