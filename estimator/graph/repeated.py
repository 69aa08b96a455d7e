"""Tell which operators of the backward phase compute again what the forward phase has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from estimator.graph.ops import Op, Value


def with_repeated(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Op, ...]:
    """The operators of an eager step, those marked that activation checkpoints run a second time.

    The backward phase begins with the gradient of the loss. All that it is there for depends on
    that gradient; what does not, forward work on forward values, is computed again.
    """
    seed = next((op for op in ops if op.phase == "backward"), None)
    storages = [index if value.base is None else value.base for index, value in enumerate(values)]
    from_gradient: set[int] = set()
    found = []
    for op in ops:
        if op.phase == "backward":
            if op is seed or any(storages[value] in from_gradient for value in op.inputs):
                from_gradient.update(storages[value] for value in op.outputs)
            else:
                op = replace(op, is_repeated=True)
        found.append(op)
    return tuple(found)
