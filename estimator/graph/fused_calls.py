"""Describe a kernel that a compiler makes of several operators, as a call like any other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from estimator.graph.cost_registry import cost_of, written
from estimator.graph.ops import OpCost
from estimator.tensors import OpCall, TensorSpec

FusedFamily = Literal["elementwise", "reduction", "softmax", "normalization"]
FUSED = "fused."


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """What a fused kernel does, beside the tensors that it reads and writes.

    Each outside tensor is read once (`read_bytes`; of a table only the rows looked up) and each
    output written once. `rows` and `row_length` are those of its sums; without any it is one row.
    `members` are the targets of the operators in it.
    """

    family: FusedFamily
    flops: int
    read_bytes: int
    rows: int
    row_length: int
    members: tuple[str, ...]

    def call(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> OpCall:
        """The kernel as a call that reads and writes these tensors."""
        numbers = (self.flops, self.read_bytes, self.rows, self.row_length)
        arguments = (*inputs, *numbers, self.members)
        return OpCall(f"{FUSED}{self.family}.default", arguments, outputs=outputs)

    def share(self, ranks_ratio: float) -> FusedKernel:
        """What one rank of several does of it, by the share of its rows."""
        return replace(
            self,
            flops=round(self.flops * ranks_ratio),
            read_bytes=round(self.read_bytes * ranks_ratio),
            rows=max(round(self.rows * ranks_ratio), 1),
        )

    @classmethod
    def of(cls, call: OpCall) -> FusedKernel:
        """The kernel that a call stands for; raises ValueError or TypeError for any other call."""
        flops, read_bytes, rows, row_length, members = call.arguments[len(call.inputs) :]
        family = next((f for f in _FAMILIES if f == call.target.split(".")[1]), None)
        if family is None:
            raise ValueError(f"'{call.target}' is no fused kernel")
        if any(type(number) is not int for number in (flops, read_bytes, rows, row_length)):
            raise ValueError(f"'{call.target}' has sizes that are no whole numbers")
        return cls(
            family=family,
            flops=flops,
            read_bytes=read_bytes,
            rows=rows,
            row_length=row_length,
            members=tuple(str(member) for member in members),
        )


_FAMILIES: tuple[FusedFamily, ...] = ("elementwise", "reduction", "softmax", "normalization")


def _dims(call: OpCall) -> tuple[float, ...]:
    kernel = FusedKernel.of(call)
    return float(kernel.rows), float(kernel.row_length)


def _cost(call: OpCall) -> OpCost:
    kernel = FusedKernel.of(call)
    return OpCost(float(kernel.flops), float(kernel.read_bytes), written(call))


for _family in _FAMILIES:
    cost_of(f"{FUSED}{_family}", family=_family, dims=_dims)(_cost)
