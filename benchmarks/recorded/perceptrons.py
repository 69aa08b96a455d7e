"""Steps of multi-layer perceptrons written down by hand, as the graph files every version reads."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Json = dict[str, Any]


class _Step:
    """Collects the values and calls of a step at two batch sizes."""

    def __init__(self, batch: int) -> None:
        self.batches = (batch, 2 * batch)
        self.specs: list[Json] = []
        self.values: list[list[Any]] = []
        self.calls: list[Json] = []
        self.ops: list[list[Any]] = []

    def value(self, kind: str, *shape: int, base: int | None = None) -> int:
        """A new value; a dimension of 0 stands for the batch."""
        first = len(self.specs)
        for batch in self.batches:
            self.specs.append({"t": [size or batch for size in shape], "d": "float32"})
        self.values.append([first, first + 1, kind, base])
        return len(self.values) - 1

    def call(
        self,
        target: str,
        phase: str,
        inputs: Sequence[int],
        out: int,
        *numbers: Any,
        module: str = "",
        is_view: bool = False,
    ) -> int:
        """A call that reads `inputs` and writes `out`; returns `out`."""
        first = len(self.calls)
        for at in (0, 1):
            arguments = [self.specs[self.values[value][at]] for value in inputs]
            self.calls.append(
                {
                    "target": target,
                    "arguments": [*arguments, *numbers],
                    "keywords": {},
                    "outputs": [self.specs[self.values[out][at]]],
                }
            )
        name = f"{target}_{len(self.ops)}"
        self.ops.append([name, first, first + 1, phase, module, [*inputs], [out], int(is_view)])
        return out


def perceptron(
    name: str,
    widths: Sequence[int],
    *,
    target: Literal["cpu", "cuda"],
    batch: int = 8,
    blocks: bool = False,
    views: bool = False,
    buffer_bytes: int = 0,
    trained: bool = True,
    optimizer: str = "adamw",
) -> Json:
    """The graph of a perceptron's step: a product and a relu per layer, then their gradients.

    In `blocks`, FSDP gathers layers one by one, the first one as the rest; with `views` each layer
    begins with one. If not `trained`, no gradient is kept.
    """
    step = _Step(batch)
    modules = [f"layers.{layer}" if blocks and layer else "" for layer in range(len(widths) - 1)]
    hidden = step.value("input", 0, widths[0])
    weights, matmuls = [], []
    for (inner, outer), module in zip(itertools.pairwise(widths), modules, strict=True):
        if views:
            seen = step.value("activation", 0, inner, base=hidden)
            hidden = step.call(
                "aten.alias.default", "forward", [hidden], seen, module=module, is_view=True
            )
        weights.append(step.value("parameter", inner, outer))
        matmuls.append(step.value("activation", 0, outer))
        step.call("aten.mm.default", "forward", [hidden, weights[-1]], matmuls[-1], module=module)
        hidden = step.value("activation", 0, outer)
        step.call("aten.relu.default", "forward", [matmuls[-1]], hidden, module=module)
    parameters = []
    upstream = hidden
    for layer in reversed(range(len(weights))):
        upstream, parameter = _backward(
            step,
            widths[layer : layer + 2],
            weights[layer],
            matmuls[layer],
            upstream,
            modules[layer],
        )
        owner = modules[layer] or ("rest" if blocks else f"layers_{layer}")
        parameters.append([f"{owner}.weight", *parameter])
    return {
        "format": "estimator-graph",
        "version": 1,
        "name": name,
        "target": target,
        "precision": "fp32",
        "optimizer": optimizer,
        "batch": batch,
        "other_batch": 2 * batch,
        "tokens_per_sample": None,
        "frozen_parameter_bytes": 0,
        "buffer_bytes": buffer_bytes,
        "buffers": 2 if buffer_bytes else 0,
        "module_calls": len(weights) if blocks else 0,
        "timed_on": None,
        "assumptions": [],
        "unknown_ops": [],
        "versions": {},
        "ops": step.ops,
        "values": step.values,
        "parameters": parameters if trained else [],
        "inputs": [["x", 0, None, None]],
        "timings": [],
        "calls": step.calls,
        "specs": step.specs,
    }


def _backward(
    step: _Step, widths: Sequence[int], weight: int, matmul: int, upstream: int, module: str
) -> tuple[int, list[int]]:
    """Of one layer: (gradient of what it read, its parameter's spec, gradient and last op)."""
    inner, outer = widths
    through = step.value("activation", 0, outer)
    step.call(
        "aten.threshold_backward.default",
        "backward",
        [upstream, matmul],
        through,
        0,
        module=module,
    )
    # The transposed factors are laid out anew, so that every product is a plain one.
    turned = step.value("activation", inner, 0)
    step.call("aten.copy_.default", "backward", [turned, turned], turned, module=module)
    gradient = step.value("activation", inner, outer)
    step.call("aten.mm.default", "backward", [turned, through], gradient, module=module)
    parameter = [step.values[weight][0], gradient, len(step.ops) - 1]
    turned = step.value("activation", outer, inner)
    step.call("aten.copy_.default", "backward", [turned, turned], turned, module=module)
    below = step.value("activation", 0, inner)
    step.call("aten.mm.default", "backward", [through, turned], below, module=module)
    return below, parameter


def write_graph(graph: Json, path: Path) -> Path:
    """The graph as a file that `OpGraph.load` reads."""
    path.write_bytes(gzip.compress(json.dumps(graph).encode(), mtime=0))
    return path
