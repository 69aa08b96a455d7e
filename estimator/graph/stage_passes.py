"""Say what the passes of a pipeline's stage are made of, and what waits between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.optimizer_memory import block_bytes
from estimator.graph.structure import GraphStructure


def pass_seconds(
    graph: OpGraph, of_weights: frozenset[int], seconds: Callable[[int], float]
) -> tuple[float, float, float]:
    """(forward, gradients of the input, gradients of weights) of a stage, by the seconds of ops.

    `of_weights` are `weight_ops(graph)`. What the gradient of the stage's input does not need is of
    weights; in the first stage, whose
    input has none, all of the backward pass. A kernel that gives both, as of convolutions, is half
    of each.
    """
    trained = {p.gradient for p in graph.parameters}
    forward_s = input_s = weight_s = 0.0
    for index, op in enumerate(graph.ops):
        spent_s = seconds(index)
        if op.phase == "forward":
            forward_s += spent_s
            continue
        share = 1.0 if index in of_weights else 0.0 if trained.isdisjoint(op.outputs) else 0.5
        weight_s += share * spent_s
        input_s += (1.0 - share) * spent_s
    return forward_s, input_s, weight_s


def weight_ops(graph: OpGraph) -> frozenset[int]:
    """Ops of the backward pass whose results serve gradients of parameters alone."""
    only: set[int] = set()
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
    used_by: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            used_by.setdefault(value, []).append(index)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase != "backward":
            break
        readers = [reader for value in op.outputs for reader in used_by.get(value, ())]
        ends = bool(gradients.intersection(op.outputs))
        if (ends or readers) and all(reader in only for reader in readers):
            only.add(index)
    return frozenset(only)


def held_between_passes(
    bound: BoundGraph, known: GraphStructure, outputs: Sequence[int] = ()
) -> int:
    """Bytes that a micro-batch whose backward pass has not begun holds: what that will read.

    Gradients that other stages give to that pass have not come yet. `outputs` are held as well: a
    stage of torch.distributed.pipelining keeps what it has sent.
    """
    begin = int(known.is_forward.sum())
    waits = (known.born < begin) & (known.dies >= begin)
    kinds = np.array([storage.kind for storage in known.storages])
    has_come = np.zeros(len(kinds), dtype=np.bool_)
    has_come[known.touches.storage[known.touches.op < begin]] = True
    waits &= (kinds == "activation") | ((kinds == "input") & has_come)
    waits[known.storage_of[list(outputs)]] = True
    block = block_bytes(bound.graph)
    return int((-(-known.storage_bytes(bound)[waits] // block) * block).sum())
