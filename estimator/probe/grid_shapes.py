"""Grid families that move rows and windows: look-ups, joins, fills, pooling, losses, sorting."""

from __future__ import annotations

from estimator.probe.grid_calls import (
    GridCall,
    grid_call,
    indices,
    tensor,
)
from estimator.tensors import TensorSpec


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


_ROWS = ((60, 64), (500, 300), (3000, 400), (8000, 700))


def joins() -> list[GridCall]:
    """cat and stack, and the gradients of slicing, selecting and padding."""
    calls = []
    for rows, columns in _ROWS:
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
