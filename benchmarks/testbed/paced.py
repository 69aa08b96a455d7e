"""Models that train for real but wait a set time per layer instead of computing.

Parameters, gradients, DDP, FSDP and their traffic are real; forward, backward and update leave the
cores alone, so that sixteen ranks fit on two cores. The function with a
model's name returns ``(model, batch)``. To the engine it is a graph whose ops were timed
(`paced_graph`) on a machine with nothing but its network to it (`paced_machine`).

A layer is three pieces of work, as a matrix product is: its output, the gradient of its input and
the gradient of its weights, in this order. Each piece ends a set time after the one before was due
to end: the chain starts with zero_grad and knows no drift, so that what else a layer's thread does
(Python, copies into buckets) costs nothing unless it takes longer than the layer, and no spinning
at the end of a sleep is needed. A collective that blocks the thread, as FSDP's do on CPUs, defers
all that is due after it by as long as it lasts (`pausing_at_collectives`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.graph.trace.trace import trace_graph
from estimator.machines.profile import (
    Device,
    HostCost,
    KernelCost,
    KernelPoint,
    MachineProfile,
    Provenance,
    UpdateCost,
)
from estimator.tensors import OpCall, TensorSpec

# What a paced update waits for: once, and for each parameter unless told otherwise.
UPDATE_S, UPDATE_S_PER_PARAMETER = 1e-3, 1e-9
_FEATURES = 16
_TIMED = ("paced.forward", "paced.input_gradient", "paced.weight_gradient")
_DECLARED = Provenance(source="datasheet", relative_error=0.0, note="declared, not measured")


class Pace:
    """When the work of this process is due: each piece a set time after the one before."""

    def __init__(self) -> None:
        # A slow node takes this many times as long.
        self.slowdown_ratio = 1.0
        self._due = 0.0

    def restart(self) -> None:
        """Let the next piece begin now."""
        self._due = time.perf_counter()

    def defer(self, seconds: float) -> None:
        """Let all that is due end this much later."""
        self._due += seconds

    def wait(self, seconds: float) -> None:
        """Wait until the next piece of work is done."""
        self._due += seconds * self.slowdown_ratio
        left_s = self._due - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


pace = Pace()


@contextlib.contextmanager
def pausing_at_collectives() -> Iterator[None]:
    """Meanwhile each collective of torch.distributed that blocks defers what is due after it.

    Without this the next piece of work would already be over once the collective is.
    """
    dist: Any = torch_distributed
    collectives = {
        name: function
        for name, function in vars(dist).items()
        # torch.distributed's deprecated `reduce_op` warns whoever asks for an attribute of it.
        if type(function) is FunctionType and "async_op" in inspect.signature(function).parameters
    }
    for name, function in collectives.items():
        setattr(dist, name, _deferring(function))
    try:
        yield
    finally:
        for name, function in collectives.items():
            setattr(dist, name, function)


def _deferring(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = collective(*args, **kwargs)
        # One that does not block returns what to wait for.
        if work is None:
            pace.defer(time.perf_counter() - began)
        return work

    return call


def _waiting(name: str) -> Any:
    """An operator of one tensor that takes `seconds` per sample of it."""

    @torch.library.custom_op(f"paced::{name}", mutates_args=())
    def operator(x: Tensor, weights: Sequence[Tensor], seconds: float) -> Tensor:
        pace.wait(seconds * x.shape[0])
        return torch.zeros_like(x)

    operator.register_fake(lambda x, weights, seconds: torch.empty_like(x))
    return operator


# A layer's forward pass, and the gradient of its input.
paced_forward, paced_input_gradient = _waiting("forward"), _waiting("input_gradient")


@torch.library.custom_op("paced::weight_gradient", mutates_args=())
def paced_weight_gradient(
    gradient: Tensor, weights: Sequence[Tensor], seconds: float
) -> list[Tensor]:
    """The gradients of a layer's weights, likewise."""
    pace.wait(seconds * gradient.shape[0])
    return [_zero_gradient(place, weight) for place, weight in enumerate(weights)]


@paced_weight_gradient.register_fake
def _(gradient: Tensor, weights: Sequence[Tensor], seconds: float) -> list[Tensor]:
    return [torch.empty_like(weight) for weight in weights]


class _InputPath(torch.autograd.Function):
    """From a layer's input to its output, and the gradient back; none to the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: list[Tensor], seconds: float, backward_seconds: float
    ) -> Tensor:
        ctx.seconds = backward_seconds
        ctx.save_for_backward(*weights)
        return paced_forward(x, weights, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = paced_input_gradient(gradient, list(ctx.saved_tensors), ctx.seconds)
        return found, None, None, None


class _WeightPath(torch.autograd.Function):
    """From a layer's weights to its output, whose size `x` has, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward_seconds: float, *weights: Tensor) -> Tensor:
        ctx.seconds = backward_seconds
        ctx.save_for_backward(*weights)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = paced_weight_gradient(gradient, list(ctx.saved_tensors), ctx.seconds)
        return None, None, *found


_gradients: dict[tuple[int, torch.Size], Tensor] = {}


def _zero_gradient(place: int, weight: Tensor) -> Tensor:
    """A new tensor on the same zeros every time: autograd takes it over without a copy.

    Layers share them, the weights of one layer, each in its own `place`, do not.
    """
    key = (place, weight.shape)
    if key not in _gradients:
        _gradients[key] = torch.zeros_like(weight)
    return _gradients[key].detach()


Shape = tuple[int, ...]


class PacedLayer(nn.Module):
    """Real parameters, and a forward and backward pass that wait.

    The backward pass takes `ratio` times as long as the forward pass, half of it for the gradient
    of the input: a layer whose input needs none takes the other half.
    """

    def __init__(self, shapes: Sequence[Shape], seconds: float, ratio: float = 2.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.forward_s, self.gradient_s = seconds, ratio * seconds / 2

    def forward(self, x: Tensor) -> Tensor:
        """Wait; nothing is computed."""
        weights = list(self.weights)
        # Autograd turns first to what was recorded last: to the input's gradient.
        of_weights = _WeightPath.apply(x.detach(), self.gradient_s, *weights)
        of_input = _InputPath.apply(x, weights, self.forward_s, self.gradient_s)
        return of_input + of_weights


class PacedModel(nn.Sequential):
    """Layers that wait one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop what an earlier micro-batch left: adding gradients up is work, too."""
        for parameter in self.parameters():
            parameter.grad = None
        return super().forward(x)  # type: ignore[no-any-return]


class PacedUpdate:
    """In place of an optimizer: a step that waits, and a zero_grad with which a step begins."""

    def __init__(
        self, model: nn.Module, parameter_s: float = UPDATE_S_PER_PARAMETER, share: float = 1.0
    ) -> None:
        self.parameters = list(model.parameters())
        count = sum(_held(parameter).numel() for parameter in self.parameters)
        self.seconds = UPDATE_S + parameter_s * count * share

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients and start the clock of the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        pace.restart()

    def step(self) -> None:
        """Wait, from now on: an update follows the last all-reduce."""
        pace.restart()
        pace.wait(self.seconds)


def _held(parameter: Tensor) -> Tensor:
    """What of a parameter lies on this rank: under FSDP its shard."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


Built = tuple[PacedModel, Tensor]


def _layers(
    *alike: tuple[int, Sequence[Shape], float], features: int = _FEATURES
) -> Callable[..., Built]:
    """A model of so many layers of such shapes and seconds a sample, and others after them."""

    def build(batch: int = 8) -> Built:
        layers = (
            PacedLayer(shapes, each_s) for count, shapes, each_s in alike for _ in range(count)
        )
        return PacedModel(*layers), torch.zeros(batch, features)

    return build


# With megabytes of parameters, and seconds at batch 8: four layers of 6 MB, 24 MB, 0.33 s.
few_big = _layers((4, [(1500, 1000)], 3.75e-3))
# Forty layers of 0.25 MB in two tensors: 10 MB, 0.24 s.
many_small = _layers((40, [(244, 256), (256,)], 0.25e-3))
# An embedding of 16 MB, whose gradient comes last, then six layers of 2 MB: 28 MB, 0.49 s.
big_first = _layers((1, [(4000, 1000)], 0.8e-3), (6, [(500, 1000)], 3.3e-3))
# Eight layers of 1 MB: 8 MB, 0.15 s.
eight_even = _layers((8, [(500, 500)], 0.83e-3))
# Twelve even blocks of four matrices, four vectors each: 48 MB, 0.95 s.
_ATTENTION = [(288, 864), (864,), (288, 288), (288,)]
transformer = _layers((12, [*_ATTENTION, (288, 1152), (1152,), (1152, 288), (288,)], 3.4e-3))
# Sixteen even layers between which 1 MB passes: 0.38 s.
wide = _layers((16, [(200, 200)], 1e-3), features=32768)


def language_model(batch: int = 8) -> Built:
    """An embedding and a head of 4 MB, six blocks of 3 MB between them: 26 MB, 0.37 s at batch 8.

    Embedding and head are no repeated blocks: under FSDP they are the rest, which is gathered once.
    """
    shapes = [(600, 1200), (600,), (120, 240)]
    layers = {
        "embedding": PacedLayer([(800, 1250)], 0.6e-3),
        "blocks": nn.Sequential(*(PacedLayer(shapes, 2.2e-3) for _ in range(6))),
        "head": PacedLayer([(800, 1250)], 1.7e-3),
    }
    return PacedModel(OrderedDict(layers)), torch.zeros(batch, _FEATURES)


def paced_graph(name: str, batch: int = 8, other_batches: Iterable[int] = ()) -> OpGraph:
    """What the engine knows of a paced model: its graph, with the waiting as measured times.

    Waiting has no formula: at batches that are not listed the engine knows no times.
    """
    model, inputs = globals()[name](batch)
    graph = trace_graph(model, inputs, optimizer="sgd")
    timings = {
        call: OpTiming(seconds=_seconds_argument(call) * samples)
        for samples in {batch, *other_batches}
        for call in graph.at(samples).calls
        if call.target.startswith(_TIMED)
    }
    return dataclasses.replace(graph, name=name, timings=timings, timed_on="paced")


def _seconds_argument(call: OpCall) -> float:
    arguments = (*call.arguments, *(value for _, value in call.keywords))
    return float(next(value for value in arguments if isinstance(value, float)))


def paced_machine(
    network: MachineProfile, devices: int, parameter_s: float = UPDATE_S_PER_PARAMETER
) -> MachineProfile:
    """The machine a paced rank runs on: `network`'s links and collectives, and waiting.

    All that is not waiting is hidden behind it, so host costs and copies count as nothing.
    """
    spec = TensorSpec((1 << 20,))
    free = KernelPoint(call=OpCall("aten.clone.default", (spec,), (), (spec,)), warm_s=1e-9)
    update = UpdateCost(
        optimizer="sgd",
        form="loop",
        device="cpu",
        launch_s=UPDATE_S,
        per_tensor_s=0.0,
        per_parameter_s=parameter_s,
        provenance=_DECLARED,
    )
    host = {item.name: 0.0 for item in dataclasses.fields(HostCost) if item.name != "provenance"}
    first = network.devices[0]
    return dataclasses.replace(
        network,
        name="paced",
        devices=tuple(
            Device(kind="cpu", index=index, name="paced", memory_bytes=first.memory_bytes)
            for index in range(devices)
        ),
        kernels=(
            KernelCost(
                target="aten.clone.default", dtype="float32", points=(free,), provenance=_DECLARED
            ),
        ),
        host=HostCost(**host, provenance=_DECLARED),
        overlaps=(),
        contentions=(),
        updates=(update,),
        rank_jitter_ratio=0.0,
    )
