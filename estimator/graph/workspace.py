"""Say how much memory an operator takes inside itself, beyond its inputs and outputs."""

from __future__ import annotations

import math

from estimator.graph.cost_registry import argument, item_bytes
from estimator.tensors import OpCall, TensorSpec

# oneDNN works on channels in blocks of 16 where the CPU has AVX-512 (8 with AVX2): tensors are
# copied into that layout, the channels filled up (nChw16c, OIhw16i16o in its documentation).
BLOCK = 16
# Its depthwise kernels take filters up to this width; wider ones run as grouped convolutions whose
# weights are blocked like any others, 16 x 16 for the one channel of each group.
WIDEST_DEPTHWISE = 3


def workspace_bytes(call: OpCall, *, threads: int = 1) -> int:
    """Memory that a CPU operator holds at most beside its inputs and outputs.

    Known for convolutions, as torch 2.13 runs them with oneDNN on AVX-512 with that many threads:
    sizes read off the allocator for plain, grouped, depthwise and channels-last cases. 0 for every
    other operator.
    """
    name = call.target.split(".")[1] if "." in call.target else ""
    if name == "convolution" and not argument(call, 6, "transposed", False):
        return round(_forward(call, threads))
    if name == "convolution_backward" and not argument(call, 7, "transposed", False):
        return round(_backward(call, threads))
    return 0


def _forward(call: OpCall, threads: int) -> float:
    image, weight, output = call.arguments[0], call.arguments[1], call.outputs[0]
    if _is_matmul(image, weight, argument(call, 3, "stride", ()), threads):
        return _contiguous_copy(image)
    blocked = _blocked_weight(weight, image)
    if _channels_last(image) or _channels_last(weight):
        return blocked
    blocked_output = _blocked(output)
    whole = _blocked_image(image) + blocked_output + blocked
    return _contiguous_copy(image) + max(whole, blocked_output + output.nbytes) - output.nbytes


def _backward(call: OpCall, threads: int) -> float:
    """First the gradient of the input, then, beside it, that of the weight."""
    gradient, image, weight = call.arguments[:3]
    wants_image, wants_weight = argument(call, 10, "output_mask", (True, True, True))[:2]
    copied = _contiguous_copy(gradient) + _contiguous_copy(image)
    if _is_matmul(image, weight, argument(call, 4, "stride", ()), threads):
        return copied
    blocked = _blocked_weight(weight, image)
    depthwise = _is_depthwise(weight, image)
    wide = depthwise and weight.shape[-1] > WIDEST_DEPTHWISE
    if _channels_last(image) or _channels_last(weight):
        if not wants_weight:
            return blocked
        filled = weight.numel * BLOCK * BLOCK * item_bytes(weight) if wide else blocked
        return filled + blocked
    whole = _blocked_image(image) + _blocked(gradient) + blocked
    image_bytes = image.nbytes if wants_image else 0
    weight_bytes = weight.nbytes if wants_weight else 0
    first = max(whole, _blocked_image(image) + image_bytes) if wants_image else 0.0
    beside = max(0.0 if wide else whole, 0.0 if wide else blocked + weight_bytes, weight_bytes)
    second = image_bytes + beside if wants_weight else 0.0
    return copied + max(first, second) - image_bytes - weight_bytes


def _is_matmul(
    image: TensorSpec, weight: TensorSpec, strides: tuple[int, ...], threads: int
) -> bool:
    """Whether a 1 x 1 convolution runs as a matmul on the tensors as they are.

    ConvParams::use_mkldnn in aten/src/ATen/native/Convolution.cpp (torch 2.13): on one thread,
    below 16 images, without stride and in float32.
    """
    pointwise = math.prod(weight.shape[2:]) == 1 == max(strides, default=1)
    return pointwise and threads == 1 and image.shape[0] < 16 and image.dtype == "float32"


def _contiguous_copy(spec: TensorSpec) -> float:
    """A tensor in an order of its own is first copied into the usual one."""
    return 0.0 if spec.strides is None else float(spec.nbytes)


def _is_depthwise(weight: TensorSpec, image: TensorSpec) -> bool:
    return weight.shape[1] == 1 and image.shape[1] > 1


def _channels_last(spec: TensorSpec) -> bool:
    return spec.strides is not None and len(spec.shape) > 2 and spec.strides[1] == 1


def _filled(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _blocked(spec: TensorSpec) -> float:
    """Bytes of a (images, channels, ...) tensor with its channels filled up to whole blocks."""
    return spec.nbytes / spec.shape[1] * _filled(spec.shape[1]) if spec.numel else 0.0


def _blocked_image(image: TensorSpec) -> float:
    """The first layer's few channels are read as they are."""
    return _blocked(image) if image.shape[1] >= BLOCK else 0.0


def _blocked_weight(weight: TensorSpec, image: TensorSpec) -> float:
    if not weight.numel or weight.shape[1] != image.shape[1]:
        return float(weight.nbytes)
    per_kernel = weight.nbytes / (weight.shape[0] * weight.shape[1])
    inputs = _filled(weight.shape[1]) if weight.shape[1] >= BLOCK else weight.shape[1]
    return per_kernel * _filled(weight.shape[0]) * inputs
