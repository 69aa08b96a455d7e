"""Count the bytes, and roughly the work, of operators that mostly move memory.

Bytes are the least a call can move: inputs once, outputs once, of a table only the rows touched.
Gathers, scatters and embeddings stand at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from estimator.graph.costs.registry import (
    CostFormula,
    argument,
    bytes_of,
    cost_of,
    elements,
    extent,
    item_bytes,
    rows_of,
    specs_in,
    streamed,
    tensor,
    written,
)
from estimator.graph.ir.ops import VIEWS, OpCost, named
from estimator.tensors import OpCall, TensorSpec

# Pointwise operators by rough instructions per element: the order of the vectorised kernels'
# polynomials (Sleef, at::vec), good to a factor of two. What follows counts likewise.
_EXPONENTIAL = 12
_RANDOM_NUMBER = 20
_POINTWISE = {
    1: "abs add bitwise_and bitwise_not bitwise_or bitwise_xor __and __or __xor ceil clamp "
    "__and__ __or__ __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift "
    "clamp_max clamp_min clip conj_physical eq floor frac ge gt isfinite isinf isnan isneginf "
    "isposinf le logical_and logical_not logical_or logical_xor lt masked_fill max.other maximum "
    "min.other minimum fmax fmin mul ne neg positive relu relu6 round rsub sgn sign signbit square "
    "sub threshold threshold_backward trunc where heaviside deg2rad rad2deg copysign "
    "native_dropout_backward hardtanh hardtanh_backward masked_scale _masked_scale nan_to_num "
    "leaky_relu leaky_relu_backward _prelu_kernel _prelu_kernel_backward complex "
    "hardshrink hardshrink_backward softshrink softshrink_backward",
    2: "addcmul lerp hardsigmoid hardsigmoid_backward hardswish hardswish_backward",
    4: "div true_divide addcdiv reciprocal sqrt rsqrt floor_divide remainder fmod hypot",
    _EXPONENTIAL: "exp exp2 expm1 log log2 log10 log1p sigmoid sigmoid_backward silu logaddexp "
    "logaddexp2 "
    "elu elu_backward celu selu logit logit_backward xlogy special_xlog1py special_entr glu "
    "log_sigmoid_backward softplus_backward glu_backward glu_jvp tanh_backward",
    20: "tanh silu_backward softplus log_sigmoid_forward sin cos tan sinh cosh asin acos atan "
    "asinh acosh atanh atan2 erf erfc gelu gelu_backward mish mish_backward pow float_power angle "
    "polar sinc special_log_ndtr _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl "
    "_thnn_fused_gru_cell _thnn_fused_gru_cell_backward",
    60: "erfinv lgamma digamma polygamma mvlgamma igamma igammac i0 special_i0e special_i1 "
    "special_i1e special_erfcx special_ndtri special_zeta gcd lcm ldexp frexp nextafter",
}


def _pointwise(flops_per_element: int) -> CostFormula:
    def cost(call: OpCall) -> OpCost:
        return streamed(call, _power_flops(call) or flops_per_element)

    return cost


def _power_flops(call: OpCall) -> int:
    """pow by a small whole number is a few products (aten/src/ATen/native/cpu/PowKernel.cpp)."""
    if not call.target.startswith("aten.pow"):
        return 0
    exponent = argument(call, 1, "exponent")
    if exponent == 1:  # a copy (aten/src/ATen/native/Pow.cpp), as backward of a square asks for it
        return 1
    return 2 if exponent in (2, 3, 2.0, 3.0) else 4 if exponent in (0.5, -0.5, -1, -2) else 0


for _flops, _names in _POINTWISE.items():
    cost_of(*named(_names), family="elementwise")(_pointwise(_flops))


@cost_of("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", family="elementwise")
def _masked_fill(call: OpCall) -> OpCost:
    """A copy, then filled in place (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    copied = OpCost(read_bytes=written(call), written_bytes=written(call))
    return streamed(call) + copied


@cost_of("aten.native_dropout", "aten._fused_dropout", family="elementwise")
def _dropout(call: OpCall) -> OpCost:
    """Half of a random number alone, since one call of Philox gives several."""
    return streamed(call, _RANDOM_NUMBER / 2)


def _reduced_dims(call: OpCall) -> tuple[float, ...]:
    """Rows are the elements of the result, of which each gathers one row."""
    source, result = call.inputs[0], call.outputs[0]
    return rows_of(float(source.numel), source.numel / result.numel if result.numel else 1.0)


@cost_of(
    *named("sum mean nansum amax amin aminmax max min argmax argmin prod all any median"),
    *named("_is_all_true _is_any_true count_nonzero norm linalg_vector_norm nanmedian"),
    family="reduction",
    dims=_reduced_dims,
)
def _reduction(call: OpCall) -> OpCost:
    return OpCost(call.inputs[0].numel, bytes_of(call.inputs), written(call))


@cost_of(*named("var std var_mean std_mean"), family="reduction", dims=_reduced_dims)
def _moments(call: OpCall) -> OpCost:
    """The sum, then the difference, square and sum of each element."""
    return OpCost(4.0 * call.inputs[0].numel, bytes_of(call.inputs), written(call))


@cost_of("aten.logsumexp", family="reduction", dims=_reduced_dims)
def _logsumexp(call: OpCall) -> OpCost:
    """Maximum, exponential and sum of each element."""
    return OpCost((_EXPONENTIAL + 2.0) * call.inputs[0].numel, bytes_of(call.inputs), written(call))


def _along(position: int) -> Any:
    """Dims of an operator that works along the dimension in its argument `position`."""

    def dims(call: OpCall) -> tuple[float, ...]:
        source = call.inputs[0]
        return rows_of(float(source.numel), extent(source, argument(call, position, "dim", -1)))

    return dims


@cost_of(
    *named("cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"),
    family="reduction",
    dims=_along(1),
)
def _scan(call: OpCall) -> OpCost:
    return streamed(call)


@cost_of(
    *named("_softmax _log_softmax _safe_softmax _masked_softmax"), family="softmax", dims=_along(1)
)
def _softmax(call: OpCall) -> OpCost:
    """Maximum, exponential, sum and quotient of each element."""
    return streamed(call, _EXPONENTIAL + 3)


@cost_of(
    *named("_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
    family="softmax",
    dims=_along(2),
)
def _softmax_backward(call: OpCall) -> OpCost:
    """Product, sum, difference and product; of logarithms with an exponential for one product."""
    return streamed(call, _EXPONENTIAL + 3 if "log" in call.target else 4)


def _normalized(call: OpCall) -> tuple[float, ...]:
    """One row is what one mean is taken over."""
    name = call.name
    source = call.arguments[0]
    if "group_norm" in name:
        count, _, _, groups = call.arguments[5 if "backward" in name else 3 :][:4]
        return rows_of(source.numel, source.numel / max(count * groups, 1))
    if "batch_norm" in name:
        return rows_of(source.numel, source.numel / source.shape[1])
    if "weight_norm" in name:
        dim = argument(call, 4 if "backward" in name else 2, "dim", 0)
        return rows_of(source.numel, source.numel / source.shape[dim])
    shape = argument(call, 2 if "backward" in name else 1, "normalized_shape", ())
    row = 1
    for size in shape:
        row *= size
    return rows_of(source.numel, row)


@cost_of(
    *named("native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit"),
    *named("_native_batch_norm_legit_functional _batch_norm_with_update cudnn_batch_norm"),
    *named("_batch_norm_with_update_functional miopen_batch_norm _fused_rms_norm rms_norm"),
    *named("_weight_norm_interface _batch_norm_no_update native_batch_norm_legit_no_training"),
    *named("_native_batch_norm_legit_no_training layer_norm group_norm"),
    family="normalization",
    dims=_normalized,
)
def _normalization(call: OpCall) -> OpCost:
    """Mean, variance, difference, product, scale and shift."""
    return streamed(call, 8)


@cost_of(
    *named("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"),
    *named("batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward"),
    *named("_fused_rms_norm_backward _weight_norm_interface_backward"),
    family="normalization",
    dims=_normalized,
)
def _normalization_backward(call: OpCall) -> OpCost:
    """The two sums' products, then the normalised value again and three terms of each element."""
    return streamed(call, 14)


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
    output_bytes = written(call)
    if len(read) == 1 and call.outputs and read[0].numel > elements_written(call):
        # A copy of a part (slice_copy, tril of a view) reads that part only.
        return OpCost(0.0, elements_written(call) * item_bytes(read[0]), output_bytes)
    return OpCost(0.0, bytes_of(read), output_bytes)


@cost_of("te.permute", "te.unpermute", family="copy")
def _permuted(call: OpCall) -> OpCost:
    """Rows of tokens copied for each of their experts, or added up; their order is little."""
    return OpCost(0.0, bytes_of(call.inputs), written(call))


@cost_of(
    # Kernels that nothing fuses; a product makes the gradient of its bias in passing.
    *(f"eager.{name}" for name in ("add", "cat", "clamp", "clamp_backward", "copy", "fill")),
    *(f"eager.{name}" for name in ("mul", "neg", "sum")),
    "te.bias_gradient",
    family="elementwise",
)
def _unfused(call: OpCall) -> OpCost:
    return streamed(call)


def elements_written(call: OpCall) -> float:
    """Elements of all outputs together."""
    return float(sum(spec.numel for spec in call.outputs))


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
    scores, targets = call.arguments[:2]
    weight = tensor(call, 2, "weight")
    read_bytes = bytes_of([targets, weight]) + targets.numel * item_bytes(scores)
    return OpCost(targets.numel, read_bytes, written(call))


@cost_of("aten.nll_loss_backward", "aten.nll_loss2d_backward", family="loss", dims=_classified)
def _nll_backward(call: OpCall) -> OpCost:
    """Zeros everywhere, then one entry per target."""
    scores, targets = call.arguments[1:3]
    gradient = call.arguments[0]
    touched_bytes = targets.numel * item_bytes(scores)
    return OpCost(targets.numel, bytes_of([targets, gradient]), written(call) + touched_bytes)


@cost_of(
    *named("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div"),
    *named("binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss"),
    *named("multilabel_margin_loss_forward poisson_nll_loss mse_loss_backward l1_loss_backward"),
    *named("smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward"),
    *named("soft_margin_loss_backward multi_margin_loss_backward"),
    *named("multilabel_margin_loss_backward"),
    family="loss",
)
def _loss(call: OpCall) -> OpCost:
    """Difference, function and product of each element; of entropies two logarithms."""
    has_logarithms = "cross_entropy" in call.target or "soft" in call.target
    return streamed(call, 2 * _EXPONENTIAL if has_logarithms else 3)


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


@cost_of(
    *named("_local_scalar_dense item bincount histc is_nonzero equal is_same_size"),
    family="other",
)
def _small(call: OpCall) -> OpCost:
    return streamed(call)


def _pooled(call: OpCall) -> tuple[float, ...]:
    """Images x channels, and positions of the larger side."""
    largest = max((*call.inputs, *call.outputs), key=lambda spec: spec.numel)
    spatial = min(max(len(largest.shape) - 2, 1), 3)
    return rows_of(largest.numel, extent(largest, tuple(range(-spatial, 0))))


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
    *named("adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d"),
    *named("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool3d"),
    *named("fractional_max_pool2d fractional_max_pool3d"),
    family="pooling",
    dims=_pooled,
)
def _adaptive_pooling(call: OpCall) -> OpCost:
    return streamed(call)


@cost_of(
    *named("upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d"),
    *named("_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d"),
    *named("upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d"),
    *named("_upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d affine_grid_generator"),
    family="pooling",
    dims=_pooled,
)
def _resampling(call: OpCall) -> OpCost:
    return streamed(call, _resampling_flops(call.target))


def _resampling_flops(target: str) -> int:
    weights = {"nearest": 1, "linear1d": 3, "bilinear": 7, "trilinear": 15, "bicubic": 40}
    return next((flops for word, flops in weights.items() if word in target), 20)


@cost_of(
    *named("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"),
    *named("_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward"),
    *named("_upsample_nearest_exact3d_backward upsample_linear1d_backward"),
    *named("upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward"),
    *named("upsample_trilinear3d_backward upsample_bicubic2d_backward"),
    *named("_upsample_bicubic2d_aa_backward avg_pool2d_backward avg_pool3d_backward"),
    *named("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    family="pooling",
    dims=_pooled,
)
def _resampling_backward(call: OpCall) -> OpCost:
    """The input is given for its shape alone."""
    gradient = call.inputs[0]
    each = _resampling_flops(call.target) if "upsample" in call.target else 1
    return OpCost(each * elements(call), bytes_of([gradient]), written(call))


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


@cost_of(
    *named("grid_sampler_2d_backward grid_sampler_3d_backward"), family="pooling", dims=_pooled
)
def _grid_backward(call: OpCall) -> OpCost:
    return streamed(call, 30)


Dims = tuple[float, float]


def _looked_up(table_position: int, index_position: int) -> Callable[[OpCall], Dims]:
    """One row per index, as long as the table is wide; the table may be the output (-1)."""

    def dims(call: OpCall) -> Dims:
        table = call.outputs[0] if table_position < 0 else call.arguments[table_position]
        return float(call.arguments[index_position].numel), float(table.shape[-1])

    return dims


def _along_dim(call: OpCall) -> Dims:
    """index_select, index_add and the like: (table, dim, indices) take slices along dim."""
    table, dim, indices = call.arguments[:3]
    return float(indices.numel), table.numel / max(extent(table, dim), 1)


def _by_tensors(data: Callable[[OpCall], TensorSpec]) -> Callable[[OpCall], Dims]:
    """index and index_put: (table, index tensors); a boolean mask chooses the rows of the data."""

    def dims(call: OpCall) -> Dims:
        chosen, moved = specs_in(call.arguments[1]), data(call)
        rows = 1
        for spec in chosen:
            rows = max(rows, spec.numel)
        if any(spec.dtype in ("bool", "uint8") for spec in chosen):
            rows = moved.shape[0] if moved.shape else 1
        elif len(chosen) > 1:
            rows = max(rows, _broadcast_numel(chosen))
        return float(rows), max(moved.numel, rows) / max(rows, 1)

    return dims


def _broadcast_numel(specs: tuple[TensorSpec, ...]) -> int:
    """Elements of tensors broadcast against each other."""
    rank = max(len(spec.shape) for spec in specs)
    numel = 1
    for axis in range(1, rank + 1):
        numel *= max(spec.shape[-axis] if axis <= len(spec.shape) else 1 for spec in specs)
    return numel


def _by_element(call: OpCall) -> Dims:
    """gather and scatter move one element per index."""
    return float(_index_of(call).numel), 1.0


def _index_of(call: OpCall) -> TensorSpec:
    return call.arguments[2] if len(call.arguments) > 2 else call.arguments[1]


def _in_place(call: OpCall) -> bool:
    return call.name.endswith("_")


def _read_rows(call: OpCall, indices: Any, table: TensorSpec, elements: float) -> OpCost:
    read_bytes = bytes_of(specs_in((indices,))) + elements * item_bytes(table)
    return OpCost(0.0, read_bytes, written(call))


@cost_of("aten.embedding", family="index", dims=_looked_up(0, 1))
def _embedding(call: OpCall) -> OpCost:
    table, indices = call.arguments[:2]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of("aten.index_select", family="index", dims=_along_dim)
def _index_select(call: OpCall) -> OpCost:
    table, _, indices = call.arguments[:3]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of(
    "aten.index", "aten._unsafe_index", family="index", dims=_by_tensors(lambda c: c.outputs[0])
)
def _index(call: OpCall) -> OpCost:
    table, indices = call.arguments[:2]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of("aten.gather", "aten.take", "aten.take_along_dim", family="index", dims=_by_element)
def _gather(call: OpCall) -> OpCost:
    return _read_rows(call, _index_of(call), call.arguments[0], call.outputs[0].numel)


@cost_of(
    *("aten._embedding_bag", "aten._embedding_bag_forward_only"),
    family="index",
    dims=_looked_up(0, 1),
)
def _embedding_bag(call: OpCall) -> OpCost:
    """Every row looked up is read; the bags and their bookkeeping are written."""
    table, indices, offsets = call.arguments[:3]
    moved = indices.numel * table.shape[-1]
    return _read_rows(call, (indices, offsets), table, moved) + OpCost(flops=moved)


def _accumulated(call: OpCall, indices: TensorSpec, *, per_index: bool) -> OpCost:
    """A dense gradient of a table: zeros everywhere, then each row read, added to and written."""
    gradient, table = call.arguments[0], call.outputs[0]
    moved = indices.numel * table.shape[-1]
    rows_bytes = moved * item_bytes(table)
    gradient_bytes = moved * item_bytes(gradient) if per_index else bytes_of([gradient])
    read_bytes = bytes_of([indices]) + gradient_bytes + rows_bytes
    return OpCost(moved, read_bytes, written(call) + rows_bytes)


@cost_of("aten.embedding_dense_backward", family="index", dims=_looked_up(-1, 1))
def _embedding_backward(call: OpCall) -> OpCost:
    return _accumulated(call, call.arguments[1], per_index=True)


@cost_of(
    *("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward"),
    family="index",
    dims=_looked_up(-1, 1),
)
def _embedding_bag_backward(call: OpCall) -> OpCost:
    return _accumulated(call, call.arguments[1], per_index=False)


def _placed(call: OpCall, touched: float, sources: list[Any], *, adds: bool) -> OpCost:
    """Values placed or added into a tensor, in place or into a fresh copy of it."""
    table = call.arguments[0]
    touched_bytes = touched * item_bytes(table)
    read_bytes = bytes_of(specs_in(sources)) + (touched_bytes if adds else 0.0)
    cost = OpCost(touched if adds else 0.0, read_bytes, touched_bytes)
    copy = OpCost(0.0, bytes_of([table]), written(call))
    return cost if _in_place(call) else cost + copy


@cost_of(
    *("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"),
    family="index",
    dims=_by_tensors(lambda call: call.arguments[2]),
)
def _index_put(call: OpCall) -> OpCost:
    _, indices, values = call.arguments[:3]
    rows, row = _by_tensors(lambda each: each.arguments[2])(call)
    adds = bool(argument(call, 3, "accumulate", False))
    return _placed(call, rows * row, [indices, values], adds=adds)


@cost_of(
    *("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce"),
    family="index",
    dims=_along_dim,
)
def _index_add(call: OpCall) -> OpCost:
    rows, row = _along_dim(call)
    adds = "add" in call.target or "reduce" in call.target
    return _placed(call, rows * row, list(call.arguments[2:4]), adds=adds)


@cost_of(
    "aten.scatter", "aten.scatter_add", "aten.scatter_reduce", family="index", dims=_by_element
)
def _scatter(call: OpCall) -> OpCost:
    """(self, dim, index, source): as many elements as the index has."""
    index = _index_of(call)
    adds = "add" in call.target or "reduce" in call.target
    source = [spec for spec in call.arguments[3:4] if isinstance(spec, TensorSpec)]
    read = _placed(call, index.numel, [index], adds=adds)
    # Of a larger source only the elements that have an index are read.
    return read + OpCost(0.0, sum(index.numel * item_bytes(spec) for spec in source), 0.0)


@cost_of("aten.masked_scatter", "aten.masked_scatter_backward", "aten.put", family="index")
def _masked_scatter(call: OpCall) -> OpCost:
    return streamed(call, 1)


@cost_of("aten.nonzero", "aten.nonzero_static", "aten.masked_select", family="index")
def _nonzero(call: OpCall) -> OpCost:
    return streamed(call, 1)
