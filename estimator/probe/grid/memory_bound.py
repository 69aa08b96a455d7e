"""Grid families that stream through memory: pointwise, reductions, normalisation, look-ups.

Each is a function of the sizes that data/grid.json lists for a kind of device; where a GPU's sizes
are timed with other operators than a CPU's, its family is one of its own (`…_on_cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from estimator.machines.profile import DeviceKind
from estimator.probe.devices.calls import (
    GridCall,
    channels_innermost,
    grid_call,
    heads_inside,
    in_dtype,
    indices,
    mask,
    sizes,
    tensor,
)
from estimator.tensors import TensorSpec

Calls = Iterator[GridCall]

# These also run at the largest size; the rest cost per element what they cost at three million.
_ALSO_LARGEST = {"add.Tensor", "mul.Tensor", "gelu", "relu", "clone"}
_BINARY = ("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor", "maximum")
_UNARY = (
    *("neg", "relu", "silu", "sigmoid", "tanh", "exp", "gelu", "hardswish", "abs", "clone"),
    *("sin", "cos", "erf", "hardsigmoid", "softplus"),
)
_RARE = ("sin", "cos", "erf", "hardsigmoid", "softplus")
_OF_POSITIVE = ("sqrt", "rsqrt", "log", "reciprocal")
_WITH_NUMBER = {
    "add.Scalar": 1.0,
    "mul.Scalar": 0.5,
    "div.Scalar": 3.0,
    "pow.Tensor_Scalar": 2,
    "gt.Scalar": 0.0,
    "leaky_relu": 0.01,
    "elu": 1.0,
}


def _elements(target: str) -> list[int]:
    """How many elements an operator is timed with on a CPU."""
    name = "elements of common operators" if target in _ALSO_LARGEST else "elements"
    return [n for (n,) in sizes(name, "cpu")][: 2 if target in _RARE else None]


def pointwise() -> Calls:
    """Forward elementwise operators, one operator at a time."""
    for target in _BINARY:
        yield from (
            grid_call(target, tensor(n), tensor(n), positive=(1,)) for n in _elements(target)
        )
    for target in _UNARY:
        yield from (grid_call(target, tensor(n)) for n in _elements(target))
    for target in _OF_POSITIVE:
        yield from (grid_call(target, tensor(n), positive=(0,)) for n in _elements(target))
    for target, number in _WITH_NUMBER.items():
        yield from (grid_call(target, tensor(n), number) for n in _elements(target))
    yield from operators("operators", "cpu")
    for (n,) in sizes("random elements", "cpu"):
        yield grid_call("native_dropout", tensor(n), 0.1, True)


def operators(name: str, kind: DeviceKind, *, of: str = "elements") -> Calls:
    """What data/grid.json lists under a name, on tensors of the sizes under another."""
    for shape in sizes(of, kind):
        x, column = tensor(*shape), tensor(*shape[:-1], 1)
        tensors = {"x": x, "low": replace(x, dtype="bfloat16"), "mask": mask(*shape)}
        tensors |= {"row": tensor(shape[-1]), "column": column}
        tensors["spread"] = replace(x, strides=(1, *[0] * (len(shape) - 1)))
        for target, *arguments in sizes(name, kind):
            keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
            given = (tensors.get(str(each), each) for each in arguments)
            yield grid_call(target, *given, **keywords)


def in_place() -> Calls:
    """Operators that write into their first argument."""
    yield from operators("operators in place", "cpu")
    for (n,) in sizes("random elements", "cpu"):
        yield grid_call("bernoulli_.float", tensor(n), 0.9)


def broadcasts() -> Calls:
    """A row, a column, a channel or one number against a whole tensor."""
    yield from operators("operators of rows", "cpu", of="rows")
    for batch, channels, places in sizes("places", "cpu"):
        x = tensor(batch, channels, places)
        yield grid_call("add.Tensor", x, tensor(1, channels, 1))
        yield grid_call("mul.Tensor", x, tensor(batch, channels, 1))
        yield grid_call("mul.Tensor", x, tensor())


def strided(kind: DeviceKind) -> Calls:
    """Copies and sums of permuted tensors, whose innermost run of memory is short."""
    contiguous = "torch.contiguous_format"
    for batch, length, heads, width in sizes("heads", kind):
        swapped, flat = (
            heads_inside(batch, heads, length, width),
            tensor(batch, heads, length, width),
        )
        rows, columns = batch * length, heads * width
        across = tensor(rows, columns, strides=(1, rows))
        yield grid_call("clone", swapped, memory_format=contiguous)
        if kind == "cuda":
            yield grid_call("clone", across, memory_format=contiguous)
            yield grid_call("add.Tensor", flat, swapped)
            yield grid_call("copy_", flat, swapped)
            yield grid_call("cat", [flat, flat], -1)
            continue
        # Keys enter a matmul as (batch, heads, width, length).
        turned = tensor(
            *(batch, heads, width, length), strides=(length * columns, width, 1, columns)
        )
        yield grid_call("clone", turned, memory_format=contiguous)
        yield grid_call("add.Tensor", flat, swapped)
        yield grid_call("add.Tensor", tensor(rows, columns), across)
        yield grid_call("copy_", flat, swapped)
    for batch, channels, side in sizes("strided images", kind):
        last, first = channels_innermost(batch, channels, side), tensor(batch, channels, side, side)
        yield grid_call("clone", last, memory_format=contiguous)
        yield grid_call("add.Tensor", first, last)
        if kind == "cuda":
            yield grid_call("cat", [first, first], 1)
            yield grid_call("mean.dim", first, [-1, -2], True)


def reductions() -> Calls:
    """Sums, means and extremes over rows, columns, places and everything."""
    yield from operators("reductions of rows", "cpu", of="rows")
    for (n,) in sizes("elements", "cpu"):
        yield grid_call("mean", tensor(n))
    for batch, channels, side in sizes("reduced images", "cpu"):
        x = tensor(batch, channels, side, side)
        yield grid_call("sum.dim_IntList", x, [0, 2, 3])
        yield grid_call("mean.dim", x, [-1, -2], True)
    for shape in sizes("stacks", "cpu"):
        yield grid_call("sum.dim_IntList", tensor(*shape), [1])
        yield grid_call("mean.dim", tensor(*shape), [1])


def rows_on_cuda() -> Calls:
    """Broadcasts, sums, norms and softmax over rows, with their gradients."""
    for rows, columns in sizes("rows", "cuda"):
        x = tensor(rows, columns)
        yield grid_call("add.Tensor", x, tensor(columns))
        yield grid_call("mul.Tensor", x, tensor(columns))
        yield grid_call("mul.Tensor", x, tensor(rows, 1))
        for dimension in (0, 1):
            yield grid_call("sum.dim_IntList", x, [dimension], True)
        yield grid_call("mean.dim", x, [-1], True)
        yield grid_call("amax", x, [-1], True)
        yield from layer_norm(rows, columns)
    for batch, heads, length in sizes("scores", "cuda"):
        yield from softmax(tensor(batch, heads, length, length), "_softmax")
    for rows, classes in sizes("softmax rows", "cuda"):
        yield from softmax(tensor(rows, classes), "_log_softmax")


def softmax(x: TensorSpec, name: str) -> Calls:
    """Softmax or its logarithm over the last dimension, and its gradient."""
    yield grid_call(name, x, -1, False)
    yield grid_call(f"{name}_backward_data", x, x, -1, "torch.float32")


def layer_norm(rows: int, columns: int) -> Calls:
    """Layer normalisation of rows, and its gradients."""
    x, row, column = tensor(rows, columns), tensor(columns), tensor(rows, 1)
    yield grid_call("native_layer_norm", x, [columns], row, row, 1e-5)
    yield grid_call(
        "native_layer_norm_backward",
        *(x, x, [columns], column, column, row, row, [True, True, True]),
        positive=(3,),
        statistics=(2, 3),
    )


def batch_norm(batch: int, channels: int, side: int) -> Calls:
    """Batch normalisation of square images in training, and its gradients."""
    x, row = tensor(batch, channels, side, side), tensor(channels)
    yield grid_call(
        "native_batch_norm",
        *(x, row, row, row, row, True, 0.1, 1e-5),
        positive=(1, 2, 3, 4),
        statistics=(1, 2, 3, 4),
    )
    yield grid_call(
        "native_batch_norm_backward",
        *(x, x, row, row, row, row, row, True, 1e-5, [True, True, True]),
        positive=(2, 3, 4, 5, 6),
        statistics=(2, 3, 4, 5, 6),
    )


def batch_norms_on_cuda() -> Calls:
    """Batch norm in training: cuDNN's of float32 images, torch's own of bfloat16 ones.

    cuDNN's takes no bfloat16 (use_cudnn of aten/src/ATen/native/Normalization.cpp).
    """
    for batch, channels, side in sizes("batch norm images", "cuda"):
        x, row = tensor(batch, channels, side, side), tensor(channels)
        by_cudnn = grid_call(
            "cudnn_batch_norm", *(x, row, row, row, row, True, 0.1, 1e-5), positive=(1, 2, 3, 4)
        )
        yield by_cudnn
        yield grid_call(
            "cudnn_batch_norm_backward",
            *(x, x, row, row, row, row, row, 1e-5, TensorSpec((0,), "uint8")),
            positive=(2, 3, 4, 5, 6),
            follows=by_cudnn,
        )
        yield from in_dtype(batch_norm(batch, channels, side), "bfloat16", on_cuda=True)


def softmaxes() -> Calls:
    """Softmax and log-softmax over the last dimension, with their gradients."""
    for rows, columns in sizes("softmax rows", "cpu"):
        for name in ("_softmax", "_log_softmax"):
            yield from softmax(tensor(rows, columns), name)
    for batch, heads, length in sizes("scores", "cpu"):
        yield grid_call("_safe_softmax", tensor(batch, heads, length, length), -1)


def normalisations() -> Calls:
    """Layer, batch and group normalisation in training, with their gradients."""
    for rows, columns in sizes("layer norm rows", "cpu"):
        yield from layer_norm(rows, columns)
    for batch, channels, side in sizes("batch norm images", "cpu"):
        yield from batch_norm(batch, channels, side)
    for batch, channels, side in sizes("group norm images", "cpu"):
        x, row, groups = tensor(batch, channels, side, side), tensor(channels), 8
        sums, shape = tensor(batch, groups), (batch, channels, side * side, groups)
        yield grid_call("native_group_norm", x, row, row, *shape, 1e-5)
        yield grid_call(
            "native_group_norm_backward",
            *(x, x, sums, sums, row, *shape, [True, True, True]),
            positive=(3,),
        )


def lookups(kind: DeviceKind) -> Calls:
    """Embeddings and indexing, with their gradients, over tables of unlike height and width."""
    for count, height, width in sizes("lookups", kind):
        table, picked, rows = tensor(height, width), indices(count), tensor(count, width)
        high = {"index_high": height}
        yield grid_call("embedding", table, picked, **high)
        yield grid_call("embedding_dense_backward", rows, picked, height, -1, False, **high)
        yield grid_call("index.Tensor", table, [picked], **high)
        yield grid_call("index_put", table, [picked], rows, True, **high)
        bags = grid_call(
            "_embedding_bag",
            *(table, picked, picked, False, 0, False, None),
            counting=(2,),
            **high,
        )
        if kind == "cuda":
            yield grid_call("index_add", table, 0, picked, rows, **high)
            yield bags
            continue
        spread_rows = tensor(count, width, dtype="int64", strides=(1, 0))
        yield grid_call("index_select", table, 0, picked, **high)
        yield grid_call("index_add", table, 0, picked, rows, **high)
        yield grid_call("gather", table, 0, spread_rows, **high)
        yield grid_call("scatter_add", table, 0, spread_rows, rows, **high)
        if width <= 200:
            yield bags
            yield grid_call(
                "_embedding_bag_backward",
                *(rows, picked, picked, indices(0), picked, picked, height, False, 0, False, None),
                counting=(2,),
                **high,
            )
    if kind == "cuda":
        yield from likelihoods(kind)


def joins() -> Calls:
    """cat and stack, and the gradients of slicing, selecting and padding."""
    for rows, columns in sizes("joined rows", "cpu"):
        x, part = tensor(rows, columns), tensor(rows, columns // 4)
        yield grid_call("cat", [x, x], 1)
        yield grid_call("cat", [part, part, part], 1)
        yield grid_call("stack", [x, x])
        yield grid_call("slice_backward", part, [rows, columns], 1, 0, columns // 4, 1)
        yield grid_call("select_backward", tensor(columns), [rows, columns], 0, 0)
        yield grid_call("constant_pad_nd", x, [1, 1], 0.0)
    for batch, channels, side in sizes("joined images", "cpu"):
        x = tensor(batch, channels, side, side)
        yield grid_call("cat", [x, x], 1)
        yield grid_call("constant_pad_nd", x, [1, 1, 1, 1], 0.0)
        yield grid_call("roll", x, [2, 2], [2, 3])


# Tensors larger than this are not filled with random or counted numbers.
_MOST_COUNTED = 800_000


def fills() -> Calls:
    """Making tensors: filled, empty, random, counted."""
    for (n,) in sizes("filled elements", "cpu"):
        x = tensor(n)
        yield grid_call("zeros", [n])
        yield grid_call("ones", [n])
        yield grid_call("full", [n], 0.5)
        yield grid_call("empty_like", x)
        yield grid_call("zeros_like", x)
        yield grid_call("new_zeros", x, [n])
        if n <= _MOST_COUNTED:
            yield grid_call("rand", [n])
            yield grid_call("randn", [n])
            yield grid_call("arange", n)
            yield grid_call("ones_like", x)


def pools(kind: DeviceKind) -> Calls:
    """Pooling and up-sampling, with their gradients."""
    for batch, channels, side in sizes("pooled images", kind):
        x, half = tensor(batch, channels, side, side), tensor(batch, channels, side // 2, side // 2)
        yield grid_call("max_pool2d_with_indices", x, [3, 3], [2, 2], [1, 1])
        yield grid_call("max_pool2d_with_indices", x, [2, 2], [2, 2])
        yield grid_call(
            "max_pool2d_with_indices_backward",
            *(half, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices(*half.shape)),
            index_high=side * side,
        )
        if kind == "cuda":
            yield grid_call("_adaptive_avg_pool2d", x, [4, 4])
            yield from _nearest(half)
            continue
        yield grid_call("avg_pool2d", x, [2, 2], [2, 2])
        yield grid_call("avg_pool2d_backward", half, x, [2, 2], [2, 2], [0, 0], False, True, None)
        yield grid_call("_adaptive_avg_pool2d", x, [4, 4])
        yield grid_call("_adaptive_avg_pool2d_backward", tensor(batch, channels, 4, 4), x)
    if kind == "cuda":
        return
    for batch, channels, side in sizes("upsampled images", "cpu"):
        x, double = tensor(batch, channels, side, side), [2 * side, 2 * side]
        up, scales = tensor(batch, channels, *double), (False, 2.0, 2.0)
        yield from _nearest(x)
        yield grid_call("upsample_bilinear2d", x, double, *scales)
        yield grid_call("upsample_bilinear2d_backward", up, double, list(x.shape), *scales)


def _nearest(x: TensorSpec) -> Calls:
    """Images scaled to twice their sides, and back."""
    double = [2 * side for side in x.shape[2:]]
    up = tensor(*x.shape[:2], *double)
    yield grid_call("upsample_nearest2d", x, double, 2.0, 2.0)
    yield grid_call("upsample_nearest2d_backward", up, double, list(x.shape), 2.0, 2.0)


def likelihoods(kind: DeviceKind) -> Calls:
    """Negative log likelihood of labels, and its gradient; on a CPU other losses beside it."""
    for rows, classes in sizes("labels", kind):
        x, labels, one = tensor(rows, classes), indices(rows), tensor()
        how = (labels, None, 1, -100)
        yield grid_call("nll_loss_forward", x, *how, index_high=classes)
        yield grid_call("nll_loss_backward", one, x, *how, one, index_high=classes, positive=(3,))
        if kind == "cpu":
            x = tensor(rows, min(classes, 1000))
            yield grid_call("mse_loss", x, x)
            yield grid_call("mse_loss_backward", one, x, x, 1)
            yield grid_call("binary_cross_entropy_with_logits", x, x, positive=(1,))
