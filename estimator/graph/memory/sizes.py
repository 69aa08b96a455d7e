"""Say how large tensors are: parameters, what an optimizer holds, activations, workspaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Sizes
from estimator.graph.costs.registry import argument, item_bytes
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, parameter_unit
from estimator.graph.ir.ops import Parameter
from estimator.graph.ir.structure import GraphStructure
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.optimizers import (
    RULES,
    OptimizedTensor,
    check_optimizer,
    master_size,
    state_sizes,
    temporaries_bytes,
)
from estimator.workload.recipe import Recipe

# The CUDA caching allocator rounds every block up to kMinBlockSize
# (c10/core/AllocatorConfig.h, torch 2.13).
CUDA_BLOCK_BYTES = 512


class OptimizerMemory(NamedTuple):
    """Bytes that an optimizer holds, of all parameters together and of the one with most.

    `state_bytes` stay between steps, master weights among them; while it updates,
    `together_bytes` are made of all parameters and `single_bytes` of one at a time.
    """

    state_bytes: int
    largest_state_bytes: int
    together_bytes: int
    largest_together_bytes: int
    single_bytes: int

    @property
    def update_bytes(self) -> int:
        return self.together_bytes + self.single_bytes


def optimizer_memory(
    graph: OpGraph, *, stored_ratio: int = 1, master_ratio: int = 1, sharded: bool = False
) -> OptimizerMemory:
    """What a graph's optimizer holds of parameters that take `stored_ratio` times the traced bytes.

    With `sharded`, of all that the ranks which shard a model hold together.

    Master weights are copies of `master_ratio` times the size, 1: there are none. With them the
    state is as wide, and gradients are cast for the update (Float16OptimizerWithFloat16Params of
    Megatron-LM, BF16_Optimizer of DeepSpeed).
    """
    by_name: dict[str, list[Parameter]] = {}
    usual = check_optimizer(graph.optimizer)
    for parameter in graph.parameters:
        # What no optimizer updates has no state.
        if parameter.gradient is not None and parameter.updates:
            name = check_optimizer(parameter.optimizer) if parameter.optimizer else usual
            by_name.setdefault(name, []).append(parameter)
    held = []
    for name, some in by_name.items():
        own = replace(graph, parameters=tuple(some))
        tensors = trained_tensors(own, stored_ratio * master_ratio, sharded=sharded)
        foreach = graph.target == "cuda" and RULES[name].form != "loop"
        # Equal blocks have equal tensors.
        of_tensor = {
            tensor: (
                master_size(name, tensor) if master_ratio > 1 else 0,
                sum(state_sizes(name, tensor)),
                temporaries_bytes(name, [tensor], foreach=foreach)[0],
            )
            for tensor in set(tensors)
        }
        masters, states, each_bytes = zip(*map(of_tensor.__getitem__, tensors), strict=True)
        # Kernels that keep no fp32 weights take gradients as they are.
        casts = (0,) * len(tensors) if name == "adamw-bf16" else masters
        together, single = temporaries_bytes(name, tensors, foreach=foreach)
        held.append(
            OptimizerMemory(
                state_bytes=sum(states) + sum(masters),
                largest_state_bytes=max(map(sum, zip(states, masters, strict=True))),
                together_bytes=together + sum(casts),
                largest_together_bytes=max(map(sum, zip(each_bytes, casts, strict=True))),
                single_bytes=single,
            )
        )
    # They update one after the other.
    state, *most = zip(*held, strict=True) if held else [(0,)] * 5
    return OptimizerMemory(sum(state), *map(max, most))


def update_call(graph: OpGraph) -> OpCall:
    """The optimizer's whole step, as a call by which its seconds are kept."""
    trained = tuple(
        parameter.spec for parameter in graph.parameters if parameter.gradient is not None
    )
    return OpCall(f"update.{graph.optimizer}", (trained,))


def trained_tensors(
    graph: OpGraph, ratio: int = 1, *, sharded: bool = False
) -> list[OptimizedTensor]:
    """The parameters that get a gradient, `ratio` times as wide as they were traced.

    With `sharded`, those of all ranks that shard a model: experts that they divide come whole.
    """
    block, units = block_bytes(graph), [parameter_unit(p) for p in graph.parameters]
    tensors = []
    for parameter, unit in zip(graph.parameters, units, strict=True):
        if parameter.gradient is None:
            continue
        shape, parts = parameter.spec.shape, parameter.sharded_parts if sharded else 1
        tensors.append(
            OptimizedTensor(
                shape=(shape[0] * parts, *shape[1:]) if shape else (),
                elements=parameter.spec.numel * parts,
                size_bytes=ratio * rounded_bytes(parameter.spec.nbytes, block) * parts,
                in_block=bool(unit) or not any(units),
            )
        )
    return tensors


def block_bytes(graph: OpGraph) -> int:
    """What the allocator of the graph's device rounds sizes up to."""
    return CUDA_BLOCK_BYTES if graph.target == "cuda" else 1


def rounded_bytes(size_bytes: int, block: int) -> int:
    """A size in whole blocks of an allocator."""
    return -(-size_bytes // block) * block


# A CUDA graph of the whole iteration knows no counts of tokens: buffers of experts have room for so
# many times those of balanced ranks, and what is saved for gradients is copied to pages that have
# for fewer (Megatron-Core, moe_expert_rank_capacity_factor and moe_paged_stash_buffer_size_factor,
# as Megatron-Bridge sets them: scripts/performance/configs, set_full_iter_cg_configs).
_EXPERT_CAPACITY, _STASHED_CAPACITY = 1.5, 1.2


def _expert_slack(bound: BoundGraph, structure: GraphStructure) -> Array:
    """How many times what its tokens need each storage has room for."""
    graph, slack = bound.graph, np.ones(len(structure.kinds))
    recipe = None if graph.recipe is None else Recipe.parse(graph.recipe)
    if recipe is None or recipe.graphs != "iteration" or recipe.dispatch is None:
        return slack
    experts = {op.module for op in graph.ops if "_grouped_mm" in op.call.target}
    # Before the step nothing is made, after it nothing used.
    own = np.array([*(op.module in experts for op in graph.ops), False])
    is_forward = np.array([*(op.phase == "forward" for op in graph.ops), False])
    of_experts = own[structure.born] & (structure.kinds == "activation")
    dies = np.minimum(structure.dies, len(graph.ops))
    is_saved = is_forward[structure.born] & ~is_forward[dies]
    slack[of_experts] = np.where(is_saved, _STASHED_CAPACITY, _EXPERT_CAPACITY)[of_experts]
    return slack


class Gradient(NamedTuple):
    """A storage of gradients: the op that makes it, the one after which it is final, its unit.

    The ranks that shard a model have `parts` unlike ones.
    """

    born: int
    final: int
    size_bytes: int
    unit: str
    parts: int = 1


class StepTensors:
    """What there is to hold in a step of one batch size: a strategy says for how long.

    Sizes are in blocks of the device's allocator. `activations` and `gradient_storages` are the
    numbers of the storages that are one, `workspaces` what each op takes beside its tensors;
    `threads` are those that one rank has on a CPU.
    """

    def __init__(self, bound: BoundGraph, structure: GraphStructure, threads: int = 1) -> None:
        graph, kinds, block = bound.graph, structure.kinds, block_bytes(bound.graph)
        self.graph, self.structure, self.ops = graph, structure, len(graph.ops)
        wanted = structure.storage_bytes(bound) * _expert_slack(bound, structure)
        sizes: Sizes = -(-wanted.astype(np.int64) // block) * block
        self.size_bytes = sizes
        self.activations = np.flatnonzero(kinds == "activation")
        self.gradient_storages = np.flatnonzero(kinds == "gradient")
        self.inputs_bytes = int(sizes[kinds == "input"].sum())
        self.buffers_bytes = graph.buffer_bytes + int(sizes[kinds == "constant"].sum())
        self.workspaces = np.zeros(self.ops, dtype=np.int64)
        if graph.target == "cpu" and self.ops:
            of_call = [
                workspace_bytes(call, threads=threads) for call in structure.distinct_calls(bound)
            ]
            self.workspaces = np.array(of_call, dtype=np.int64)[structure.columns.call_of]

    def parameters_bytes(self, stored_ratio: int = 1, *, sharded: bool = False) -> int:
        """All parameters, `stored_ratio` times as wide as they were traced.

        With `sharded`, of all ranks that shard a model: experts that they divide come whole.
        """
        own_bytes = self._bytes_of(self.graph.parameters, sharded=sharded)
        return stored_ratio * (self.graph.frozen_parameter_bytes + own_bytes)

    def trained_bytes(self, stored_ratio: int = 1, *, sharded: bool = False) -> int:
        """The same of the parameters that get a gradient."""
        trained = [p for p in self.graph.parameters if p.gradient is not None]
        return stored_ratio * self._bytes_of(trained, sharded=sharded)

    def _bytes_of(self, parameters: Sequence[Parameter], *, sharded: bool) -> int:
        block = block_bytes(self.graph)
        return sum(
            rounded_bytes(parameter.spec.nbytes, block)
            * (parameter.sharded_parts if sharded else 1)
            for parameter in parameters
        )

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The storages of gradients: until when each is made, and for which unit."""
        structure = self.structure
        of_gradient = {p.gradient: p for p in self.graph.parameters if p.gradient is not None}
        owners_of: dict[int, list[Parameter]] = {}
        for value, parameter in sorted(of_gradient.items()):
            owners_of.setdefault(int(structure.storage_of[value]), []).append(parameter)
        gradients = []
        for number in self.gradient_storages.tolist():
            owners = owners_of[number]
            ready = [self.ops - 1 if p.ready_after is None else p.ready_after for p in owners]
            size, born = int(self.size_bytes[number]), int(structure.born[number])
            unit, parts = parameter_unit(owners[0]), owners[0].sharded_parts
            gradients.append(Gradient(born, max(ready), size, unit, parts))
        return tuple(gradients)


# oneDNN works on channels in blocks of 16 where the CPU has AVX-512 (8 with AVX2): tensors are
# copied into that layout, the channels filled up (nChw16c, OIhw16i16o in its documentation).
BLOCK = 16
# Fewer channels than these are read as they are; up to a block they are filled to half of one where
# the gradient of the weight is made.
FEWEST_BLOCKED = 4
# Its depthwise kernels take filters up to this width; wider ones run as grouped convolutions whose
# weights are blocked like any others, 16 x 16 for the one channel of each group.
WIDEST_DEPTHWISE = 3


def workspace_bytes(call: OpCall, *, threads: int = 1) -> int:
    """Memory that a CPU operator holds at most beside its inputs and outputs.

    Known for convolutions and LSTM layers, as torch 2.13 runs them with oneDNN on AVX-512 with that
    many threads: sizes read off the allocator for plain, grouped, depthwise, dilated, transposed
    and channels-last cases. 0 for every other operator.
    """
    rules = {
        "convolution": _transposed if argument(call, 6, "transposed", False) else _forward,
        "convolution_backward": _backward,
        "mkldnn_rnn_layer": _lstm,
        "mkldnn_rnn_layer_backward": _lstm,
    }
    rule = rules.get(call.target.split(".")[1]) if "." in call.target else None
    return round(rule(call, threads)) if rule else 0


def _forward(call: OpCall, threads: int) -> float:
    image, weight, output = call.arguments[0], call.arguments[1], call.outputs[0]
    if _is_matmul(image, weight, argument(call, 3, "stride", ()), threads):
        return _copies(image, weight, image)
    blocked = _filled_weight(weight, image)
    if _channels_last(image) or _channels_last(weight):
        return blocked
    blocked_output = _blocked(output)
    total_bytes = _blocked_image(image) + blocked_output + blocked
    return (
        _contiguous_copy(image) + max(total_bytes, blocked_output + output.nbytes) - output.nbytes
    )


def _transposed(call: OpCall, _threads: int) -> float:
    """Runs as the gradient of a convolution's input, one padded image beside; then the bias."""
    image, weight, output = call.arguments[0], call.arguments[1], call.outputs[0]
    if _channels_last(image) or _channels_last(weight):
        return _filled_weight(weight)
    return _contiguous_copy(image) + _scattered(image, output, weight) - output.nbytes


def _backward(call: OpCall, threads: int) -> float:
    """First the gradient of the input, then, beside it, that of the weight."""
    gradient, image, weight = call.arguments[:3]
    wants_image, wants_weight = argument(call, 10, "output_mask", (True, True, True))[:2]
    transposed = bool(argument(call, 7, "transposed", False))
    if not transposed and _is_matmul(image, weight, argument(call, 4, "stride", ()), threads):
        return _copies(image, weight, gradient, image)
    copied = _contiguous_copy(gradient) + _contiguous_copy(image)
    blocked = _filled_weight(weight, None if transposed else image)
    depthwise = weight.shape[1] == 1 and image.shape[1] > 1
    grouped = int(argument(call, 9, "groups", 1)) > 1
    dilated = grouped and max(argument(call, 6, "dilation", (1,))) > 1
    wide = depthwise and weight.shape[-1] > WIDEST_DEPTHWISE
    if _channels_last(image) or _channels_last(weight):
        if not wants_weight:
            return blocked
        filled = weight.numel * BLOCK * BLOCK * item_bytes(weight) if wide else blocked
        return filled + blocked
    # A transposed convolution reads the gradient as a plain one does its image.
    incoming = _blocked_image(gradient) if transposed else _blocked(gradient)
    image_bytes = image.nbytes if wants_image else 0
    weight_bytes = weight.nbytes if wants_weight else 0
    first = second = 0.0
    if wants_image:
        # Groups of at most half a block, or of one, have kernels of their own.
        by_group = grouped and (weight.shape[1] <= BLOCK // 2 or weight.shape[1] == BLOCK)
        if not (transposed or by_group) and max(argument(call, 4, "stride", (1,))) > 1:
            first = _scattered(gradient, image, weight)
        else:
            made = _blocked(image)
            outgoing = 0.0 if dilated and depthwise else incoming + blocked
            first = max(outgoing + made, made + image_bytes)
    if wants_weight:
        beside = float(weight_bytes)
        if not (wide or dilated):
            if FEWEST_BLOCKED <= image.shape[1] < BLOCK and not (transposed or grouped):
                copies = _blocked(image, BLOCK // 2) + _blocked(gradient, BLOCK // 2)
            else:
                copies = (_blocked(image) if transposed else _blocked_image(image)) + incoming
                if image.shape[1] < FEWEST_BLOCKED:
                    copies = incoming
            beside = max(copies + blocked, blocked + weight_bytes)
        second = image_bytes + beside
    return copied + max(first, second) - image_bytes - weight_bytes


def _scattered(gradient: TensorSpec, image: TensorSpec, weight: TensorSpec) -> float:
    """The gradient of what a strided convolution reads: one padded sample lies beside the copies.

    It is made in an order of its own and copied twice; one channel is in the right order already.
    """
    one_sample = gradient.nbytes / gradient.shape[0] if gradient.numel else 0.0
    total_bytes = one_sample + gradient.nbytes + _filled_weight(weight) + image.nbytes
    return max(total_bytes, (3 if image.shape[1] > 1 else 2) * image.nbytes)


def _lstm(call: OpCall, _threads: int) -> float:
    """Both weights, or their gradients, in oneDNN's order, and the gates of all steps.

    Backward also weights whose rows it pads.
    """
    sequence, *weights = call.arguments[:3]
    steps, batch, _ = sequence.shape
    total_bytes = steps * batch * _row(weights[0].shape[0]) * item_bytes(weights[0])
    for weight in weights:
        columns = weight.shape[1]
        total_bytes += weight.nbytes
        if "backward" in call.target and _row(columns) != columns:
            total_bytes += weight.nbytes // columns * _row(columns)
    return float(total_bytes)


def _row(length: int) -> int:
    """oneDNN fills rows up to cache lines, and beyond multiples of 256 (rnn_utils.cpp)."""
    filled = _filled(length)
    return filled + BLOCK if filled % 256 == 0 else filled


def _is_matmul(
    image: TensorSpec, weight: TensorSpec, strides: tuple[int, ...], threads: int
) -> bool:
    """Whether a 1 x 1 convolution runs as a matmul on the tensors as they are.

    ConvParams::use_mkldnn in aten/src/ATen/native/Convolution.cpp (torch 2.13): on one thread,
    below 16 images, without stride and in float32.
    """
    pointwise = math.prod(weight.shape[2:]) == 1 == max(strides, default=1)
    return pointwise and threads == 1 and image.shape[0] < 16 and image.dtype == "float32"


def _copies(image: TensorSpec, weight: TensorSpec, *read: TensorSpec) -> float:
    """What a matmul reads in another order than its image's (thnn_conv_use_channels_last)."""
    last = _channels_last(image) or _channels_last(weight)
    copied_bytes = 0.0
    for spec in read:
        as_it_is = _channels_last(spec) if last else spec.strides is None
        if not as_it_is and (spec.strides is not None or math.prod(spec.shape[2:]) > 1):
            copied_bytes += spec.nbytes
    return copied_bytes


def _contiguous_copy(spec: TensorSpec) -> float:
    """A tensor in an order of its own is first copied into the usual one."""
    return 0.0 if spec.strides is None else float(spec.nbytes)


def _channels_last(spec: TensorSpec) -> bool:
    return spec.strides is not None and len(spec.shape) > 2 and spec.strides[1] == 1


def _filled(channels: int, block: int = BLOCK) -> int:
    return -(-channels // block) * block


def _blocked(spec: TensorSpec, block: int = BLOCK) -> float:
    """Bytes of a (images, channels, ...) tensor with its channels filled up to whole blocks."""
    return spec.nbytes / spec.shape[1] * _filled(spec.shape[1], block) if spec.numel else 0.0


def _blocked_image(image: TensorSpec) -> float:
    """The first layer's few channels are read as they are."""
    return _blocked(image) if image.shape[1] >= BLOCK else 0.0


def _filled_weight(weight: TensorSpec, image: TensorSpec | None = None) -> float:
    """Both channels filled up, but the few of a first layer's image or those of groups."""
    is_grouped = image is not None and weight.shape[1] != image.shape[1]
    if is_grouped or not weight.numel:
        return float(weight.nbytes)
    few = image is not None and weight.shape[1] < BLOCK
    inputs = weight.shape[1] if few else _filled(weight.shape[1])
    return weight.nbytes / (weight.shape[0] * weight.shape[1]) * _filled(weight.shape[0]) * inputs
