"""Count the work of pooling and of resampling images."""

from __future__ import annotations

from estimator.graph.cost_registry import (
    argument,
    bytes_of,
    cost_of,
    elements,
    extent,
    rows_of,
    streamed,
    written,
)
from estimator.graph.ops import OpCost, named
from estimator.tensors import OpCall


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
