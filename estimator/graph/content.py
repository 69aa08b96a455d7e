"""Tell jobs apart by what they compute: a fingerprint of a graph, whatever its name and batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from estimator.coefficients import JobContent
from estimator.graph.op_graph import OpGraph
from estimator.tensors import OpCall, TensorSpec

# Digits of a constant that depends on the batch: enough to tell constants apart, too few for the
# rounding of one that was traced at another batch size.
_DIGITS = 9


def job_content(graph: OpGraph) -> JobContent:
    """The operators and shapes of a graph but for its batch, its parameters, optimizer and mode.

    Of an integer that depends on the batch its line over the batch counts, so that one model traced
    at two batch sizes is one job. Names of models, modules and parameters do not count.
    """
    lines = _Lines(graph.batch or 0, graph.other_batch or 0)
    digest = hashlib.sha256()
    about = (graph.target, graph.mode, graph.optimizer, graph.frozen_parameter_bytes)
    digest.update(repr((*about, graph.buffer_bytes, graph.timed_on)).encode())
    for op in graph.ops:
        digest.update(f"{op.phase}{lines.call(op.call, op.other_call)}".encode())
    for parameter in graph.parameters:
        own = (parameter.optimizer, parameter.updates)
        text = f"{parameter.spec.shape}{parameter.spec.dtype}{own if own != (None, 1) else ''}"
        digest.update(text.encode())
    counts = Counter(op.call.target for op in graph.ops if not op.is_view)
    total = max(sum(counts.values()), 1)
    return JobContent(
        fingerprint=digest.hexdigest()[:32],
        mode=graph.mode,
        optimizer=graph.optimizer,
        parameter_bytes=graph.parameter_bytes,
        op_shares={target: count / total for target, count in counts.items()},
    )


class _Lines:
    """Writes calls that are known at two batch sizes as lines over the batch."""

    def __init__(self, first: int, second: int) -> None:
        self.first, self.span = first, second - first
        self._calls: dict[tuple[int, int], str] = {}

    def call(self, one: OpCall, two: OpCall) -> str:
        """The text of a call; worked out once for the same two objects."""
        key = id(one), id(two)
        if key not in self._calls:
            parts = ((each.arguments, each.keywords, each.outputs) for each in (one, two))
            self._calls[key] = f"{one.target}{self._tree(next(parts), next(parts))}"
        return self._calls[key]

    def _tree(self, one: Any, two: Any) -> str:
        if one is two or one == two:
            return str(one)
        if isinstance(one, TensorSpec):
            return f"{one.dtype}{self._tree((one.shape, one.strides), (two.shape, two.strides))}"
        if isinstance(one, tuple):
            return f"({','.join(map(self._tree, one, two))})"
        if isinstance(one, float):
            # The only floats that depend on the batch are constants over the batch size.
            return f"{one * self.first:.{_DIGITS}g}/b"
        slope = (two - one) / self.span
        return f"{one - slope * self.first:.{_DIGITS + 3}g}+{slope:.{_DIGITS + 3}g}b"
