"""Say what the host does for each op of a step, and where it waits for the device.

Those are what ``torch.cuda.set_sync_debug_mode("warn")`` names in a step: reading a tensor's value
in Python, and operators whose result is as long as its values say (PyTorch, "CUDA semantics").
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from estimator.elementwise import Array, Flags
from estimator.graph.costs.call_costs import family_of
from estimator.graph.ir.collectives import is_collective
from estimator.graph.ir.op_graph import OpGraph, unit_path
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import GraphStructure
from estimator.kernels.contention import Eviction
from estimator.machines.profile import HostCost, MachineProfile
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.recipe import Recipe

# Before a library's kernel is launched, its descriptors are made and its algorithm looked up: on a
# GPU a convolution takes the host 4 times as long as relu_, a batch norm 3 times with what wraps it
# (112 and 51 beside 26 µs in a profile: pytorch/pytorch, issue 27058). For machines whose probe has
# not timed that.
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


def issue_costs(profile: MachineProfile) -> dict[str, float]:
    """Host seconds of a bare call, the median of those probed, by operator and by family."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in profile.kernels:
        own = [point.host_s for point in kernel.points if point.host_s is not None]
        for name in (kernel.target, family_of(kernel.target)):
            seconds[name] += own
    return {name: statistics.median(own) for name, own in seconds.items() if own}


def eager_host_seconds(
    structure: GraphStructure,
    calls: Sequence[OpCall],
    moved_bytes: Array,
    host: HostCost,
    private_bytes: float,
    issued_s: Mapping[str, float],
) -> Array:
    """Python, dispatch and autograd seconds per op; on CUDA also the launch.

    `calls` are the distinct ones of the graph, and `moved_bytes` what each reads and writes;
    `issued_s` are the `issue_costs` of the machine.

    The forward pass, and what checkpoints run again, pay Python and module calls, the rest of the
    backward pass only C++. A CPU kernel's own time includes its bare call; a CUDA kernel's does
    not. On CPUs what the kernel before touched has evicted the host's code from `private_bytes` of
    cache, or has not.
    """
    graph, columns = structure.graph, structure.columns
    moved = np.where(columns.is_view, 0.0, moved_bytes[columns.call_of])
    before = np.concatenate([[0.0], moved[:-1]]) if len(moved) else moved
    cold = Eviction.of_size(private_bytes).at(before) if private_bytes else np.ones(len(moved))
    op_s = _between(host.cached_forward_op_s, host.forward_op_s, cold)
    view_s = _between(host.cached_forward_view_s, host.forward_view_s, cold)
    node_s = _between(host.cached_backward_op_s, host.backward_op_s, cold)
    # What a CPU's kernel takes includes its bare call.
    ratios, launch_s = np.ones(len(op_s)), np.zeros(len(op_s))
    if graph.target == "cuda":
        launches = _launches(calls, host.bare_op_s, issued_s)
        ratios, launch_s = (given[columns.call_of] for given in launches)
    forward_s = np.where(columns.is_view, view_s, op_s * ratios + launch_s)
    backward_s = np.where(
        columns.is_view, _BACKWARD_VIEW_RATIO * view_s, node_s * ratios + launch_s
    )
    by_python = columns.is_forward | structure.is_run_again
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
    columns = structure.columns
    has_dtensors = columns.enters_dtensor.any()
    exchanges = [
        is_collective(call) and (has_dtensors or call.arguments[1] != "tp") for call in calls
    ]
    module_s = np.where(columns.is_forward, host.dtensor_forward_s, host.dtensor_backward_s)
    exchange_s = host.dtensor_exchange_s * np.array(exchanges, dtype=np.float64)
    return np.asarray(columns.enters_dtensor * module_s + exchange_s[columns.call_of])


def _launches(
    calls: Sequence[OpCall], bare_s: float, issued_s: Mapping[str, float]
) -> tuple[Array, Array]:
    """(how many times as long as usual the rest takes, seconds of launching) of distinct calls."""
    ratios, seconds = np.ones(len(calls)), np.full(len(calls), bare_s)
    for number, call in enumerate(calls):
        own_s = issued_s.get(call.target, issued_s.get(family_of(call.target)))
        if own_s is not None:
            seconds[number] = own_s
            continue
        named = (ratio for word, ratio in _LIBRARY_CALLS.items() if word in call.target)
        ratios[number] = next(named, 1.0)
        seconds[number] *= ratios[number]
    return ratios, seconds


def _python_calls(structure: GraphStructure, by_python: Flags) -> Array:
    """What Python does around each op, in calls of a module: these come between all its ops."""
    graph, is_forward = structure.graph, structure.columns.is_forward
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

# Transformer Engine's modules are called from Python: a linear layer in bf16 takes the host 2.7
# times as long as torch's (99.7 and 37.1 µs on GB200, 90.5 and 33.2 on GH200;
# NVIDIA/TransformerEngine, issue 2053), one in FP8 twice as long again (issue 761).
_MODULE_RATIO, _FLOAT8_RATIO = 2.7, 2.0
_PRODUCTS = ("aten.mm", "aten.addmm", "aten._scaled_mm")
_EXPERTS = ("aten._grouped_mm", "aten._scaled_grouped_mm")
_CASTS = ("te.quantize", "aten.amax")
# Its grouped layer has a weight for each expert. In calls of an operator: one product of one expert
# goes through cuBLASLt, on streams beside each other (10 µs with descriptors and heuristics,
# rapidsai/raft, pull request 1736; 16 in 186 µs on H100, TransformerEngine, 2045)
_EXPERT_PRODUCT = 1.5
# and what is listed, split and allocated for an expert, forward and for each product of a backward
# pass (1.2 and 2.1 ms for 64 experts of two layers whose products are launched at once, on a GB200
# as slow as above; TransformerEngine, issue 2897).
_EXPERT_LISTS = {"forward": 0.6, "backward": 0.55}
# What a mixture does beside its products, in calls of an operator: routing and its loss, counts,
# dispatch, permutation, combination, each a function of Python. A layer of Megatron-Core with 16
# bf16 experts a rank takes 5.0 ms forward and 6.0 to 6.6 backward on 8 H100 however few tokens and
# however narrow it is (marin-community/marin, .agents/logbooks/moe-megatron-qwen-scale.md and
# issue 3666, 9.0 to 12.4 ms together with DeepEP, 11.4 to 19.5 with HybridEP, 11.9 with 4 experts).
_MIXTURE_CALLS = {"forward": 440, "backward": 360}


def compiled_host_seconds(graph: OpGraph, host: HostCost) -> Array:
    """Host seconds per op of a compiled graph, whose forward and backward are one call each.

    Modules are not called any more; autograd still hands every gradient to its parameter. A CUDA
    graph is launched as a whole; on a CPU, calling a kernel is part of its own time.
    """
    on_gpu = graph.target == "cuda"
    is_replayed = graph.execution == "cuda-graphs"
    launch_s = _LAUNCH_RATIO * host.bare_op_s if on_gpu and not is_replayed else 0.0
    per_op = np.full(len(graph.ops), launch_s)
    if graph.recipe is not None:
        per_op = _megatron_seconds(graph, host, per_op)
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


def _megatron_seconds(graph: OpGraph, host: HostCost, per_op: Array) -> Array:
    """Launches, and the calls of Transformer Engine's modules; graphs of layers leave experts out.

    What reads one tensor, as queries, keys and values do, is one module. Its backward pass, of two
    products, takes as long as the forward one.
    """
    recipe = Recipe.parse(graph.recipe or "")
    if recipe.graphs == "iteration":
        return np.zeros_like(per_op)
    linear_s = host.forward_op_s + host.module_call_s + host.bare_op_s
    module_s = _MODULE_RATIO * (_FLOAT8_RATIO if recipe.fp8 else 1.0) * linear_s
    counts = {
        op.module: _expert_count(op.call) for op in graph.ops if op.call.target.startswith(_EXPERTS)
    }
    before, firsts = -1, dict[tuple[str, str, bool], int]()
    for index, op in enumerate(graph.ops):
        experts, target = counts.get(op.module, 0), op.call.target
        is_grouped = target.startswith(_EXPERTS)
        if experts:
            firsts.setdefault((op.module, op.phase, is_grouped), index)
        pieces = dict(op.call.keywords).get("pieces") if experts else None
        if pieces:
            # Each is an operator of torch, forward from Python.
            eager_s = host.forward_op_s if op.phase == "forward" else host.backward_op_s
            per_op[index] = pieces * (eager_s + host.bare_op_s)
        elif target.startswith(_CASTS) and experts and not recipe.fused_grouped_mlp:
            per_op[index] *= experts
        if recipe.graphs == "layers" and unit_path(op.module) and not experts:
            per_op[index] = 0.0
        elif is_grouped or target.startswith(_PRODUCTS):
            if op.inputs[0] != before:
                per_op[index] += module_s if op.phase == "forward" else module_s / 2
            before = op.inputs[0]
            if is_grouped:
                per_op[index] += experts * _expert_seconds(op, host, recipe)
    for (_, phase, is_grouped), index in firsts.items():
        # Half comes before tokens are counted, which graphs of layers hold, and half after it.
        if is_grouped or recipe.graphs is None:
            per_op[index] += _MIXTURE_CALLS[phase] / 2 * host.bare_op_s
    return per_op


def _expert_seconds(op: Op, host: HostCost, recipe: Recipe) -> float:
    """What each expert adds to one call of a grouped product."""
    calls = _EXPERT_LISTS[op.phase] + (0.0 if recipe.fused_grouped_mlp else _EXPERT_PRODUCT)
    seconds = calls * host.bare_op_s
    if len(op.call.outputs[0].shape) == 3:
        # Autograd hands the gradient to the weight, and a hook of Megatron-Core counts it.
        seconds += host.backward_op_s + host.module_call_s
    return seconds


def _expert_count(call: OpCall) -> int:
    """How many products one call of a grouped product is."""
    return max((s.shape[0] for s in (*call.inputs, *call.outputs) if len(s.shape) == 3), default=1)


_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
# These count the elements of a mask where one indexes.
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MASKS = frozenset({"bool", "uint8"})


def awaited_ops(structure: GraphStructure) -> tuple[int, ...]:
    """The ops after which the host issues nothing before the device has done them."""
    if structure.graph.target != "cuda":
        return ()
    columns = structure.columns
    awaited = np.flatnonzero(columns.of_calls(_waits(call) for call, _ in columns.calls)).tolist()
    return tuple(sorted({*awaited, *_token_counts(structure.graph)}))


def _token_counts(graph: OpGraph) -> list[int]:
    """Where Megatron-Core's host reads how many tokens experts have, but where all is one graph."""
    if graph.recipe is None or Recipe.parse(graph.recipe).graphs == "iteration":
        return []
    return [
        index
        for index, op in enumerate(graph.ops)
        if op.phase == "forward"
        and op.call.target == "aten.cumsum.default"
        and op.module.endswith(".experts")
    ]


def _waits(call: OpCall) -> bool:
    name, _, overload = call.target.removeprefix("aten.").partition(".")
    if name == "repeat_interleave":
        return overload == "Tensor" and not dict(call.keywords).get("output_size")
    if name in _INDEXING:
        indices, value, adds = (*call.arguments[1:4], (), None, None)[:3]
        by_mask = any(isinstance(i, TensorSpec) and i.dtype in _MASKS for i in indices)
        # Where one number is put where a mask says, torch has masked_fill_ do that.
        fills = isinstance(value, TensorSpec) and value.numel == 1 and not adds
        return by_mask and not fills
    return name in _WAITING


def described(graph: OpGraph, awaited: Sequence[int]) -> str:
    """The commonest of them by name and module, for a sentence."""
    ops = graph.ops
    named = Counter((ops[op].call.target, ops[op].module) for op in awaited)
    (target, module), _ = named.most_common(1)[0]
    return f"{target} in '{module}'" if module else target
