"""Grid families that multiply: matmuls, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.probe.grid_calls import GridCall, grid_call, tensor, transposed
from estimator.tensors import TensorSpec

Shapes = Sequence[tuple[int, ...]]

# (rows, inner, columns) of a linear layer: from one skinny row to many, narrow to wide.
_LINEAR = (
    (1, 512, 512),
    (1, 4000, 1100),
    (2, 96, 96),
    (4, 800, 800),
    (8, 2000, 1000),
    (8, 320, 1280),
    (16, 240, 960),
    (20, 3200, 800),
    (32, 1000, 4000),
    (40, 64, 64),
    # The head of a language model: its weights alone are beyond any cache.
    (48, 550, 60000),
    (64, 700, 500),
    (100, 800, 3200),
    (128, 128, 128),
    (144, 1600, 400),
    (200, 192, 16000),
    (224, 480, 480),
    (256, 3200, 800),
    (300, 32, 128),
    (320, 300, 1200),
    (400, 1200, 1200),
    (512, 64, 320),
    (640, 640, 160),
    (800, 800, 800),
    (1200, 112, 448),
    (1600, 400, 400),
    (2400, 160, 480),
    (3200, 360, 90),
    (4800, 96, 300),
    (6400, 40, 160),
    (8000, 200, 200),
    (8192, 24, 24),
    (120, 1024, 1040),
    (260, 768, 3000),
    (480, 256, 1000),
    (576, 384, 1500),
    (580, 1536, 384),
    (1000, 256, 256),
    (1500, 64, 256),
)


def matmuls(shapes: Shapes = _LINEAR) -> list[GridCall]:
    """Linear layers as training runs them: forward x·Wᵀ + b, then grad·W and gradᵀ·x."""
    calls = []
    for number, (rows, inner, columns) in enumerate(shapes):
        flops = 2.0 * rows * inner * columns
        x, grad = tensor(rows, inner), tensor(rows, columns)
        forward = grid_call(
            "addmm.default", tensor(columns), x, transposed(inner, columns), flops=flops
        )
        plain = grid_call("mm.default", x, transposed(inner, columns), flops=flops)
        by_input = grid_call("mm.default", grad, tensor(columns, inner), flops=flops)
        by_weight = grid_call("mm.default", transposed(columns, rows), x, flops=flops)
        calls += [plain if number % 4 == 3 else forward, by_input, by_weight]
        if number % 8 == 5:
            calls.append(
                grid_call("addmm.default", tensor(columns), x, tensor(inner, columns), flops=flops)
            )
    return calls


# (batch, rows, inner, columns)
_BATCHED = (
    (4, 1000, 48, 1000),
    (8, 64, 64, 64),
    (8, 500, 500, 80),
    (12, 20, 20, 20),
    (16, 400, 80, 400),
    (24, 300, 300, 32),
    (32, 12, 200, 12),
    (40, 128, 40, 128),
    (48, 100, 64, 100),
    (64, 200, 200, 64),
    (96, 250, 32, 250),
    (100, 32, 64, 500),
    (200, 50, 32, 50),
    (384, 50, 50, 32),
    (800, 48, 24, 48),
)


def batched_matmuls(shapes: Shapes = _BATCHED) -> list[GridCall]:
    """bmm in its three layouts, in the proportions that attention and mixing layers have."""
    calls = []
    for number, (batch, rows, inner, columns) in enumerate(shapes):
        flops = 2.0 * batch * rows * inner * columns
        left, right = tensor(batch, rows, inner), tensor(batch, inner, columns)
        left_t = TensorSpec(left.shape, "float32", (rows * inner, 1, rows))
        right_t = TensorSpec(right.shape, "float32", (inner * columns, 1, inner))
        calls.append(grid_call("bmm.default", left, right, flops=flops))
        calls.append(grid_call("bmm.default", left, right_t, flops=flops))
        if number % 2:
            calls.append(grid_call("bmm.default", left_t, right, flops=flops))
        if number % 5 == 4:
            out = tensor(batch, rows, columns)
            calls.append(grid_call("baddbmm.default", out, left, right, flops=flops))
    return calls


# (batch, heads, length, head width, causal)
_ATTENTION = (
    (1, 4, 64, 32, False),
    (2, 6, 500, 64, True),
    (4, 8, 120, 64, True),
    (4, 10, 250, 40, False),
    (1, 8, 800, 80, True),
    (16, 3, 50, 32, False),
    (8, 12, 32, 64, True),
    (1, 4, 1500, 32, True),
    (32, 4, 100, 48, False),
)


def heads_inside(batch: int, heads: int, length: int, width: int) -> TensorSpec:
    """(batch, heads, length, width), a view of the (batch, length, heads·width) of a projection."""
    strides = (length * heads * width, width, heads * width, 1)
    return TensorSpec((batch, heads, length, width), "float32", strides)


def attention_on_cpu() -> list[GridCall]:
    """Fused attention and its gradient, as scaled_dot_product_attention runs them on a CPU."""
    calls = []
    for batch, heads, length, width, causal in _ATTENTION:
        flops = 4.0 * batch * heads * length * length * width * (0.5 if causal else 1.0)
        x = heads_inside(batch, heads, length, width)
        sums = TensorSpec((batch, heads, length), "float32", (heads * length, 1, heads))
        name = "_scaled_dot_product_flash_attention_for_cpu"
        calls.append(grid_call(f"{name}.default", x, x, x, 0.0, causal, flops=flops))
        calls.append(
            grid_call(
                f"{name}_backward.default",
                *(x, x, x, x, x, sums, 0.0, causal),
                flops=2.5 * flops,
                positive=(5,),
            )
        )
    return calls


# (steps, batch, inputs, hidden)
_RECURRENT = ((12, 4, 40, 64), (24, 16, 100, 200), (40, 8, 300, 120), (40, 24, 200, 320))


def recurrent_on_cpu() -> list[GridCall]:
    """One LSTM layer over a whole sequence (oneDNN), forward and gradient, as nn.LSTM runs it."""
    calls = []
    for steps, batch, inputs, hidden in _RECURRENT:
        gates, state = 4 * hidden, tensor(batch, hidden)
        flops = 2.0 * steps * batch * gates * (inputs + hidden)
        x, out = tensor(steps, batch, inputs), tensor(steps, batch, hidden)
        weights = (tensor(gates, inputs), tensor(gates, hidden), tensor(gates), tensor(gates))
        forward = grid_call(
            "mkldnn_rnn_layer.default",
            *(x, *weights, state, state, False, [], 2, hidden, 1, True, False, True, True),
            flops=flops,
        )
        workspace = TensorSpec((0,), "uint8")
        backward = grid_call(
            "mkldnn_rnn_layer_backward.default",
            *(x, *weights, state, state, out, state, state, out, None, None),
            *(False, 2, hidden, 1, True, True, False, [], True, workspace),
            flops=2 * flops,
            follows=forward,
        )
        calls += [forward, backward]
    return calls
