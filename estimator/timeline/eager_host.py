"""What the host does for each op of an eager step: Python, dispatch, autograd, launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.graph.exchanges import is_collective
from estimator.graph.structure import GraphStructure
from estimator.machines.profile import HostCost
from estimator.tensors import OpCall
from estimator.timeline.caches import Eviction

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Before a library's kernel is launched, its descriptors are made and its algorithm looked up: on a
# GPU a convolution takes the host 4 times as long as relu_, a batch norm 3 times with what wraps it
# (112 and 51 beside 26 µs in a profile: pytorch/pytorch, issue 27058).
_LIBRARY_CALLS = {"convolution": 4.0, "batch_norm": 3.0}
# The backward pass of a view is a view made from C++, without Python's half of the call.
_BACKWARD_VIEW_RATIO = 0.5
# What torch.utils.checkpoint costs the host beside running a block again, in calls of a module:
# states of generators, detached inputs, a nested backward pass (95 µs in its reentrant form and 0.8
# a call, torch 2.13 on an EPYC server; 300 µs in the other form, with hooks on what is saved).
_CHECKPOINT_CALLS = 120
# What a torch.autograd.Function adds to the ops in it, forward and backward, in the same calls (4
# and 7 µs there): its context, what it saves, and Python called from autograd's thread.
_FUNCTION_CALLS, _FUNCTION_BACKWARD_CALLS = 5, 9


def eager_host_seconds(
    structure: GraphStructure,
    calls: Sequence[OpCall],
    moved_bytes: Array,
    host: HostCost,
    private_bytes: float,
) -> Array:
    """Python, dispatch and autograd seconds per op; on CUDA also the launch.

    `calls` are the distinct ones of the graph, and `moved_bytes` what each reads and writes.

    The forward pass, and what checkpoints run again, pay Python and module calls, the rest of the
    backward pass only C++. A CPU kernel's own time includes its bare call; a CUDA kernel's does
    not. On CPUs what the kernel before touched has evicted the host's code from `private_bytes` of
    cache, or has not.
    """
    graph = structure.graph
    launch = host.bare_op_s if graph.target == "cuda" else 0.0
    moved = np.where(structure.is_view, 0.0, moved_bytes[structure.call_of])
    before = np.concatenate([[0.0], moved[:-1]]) if len(moved) else moved
    cold = Eviction.of_size(private_bytes).at(before) if private_bytes else np.ones(len(moved))
    op_s = _between(host.cached_forward_op_s, host.forward_op_s, cold)
    view_s = _between(host.cached_forward_view_s, host.forward_view_s, cold)
    node_s = _between(host.cached_backward_op_s, host.backward_op_s, cold)
    ratios = _library_ratios(calls)[structure.call_of] if graph.target == "cuda" else 1.0
    forward_s = np.where(structure.is_view, view_s, (op_s + launch) * ratios)
    backward_s = np.where(
        structure.is_view, _BACKWARD_VIEW_RATIO * view_s, (node_s + launch) * ratios
    )
    by_python = structure.is_forward | structure.is_run_again
    per_op = np.where(by_python, forward_s, backward_s)
    for parameter in graph.parameters:
        if parameter.ready_after is not None:  # autograd hands the gradient to the parameter
            per_op[parameter.ready_after] += node_s[parameter.ready_after]
    per_op += _dtensor_seconds(structure, calls, host)
    if len(per_op):
        per_op[0] += host.step_s
        per_op += host.module_call_s * _python_calls(structure, by_python)
    return per_op


def _dtensor_seconds(structure: GraphStructure, calls: Sequence[OpCall], host: HostCost) -> Array:
    """What DTensor does per call of a module that it runs, and per collective.

    Where ranks divide layers without it, as Megatron-LM's do, they exchange without it, too.
    """
    has_dtensors = structure.enters_dtensor.any()
    exchanges = [
        is_collective(call) and (has_dtensors or call.arguments[1] != "tp") for call in calls
    ]
    module_s = np.where(structure.is_forward, host.dtensor_forward_s, host.dtensor_backward_s)
    exchange_s = host.dtensor_exchange_s * np.array(exchanges, dtype=np.float64)
    return np.asarray(structure.enters_dtensor * module_s + exchange_s[structure.call_of])


def _library_ratios(calls: Sequence[OpCall]) -> Array:
    """How many times a simple operator each distinct call takes the host."""
    kinds = [
        next((ratio for word, ratio in _LIBRARY_CALLS.items() if word in call.target), 1.0)
        for call in calls
    ]
    return np.array(kinds)


def _python_calls(structure: GraphStructure, by_python: Flags) -> Array:
    """What Python does around each op, in calls of a module: these come between all its ops."""
    graph, is_forward = structure.graph, structure.is_forward
    calls = np.zeros(len(by_python))
    calls[structure.checkpoints] = _CHECKPOINT_CALLS
    functions = _FUNCTION_CALLS * graph.function_calls / max(is_forward.sum(), 1)
    calls[by_python] += graph.module_calls / max(by_python.sum(), 1) + functions
    calls[~by_python] += (
        _FUNCTION_BACKWARD_CALLS * graph.function_calls / max((~by_python).sum(), 1)
    )
    return calls


def _between(cached_s: float | None, cold_s: float, cold: Array) -> Array:
    """Seconds by the share of the host's code and data that has left the private caches."""
    return cold * cold_s + (1.0 - cold) * (cold_s if cached_s is None else cached_s)
