"""Grid families that stream through memory: pointwise, reductions, normalisation, look-ups."""

from __future__ import annotations

from estimator.probe.devices.calls import GridCall, channels_innermost, grid_call, indices, tensor
from estimator.tensors import TensorSpec

_SIZES = (6_000, 200_000, 3_000_000)
_LARGEST = 8_000_000
# Random numbers take many times as long as an element's bytes.
_RANDOM_SIZES = (6_000, 100_000, 800_000)
# These also run at the largest size; the rest cost per element what they cost at three million.
_ALSO_LARGEST = {"add.Tensor", "mul.Tensor", "gelu.default", "relu.default", "clone.default"}


def _sizes(target: str) -> tuple[int, ...]:
    return (*_SIZES, _LARGEST) if target in _ALSO_LARGEST else _SIZES


def pointwise() -> list[GridCall]:
    """Forward elementwise operators, one operator at a time."""
    calls = []
    binary = ("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor", "maximum.default")
    unary: tuple[str, ...] = (
        "neg.default",
        "relu.default",
        "silu.default",
        "sigmoid.default",
        "tanh.default",
    )
    unary += ("exp.default", "gelu.default", "hardswish.default", "abs.default", "clone.default")
    rare = ("sin.default", "cos.default", "erf.default", "hardsigmoid.default", "softplus.default")
    of_positive = ("sqrt.default", "rsqrt.default", "log.default", "reciprocal.default")
    with_number = {
        "add.Scalar": 1.0,
        "mul.Scalar": 0.5,
        "div.Scalar": 3.0,
        "pow.Tensor_Scalar": 2,
        "gt.Scalar": 0.0,
        "leaky_relu.default": 0.01,
        "elu.default": 1.0,
    }
    for target in binary:
        calls += [grid_call(target, tensor(n), tensor(n), positive=(1,)) for n in _sizes(target)]
    for target in (*unary, *rare):
        calls += [
            grid_call(target, tensor(n)) for n in _sizes(target)[: 2 if target in rare else 5]
        ]
    for target in of_positive:
        calls += [grid_call(target, tensor(n), positive=(0,)) for n in _SIZES]
    for target, number in with_number.items():
        calls += [grid_call(target, tensor(n), number) for n in _SIZES]
    for n in _SIZES:
        mask = TensorSpec((n,), "bool")
        half = TensorSpec((n,), "bfloat16")
        calls += [
            grid_call("gelu.default", tensor(n), approximate="tanh"),
            grid_call("pow.Tensor_Scalar", tensor(n), 3),
            grid_call("hardtanh.default", tensor(n), 0.0, 6.0),
            grid_call("where.self", mask, tensor(n), tensor(n)),
            grid_call("masked_fill.Scalar", tensor(n), mask, -1e9),
            grid_call("eq.Tensor", tensor(n), tensor(n)),
            grid_call("addcmul.default", tensor(n), tensor(n), tensor(n)),
            grid_call("_to_copy.default", tensor(n), dtype="torch.bfloat16"),
            grid_call("_to_copy.default", half, dtype="torch.float32"),
            grid_call("_to_copy.default", mask, dtype="torch.float32"),
        ]
    return calls + [
        grid_call("native_dropout.default", tensor(n), 0.1, True) for n in _RANDOM_SIZES
    ]


def pointwise_gradients() -> list[GridCall]:
    """Gradients of activation functions and of dropout."""
    calls = []
    plain: tuple[str, ...] = ("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward")
    plain += ("hardswish_backward", "hardsigmoid_backward")
    for n in _SIZES:
        grad, x = tensor(n), tensor(n)
        calls += [grid_call(f"{name}.default", grad, x) for name in plain]
        calls += [
            grid_call("threshold_backward.default", grad, x, 0),
            grid_call("gelu_backward.default", grad, x, approximate="tanh"),
            grid_call("hardtanh_backward.default", grad, x, 0.0, 6.0),
            grid_call("leaky_relu_backward.default", grad, x, 0.01, False),
            grid_call("elu_backward.default", grad, 1.0, 1, 1, False, x),
            grid_call("native_dropout_backward.default", grad, TensorSpec((n,), "bool"), 1.1),
        ]
    return calls


def in_place() -> list[GridCall]:
    """Operators that write into their first argument (dropout masks, residuals, accumulation)."""
    calls = []
    for n in _SIZES:
        x = tensor(n)
        calls += [
            grid_call("add_.Tensor", x, tensor(n)),
            grid_call("relu_.default", x),
            grid_call("div_.Scalar", x, 1.0),
            grid_call("mul_.Tensor", x, 1.0),
            grid_call("zero_.default", x),
            grid_call("fill_.Scalar", x, 1.0),
            grid_call("copy_.default", x, tensor(n)),
            grid_call("sigmoid_.default", x),
            grid_call("masked_fill_.Scalar", x, TensorSpec((n,), "bool"), 0.0),
        ]
    return calls + [grid_call("bernoulli_.float", tensor(n), 0.9) for n in _RANDOM_SIZES]


_ROWS = ((60, 64), (300, 400), (2000, 300), (6000, 500), (200, 16000), (50_000, 48))


def broadcasts() -> list[GridCall]:
    """A row, a column, a channel or one number against a whole tensor."""
    calls = []
    for rows, columns in _ROWS:
        x = tensor(rows, columns)
        column = tensor(rows, 1)
        calls += [
            grid_call("add.Tensor", x, tensor(columns)),
            grid_call("mul.Tensor", x, column),
            grid_call("sub.Tensor", x, column),
            grid_call("div.Tensor", x, column, positive=(1,)),
            # A gradient that sum() or mean() spreads over its input.
            grid_call("div.Scalar", TensorSpec((rows, columns), "float32", (1, 0)), 10.0),
            grid_call("clone.default", TensorSpec((rows, columns), "float32", (1, 0))),
        ]
    for batch, channels, places in ((4, 40, 900), (16, 100, 400), (16, 300, 49)):
        x = tensor(batch, channels, places)
        calls += [
            grid_call("add.Tensor", x, tensor(1, channels, 1)),
            grid_call("mul.Tensor", x, tensor(batch, channels, 1)),
            grid_call("mul.Tensor", x, tensor()),
        ]
    return calls


def strided() -> list[GridCall]:
    """Copies and sums of permuted tensors, whose innermost run of memory is short."""
    calls = []
    for batch, length, heads, width in (
        (2, 50, 4, 32),
        (8, 100, 8, 64),
        (4, 400, 12, 40),
        (16, 200, 6, 80),
        (8, 1000, 4, 200),
    ):
        shape = (batch, heads, length, width)
        inner = (length * heads * width, width, heads * width, 1)
        swapped = TensorSpec(shape, "float32", inner)
        flat = tensor(*shape)
        # Keys enter a matmul as (batch, heads, width, length).
        turned = TensorSpec(
            (batch, heads, width, length), "float32", (inner[0], width, 1, heads * width)
        )
        rows, columns = batch * length, heads * width
        across = TensorSpec((rows, columns), "float32", (1, rows))
        calls += [
            grid_call("clone.default", swapped, memory_format="torch.contiguous_format"),
            grid_call("clone.default", turned, memory_format="torch.contiguous_format"),
            grid_call("add.Tensor", flat, swapped),
            grid_call("add.Tensor", tensor(rows, columns), across),
            grid_call("copy_.default", flat, swapped),
        ]
    for batch, channels, side in ((4, 64, 28), (8, 100, 40), (8, 300, 14)):
        last = channels_innermost(batch, channels, side)
        first = tensor(batch, channels, side, side)
        calls += [
            grid_call("clone.default", last, memory_format="torch.contiguous_format"),
            grid_call("add.Tensor", first, last),
        ]
    return calls


def reductions() -> list[GridCall]:
    """Sums, means and extremes over rows, columns, places and everything."""
    calls = []
    for rows, columns in _ROWS:
        x = tensor(rows, columns)
        calls += [
            grid_call("sum.dim_IntList", x, [0], True),
            grid_call("sum.dim_IntList", x, [1], True),
            grid_call("mean.dim", x, [-1], True),
            grid_call("sum.default", x),
            grid_call("var_mean.correction", x, [-1], correction=0, keepdim=True),
            grid_call("amax.default", x, [-1], True),
            grid_call("max.dim", x, 1),
            grid_call("argmax.default", x, -1),
        ]
    calls += [grid_call("mean.default", tensor(n)) for n in _SIZES]
    for batch, channels, side in ((4, 40, 30), (16, 100, 20), (16, 300, 7)):
        x = tensor(batch, channels, side, side)
        calls += [
            grid_call("sum.dim_IntList", x, [0, 2, 3]),
            grid_call("mean.dim", x, [-1, -2], True),
        ]
    for shape in ((500, 2, 300), (100, 4, 800), (8, 200, 96)):
        calls += [grid_call(name, tensor(*shape), [1]) for name in ("sum.dim_IntList", "mean.dim")]
    return calls


def softmax(x: TensorSpec, name: str) -> list[GridCall]:
    """Softmax or its logarithm over the last dimension, and its gradient."""
    return [
        grid_call(f"{name}.default", x, -1, False),
        grid_call(f"{name}_backward_data.default", x, x, -1, "torch.float32"),
    ]


def layer_norm(rows: int, columns: int) -> list[GridCall]:
    """Layer normalisation of rows, and its gradients."""
    x, row, column = tensor(rows, columns), tensor(columns), tensor(rows, 1)
    return [
        grid_call("native_layer_norm.default", x, [columns], row, row, 1e-5),
        grid_call(
            "native_layer_norm_backward.default",
            *(x, x, [columns], column, column, row, row, [True, True, True]),
            positive=(3,),
            statistics=(2, 3),
        ),
    ]


def batch_norm(batch: int, channels: int, side: int) -> list[GridCall]:
    """Batch normalisation of square images in training, and its gradients."""
    x, row = tensor(batch, channels, side, side), tensor(channels)
    return [
        grid_call(
            "native_batch_norm.default",
            *(x, row, row, row, row, True, 0.1, 1e-5),
            positive=(1, 2, 3, 4),
            statistics=(1, 2, 3, 4),
        ),
        grid_call(
            "native_batch_norm_backward.default",
            *(x, x, row, row, row, row, row, True, 1e-5, [True, True, True]),
            positive=(2, 3, 4, 5, 6),
            statistics=(2, 3, 4, 5, 6),
        ),
    ]


def softmaxes() -> list[GridCall]:
    """Softmax and log-softmax over the last dimension, with their gradients."""
    calls = []
    for rows, columns in ((64, 10), (500, 32), (3000, 50), (8000, 200), (3000, 1000), (120, 30000)):
        x = tensor(rows, columns)
        for name in ("_softmax", "_log_softmax"):
            calls += softmax(x, name)
    for batch, heads, rows in ((2, 4, 40), (4, 6, 100), (60, 3, 50), (2, 10, 400), (16, 12, 110)):
        scores = tensor(batch, heads, rows, rows)
        calls.append(grid_call("_safe_softmax.default", scores, -1))
    return calls


def normalisations() -> list[GridCall]:
    """Layer, batch and group normalisation in training, with their gradients."""
    calls = []
    for rows, columns in ((200, 32), (64, 800), (1000, 100), (3000, 400), (800, 1500), (400, 4000)):
        calls += layer_norm(rows, columns)
    for batch, channels, side in (
        (1, 32, 112),
        (8, 24, 60),
        (8, 100, 28),
        (16, 300, 12),
        (32, 80, 6),
        (8, 40, 15),
        (10, 200, 8),
        (8, 400, 4),
        (24, 640, 5),
    ):
        calls += batch_norm(batch, channels, side)
    for batch, channels, side in ((4, 64, 24), (8, 160, 16), (2, 32, 64)):
        x, row, groups = tensor(batch, channels, side, side), tensor(channels), 8
        sums = tensor(batch, groups)
        shape = (batch, channels, side * side, groups)
        calls += [
            grid_call("native_group_norm.default", x, row, row, *shape, 1e-5),
            grid_call(
                "native_group_norm_backward.default",
                *(x, x, sums, sums, row, *shape, [True, True, True]),
                positive=(3,),
            ),
        ]
    return calls


def lookups() -> list[GridCall]:
    """Embeddings and indexing, with their gradients, over tables of unlike height and width."""
    calls = []
    for count, height, width in (
        (200, 1000, 32),
        (1000, 30_000, 200),
        (4000, 10_000, 800),
        (8000, 500, 400),
        (20_000, 100_000, 20),
    ):
        table, picked, rows = tensor(height, width), indices(count), tensor(count, width)
        spread_rows = TensorSpec((count, width), "int64", (1, 0))
        calls += picking(count, height, width)
        calls += [
            grid_call("index_select.default", table, 0, picked, index_high=height),
            grid_call("index_add.default", table, 0, picked, rows, index_high=height),
            grid_call("gather.default", table, 0, spread_rows, index_high=height),
            grid_call("scatter_add.default", table, 0, spread_rows, rows, index_high=height),
        ]
        if width <= 200:
            bags = embedding_bag(table, picked, indices(count))
            bags_backward = grid_call(
                "_embedding_bag_backward.default",
                *(rows, picked, indices(count), indices(0), indices(count), indices(count)),
                *(height, False, 0, False, None),
                index_high=height,
                counting=(2,),
            )
            calls += [bags, bags_backward]
    return calls


def picking(count: int, height: int, width: int) -> list[GridCall]:
    """Rows picked from a table, as an embedding or by indices, and put back."""
    table, picked, rows = tensor(height, width), indices(count), tensor(count, width)
    return [
        grid_call("embedding.default", table, picked, index_high=height),
        grid_call(
            "embedding_dense_backward.default",
            *(rows, picked, height, -1, False),
            index_high=height,
        ),
        grid_call("index.Tensor", table, [picked], index_high=height),
        grid_call("index_put.default", table, [picked], rows, True, index_high=height),
    ]


def embedding_bag(table: TensorSpec, picked: TensorSpec, bags: TensorSpec) -> GridCall:
    """Sums of the rows that are picked for each bag."""
    return grid_call(
        "_embedding_bag.default",
        *(table, picked, bags, False, 0, False, None),
        index_high=table.shape[0],
        counting=(2,),
    )


_LOOKUP_ROWS = ((60, 64), (500, 300), (3000, 400), (8000, 700))


def joins() -> list[GridCall]:
    """cat and stack, and the gradients of slicing, selecting and padding."""
    calls = []
    for rows, columns in _LOOKUP_ROWS:
        x = tensor(rows, columns)
        part = tensor(rows, columns // 4)
        calls += [
            grid_call("cat.default", [x, x], 1),
            grid_call("cat.default", [part, part, part], 1),
            grid_call("stack.default", [x, x]),
            grid_call(
                "slice_backward.default",
                *(part, [rows, columns], 1, 0, columns // 4, 1),
            ),
            grid_call("select_backward.default", tensor(columns), [rows, columns], 0, 0),
            grid_call("constant_pad_nd.default", x, [1, 1], 0.0),
        ]
    for batch, channels, side in ((4, 32, 56), (8, 96, 28), (8, 240, 14)):
        x = tensor(batch, channels, side, side)
        calls += [
            grid_call("cat.default", [x, x], 1),
            grid_call("constant_pad_nd.default", x, [1, 1, 1, 1], 0.0),
            grid_call("roll.default", x, [2, 2], [2, 3]),
        ]
    return calls


def fills() -> list[GridCall]:
    """Making tensors: filled, empty, random, counted."""
    calls = []
    for n in (1_000, 50_000, 800_000, 5_000_000):
        x = tensor(n)
        calls += [
            grid_call("zeros.default", [n]),
            grid_call("ones.default", [n]),
            grid_call("full.default", [n], 0.5),
            grid_call("empty_like.default", x),
            grid_call("zeros_like.default", x),
            grid_call("new_zeros.default", x, [n]),
        ]
        if n <= 800_000:
            calls += [
                grid_call("rand.default", [n]),
                grid_call("randn.default", [n]),
                grid_call("arange.default", n),
                grid_call("ones_like.default", x),
            ]
    return calls


def max_pools(batch: int, channels: int, side: int) -> list[GridCall]:
    """The largest of windows that overlap and of such that don't, and the latter's gradient."""
    x, half = tensor(batch, channels, side, side), tensor(batch, channels, side // 2, side // 2)
    places = TensorSpec(half.shape, "int64")
    return [
        grid_call("max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1]),
        grid_call("max_pool2d_with_indices.default", x, [2, 2], [2, 2]),
        grid_call(
            "max_pool2d_with_indices_backward.default",
            *(half, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
            index_high=side * side,
        ),
    ]


def pools() -> list[GridCall]:
    """Pooling and up-sampling, with their gradients."""
    calls = []
    for batch, channels, side in ((2, 64, 100), (8, 32, 48), (8, 160, 28), (16, 400, 8)):
        x, half = tensor(batch, channels, side, side), tensor(batch, channels, side // 2, side // 2)
        calls += [
            *max_pools(batch, channels, side),
            grid_call("avg_pool2d.default", x, [2, 2], [2, 2]),
            grid_call(
                "avg_pool2d_backward.default",
                *(half, x, [2, 2], [2, 2], [0, 0], False, True, None),
            ),
            grid_call("_adaptive_avg_pool2d.default", x, [4, 4]),
            grid_call("_adaptive_avg_pool2d_backward.default", tensor(batch, channels, 4, 4), x),
        ]
    for batch, channels, side in ((2, 64, 40), (8, 32, 48), (8, 160, 14), (16, 400, 8)):
        x, small = tensor(batch, channels, side, side), [batch, channels, side, side]
        double, up = [2 * side, 2 * side], tensor(batch, channels, 2 * side, 2 * side)
        calls += [
            grid_call("upsample_nearest2d.default", x, double, 2.0, 2.0),
            grid_call("upsample_nearest2d_backward.default", up, double, small, 2.0, 2.0),
            grid_call("upsample_bilinear2d.default", x, double, False, 2.0, 2.0),
            grid_call("upsample_bilinear2d_backward.default", up, double, small, False, 2.0, 2.0),
        ]
    return calls


def likelihood(rows: int, classes: int) -> list[GridCall]:
    """Negative log likelihood of labels, and its gradient."""
    x, labels, one = tensor(rows, classes), indices(rows), tensor()
    return [
        grid_call("nll_loss_forward.default", x, labels, None, 1, -100, index_high=classes),
        grid_call(
            "nll_loss_backward.default",
            *(one, x, labels, None, 1, -100, one),
            index_high=classes,
            positive=(3,),
        ),
    ]


def losses() -> list[GridCall]:
    """Negative log likelihood, squared error and binary cross entropy."""
    calls = []
    for rows, classes in ((16, 100), (500, 1000), (400, 20_000), (4000, 300)):
        calls += likelihood(rows, classes)
        x, one = tensor(rows, min(classes, 1000)), tensor()
        calls += [
            grid_call("mse_loss.default", x, x),
            grid_call("mse_loss_backward.default", one, x, x, 1),
            grid_call("binary_cross_entropy_with_logits.default", x, x, positive=(1,)),
        ]
    return calls


def orders() -> list[GridCall]:
    """Sorting, picking the largest, running sums."""
    calls = []
    for rows, columns in ((200, 8), (1000, 64), (40, 5000)):
        x = tensor(rows, columns)
        calls += [
            grid_call("topk.default", x, 2),
            grid_call("sort.default", x),
            grid_call("cumsum.default", x, -1),
            grid_call("tril.default", x),
        ]
    return calls
