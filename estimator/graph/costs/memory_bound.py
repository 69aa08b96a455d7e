"""Count the bytes, and roughly the work, of operators that mostly move memory.

Bytes are the least a call can move: inputs once, outputs once, of a table only the rows touched.
Operators for which that is all stand in one table; gathers, scatters and embeddings at the end.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from estimator.graph.costs.registry import (
    DimsFormula,
    Family,
    argument,
    bytes_of,
    cost_of,
    elements,
    extent,
    flat_dims,
    item_bytes,
    rows_of,
    specs_in,
    streamed,
    written,
)
from estimator.graph.ir.ops import VIEWS, OpCost, named
from estimator.tensors import OpCall, TensorSpec


def _reduced_dims(call: OpCall) -> tuple[float, ...]:
    """Rows are the elements of the result, of which each gathers one row."""
    source, result = call.inputs[0], call.outputs[0]
    return rows_of(float(source.numel), source.numel / result.numel if result.numel else 1.0)


def _along(position: int) -> DimsFormula:
    """Dims of an operator that works along the dimension in its argument `position`."""

    def dims(call: OpCall) -> tuple[float, ...]:
        source = call.inputs[0]
        return rows_of(float(source.numel), extent(source, argument(call, position, "dim", -1)))

    return dims


def _normalized(call: OpCall) -> tuple[float, ...]:
    """One row is what one mean is taken over."""
    name, source = call.name, call.arguments[0]
    if "group_norm" in name:
        count, _, _, groups = call.arguments[5 if "backward" in name else 3 :][:4]
        return rows_of(source.numel, source.numel / max(count * groups, 1))
    if "batch_norm" in name:
        return rows_of(source.numel, source.numel / source.shape[1])
    if "weight_norm" in name:
        dim = argument(call, 4 if "backward" in name else 2, "dim", 0)
        return rows_of(source.numel, source.numel / source.shape[dim])
    shape = argument(call, 2 if "backward" in name else 1, "normalized_shape", ())
    return rows_of(source.numel, math.prod(shape))


def _pooled(call: OpCall) -> tuple[float, ...]:
    """Images x channels, and positions of the larger side."""
    largest = max((*call.inputs, *call.outputs), key=lambda spec: spec.numel)
    spatial = min(max(len(largest.shape) - 2, 1), 3)
    return rows_of(largest.numel, extent(largest, tuple(range(-spatial, 0))))


def _and_backward(names: str) -> str:
    return " ".join(f"{name} {name}_backward" for name in names.split())


# What reads each input and writes each output once, by family and sizes: names by work per element.
# That is in rough instructions, the order of the vectorised kernels' polynomials (Sleef, at::vec),
# good to a factor of two.
_EXPONENTIAL = 12
_RANDOM_NUMBER = 20
_STREAMED: dict[tuple[Family, DimsFormula], dict[float, str]] = {
    ("elementwise", flat_dims): {
        1: "abs add bitwise_and bitwise_not bitwise_or bitwise_xor __and __or __xor ceil clamp "
        "__and__ __or__ __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift "
        "clamp_max clamp_min clip conj_physical eq floor frac ge gt isfinite isinf isnan isneginf "
        "isposinf le logical_and logical_not logical_or logical_xor lt masked_fill max.other "
        "maximum min.other minimum fmax fmin mul ne neg positive relu relu6 round rsub sgn sign "
        "signbit square sub trunc where heaviside deg2rad rad2deg copysign native_dropout_backward "
        "masked_scale _masked_scale nan_to_num complex "
        + _and_backward("threshold hardtanh leaky_relu _prelu_kernel hardshrink softshrink"),
        2: "addcmul lerp " + _and_backward("hardsigmoid hardswish"),
        4: "div true_divide addcdiv reciprocal sqrt rsqrt floor_divide remainder fmod hypot",
        # Half of a random number alone, since one call of Philox gives several.
        _RANDOM_NUMBER / 2: "native_dropout _fused_dropout",
        _EXPONENTIAL: "exp exp2 expm1 log log2 log10 log1p silu logaddexp logaddexp2 celu selu "
        "xlogy special_xlog1py special_entr log_sigmoid_backward softplus_backward glu_jvp "
        "tanh_backward " + _and_backward("sigmoid elu logit glu"),
        20: "tanh silu_backward softplus log_sigmoid_forward sin cos tan sinh cosh asin acos atan "
        "asinh acosh atanh atan2 erf erfc float_power angle polar sinc special_log_ndtr "
        "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl "
        + _and_backward("gelu mish _thnn_fused_gru_cell"),
        60: "erfinv lgamma digamma polygamma mvlgamma igamma igammac i0 special_i0e special_i1 "
        "special_i1e special_erfcx special_ndtri special_zeta gcd lcm ldexp frexp nextafter",
    },
    ("reduction", _reduced_dims): {
        1: "sum mean nansum amax amin aminmax max min argmax argmin prod all any median nanmedian "
        "_is_all_true _is_any_true count_nonzero norm linalg_vector_norm",
        # The sum, then the difference, square and sum of each element.
        4: "var std var_mean std_mean",
        # Maximum, exponential and sum of each element; of softmax a quotient too.
        _EXPONENTIAL + 2: "logsumexp",
    },
    ("reduction", _along(1)): {
        1: "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"
    },
    ("softmax", _along(1)): {
        _EXPONENTIAL + 3: "_softmax _log_softmax _safe_softmax _masked_softmax"
    },
    ("softmax", _along(2)): {
        # Product, sum, difference and product; of logarithms an exponential for one product.
        4: "_softmax_backward_data _masked_softmax_backward",
        _EXPONENTIAL + 3: "_log_softmax_backward_data",
    },
    ("normalization", _normalized): {
        # Mean, variance, difference, product, scale and shift.
        8: "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _batch_norm_with_update cudnn_batch_norm "
        "_batch_norm_with_update_functional miopen_batch_norm _fused_rms_norm rms_norm "
        "_weight_norm_interface _batch_norm_no_update native_batch_norm_legit_no_training "
        "_native_batch_norm_legit_no_training layer_norm group_norm",
        # The two sums' products, then the normalised value again and three terms of each element.
        14: "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward "
        "batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward "
        "_fused_rms_norm_backward _weight_norm_interface_backward",
    },
    ("loss", flat_dims): {
        # Difference, function and product of each element; of entropies two logarithms.
        3: "kl_div multilabel_margin_loss_forward multilabel_margin_loss_backward poisson_nll_loss "
        + _and_backward("mse_loss l1_loss smooth_l1_loss huber_loss multi_margin_loss"),
        2 * _EXPONENTIAL: "binary_cross_entropy_with_logits "
        + _and_backward("binary_cross_entropy soft_margin_loss"),
    },
    ("pooling", _pooled): {
        1: "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool3d "
        "fractional_max_pool2d fractional_max_pool3d "
        + _and_backward(
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d"
        ),
        3: _and_backward("upsample_linear1d"),
        7: _and_backward("upsample_bilinear2d _upsample_bilinear2d_aa"),
        15: _and_backward("upsample_trilinear3d"),
        40: _and_backward("upsample_bicubic2d _upsample_bicubic2d_aa"),
        20: "grid_sampler_2d grid_sampler_3d affine_grid_generator",
        30: "grid_sampler_2d_backward grid_sampler_3d_backward",
    },
    ("index", flat_dims): {
        1: "masked_scatter masked_scatter_backward put nonzero nonzero_static masked_select"
    },
    ("other", flat_dims): {
        1: "_local_scalar_dense item bincount histc is_nonzero equal is_same_size"
    },
}
for (_family, _dims), _work in _STREAMED.items():
    for _flops, _names in _work.items():
        _formula = partial(streamed, flops_per_element=_flops)
        cost_of(*named(_names), family=_family, dims=_dims)(_formula)
# Kernels that nothing fuses; a product makes the gradient of its bias in passing.
cost_of(
    *(f"eager.{name}" for name in ("add", "cat", "clamp", "clamp_backward", "copy", "fill")),
    *(f"eager.{name}" for name in ("mul", "neg", "sum")),
    "te.bias_gradient",
    family="elementwise",
)(streamed)
# Rows of tokens copied for each of their experts, or added up; their order is little.
cost_of("te.permute", "te.unpermute", family="copy")(partial(streamed, flops_per_element=0.0))


@cost_of("aten.pow", family="elementwise")
def _power(call: OpCall) -> OpCost:
    """By a small whole number it is a few products (aten/src/ATen/native/cpu/PowKernel.cpp)."""
    products = {1: 1, 2: 2, 3: 2, 0.5: 4, -0.5: 4, -1: 4, -2: 4}
    # By 1 it is a copy (aten/src/ATen/native/Pow.cpp), as backward of a square asks for it.
    return streamed(call, products.get(argument(call, 1, "exponent"), 20))


@cost_of("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", family="elementwise")
def _masked_fill(call: OpCall) -> OpCost:
    """A copy, then filled in place (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    copied = OpCost(read_bytes=written(call), written_bytes=written(call))
    return streamed(call) + copied


@cost_of(
    # Transformer Engine's casts to FP8, by rows and by columns.
    "te.quantize",
    *named("clone copy _to_copy cat stack constant_pad_nd roll repeat flip pixel_shuffle"),
    *named("pixel_unshuffle tril triu im2col contiguous channel_shuffle native_channel_shuffle"),
    *named("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d rot90 hstack"),
    *named("replication_pad2d replication_pad3d view_copy permute_copy transpose_copy expand_copy"),
    *named("unfold_copy slice_copy select_copy t_copy as_strided_copy view_as_complex_copy"),
    *named("split_copy split_with_sizes_copy unbind_copy diagonal_copy alias_copy detach_copy"),
    *named("squeeze_copy unsqueeze_copy block_diag repeat_interleave diag_embed unsafe_chunk"),
    *named("lift _reshape_copy _conj_copy view_as_real_copy vstack dstack trace"),
    family="copy",
)
def _copy(call: OpCall) -> OpCost:
    """A copy reads what it writes; `copy_` does not read the tensor it fills."""
    into = call.name == "copy_"
    read = call.inputs[1:2] if into else call.inputs
    made = sum(spec.numel for spec in call.outputs)
    if len(read) == 1 and call.outputs and read[0].numel > made:
        # A copy of a part (slice_copy, tril of a view) reads that part only.
        return OpCost(0.0, made * item_bytes(read[0]), written(call))
    return OpCost(0.0, bytes_of(read), written(call))


@cost_of(
    *named("slice_backward select_backward diagonal_backward unfold_backward trace_backward"),
    *named("slice_scatter select_scatter diagonal_scatter as_strided_scatter"),
    family="copy",
)
def _spread(call: OpCall) -> OpCost:
    """The whole result is written once (zeros or a copy), then the part once more."""
    part = call.inputs[1] if "scatter" in call.target and len(call.inputs) > 1 else call.inputs[0]
    return OpCost(0.0, bytes_of(call.inputs), written(call) + part.nbytes)


@cost_of(
    *named("col2im reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward"),
    *named("replication_pad2d_backward replication_pad3d_backward reflection_pad3d_backward"),
    family="copy",
)
def _fold(call: OpCall) -> OpCost:
    """Sums the gradient into the shape of the input, which itself is not read."""
    gradient = call.inputs[0]
    return OpCost(gradient.numel, bytes_of([gradient]), written(call))


@cost_of(
    *named("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill zero"),
    *named("arange linspace logspace eye scalar_tensor tril_indices triu_indices"),
    "aten._efficientzerotensor",
    family="fill",
)
def _fill(call: OpCall) -> OpCost:
    return OpCost(0.0, 0.0, written(call))


@cost_of(
    *named("rand rand_like randn randn_like randint randint_like randperm bernoulli normal"),
    *named("uniform exponential random log_normal cauchy geometric poisson multinomial"),
    *named("rrelu_with_noise_functional normal_functional"),
    family="fill",
)
def _random(call: OpCall) -> OpCost:
    """Mersenne twister or Philox; `bernoulli(p)` reads p."""
    reads = call.target in ("aten.bernoulli.default", "aten.bernoulli_.Tensor")
    return OpCost(
        _RANDOM_NUMBER * elements(call), bytes_of(call.inputs) if reads else 0.0, written(call)
    )


@cost_of(
    *named("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize"),
    *named("set _resize_output"),
    family="fill",
)
def _allocation(call: OpCall) -> OpCost:
    """Memory is taken, not touched."""
    return OpCost()


def _classified(call: OpCall) -> tuple[float, ...]:
    """Rows are targets, a row is the scores of one."""
    scores = call.arguments[1 if "backward" in call.target else 0]
    classes = scores.shape[1] if len(scores.shape) > 1 else scores.numel
    return rows_of(scores.numel, classes)


@cost_of("aten.nll_loss_forward", "aten.nll_loss2d_forward", family="loss", dims=_classified)
def _nll(call: OpCall) -> OpCost:
    """Reads one score per target."""
    scores, targets, *weights = call.inputs
    read_bytes = bytes_of([targets, *weights]) + targets.numel * item_bytes(scores)
    return OpCost(targets.numel, read_bytes, written(call))


@cost_of("aten.nll_loss_backward", "aten.nll_loss2d_backward", family="loss", dims=_classified)
def _nll_backward(call: OpCall) -> OpCost:
    """Zeros everywhere, then one entry per target."""
    scores, targets = call.arguments[1:3]
    gradient = call.arguments[0]
    touched_bytes = targets.numel * item_bytes(scores)
    return OpCost(targets.numel, bytes_of([targets, gradient]), written(call) + touched_bytes)


@cost_of("aten._ctc_loss", "aten._ctc_loss_backward", family="loss")
def _ctc(call: OpCall) -> OpCost:
    """Three exponentials and a logarithm for each state of the lattice, log_alpha or log_beta."""
    lattice = call.outputs[1] if len(call.outputs) > 1 else call.outputs[0]
    return OpCost((4.0 * _EXPONENTIAL + 2.0) * lattice.numel, bytes_of(call.inputs), written(call))


@cost_of(*VIEWS, family="view")
def _view(call: OpCall) -> OpCost:
    return OpCost()


def _ordering(call: OpCall) -> OpCost:
    """A comparison sort compares each element about log2(row length) times."""
    source = call.inputs[0]
    row = max(source.shape[-1] if source.shape else 1, 2)
    return OpCost(source.numel * row.bit_length(), bytes_of(call.inputs), written(call))


cost_of(*named("sort argsort msort mode"), family="other", dims=_along(1))(_ordering)
cost_of(*named("topk kthvalue"), family="other", dims=_along(2))(_ordering)
cost_of(
    *named("sort.stable searchsorted bucketize unique_dim _unique2 unique_consecutive"),
    family="other",
)(_ordering)


def _transformed(call: OpCall) -> tuple[float, ...]:
    """Rows are transforms, a row is the signal of one; of half a spectrum its real side counts."""
    signal = max(call.inputs[0], call.outputs[0], key=lambda spec: spec.numel)
    return rows_of(signal.numel, extent(signal, argument(call, 1, "dim", None)))


@cost_of(*named("_fft_r2c _fft_c2r _fft_c2c"), family="fourier", dims=_transformed)
def _fourier(call: OpCall) -> OpCost:
    """5 n log2 n of complex numbers, half of it with a real side (Van Loan 1992; benchFFT)."""
    transforms, length = _transformed(call)
    per_point = 5.0 if "c2c" in call.target else 2.5
    flops = per_point * transforms * length * math.log2(max(length, 2.0))
    return OpCost(flops, bytes_of(call.inputs), written(call))


@cost_of("aten._cdist_forward", "aten._cdist_backward", "aten._pdist_forward", family="other")
def _distances(call: OpCall) -> OpCost:
    """A difference, a power and a sum for each pair and each coordinate."""
    first = next(spec for spec in call.inputs if len(spec.shape) > 1)
    pairs = max(spec.numel for spec in (*call.outputs, *call.inputs))
    return OpCost(3.0 * pairs * first.shape[-1], bytes_of(call.inputs), written(call))


def _window(call: OpCall) -> int:
    """Elements under one pooling window, which ends where the input does."""
    kernel = argument(call, 1, "kernel_size", ())
    sizes = kernel if isinstance(kernel, tuple) else (kernel,)
    count = 1
    for size, most in zip(sizes, call.inputs[0].shape[-len(sizes) :], strict=False):
        count *= max(min(int(size), most), 1) if isinstance(size, (int, float)) else 1
    return count


@cost_of(
    *named("avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices"),
    *named("max_pool2d mkldnn_max_pool2d"),
    family="pooling",
    dims=_pooled,
)
def _pooling(call: OpCall) -> OpCost:
    return OpCost(_window(call) * call.outputs[0].numel, bytes_of(call.inputs), written(call))


@cost_of(
    *named("avg_pool2d_backward avg_pool3d_backward"),
    *named("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    family="pooling",
    dims=_pooled,
)
def _average_pooling_backward(call: OpCall) -> OpCost:
    """The input is given for its shape alone."""
    return OpCost(elements(call), bytes_of(call.inputs[:1]), written(call))


@cost_of(
    *named("max_pool2d_with_indices_backward max_pool3d_with_indices_backward"),
    *named("adaptive_max_pool2d_backward adaptive_max_pool3d_backward"),
    *named("fractional_max_pool2d_backward"),
    family="pooling",
    dims=_pooled,
)
def _max_pooling_backward(call: OpCall) -> OpCost:
    """Zeros everywhere, then each gradient added where its maximum was."""
    gradient, indices = call.inputs[0], call.inputs[-1]
    read_bytes = bytes_of([gradient, gradient, indices])
    return OpCost(gradient.numel, read_bytes, written(call) + gradient.nbytes)


def _looked_up(call: OpCall) -> tuple[float, ...]:
    """One row per index, as long as the table is wide; the backward pass makes the table."""
    table = call.outputs[0] if "backward" in call.target else call.arguments[0]
    return float(call.arguments[1].numel), float(table.shape[-1])


def _along_dim(call: OpCall) -> tuple[float, ...]:
    """index_select, index_add and the like: (table, dim, indices) take slices along dim."""
    table, dim, indices = call.arguments[:3]
    return float(indices.numel), table.numel / max(extent(table, dim), 1)


def _by_tensors(call: OpCall) -> tuple[float, ...]:
    """index and index_put: (table, index tensors); a boolean mask chooses the rows of the data."""
    chosen = specs_in(call.arguments[1])
    moved = call.arguments[2] if "put" in call.target else call.outputs[0]
    rows = math.prod(np.broadcast_shapes(*(spec.shape for spec in chosen)))
    if any(spec.dtype in ("bool", "uint8") for spec in chosen):
        rows = moved.shape[0] if moved.shape else 1
    return float(rows), max(moved.numel, rows) / max(rows, 1)


def _by_element(call: OpCall) -> tuple[float, ...]:
    """gather and scatter move one element per index."""
    return float(_index_of(call).numel), 1.0


def _index_of(call: OpCall) -> TensorSpec:
    return call.arguments[2] if len(call.arguments) > 2 else call.arguments[1]


def _lookup(call: OpCall) -> OpCost:
    """The rows that are looked up are read, and their numbers."""
    table, *indices = call.inputs
    rows_bytes = call.outputs[0].numel * item_bytes(table)
    return OpCost(0.0, bytes_of(indices) + rows_bytes, written(call))


cost_of("aten.embedding", family="index", dims=_looked_up)(_lookup)
cost_of("aten.index_select", family="index", dims=_along_dim)(_lookup)
cost_of("aten.index", "aten._unsafe_index", family="index", dims=_by_tensors)(_lookup)
cost_of(*named("gather take take_along_dim"), family="index", dims=_by_element)(_lookup)


@cost_of(*named("_embedding_bag _embedding_bag_forward_only"), family="index", dims=_looked_up)
def _embedding_bag(call: OpCall) -> OpCost:
    """Every row looked up is read; the bags and their bookkeeping are written."""
    table, *indices = call.arguments[:3]
    moved = math.prod(_looked_up(call))
    return OpCost(moved, bytes_of(indices) + moved * item_bytes(table), written(call))


@cost_of(
    *named("embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward"),
    family="index",
    dims=_looked_up,
)
def _embedding_backward(call: OpCall) -> OpCost:
    """A dense gradient of a table: zeros everywhere, then each row read, added to and written.

    Rows of a bag share one gradient.
    """
    gradient, indices = call.arguments[:2]
    moved = math.prod(_looked_up(call))
    rows_bytes = moved * item_bytes(call.outputs[0])
    is_bag = "bag" in call.target
    gradient_bytes = bytes_of([gradient]) if is_bag else moved * item_bytes(gradient)
    read_bytes = bytes_of([indices]) + gradient_bytes + rows_bytes
    return OpCost(moved, read_bytes, written(call) + rows_bytes)


def _placed(call: OpCall, touched: float, sources: tuple[Any, ...], *, adds: bool) -> OpCost:
    """Values placed or added into a tensor, in place or into a fresh copy of it."""
    table = call.arguments[0]
    touched_bytes = touched * item_bytes(table)
    read_bytes = bytes_of(specs_in(sources)) + (touched_bytes if adds else 0.0)
    cost = OpCost(touched if adds else 0.0, read_bytes, touched_bytes)
    copy = OpCost(0.0, bytes_of([table]), written(call))
    return cost if call.name.endswith("_") else cost + copy


def _adds(call: OpCall) -> bool:
    return "add" in call.target or "reduce" in call.target


@cost_of(*named("index_put _index_put_impl _unsafe_index_put"), family="index", dims=_by_tensors)
def _index_put(call: OpCall) -> OpCost:
    adds = bool(argument(call, 3, "accumulate", False))
    return _placed(call, math.prod(_by_tensors(call)), call.arguments[1:3], adds=adds)


@cost_of(*named("index_add index_copy index_fill index_reduce"), family="index", dims=_along_dim)
def _index_add(call: OpCall) -> OpCost:
    return _placed(call, math.prod(_along_dim(call)), call.arguments[2:4], adds=_adds(call))


@cost_of(*named("scatter scatter_add scatter_reduce"), family="index", dims=_by_element)
def _scatter(call: OpCall) -> OpCost:
    """(self, dim, index, source): as many elements as the index has."""
    index = _index_of(call)
    placed = _placed(call, index.numel, (index,), adds=_adds(call))
    # Of a larger source only the elements that have an index are read.
    items = sum(item_bytes(spec) for spec in specs_in(call.arguments[3:4]))
    return placed + OpCost(read_bytes=index.numel * items)
