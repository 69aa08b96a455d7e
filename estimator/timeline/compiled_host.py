"""Say what issuing the kernels of a compiled step costs the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import HostCost

Array = NDArray[np.float64]

# Inductor's Python wrapper takes 6.5 to 6.8 µs to launch a kernel without arguments, 9.1 µs with 19
# (meta-pytorch/tritonbench, pull requests 1016 and 1017, 2026), where the bare call of an operator
# from Python takes 4.5 µs.
_LAUNCH_RATIO = 1.5
# Guards, Dynamo's cache and AOTAutograd's wrappers around one compiled graph: 39 µs where gradients
# are wanted (pytorch/pytorch, issue 122029, 2024), 33 to 44 µs (those pull requests).
_CALL_S = 4e-5
# What mode="reduce-overhead" adds for one graph: checks of its tree 128 µs, cudaGraphLaunch 41 µs
# (pytorch/pytorch, issue 150488, 2025).
_REPLAY_S = 1.7e-4


def compiled_host_seconds(graph: OpGraph, host: HostCost) -> Array:
    """Host seconds per op of a compiled graph, whose forward and backward are one call each.

    Modules are not called any more; autograd still hands every gradient to its parameter. A CUDA
    graph is launched as a whole; on a CPU, calling a kernel is part of its own time.
    """
    on_gpu = graph.target == "cuda"
    is_replayed = graph.execution == "cuda-graphs"
    launch_s = _LAUNCH_RATIO * host.bare_op_s if on_gpu and not is_replayed else 0.0
    per_op = np.full(len(graph.ops), launch_s)
    phases = [op.phase for op in graph.ops]
    for phase in dict.fromkeys(phases):
        per_op[phases.index(phase)] += _CALL_S + (_REPLAY_S if is_replayed else 0.0)
    for parameter in graph.parameters:
        if parameter.ready_after is not None:
            # What one call returns, autograd hands on when that call has ended.
            per_op[-1] += host.backward_op_s
    if len(per_op):
        per_op[0] += host.step_s
    return per_op
