"""Say how much memory an operator takes inside itself, beyond its inputs and outputs."""

from __future__ import annotations

import math

from estimator.graph.costs.registry import argument, item_bytes
from estimator.tensors import OpCall, TensorSpec

# oneDNN works on channels in blocks of 16 where the CPU has AVX-512 (8 with AVX2): tensors are
# copied into that layout, the channels filled up (nChw16c, OIhw16i16o in its documentation).
BLOCK = 16
# Fewer channels than these are read as they are; up to a block they are filled to half of one where
# the gradient of the weight is made.
FEWEST_BLOCKED = 4
# Its depthwise kernels take filters up to this width; wider ones run as grouped convolutions whose
# weights are blocked like any others, 16 x 16 for the one channel of each group.
WIDEST_DEPTHWISE = 3


def workspace_bytes(call: OpCall, *, threads: int = 1) -> int:
    """Memory that a CPU operator holds at most beside its inputs and outputs.

    Known for convolutions and LSTM layers, as torch 2.13 runs them with oneDNN on AVX-512 with that
    many threads: sizes read off the allocator for plain, grouped, depthwise, dilated, transposed
    and channels-last cases. 0 for every other operator.
    """
    name = call.target.split(".")[1] if "." in call.target else ""
    if name == "convolution":
        return round(
            (_transposed if argument(call, 6, "transposed", False) else _forward)(call, threads)
        )
    if name == "convolution_backward":
        return round(_backward(call, threads))
    if name == "mkldnn_rnn_layer":
        return _lstm(call)
    if name == "mkldnn_rnn_layer_backward":
        return _lstm_backward(call)
    return 0


def _forward(call: OpCall, threads: int) -> float:
    image, weight, output = call.arguments[0], call.arguments[1], call.outputs[0]
    if _is_matmul(image, weight, argument(call, 3, "stride", ()), threads):
        return _copies(image, weight, image)
    blocked = _blocked_weight(weight, image)
    if _channels_last(image) or _channels_last(weight):
        return blocked
    blocked_output = _blocked(output)
    total_bytes = _blocked_image(image) + blocked_output + blocked
    return (
        _contiguous_copy(image) + max(total_bytes, blocked_output + output.nbytes) - output.nbytes
    )


def _transposed(call: OpCall, _threads: int) -> float:
    """Runs as the gradient of a convolution's input, one padded image beside; then the bias."""
    image, weight, output = call.arguments[0], call.arguments[1], call.outputs[0]
    if _channels_last(image) or _channels_last(weight):
        return _filled_weight(weight)
    return _contiguous_copy(image) + _scattered(image, output, weight) - output.nbytes


def _backward(call: OpCall, threads: int) -> float:
    """First the gradient of the input, then, beside it, that of the weight."""
    gradient, image, weight = call.arguments[:3]
    wants_image, wants_weight = argument(call, 10, "output_mask", (True, True, True))[:2]
    transposed = bool(argument(call, 7, "transposed", False))
    if not transposed and _is_matmul(image, weight, argument(call, 4, "stride", ()), threads):
        return _copies(image, weight, gradient, image)
    copied = _contiguous_copy(gradient) + _contiguous_copy(image)
    blocked = _filled_weight(weight) if transposed else _blocked_weight(weight, image)
    depthwise = _is_depthwise(weight, image)
    grouped = int(argument(call, 9, "groups", 1)) > 1
    dilated = grouped and max(argument(call, 6, "dilation", (1,))) > 1
    wide = depthwise and weight.shape[-1] > WIDEST_DEPTHWISE
    if _channels_last(image) or _channels_last(weight):
        if not wants_weight:
            return blocked
        filled = weight.numel * BLOCK * BLOCK * item_bytes(weight) if wide else blocked
        return filled + blocked
    # A transposed convolution reads the gradient as a plain one does its image.
    incoming = _blocked_image(gradient) if transposed else _blocked(gradient)
    image_bytes = image.nbytes if wants_image else 0
    weight_bytes = weight.nbytes if wants_weight else 0
    first = second = 0.0
    if wants_image:
        # Groups of at most half a block, or of one, have kernels of their own.
        by_group = grouped and (weight.shape[1] <= BLOCK // 2 or weight.shape[1] == BLOCK)
        if not (transposed or by_group) and max(argument(call, 4, "stride", (1,))) > 1:
            first = _scattered(gradient, image, weight)
        else:
            made = _blocked(image)
            outgoing = 0.0 if dilated and depthwise else incoming + blocked
            first = max(outgoing + made, made + image_bytes)
    if wants_weight:
        beside = float(weight_bytes)
        if not (wide or dilated):
            if FEWEST_BLOCKED <= image.shape[1] < BLOCK and not (transposed or grouped):
                copies = _blocked(image, BLOCK // 2) + _blocked(gradient, BLOCK // 2)
            else:
                copies = (_blocked(image) if transposed else _blocked_image(image)) + incoming
                if image.shape[1] < FEWEST_BLOCKED:
                    copies = incoming
            beside = max(copies + blocked, blocked + weight_bytes)
        second = image_bytes + beside
    return copied + max(first, second) - image_bytes - weight_bytes


def _scattered(gradient: TensorSpec, image: TensorSpec, weight: TensorSpec) -> float:
    """The gradient of what a strided convolution reads: one padded sample lies beside the copies.

    It is made in an order of its own and copied twice; one channel is in the right order already.
    """
    one_sample = gradient.nbytes / gradient.shape[0] if gradient.numel else 0.0
    total_bytes = one_sample + gradient.nbytes + _filled_weight(weight) + image.nbytes
    return max(total_bytes, (3 if image.shape[1] > 1 else 2) * image.nbytes)


def _lstm(call: OpCall) -> int:
    """Both weights in oneDNN's order, and the gates of all steps."""
    sequence, inputs, hidden = call.arguments[:3]
    return int(inputs.nbytes + hidden.nbytes + _gates_bytes(sequence, inputs))


def _lstm_backward(call: OpCall) -> int:
    """Gradients of both weights in its order beside the gates, and weights whose rows it pads."""
    sequence, inputs, hidden = call.arguments[:3]
    padded = sum(
        weight.nbytes // weight.shape[1] * _row(weight.shape[1])
        for weight in (inputs, hidden)
        if _row(weight.shape[1]) != weight.shape[1]
    )
    return int(inputs.nbytes + hidden.nbytes + padded + _gates_bytes(sequence, inputs))


def _gates_bytes(sequence: TensorSpec, weight: TensorSpec) -> int:
    steps, batch, _ = sequence.shape
    return int(steps * batch * _row(weight.shape[0]) * item_bytes(weight))


def _row(length: int) -> int:
    """oneDNN fills rows up to cache lines, and beyond multiples of 256 (rnn_utils.cpp)."""
    filled = _filled(length)
    return filled + BLOCK if filled % 256 == 0 else filled


def _is_matmul(
    image: TensorSpec, weight: TensorSpec, strides: tuple[int, ...], threads: int
) -> bool:
    """Whether a 1 x 1 convolution runs as a matmul on the tensors as they are.

    ConvParams::use_mkldnn in aten/src/ATen/native/Convolution.cpp (torch 2.13): on one thread,
    below 16 images, without stride and in float32.
    """
    pointwise = math.prod(weight.shape[2:]) == 1 == max(strides, default=1)
    return pointwise and threads == 1 and image.shape[0] < 16 and image.dtype == "float32"


def _copies(image: TensorSpec, weight: TensorSpec, *read: TensorSpec) -> float:
    """What a matmul reads in another order than its image's (thnn_conv_use_channels_last)."""
    last = _channels_last(image) or _channels_last(weight)
    copied_bytes = 0.0
    for spec in read:
        as_it_is = _channels_last(spec) if last else spec.strides is None
        if not as_it_is and (spec.strides is not None or math.prod(spec.shape[2:]) > 1):
            copied_bytes += spec.nbytes
    return copied_bytes


def _contiguous_copy(spec: TensorSpec) -> float:
    """A tensor in an order of its own is first copied into the usual one."""
    return 0.0 if spec.strides is None else float(spec.nbytes)


def _is_depthwise(weight: TensorSpec, image: TensorSpec) -> bool:
    return weight.shape[1] == 1 and image.shape[1] > 1


def _channels_last(spec: TensorSpec) -> bool:
    return spec.strides is not None and len(spec.shape) > 2 and spec.strides[1] == 1


def _filled(channels: int, block: int = BLOCK) -> int:
    return -(-channels // block) * block


def _blocked(spec: TensorSpec, block: int = BLOCK) -> float:
    """Bytes of a (images, channels, ...) tensor with its channels filled up to whole blocks."""
    return spec.nbytes / spec.shape[1] * _filled(spec.shape[1], block) if spec.numel else 0.0


def _blocked_image(image: TensorSpec) -> float:
    """The first layer's few channels are read as they are."""
    return _blocked(image) if image.shape[1] >= BLOCK else 0.0


def _filled_weight(weight: TensorSpec) -> float:
    """Both channels filled up, as where the gradient of an image is made."""
    if not weight.numel:
        return 0.0
    kernel = weight.nbytes / (weight.shape[0] * weight.shape[1])
    return kernel * _filled(weight.shape[0]) * _filled(weight.shape[1])


def _blocked_weight(weight: TensorSpec, image: TensorSpec) -> float:
    if not weight.numel or weight.shape[1] != image.shape[1]:
        return float(weight.nbytes)
    per_kernel = weight.nbytes / (weight.shape[0] * weight.shape[1])
    inputs = _filled(weight.shape[1]) if weight.shape[1] >= BLOCK else weight.shape[1]
    return per_kernel * _filled(weight.shape[0]) * inputs
