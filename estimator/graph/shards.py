"""Divide a model into the units that FSDP gathers one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.graph.ops import OpGraph


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Parameters gathered together: everything below one module path ("" is the rest).

    `forward` and `backward` are the first ops of the unit's module in each phase, in op indices;
    None where the phase has none.
    """

    path: str
    parameter_bytes: int
    tensors: int
    forward: int | None
    backward: int | None


def unit_path(path: str) -> str:
    """The repeated block that a module path lies in: up to its first numbered part, else "".

    >>> unit_path("transformer.h.3.attn"), unit_path("lm_head")
    ('transformer.h.3', '')
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def shard_units(graph: OpGraph) -> tuple[ShardUnit, ...]:
    """The units of a graph in the order in which its forward pass meets them, the rest first."""
    sizes: dict[str, tuple[int, int]] = {"": (0, 0)}
    for parameter in graph.parameters:
        unit = unit_path(parameter.name.rpartition(".")[0])
        held, tensors = sizes.get(unit, (0, 0))
        sizes[unit] = (held + parameter.spec.nbytes, tensors + 1)
    first: dict[tuple[str, str], int] = {}
    for index, op in enumerate(graph.ops):
        first.setdefault((unit_path(op.module), op.phase), index)
    units = [
        ShardUnit(path, held, tensors, first.get((path, "forward")), first.get((path, "backward")))
        for path, (held, tensors) in sizes.items()
        if tensors
    ]
    last = len(graph.ops)
    return tuple(
        sorted(units, key=lambda u: (u.path != "", last if u.forward is None else u.forward))
    )
