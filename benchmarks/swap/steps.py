"""Update parameters elsewhere than at the end of a step: when ready, in slices, or paced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from estimator.advise.swap.problem import UpdateSlice
from estimator.elementwise import Array
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import block_bytes, rounded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSchedule:
    """When parameters are updated, and how much of one at once.

    At the `end` of the step as torch does it; as soon as the gradient is `ready` (torch's
    `register_post_accumulate_grad_hook`); or `paced`, from then on evenly over what is left of the
    step, so that optimizer state comes over the host link piece by piece. A parameter above
    `sub_group_bytes` is updated in slices with moments of their own, as the sub-groups of
    DeepSpeed's ZeRO-3 are (`sub_group_size`). For optimizers that update element by element, and
    without clipping or gradient scalers, which read the gradients of all parameters.
    """

    place: Literal["end", "ready", "paced"] = "end"
    sub_group_bytes: int | None = None

    def __call__(
        self, structure: GraphStructure, parameter_of: dict[int, int], op_ends_s: Array
    ) -> list[UpdateSlice]:
        """Every slice in the order of its update; `parameter_of` are the storages of parameters."""
        graph = structure.graph
        last = len(graph.ops) - 1
        ready = {
            number: last if parameter.ready_after is None else parameter.ready_after
            for number, parameter in enumerate(graph.parameters)
            if parameter.gradient is not None
        }
        # Nobody may read a parameter with this step's gradient in it: a matmul's gradient may
        # be final before that of what the matrix multiplied.
        for index, op in enumerate(graph.ops):
            for value in op.inputs:
                number = parameter_of.get(int(structure.storage_of[value]))
                if number in ready:
                    ready[number] = max(ready[number], index)
        if self.place == "end":
            ready = dict.fromkeys(ready, last)
        slices = [
            UpdateSlice(after, number, size)
            for number, after in sorted(ready.items(), key=lambda item: item[1])
            for size in _sizes(structure, number, self.sub_group_bytes)
        ]
        return _paced(slices, op_ends_s) if self.place == "paced" else slices


def _sizes(structure: GraphStructure, number: int, most: int | None) -> list[int]:
    """Bytes of the slices of a parameter, each in whole blocks of the allocator."""
    block = block_bytes(structure.graph)
    left = rounded_bytes(structure.graph.parameters[number].spec.nbytes, block)
    if most is None:
        return [left]
    pieces = max(-(-left // most), 1)
    size = rounded_bytes(-(-left // pieces), block)
    return [min(size, left - start) for start in range(0, left, size)] or [left]


def _paced(slices: list[UpdateSlice], op_ends_s: Array) -> list[UpdateSlice]:
    """Each after its share, by bytes, of the time from the first ready gradient to the end."""
    if not slices:
        return slices
    begin_s, end_s = float(op_ends_s[slices[0].after]), float(op_ends_s[-1])
    done = np.cumsum([each.size_bytes for each in slices])
    due_s = begin_s + (end_s - begin_s) * done / done[-1]
    places = np.minimum(np.searchsorted(op_ends_s, due_s), len(op_ends_s) - 1)
    return [
        each._replace(after=max(each.after, int(place)))
        for each, place in zip(slices, places, strict=True)
    ]
