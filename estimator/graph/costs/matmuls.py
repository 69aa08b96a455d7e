"""Count the work of matmuls, convolutions, attention and recurrent layers.

Flops count a multiply-add as 2, as torch.utils.flop_counter does; causal attention counts only the
keys that a query may see.
"""

from __future__ import annotations

import math

from estimator.graph.costs.registry import (
    argument,
    bytes_of,
    cost_of,
    formula_of,
    specs_in,
    written,
)
from estimator.graph.ir.ops import OpCost
from estimator.tensors import OpCall, TensorSpec

# They add a product to their first argument.
_ADDING = ("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr")


def factors(call: OpCall) -> tuple[TensorSpec, TensorSpec]:
    """The two tensors that a matmul multiplies."""
    first = int(call.name.removesuffix("_") in _ADDING)
    left, right = call.arguments[first : first + 2]
    return left, right


def matmul_dims(call: OpCall) -> tuple[float, ...]:
    """(batch, m, n, k) of a matmul (batch, m, k) x (batch, k, n)."""
    left, right = factors(call)
    name = call.name
    if name in ("linear", "mkldnn_linear"):
        return (
            1.0,
            left.numel / left.shape[-1],
            float(right.numel / left.shape[-1]),
            left.shape[-1],
        )
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped_dims(call, left, right)
    if name in ("addr", "addr_"):
        return (1.0, left.numel, right.numel, 1.0)
    inner = left.shape[-1] if left.shape else 1
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    rows = left.shape[-2] if len(left.shape) > 1 else 1
    batch = max(math.prod(left.shape[:-2]), math.prod(right.shape[:-2]))
    return (float(batch), float(rows), float(columns), float(inner))


def _grouped_dims(call: OpCall, left: TensorSpec, right: TensorSpec) -> tuple[float, ...]:
    """Groups share the tokens: of the rows (2d x 3d), the columns (3d x 2d) or the inner dim."""
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if len(left.shape) == 3 and len(right.shape) == 3:
        return (float(left.shape[0]), float(rows), float(columns), float(inner))
    if len(left.shape) == 2 and len(right.shape) == 3:
        groups = right.shape[0]
        return (float(groups), rows / groups, float(columns), float(inner))
    if len(left.shape) == 3:
        groups = left.shape[0]
        return (float(groups), float(rows), columns / groups, float(inner))
    _, _, *offsets = call.inputs
    groups = offsets[0].numel if offsets else 1
    return (float(groups), float(rows), float(columns), inner / groups)


@cost_of(
    *("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.linear"),
    *("aten.mv", "aten.addmv", "aten.dot", "aten.vdot", "aten.addr", "aten._addmm_activation"),
    *("aten.matmul", "aten._grouped_mm", "aten._scaled_mm", "aten._scaled_grouped_mm"),
    *("aten._int_mm", "aten.mkldnn_linear"),
    family="matmul",
    dims=matmul_dims,
)
def _matmul(call: OpCall) -> OpCost:
    return OpCost(
        flops=2 * math.prod(matmul_dims(call)),
        read_bytes=bytes_of(call.inputs),
        written_bytes=written(call),
    )


def matmul_layout(call: OpCall) -> str:
    """ "n" for a matrix stored by rows, "t" for one stored by columns, of both factors."""
    layout = ""
    for spec in factors(call):
        rows, columns = (0, 1) if spec.strides is None or len(spec.shape) < 2 else spec.strides[-2:]
        # A dimension of size 1 has no order of its own.
        layout += "t" if rows == 1 and columns != 1 and spec.shape[-1] > 1 else "n"
    return layout


@cost_of("aten.linear_backward", "aten.mkldnn_linear_backward", family="matmul")
def _linear_backward(call: OpCall) -> OpCost:
    gradient, weight = call.arguments[1], call.arguments[2]
    wanted = sum(bool(flag) for flag in argument(call, 3, "output_mask", (True, True))[:2])
    flops = 2 * wanted * gradient.numel * weight.shape[-1]
    return OpCost(flops, bytes_of(call.inputs), written(call))


def _convolved(call: OpCall) -> tuple[TensorSpec, TensorSpec, TensorSpec, bool, int]:
    """(image, weight, output, whether it is transposed, 1 if backward) of a convolution.

    A backward one has the gradient of its output before its other arguments.
    """
    shift = int("backward" in call.target)
    image, weight = call.arguments[shift : shift + 2]
    output = call.arguments[0] if shift else call.outputs[0]
    transposed = argument(call, 6 + shift, "transposed", "transpose" in call.target)
    return image, weight, output, bool(transposed), shift


def is_channels_last(call: OpCall) -> bool:
    """Whether a convolution runs with channels innermost: its image or its filters lie so.

    Where the filters are 1 x 1 both orders are the same (c10/core/MemoryFormat.h); the image says.
    """
    return any(
        spec.strides is not None and spec.shape[1] > 1 and spec.strides[1] == 1
        for spec in _convolved(call)[:2]
        if len(spec.shape) > 3
    )


def _convolution_dims(call: OpCall) -> tuple[float, ...]:
    """(images, cin and cout per group, groups, positions out, kernel, positions in, stride).

    A weight is (cout, cin per group, kernel), transposed (cin, cout per group, kernel).
    """
    image, weight, output, transposed, shift = _convolved(call)
    spatial = len(weight.shape) - 2
    images = image.shape[0] if len(image.shape) == len(weight.shape) else 1
    channels = image.shape[-spatial - 1]
    if transposed:
        outputs_per_group = weight.shape[1]
        groups = output.shape[-spatial - 1] // outputs_per_group
        inputs_per_group = channels // groups
    else:
        inputs_per_group = weight.shape[1]
        groups = channels // inputs_per_group
        outputs_per_group = weight.shape[0] // groups
    extents = (output.shape[-spatial:], weight.shape[2:], image.shape[-spatial:])
    stride = argument(call, 3 + shift, "stride", 1)
    largest = max(stride) if isinstance(stride, tuple) and stride else stride or 1
    sizes = (images, inputs_per_group, outputs_per_group, groups, *map(math.prod, extents), largest)
    return tuple(map(float, sizes))


def _convolution_flops(call: OpCall) -> float:
    """A transposed convolution applies its kernel at every position of its input."""
    *sizes, out_positions, kernel, in_positions, _ = _convolution_dims(call)
    _, _, _, transposed, _ = _convolved(call)
    return 2 * math.prod(sizes) * kernel * (in_positions if transposed else out_positions)


@cost_of(
    *("aten.convolution", "aten._convolution", "aten.convolution_overrideable"),
    *("aten.cudnn_convolution", "aten.cudnn_convolution_transpose", "aten.mkldnn_convolution"),
    *("aten.miopen_convolution", "aten.conv1d", "aten.conv2d", "aten.conv3d"),
    *("aten._conv_depthwise2d", "aten.thnn_conv2d", "aten._slow_conv2d_forward"),
    family="convolution",
    dims=_convolution_dims,
)
def _convolution(call: OpCall) -> OpCost:
    return OpCost(_convolution_flops(call), bytes_of(call.inputs), written(call))


@cost_of(
    *("aten.convolution_backward", "aten.convolution_backward_overrideable"),
    family="convolution",
    dims=_convolution_dims,
)
def _convolution_backward(call: OpCall) -> OpCost:
    gradient, image, weight = call.arguments[:3]
    of_image, of_weight = map(bool, argument(call, 10, "output_mask", (True, True, True))[:2])
    # The gradient of the input needs the weight, that of the weight the input.
    read = [gradient, weight if of_image else None, image if of_weight else None]
    flops = (of_image + of_weight) * _convolution_flops(call)
    return OpCost(flops, bytes_of(read), written(call))


# Where fused attention of every backend has its is_causal flag, forward and backward.
_CAUSAL_AT = {
    "flash_attention_for_cpu": (4, 7),
    "flash_attention": (4, 11),
    "efficient_attention": (6, 11),
    "cudnn_attention": (6, 14),
    "fused_attention_overrideable": (5, 13),
}
ATTENTION = {
    f"_scaled_dot_product_{kind}{'_backward' * place}": (place, bool(place), causal_at)
    for kind, places in _CAUSAL_AT.items()
    for place, causal_at in enumerate(places)
}


# How many windows of a sample's tokens a call's queries are, each of which meets its own keys.
WINDOWS = "windows"


def attention_arguments(call: OpCall) -> tuple[int, bool, int]:
    """Where a call of attention has its query, whether it is backward, and its is_causal flag."""
    return ATTENTION[call.name]


def _attention_dims(call: OpCall) -> tuple[float, ...]:
    """(batch x heads, queries, keys, head size, 1 if causal) of (batch, heads, length, size).

    Queries are those of all windows of a sample, keys those of one.
    """
    start, _, causal = attention_arguments(call)
    query, key = call.arguments[start], call.arguments[start + 1]
    windows = dict(call.keywords).get(WINDOWS, 1)
    return (
        float(math.prod(query.shape[:-2]) // windows),
        float(query.shape[-2] * windows),
        float(key.shape[-2]),
        float(query.shape[-1]),
        float(bool(argument(call, causal, "is_causal", False))),
    )


# Transformer Engine's kernels stand for torch's, whose arguments they keep.
@cost_of(
    *(f"{library}.{name}" for library in ("aten", "te") for name in ATTENTION),
    family="attention",
    dims=_attention_dims,
)
def _attention(call: OpCall) -> OpCost:
    """Scores and their sum over values: 2 matmuls forward; backward recomputes the scores, 5."""
    start, backward, _ = attention_arguments(call)
    heads, queries, keys, size, causal = _attention_dims(call)
    seen = queries * keys
    if causal:
        # Query i (from 1) sees keys 1..i.
        full = max(queries - keys, 0.0)
        seen = (queries - full) * (queries - full + 1) / 2 + full * keys
    value_size = call.arguments[start + 2].shape[-1]
    sizes = 3 * size + 2 * value_size if backward else size + value_size
    return OpCost(2 * heads * seen * sizes, bytes_of(call.inputs), written(call))


def whole_attention_flops(call: OpCall) -> tuple[float, float]:
    """(flops of attention's gradients or scores, those with the scores that backward recomputes).

    Every query counts with every key, whatever is masked. Of operators that are not torch's the
    dims of their rule are known, and values are taken to be as long as keys.
    """
    formula = formula_of(call.target)
    assert formula is not None
    heads, queries, keys, size, _ = formula.dims(call)
    backward, value_size = "backward" in call.target, size
    if formula.dims is _attention_dims:
        start, backward, _ = attention_arguments(call)
        value_size = call.arguments[start + 2].shape[-1]
    forward = 2 * heads * queries * keys * (size + value_size)
    if not backward:
        return forward, forward
    return 2 * forward, 2 * forward + 2 * heads * queries * keys * size


def _recurrent_dims(call: OpCall) -> tuple[float, ...]:
    """As `Features.dims` says.

    Both directions of a layer run at once, and layers of one direction as a wavefront, each a step
    behind the one before (Appleyard et al.: Optimizing Performance of Recurrent Neural Networks on
    GPUs, 2016).
    """
    image, rest = call.arguments[0], call.arguments[1:]
    name = call.name
    one_layer = name.startswith("mkldnn_rnn_layer")
    # mkldnn takes one layer's tensors one by one, and (steps, batch, features) whatever its
    # batch_first says; the others take a list of the weights of all layers.
    given = rest[:4] if one_layer else tuple(item for item in rest if isinstance(item, tuple))
    weights = [spec for spec in specs_in(given) if len(spec.shape) == 2]
    work = sum(spec.numel for spec in weights)
    positions = {"_cudnn_rnn": 10, "_cudnn_rnn_backward": 14, "lstm": 8}
    position = positions.get(name, 8)
    batch_first = not one_layer and argument(call, position, "batch_first", False)
    both_ways = {"_cudnn_rnn": 13, "_cudnn_rnn_backward": 17}.get(name, position - 1)
    bidirectional = not one_layer and argument(call, both_ways, "bidirectional", False)
    steps = image.shape[1 if batch_first else 0] if len(image.shape) == 3 else 1
    # A state in lists of its own is no weight; of each layer's the second multiplies the state.
    recurrent = [spec for spec in weights if spec.shape[0] == weights[0].shape[0]][1::2]
    columns, inner = recurrent[0].shape if recurrent else (1, 1)
    chains = max(len(recurrent) // 2, 1) if bidirectional else 1
    at_once = max(len(recurrent), 1) / chains
    samples = image.numel / image.shape[-1]
    return tuple(map(float, (samples, work, chains, at_once, columns, inner, steps)))


@cost_of(
    *("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.lstm", "aten.gru", "aten.rnn_tanh"),
    *("aten.rnn_relu", "aten.mkldnn_rnn_layer_backward", "aten._cudnn_rnn_backward"),
    family="recurrent",
    dims=_recurrent_dims,
)
def _recurrent(call: OpCall) -> OpCost:
    samples, work = _recurrent_dims(call)[:2]
    products = 2 if "backward" in call.target else 1
    return OpCost(2 * products * samples * work, bytes_of(call.inputs), written(call))
