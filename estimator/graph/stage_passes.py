"""Say what the passes of a pipeline's stage are made of, and what waits between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.graph.dataflow import Flags
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.optimizer_memory import block_bytes
from estimator.graph.structure import GraphStructure

Array = NDArray[np.float64]


def pass_seconds(
    is_forward: Flags, weight_shares: Array, seconds: Array
) -> tuple[float, float, float]:
    """(forward, gradients of the input, gradients of weights) of a stage, by the seconds of ops."""
    weight_s = float((weight_shares * seconds).sum())
    backward_s = float(seconds[~is_forward].sum())
    return float(seconds[is_forward].sum()), backward_s - weight_s, weight_s


def weight_shares(graph: OpGraph) -> Array:
    """The share of each op that is of gradients of weights, not of the stage's input.

    What the gradient of the stage's input does not need is of weights; in the first stage, whose
    input has none, all of the backward pass. A kernel that gives both, as of convolutions, is half
    of each.
    """
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
    # Values that something of the input's gradient needs.
    needed: set[int] = set()
    read: set[int] = set()
    shares = np.zeros(len(graph.ops))
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase != "backward":
            break
        ends = not gradients.isdisjoint(op.outputs)
        if needed.isdisjoint(op.outputs) and (ends or not read.isdisjoint(op.outputs)):
            shares[index] = 1.0
        else:
            shares[index] = 0.5 if ends else 0.0
            needed.update(op.inputs)
        read.update(op.inputs)
    return shares


def held_between_passes(
    bound: BoundGraph, known: GraphStructure, outputs: Sequence[int] = ()
) -> int:
    """Bytes that a micro-batch whose backward pass has not begun holds: what that will read.

    Gradients that other stages give to that pass have not come yet. `outputs` are held as well: a
    stage of torch.distributed.pipelining keeps what it has sent.
    """
    begin = int(known.is_forward.sum())
    waits = (known.born < begin) & (known.dies >= begin)
    kinds = known.kinds
    has_come = np.zeros(len(kinds), dtype=np.bool_)
    has_come[known.touches.storage[known.touches.op < begin]] = True
    waits &= (kinds == "activation") | ((kinds == "input") & has_come)
    waits[known.storage_of[list(outputs)]] = True
    block = block_bytes(bound.graph)
    return int((-(-known.storage_bytes(bound)[waits] // block) * block).sum())
