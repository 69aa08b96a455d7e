"""Tell which operators of the backward phase compute again what the forward phase has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from estimator.graph.ops import Op, Value


def with_repeated(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Op, ...]:
    """The operators of an eager step, those marked that activation checkpoints run a second time.

    A backward pass begins with the gradient of its loss. All that it is there for depends on that
    gradient; what does not, forward work on forward values, is computed again. A step has several
    backward passes where it calls them itself.
    """
    storages = [index if value.base is None else value.base for index, value in enumerate(values)]
    from_gradient: set[int] = set()
    found = []
    for before, op in zip([None, *ops], ops, strict=False):
        if op.phase == "backward":
            begins = before is None or before.phase == "forward" or _is_seed(op)
            if begins or any(storages[value] in from_gradient for value in op.inputs):
                from_gradient.update(storages[value] for value in op.outputs)
            else:
                op = replace(op, is_repeated=True)
        found.append(op)
    return tuple(found)


def _is_seed(op: Op) -> bool:
    """Whether an op makes the gradient of a loss that another pass was just run for."""
    return op.call.target == "aten.ones_like.default" and op.call.outputs[0].numel == 1
