"""Grid families at the sizes that fill a GPU: pointwise, rows, look-ups, normalisation, pooling."""

from __future__ import annotations

from estimator.probe.grid_calls import (
    GridCall,
    channels_innermost,
    grid_call,
    indices,
    tensor,
)
from estimator.probe.grid_matmuls import heads_inside
from estimator.probe.grid_memory_bound import layer_norm, softmax
from estimator.probe.grid_shapes import embedding_bag, likelihood, max_pools, picking
from estimator.tensors import TensorSpec

# Tensors of 1 to 4 times the last-level cache of an H100 in float32, and one far beyond.
_SIZES = (12_000_000, 40_000_000, 120_000_000)
_ROWS = ((2000, 1200), (6000, 800), (8192, 2560), (16_000, 640), (25_000, 384), (100_000, 200))
_WIDE_ROWS = ((2048, 50_000), (4000, 30_000), (8192, 32_000))


def pointwise() -> list[GridCall]:
    """What streams through memory, forward, backward and in place."""
    calls = []
    for n in _SIZES:
        x, mask, half = tensor(n), TensorSpec((n,), "bool"), TensorSpec((n,), "bfloat16")
        calls += [grid_call(name, x, x) for name in ("add.Tensor", "mul.Tensor", "add_.Tensor")]
        unary = ("relu.default", "gelu.default", "silu.default", "clone.default", "relu_.default")
        calls += [grid_call(name, x) for name in (*unary, "sigmoid.default", "hardswish.default")]
        backward = ("gelu_backward", "silu_backward", "tanh_backward", "hardswish_backward")
        calls += [grid_call(f"{name}.default", x, x) for name in backward]
        calls += [
            grid_call("mul.Tensor", x, 0.5),
            grid_call("div.Tensor", x, 3.0),
            grid_call("pow.Tensor_Scalar", x, 2),
            grid_call("pow.Tensor_Scalar", x, 0.7),
            grid_call("threshold_backward.default", x, x, 0),
            grid_call("hardtanh_.default", x, 0.0, 6.0),
            grid_call("hardtanh_backward.default", x, x, 0.0, 6.0),
            grid_call("native_dropout.default", x, 0.1, True),
            grid_call("native_dropout_backward.default", x, mask, 1.1),
            grid_call("where.self", mask, x, x),
            grid_call("masked_fill.Scalar", x, mask, -1e9),
            grid_call("copy_.default", x, x),
            grid_call("zero_.default", x),
            grid_call("sum.default", x),
            grid_call("_to_copy.default", x, dtype="torch.bfloat16"),
            grid_call("_to_copy.default", half, dtype="torch.float32"),
            grid_call("gelu.default", x, approximate="tanh"),
            grid_call("gelu_backward.default", x, x, approximate="tanh"),
        ]
    return calls


def rows() -> list[GridCall]:
    """Broadcasts, sums, norms and softmax over rows, with their gradients."""
    calls = []
    for count, width in _ROWS:
        x, row, column = tensor(count, width), tensor(width), tensor(count, 1)
        calls += [
            grid_call("add.Tensor", x, row),
            grid_call("mul.Tensor", x, row),
            grid_call("mul.Tensor", x, column),
            grid_call("sum.dim_IntList", x, [0], True),
            grid_call("sum.dim_IntList", x, [1], True),
            grid_call("mean.dim", x, [-1], True),
            grid_call("amax.default", x, [-1], True),
            *layer_norm(count, width),
        ]
    for batch, heads, length in ((16, 12, 500), (64, 12, 200), (8, 16, 1000), (2000, 4, 50)):
        scores = tensor(batch, heads, length, length)
        calls += softmax(scores, "_softmax")
    for count, classes in _WIDE_ROWS:
        calls += softmax(tensor(count, classes), "_log_softmax")
    return calls


def strided() -> list[GridCall]:
    """Copies and sums of permuted tensors."""
    calls = []
    for batch, length, heads, width in (
        (8, 500, 12, 64),
        (4, 2000, 32, 64),
        (16, 1000, 16, 64),
        (64, 200, 12, 64),
        (2000, 50, 4, 32),
    ):
        swapped = heads_inside(batch, heads, length, width)
        flat = tensor(batch, heads, length, width)
        across = TensorSpec((batch * length, heads * width), "float32", (1, batch * length))
        calls += [
            grid_call("clone.default", each, memory_format="torch.contiguous_format")
            for each in (swapped, across)
        ]
        calls += [
            grid_call("add.Tensor", flat, swapped),
            grid_call("copy_.default", flat, swapped),
            grid_call("cat.default", [flat, flat], -1),
        ]
    for batch, channels, side in ((64, 64, 60), (64, 240, 30), (96, 480, 14)):
        last = channels_innermost(batch, channels, side)
        first = tensor(batch, channels, side, side)
        calls += [
            grid_call("clone.default", last, memory_format="torch.contiguous_format"),
            grid_call("add.Tensor", first, last),
            grid_call("cat.default", [first, first], 1),
            grid_call("mean.dim", first, [-1, -2], True),
        ]
    return calls


def lookups() -> list[GridCall]:
    """Embeddings, indexing and their gradients, over tables as high as vocabularies and beyond."""
    calls = []
    for count, height, width in (
        (4000, 30_000, 1000),
        (8192, 50_000, 640),
        (16_000, 32_000, 2176),
        (60_000, 1_000_000, 64),
        (200_000, 400_000, 128),
    ):
        table, picked, rows = tensor(height, width), indices(count), tensor(count, width)
        calls += picking(count, height, width)
        calls += [
            grid_call("index_add.default", table, 0, picked, rows, index_high=height),
            embedding_bag(table, picked, indices(count // 4)),
        ]
    for count, classes in _WIDE_ROWS:
        calls += likelihood(count, classes)
    return calls


# (batch, channels, side): small ones too, since only CUDA has cuDNN's operators.
_IMAGES = (
    (4, 64, 28),
    (8, 24, 60),
    (8, 320, 7),
    (16, 100, 14),
    (32, 64, 60),
    (48, 32, 120),
    (64, 64, 100),
    (64, 240, 60),
    (64, 480, 30),
    (96, 144, 56),
    (96, 960, 14),
    (128, 1152, 8),
    (128, 2000, 7),
)


def batch_norms_by_cudnn() -> list[GridCall]:
    """cuDNN's batch norm in training, statistics in float32 whatever the images are in."""
    calls = []
    for batch, channels, side in _IMAGES:
        row = tensor(channels)
        for dtype in ("float32", "bfloat16"):
            x = tensor(batch, channels, side, side, dtype=dtype)
            forward = grid_call(
                "cudnn_batch_norm.default",
                *(x, row, row, row, row, True, 0.1, 1e-5),
                positive=(1, 2, 3, 4),
            )
            backward = grid_call(
                "cudnn_batch_norm_backward.default",
                *(x, x, row, row, row, row, row, 1e-5, TensorSpec((0,), "uint8")),
                positive=(2, 3, 4, 5, 6),
                follows=forward,
            )
            calls += [forward, backward]
    return calls


def pools() -> list[GridCall]:
    """Pooling and up-sampling of large batches, with their gradients."""
    calls = []
    for batch, channels, side in ((64, 64, 100), (96, 120, 60), (16, 240, 100)):
        x, half = tensor(batch, channels, side, side), tensor(batch, channels, side // 2, side // 2)
        calls += [
            *max_pools(batch, channels, side),
            grid_call("_adaptive_avg_pool2d.default", x, [4, 4]),
            grid_call("upsample_nearest2d.default", half, [side, side], 2.0, 2.0),
            grid_call(
                "upsample_nearest2d_backward.default",
                *(x, [side, side], list(half.shape), 2.0, 2.0),
            ),
        ]
    return calls
