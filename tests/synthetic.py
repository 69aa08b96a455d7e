"""Machines and training steps whose every number is chosen, for tests of what follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from estimator.graph.costs.call_costs import op_cost
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import GraphInput, Op, Parameter, Phase, Value, ValueKind
from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    Contention,
    Device,
    DeviceKind,
    HostCost,
    KernelCost,
    KernelPoint,
    Link,
    MachineProfile,
    MemoryCost,
    OverlapCost,
    Provenance,
    UpdateCost,
)
from estimator.tensors import OpCall, TensorSpec

CHOSEN = Provenance(source="measured", samples=1, relative_error=0.0)
HOST = HostCost(
    forward_op_s=4e-6,
    forward_view_s=2e-6,
    backward_op_s=3e-6,
    bare_op_s=2e-6,
    module_call_s=3e-6,
    step_s=2e-5,
    ddp_step_s=2e-4,
    ddp_bucket_s=3e-5,
    provenance=CHOSEN,
)


def update(optimizer: str, per_parameter_s: float) -> UpdateCost:
    """What an optimizer's loop on cores takes."""
    return UpdateCost(
        optimizer=optimizer,
        form="loop",
        device="cpu",
        launch_s=1e-5,
        per_tensor_s=2e-5,
        per_parameter_s=per_parameter_s,
        provenance=CHOSEN,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The numbers of a synthetic machine; `profile()` is what a probe of it would find."""

    devices: int = 9
    flops_per_s: float = 5e10
    memory_bytes_per_s: float = 1e10
    latency_s: float = 1e-4
    bandwidth_bytes_per_s: float = 1e9
    exposed_ratio: float = 0.8
    slowdown_ratio: float = 1.3
    two_at_once_ratio: float = 1.6
    memory_contention: float = 1.0
    rank_jitter_ratio: float = 0.01
    network_latency_s: float = 2e-4
    network_bytes_per_s: float = 1e8

    def profile(self) -> MachineProfile:
        """A profile measured without error, group size 2."""
        return MachineProfile(
            name="synthetic",
            devices=tuple(
                Device(
                    kind="cpu",
                    index=index,
                    name="core",
                    memory_bytes=64 << 30,
                    peak_flops_per_s={"float32": self.flops_per_s},
                    cores=(index,),
                )
                for index in range(self.devices)
            ),
            network=(
                Link(
                    kind="tcp",
                    locality="rack",
                    latency_s=self.network_latency_s,
                    bandwidth_bytes_per_s=self.network_bytes_per_s,
                    provenance=CHOSEN,
                ),
            ),
            collectives=tuple(self._collective(op) for op in ("all_reduce", "broadcast")),
            overlaps=(self._overlap(),),
            kernels=(
                self._kernels("aten.mm.default", _matmul),
                self._kernels("aten.relu.default", _map),
                self._kernels("aten.threshold_backward.default", _threshold),
                self._kernels("aten.copy_.default", _pair),
                self._kernels("aten.add_.Tensor", _pair),
            ),
            contentions=(
                Contention(
                    bound="memory",
                    devices_busy=2,
                    points=((1e4, 1.0), (1e8, self.memory_contention)),
                    provenance=CHOSEN,
                ),
            ),
            host=HOST,
            memory=MemoryCost(shared_cache_bytes=16 << 20, provenance=CHOSEN),
            updates=(update("adamw", 3e-9), update("sgd", 1e-9)),
            rank_jitter_ratio=self.rank_jitter_ratio,
            provenance=CHOSEN,
        )

    def _collective(self, op: CollectiveName) -> CollectiveCost:
        return CollectiveCost(
            op=op,
            backend="gloo",
            group_size=2,
            points=tuple(
                (2.0**k, self.latency_s + 2.0**k / self.bandwidth_bytes_per_s)
                for k in range(10, 28, 2)
            ),
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            pair_ratio=((2.0**10, self.two_at_once_ratio),),
            provenance=CHOSEN,
        )

    def _overlap(self) -> OverlapCost:
        return OverlapCost(
            compute="compute_bound",
            backend="gloo",
            group_size=2,
            size_bytes=1 << 24,
            exposed_ratio=self.exposed_ratio,
            collective_slowdown_ratio=self.slowdown_ratio,
            provenance=CHOSEN,
        )

    def _kernels(self, target: str, call_of: Callable[[str, int], OpCall]) -> KernelCost:
        calls = [call_of(target, size) for size in (16, 64, 256, 1024, 2048)]
        return KernelCost(
            target=target,
            dtype="float32",
            points=tuple(KernelPoint(call=call, warm_s=self.kernel_s(call)) for call in calls),
            provenance=CHOSEN,
        )

    def kernel_s(self, call: OpCall) -> float:
        """What a call takes here: a start, then arithmetic, or for elementwise ops traffic."""
        cost = op_cost(call)
        if call.target == "aten.mm.default":
            return 1e-6 + cost.flops / self.flops_per_s
        return 1e-6 + cost.moved_bytes / self.memory_bytes_per_s


def with_every_collective(profile: MachineProfile) -> MachineProfile:
    """The profile, what it knows of an all-reduce also standing for the collectives of its ring."""
    ops: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter")
    others = [
        replace(cost, op=op)
        for cost in profile.collectives
        if cost.op == "all_reduce"
        for op in ops
    ]
    return replace(profile, collectives=(*profile.collectives, *others))


def on_gpus(profile: MachineProfile) -> MachineProfile:
    """The same numbers for CUDA devices, whose backend is NCCL."""
    return replace(
        profile,
        devices=tuple(replace(each, kind="cuda", cores=()) for each in profile.devices),
        updates=tuple(replace(each, device="cuda") for each in profile.updates),
    )


@contextmanager
def fake_ranks(count: int, *, rank: int = 0) -> Iterator[None]:
    """A default process group of which this is one rank and the others do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def module(forward: Callable[..., Any], **parts: Any) -> Any:
    """An nn.Module with these parts, whose forward() is a function of it and its inputs."""
    from torch import nn

    made: Any = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def _square(size: int) -> TensorSpec:
    return TensorSpec((size, size))


def _matmul(target: str, size: int) -> OpCall:
    return OpCall(target, (_square(size), _square(size)), outputs=(_square(size),))


def _map(target: str, size: int) -> OpCall:
    return OpCall(target, (_square(size),), outputs=(_square(size),))


def _pair(target: str, size: int) -> OpCall:
    return OpCall(target, (_square(size), _square(size)), outputs=(_square(size),))


def _threshold(target: str, size: int) -> OpCall:
    return OpCall(target, (_square(size), _square(size), 0), outputs=(_square(size),))


class _Step:
    """Collects the values and calls of a step at two batch sizes."""

    def __init__(self, batch: int, other_batch: int) -> None:
        self.batches = (batch, other_batch)
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def value(self, kind: ValueKind, *shape: int) -> int:
        """A new value; a dimension of 0 stands for the batch."""
        one, two = (TensorSpec(tuple(size or batch for size in shape)) for batch in self.batches)
        self.values.append(Value(spec=one, other_spec=two, kind=kind))
        return len(self.values) - 1

    def call(
        self, target: str, phase: Phase, inputs: Sequence[int], out: int, *numbers: int
    ) -> int:
        """A call that reads `inputs` and writes `out`; returns `out`."""
        one, two = (
            OpCall(
                target,
                (*(specs[value] for value in inputs), *numbers),
                outputs=(specs[out],),
            )
            for specs in ([v.spec for v in self.values], [v.other_spec for v in self.values])
        )
        self.ops.append(
            Op(
                name=f"{target}_{len(self.ops)}",
                call=one,
                other_call=two,
                phase=phase,
                module="",
                inputs=tuple(inputs),
                outputs=(out,),
            )
        )
        return out


def perceptron(widths: Sequence[int], *, batch: int = 16, target: DeviceKind = "cpu") -> OpGraph:
    """A multi-layer perceptron's step: one product and one relu per layer, then their gradients."""
    step = _Step(batch, 2 * batch)
    hidden = [step.value("input", 0, widths[0])]
    weights, matmuls = [], []
    for inner, outer in itertools.pairwise(widths):
        weights.append(step.value("parameter", inner, outer))
        matmul = step.value("activation", 0, outer)
        step.call("aten.mm.default", "forward", [hidden[-1], weights[-1]], matmul)
        matmuls.append(matmul)
        active = step.value("activation", 0, outer)
        hidden.append(step.call("aten.relu.default", "forward", [matmul], active))
    parameters = []
    upstream = hidden[-1]
    for layer in reversed(range(len(weights))):
        inner, outer = widths[layer], widths[layer + 1]
        through = step.value("activation", 0, outer)
        step.call(
            "aten.threshold_backward.default", "backward", [upstream, matmuls[layer]], through, 0
        )
        # The transposed factors are laid out anew, so that every product is a plain one.
        turned = step.value("activation", inner, 0)
        step.call("aten.copy_.default", "backward", [turned, turned], turned)
        gradient = step.value("activation", inner, outer)
        step.call("aten.mm.default", "backward", [turned, through], gradient)
        parameters.append(
            Parameter(
                name=f"layers.{layer}",
                spec=TensorSpec((inner, outer)),
                gradient=gradient,
                ready_after=len(step.ops) - 1,
            )
        )
        weight = step.value("activation", outer, inner)
        step.call("aten.copy_.default", "backward", [weight, weight], weight)
        upstream = step.value("activation", 0, inner)
        step.call("aten.mm.default", "backward", [through, weight], upstream)
    return OpGraph(
        name="perceptron",
        target=target,
        precision="fp32",
        optimizer="adamw",
        batch=batch,
        other_batch=2 * batch,
        ops=tuple(step.ops),
        values=tuple(step.values),
        parameters=tuple(parameters),
        inputs=(GraphInput(name="x", value=0),),
    )


def in_blocks(graph: OpGraph) -> OpGraph:
    """A perceptron whose layers are blocks that FSDP gathers one by one, the first one the rest."""
    layers = len(graph.parameters)
    of_op = [op // 2 for op in range(2 * layers)]
    of_op += [layers - 1 - op // 5 for op in range(5 * layers)]
    named = [
        replace(each, name="weight" if each.name == "layers.0" else f"{each.name}.weight")
        for each in graph.parameters
    ]
    ops = [
        replace(op, module=f"layers.{layer}" if layer else "")
        for op, layer in zip(graph.ops, of_op, strict=True)
    ]
    return replace(graph, ops=tuple(ops), parameters=tuple(named))
