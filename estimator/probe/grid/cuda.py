"""Grid families at the sizes that fill a GPU, and the operators that only CUDA has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator.probe.devices.calls import (
    GridCall,
    channels_innermost,
    grid_call,
    in_dtype,
    indices,
    tensor,
)
from estimator.probe.grid.matmuls import batched_matmuls, convolutions, heads_inside, matmuls
from estimator.probe.grid.memory_bound import (
    batch_norm,
    embedding_bag,
    layer_norm,
    likelihood,
    max_pools,
    picking,
    softmax,
)
from estimator.tensors import TensorSpec

# (rows, inner, columns) of a linear layer.
_LINEAR = (
    (96, 1000, 30_000),
    (192, 2176, 2176),
    (256, 640, 2560),
    (320, 4352, 1088),
    (512, 1216, 1216),
    (640, 8704, 2176),
    (768, 320, 1280),
    (1000, 1600, 6400),
    (1024, 704, 704),
    (1300, 5632, 2048),
    (1500, 2560, 900),
    (2048, 416, 1664),
    (2048, 2176, 8704),
    (2200, 1152, 50_000),
    (2560, 832, 3328),
    (3000, 1400, 1400),
    (3136, 192, 768),
    (3600, 3456, 1152),
    (4096, 1088, 4352),
    (4096, 2560, 2560),
    (4200, 4352, 11_008),
    (4800, 640, 640),
    (5000, 960, 30_000),
    (6144, 1536, 512),
    (6272, 384, 1536),
    (7200, 2816, 704),
    (8192, 832, 832),
    (8192, 1280, 5120),
    (8192, 5120, 5120),
    (9000, 256, 1000),
    (10_000, 640, 1920),
    (12_000, 2176, 2176),
    (12_544, 192, 576),
    (14_000, 1000, 4000),
    (16_384, 512, 2000),
    (16_384, 704, 2816),
    (20_000, 320, 1280),
    (25_088, 96, 384),
    (32_768, 128, 512),
    (50_000, 64, 256),
    (100_000, 96, 288),
)
# (batch, rows, inner, columns)
_BATCHED = (
    (8, 2500, 700, 2500),
    (64, 512, 96, 512),
    (96, 256, 64, 256),
    (128, 1024, 64, 1024),
    (192, 500, 500, 64),
    (256, 128, 128, 80),
    (384, 200, 64, 200),
    (768, 50, 32, 50),
    (1000, 27, 64, 27),
    (1536, 64, 64, 32),
    (4000, 27, 128, 27),
    (16, 1000, 640, 2560),
    (48, 640, 2560, 640),
)
# (batch, channels in, side, channels out, kernel, stride, groups)
_CONVOLUTIONS = (
    (16, 3, 200, 64, 7, 2, 1),
    (48, 3, 240, 32, 3, 2, 1),
    (96, 3, 208, 96, 4, 4, 1),
    (64, 3, 208, 640, 16, 16, 1),
    (32, 3, 200, 64, 3, 1, 1),
    (12, 64, 200, 64, 3, 1, 1),
    (40, 64, 60, 64, 3, 1, 1),
    (48, 96, 56, 96, 3, 1, 1),
    (64, 128, 30, 128, 3, 1, 1),
    (80, 160, 28, 160, 3, 1, 1),
    (48, 240, 100, 120, 3, 1, 1),
    (40, 256, 15, 256, 3, 1, 1),
    (96, 320, 14, 320, 3, 1, 1),
    (64, 480, 30, 480, 3, 1, 1),
    (100, 512, 8, 512, 3, 1, 1),
    (24, 1000, 16, 1000, 3, 1, 1),
    (40, 128, 60, 128, 3, 2, 1),
    (64, 256, 30, 256, 3, 2, 1),
    (96, 480, 14, 480, 3, 2, 1),
    (48, 64, 60, 240, 1, 1, 1),
    (48, 240, 60, 64, 1, 1, 1),
    (96, 120, 56, 480, 1, 1, 1),
    (64, 480, 30, 120, 1, 1, 1),
    (64, 960, 15, 240, 1, 1, 1),
    (96, 240, 14, 960, 1, 1, 1),
    (64, 512, 8, 2000, 1, 1, 1),
    (96, 2000, 7, 512, 1, 1, 1),
    (64, 240, 60, 480, 1, 2, 1),
    (96, 480, 28, 960, 1, 2, 1),
    (48, 32, 120, 16, 1, 1, 1),
    (64, 144, 60, 24, 1, 1, 1),
    (96, 40, 30, 240, 1, 1, 1),
    (128, 192, 8, 1152, 1, 1, 1),
    (64, 96, 60, 96, 3, 1, 96),
    (64, 144, 60, 144, 3, 2, 144),
    (96, 240, 30, 240, 5, 1, 240),
    (96, 480, 15, 480, 3, 1, 480),
    (128, 1152, 8, 1152, 5, 1, 1152),
    (48, 96, 60, 96, 7, 1, 96),
    (64, 192, 30, 192, 7, 1, 192),
    (96, 384, 15, 384, 7, 1, 384),
    (64, 240, 30, 240, 3, 1, 24),
)
_CHANNELS_LAST = (
    (48, 64, 60, 64, 3, 1, 1),
    (96, 240, 14, 240, 3, 1, 1),
    (64, 120, 30, 480, 1, 1, 1),
    (96, 100, 60, 200, 2, 2, 1),
    (64, 200, 28, 400, 2, 2, 1),
    (64, 96, 60, 96, 7, 1, 96),
    (96, 200, 28, 200, 7, 1, 200),
    (96, 400, 15, 400, 7, 1, 400),
)
# (batch, channels in, side, channels out) of 2×2 stride-2 transposed convolutions.
_TRANSPOSED = ((8, 128, 100, 64), (16, 240, 60, 120), (16, 512, 30, 256), (24, 1000, 15, 500))
# (batch, heads, length, head width, causal); head widths in steps of 8, as the kernels take them.
_ATTENTION = (
    (2, 8, 256, 64, True),
    (4, 12, 500, 64, True),
    (8, 12, 200, 64, False),
    (8, 16, 1000, 64, True),
    (16, 12, 384, 64, False),
    (4, 32, 2000, 64, True),
    (2, 32, 4000, 128, True),
    (8, 16, 1500, 128, True),
    (64, 12, 200, 64, False),
    (32, 20, 130, 80, False),
    (512, 4, 50, 32, False),
    (1, 16, 8000, 64, True),
)
# (layers, steps, batch, inputs, hidden)
_RECURRENT = (
    (1, 30, 32, 200, 256),
    (2, 50, 64, 320, 320),
    (2, 100, 64, 640, 640),
    (2, 64, 128, 1000, 1000),
    (1, 200, 32, 512, 1500),
)
_LSTM_MODE = 2


def large_matmuls() -> list[GridCall]:
    """Linear layers forward and backward, and batches of matmuls."""
    return [*matmuls(_LINEAR), *batched_matmuls(_BATCHED)]


def matmuls_in_tf32() -> list[GridCall]:
    """The float32 matmuls once more, on tensor cores."""
    return [replace(call, math="tf32") for call in large_matmuls()]


def matmuls_in_float8() -> list[GridCall]:
    """Linear layers of float8 with one scale for each matrix, as Hopper and later run them."""
    calls = []
    for rows, inner, columns in _LINEAR:
        if rows % 16 or inner % 16 or columns % 16:
            continue
        x = tensor(rows, inner, dtype="float8_e4m3fn")
        weight = tensor(inner, columns, dtype="float8_e4m3fn", strides=(1, inner))
        calls.append(
            grid_call(
                "_scaled_mm.default",
                *(x, weight, tensor(), tensor(), None, None, "torch.bfloat16"),
                flops=2.0 * rows * inner * columns,
                positive=(2, 3),
            )
        )
    return calls


def large_convolutions(*, gradient: bool = False) -> list[GridCall]:
    """Dense, strided, patch-wise, depthwise, grouped and transposed, in both layouts."""
    return convolutions(_CONVOLUTIONS, _CHANNELS_LAST, _TRANSPOSED, gradient=gradient)


def attention() -> list[GridCall]:
    """Fused attention and its gradient by each of CUDA's three implementations."""
    calls = []
    for number, (batch, heads, length, width, causal) in enumerate(_ATTENTION):
        x = heads_inside(batch, heads, length, width)
        half = replace(x, dtype="bfloat16")
        flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
        calls += _flash(half, causal, flops)
        calls += _by_cudnn(half, causal, flops)
        calls += _memory_efficient(x, causal, flops)
        if number % 3 == 0:
            calls += _memory_efficient(half, causal, flops)
            calls += _flash(replace(x, dtype="float16"), causal, flops)
    return calls


def _sums(x: TensorSpec) -> TensorSpec:
    return tensor(*x.shape[:3])


def _seed() -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec((2,), "uint64"), TensorSpec((), "uint64")


def _flash(x: TensorSpec, causal: bool, flops: float) -> list[GridCall]:
    length = x.shape[2]
    gradient = (x, x, x, x, x, _sums(x), None, None, length, length, 0.0, causal, *_seed())
    return _with_gradient("flash", (x, x, x, 0.0, causal), gradient, flops)


def _memory_efficient(x: TensorSpec, causal: bool, flops: float) -> list[GridCall]:
    # Its sums of exponentials come in rows that are multiples of 32 (kAlignLSE of
    # aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h).
    batch, heads, length = x.shape[:3]
    sums = tensor(batch, heads, -(-length // 32) * 32)
    offsets, mask = TensorSpec((), "int64"), [True, True, True, False]
    gradient = (x, x, x, x, None, x, sums, offsets, offsets, 0.0, mask, causal)
    return _with_gradient("efficient", (x, x, x, None, True, 0.0, causal), gradient, flops)


def _by_cudnn(x: TensorSpec, causal: bool, flops: float) -> list[GridCall]:
    length, offsets = x.shape[2], TensorSpec((), "int64")
    # Where there is no mask its sums are one more dimension deep.
    sums = tensor(*x.shape[:3], 1)
    gradient = (x, x, x, x, x, sums, offsets, offsets, None, None, None, length, length, 0.0)
    return _with_gradient("cudnn", (x, x, x, None, True, 0.0, causal), (*gradient, causal), flops)


def _with_gradient(
    kind: str, forward: tuple[Any, ...], gradient: tuple[Any, ...], flops: float
) -> list[GridCall]:
    """One implementation of attention; its gradient makes 5 matmuls where forward makes 2."""
    name = f"_scaled_dot_product_{kind}_attention"
    return [
        grid_call(f"{name}.default", *forward, flops=flops),
        grid_call(f"{name}_backward.default", *gradient, flops=2.5 * flops, positive=(5,)),
    ]


def recurrent() -> list[GridCall]:
    """LSTM layers over whole sequences by cuDNN, forward and gradient, weights in one piece."""
    calls = []
    for layers, steps, batch, inputs, hidden in _RECURRENT:
        gates = 4 * hidden
        weights: list[TensorSpec] = []
        for layer in range(layers):
            width = inputs if layer == 0 else hidden
            weights += [tensor(gates, width), tensor(gates, hidden), tensor(gates), tensor(gates)]
        buffer = tensor(sum(weight.numel for weight in weights))
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        state = tensor(layers, batch, hidden)
        flops = 2.0 * steps * batch * sum(w.numel for w in weights if len(w.shape) == 2)
        how: tuple[Any, ...] = (_LSTM_MODE, hidden, 0, layers, False, 0.0, True, False, [], None)
        forward = grid_call("_cudnn_rnn.default", x, weights, 4, buffer, state, state, *how)
        backward = grid_call(
            "_cudnn_rnn_backward.default",
            *(x, weights, 4, buffer, state, state, out, out, state, state, *how),
            *(TensorSpec((0,), "uint8"), [True, True, True, True]),
            follows=replace(forward, flops=flops),
            handed=3,
        )
        calls += [replace(forward, flops=flops), replace(backward, flops=2 * flops)]
    return calls


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
            embedding_bag(table, picked, picked),
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


def batch_norms() -> list[GridCall]:
    """Batch norm in training: cuDNN's of float32 images, torch's own of bfloat16 ones.

    cuDNN's takes no bfloat16 (use_cudnn of aten/src/ATen/native/Normalization.cpp).
    """
    calls = []
    for shape in _IMAGES:
        forward, backward = batch_norm(*shape)
        x, row = tensor(shape[0], shape[1], shape[2], shape[2]), tensor(shape[1])
        by_cudnn = grid_call(
            "cudnn_batch_norm.default",
            *(x, row, row, row, row, True, 0.1, 1e-5),
            positive=(1, 2, 3, 4),
        )
        gradient = grid_call(
            "cudnn_batch_norm_backward.default",
            *(x, x, row, row, row, row, row, 1e-5, TensorSpec((0,), "uint8")),
            positive=(2, 3, 4, 5, 6),
            follows=by_cudnn,
        )
        calls += [by_cudnn, gradient, *in_dtype([forward, backward], "bfloat16", on_cuda=True)]
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
