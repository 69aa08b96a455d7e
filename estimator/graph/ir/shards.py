"""Divide a model into the units that FSDP gathers one at a time."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Parameter, Phase


@dataclass(frozen=True, slots=True)
class UnitRun:
    """One forward or backward pass through a unit: its first and its last op."""

    path: str
    first: int
    last: int


@lru_cache(maxsize=1 << 16)
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


def parameter_unit(parameter: Parameter) -> str:
    """The path of the unit that a parameter belongs to."""
    return unit_path(parameter.name.rpartition(".")[0])


def unit_runs(graph: OpGraph, paths: Container[str], phase: Phase) -> list[UnitRun]:
    """The passes of a phase through units with some paths, in order.

    A unit that is called again after another one has another pass; ops of no such unit, the rest of
    the model among them, end none.
    """
    units: dict[str, str] = {}
    runs: list[UnitRun] = []
    for index, op in enumerate(graph.ops):
        if op.phase != phase:
            continue
        path = units.get(op.module)
        if path is None:
            path = units[op.module] = unit_path(op.module)
        if path not in paths:
            continue
        if runs and runs[-1].path == path:
            runs[-1] = UnitRun(path, runs[-1].first, index)
        else:
            runs.append(UnitRun(path, index, index))
    return runs


def frozen_unit_bytes(graph: OpGraph) -> dict[str, int]:
    """Bytes of parameters that are not trained, by the unit that reads them first.

    What no op reads counts as the rest of the model.
    """
    left = graph.frozen_parameter_bytes
    if not left:
        return {}
    read: dict[str, int] = {}
    seen: set[int] = set()
    for op in graph.ops:
        for value in op.inputs:
            if graph.values[value].kind == "parameter" and value not in seen:
                seen.add(value)
                path = unit_path(op.module)
                read[path] = read.get(path, 0) + graph.values[value].spec.nbytes
    for parameter in graph.parameters:
        path = parameter_unit(parameter)
        read[path] = read.get(path, 0) - parameter.spec.nbytes
    frozen: dict[str, int] = {}
    for path, size in sorted(read.items(), reverse=True):
        frozen[path] = min(max(size, 0), left)
        left -= frozen[path]
    frozen[""] = frozen.get("", 0) + left
    return frozen
