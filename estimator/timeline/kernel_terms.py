"""Say what a call's time grows with: the terms of its physical form, and its algorithm."""

from __future__ import annotations

import math

from estimator.graph.costs import Features
from estimator.graph.workspace import BLOCK, WIDEST_DEPTHWISE
from estimator.tensors import OpCall

# What a kernel that is bound by memory takes goes by the bytes that it moves; between calls of as
# many bytes, row lengths and runs of neighbouring elements count for half their logarithm.
_SHAPE_WEIGHT = 0.5
# One matmul for each image and group.
_MATMULS = "matmuls by group"
# Elements read one after the other beyond a page (4 KiB of int8, 16 KiB of fp32) gain no more.
_LONGEST_RUN = 4096


def terms(features: Features, kind: str = "") -> tuple[float, ...]:
    """The physical terms whose non-negative combination is the time of a call of variant `kind`."""
    cost = features.cost
    if features.family == "matmul":
        batch, rows, columns, inner = features.dims[:4]
        return (
            1.0,
            batch * rows * columns * inner,
            batch * rows * inner,
            batch * inner * columns,
            batch * rows * columns,
        )
    if features.family == "convolution":
        images, channels_in, channels_out, groups = features.dims[:4]
        flops_ratio, bytes_ratio = _filled_ratios(features, kind)
        return (
            1.0,
            groups if kind == _MATMULS else images,
            flops_ratio * cost.flops,
            bytes_ratio * cost.read_bytes,
            bytes_ratio * cost.written_bytes,
            images * channels_in * channels_out * groups,
        )
    if features.family in ("attention", "recurrent"):
        return (1.0, cost.flops, cost.read_bytes, cost.written_bytes)
    if features.family == "reduction" and kind == "across":
        return (1.0, 0.0, cost.flops, cost.read_bytes + cost.written_bytes)
    rows = features.dims[0] if features.dims else 1.0
    return (1.0, rows, cost.flops, cost.read_bytes + cost.written_bytes)


def _filled_ratios(features: Features, kind: str) -> tuple[float, float]:
    """How many times the flops and bytes a convolution has once its channels fill whole blocks."""
    _, channels_in, channels_out, groups, out_positions, _, in_positions, _ = features.dims
    if kind.startswith("depthwise"):
        ratio = _filled(groups) / groups
        return ratio, ratio
    if groups > 1 or kind.startswith("matmul"):
        return 1.0, 1.0
    # The first layer reads its few channels as they are.
    filled_in = channels_in if kind.startswith("first layer") else _filled(channels_in)
    filled_out = _filled(channels_out)
    moved = channels_in * in_positions + channels_out * out_positions
    filled = filled_in * in_positions + filled_out * out_positions
    return filled_in * filled_out / (channels_in * channels_out), filled / moved


def _filled(channels: float) -> float:
    return math.ceil(channels / BLOCK) * BLOCK


def coordinates(features: Features) -> tuple[float, ...]:
    """Where a call stands in log-feature space."""
    dims = [math.log(max(value, 1.0)) for value in features.dims]
    if features.family in ("matmul", "convolution", "attention"):
        return tuple(dims)
    moved = math.log(max(features.cost.moved_bytes, 1.0))
    row = dims[-1] if len(dims) > 1 else 0.0
    run = math.log(min(max(features.innermost_run, 1), _LONGEST_RUN))
    return (moved, _SHAPE_WEIGHT * row, _SHAPE_WEIGHT * run)


def variant(call: OpCall, features: Features, threads: int) -> str:
    """Which algorithm a call runs, as far as its shape tells; other variants count as far away.

    Convolutions on CPU: torch runs a 1×1 kernel as one matmul per image and group where one thread
    and a batch under 16 are all there is (aten/src/ATen/native/Convolution.cpp, `use_mkldnn`), and
    matmuls narrower than a vector run several times slower; else oneDNN, which tells groups, first
    layers, strides and filters too wide for its depthwise gradient apart, and copies no image whose
    channels lie innermost into blocks.
    Reductions: over the innermost dimension, or across rows that stay vectors.
    """
    if features.family == "convolution":
        return _convolution_variant(call, features, threads)
    if features.family == "reduction" and call.inputs:
        over = call.arguments[1] if len(call.arguments) > 1 else None
        last = len(call.inputs[0].shape) - 1
        if isinstance(over, tuple) and over and last not in over and -1 not in over:
            return "across"
        return "along"
    return features.layout


def _convolution_variant(call: OpCall, features: Features, threads: int) -> str:
    kind = _convolution_kind(call, features, threads)
    image = call.arguments[1 if "backward" in call.target else 0]
    channels_last = image.strides is not None and image.strides[1] == 1
    return f"{kind}, channels last" if channels_last and "matmul" not in kind else kind


def _convolution_kind(call: OpCall, features: Features, threads: int) -> str:
    images, channels_in, channels_out, groups, positions, kernel, _, stride = features.dims
    transposed = any(argument is True for argument in call.arguments[:10])
    strided = " strided" if stride > 1 else ""
    one_by_one = kernel == 1 == stride and not transposed
    if one_by_one and images < 16 and threads == 1 and call.dtype == "float32":
        if groups > 1:
            return _MATMULS
        return "matmul" if positions >= BLOCK else "matmul narrow"
    if groups > 1:
        if not channels_in == channels_out == 1:
            return "grouped"
        wide = "backward" in call.target and kernel > WIDEST_DEPTHWISE**2
        return "depthwise wide" if wide else f"depthwise{strided}"
    if transposed:
        return "transposed"
    if channels_in < 8:
        return "first layer"
    if kernel > 1:
        return "dense"
    return f"pointwise{strided}"
