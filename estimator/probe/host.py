"""Measure what a training step costs the host when its kernels take next to no time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from estimator.probe.backend import Backend
from estimator.probe.cooling import COOLING_BYTES, cooling_backward
from estimator.probe.dtensor_costs import dtensor_costs
from estimator.probe.jobs import Emit
from estimator.probe.shard_costs import shard_costs, world_of_one

_SHORT, _LONG = 20, 220
_ROUNDS = 31
# Alone all rounds take half a second; where others leave the cores little time there are fewer.
_LOOPS, _MIXING_ROUNDS, _MOST_MIXING_S = 4, 9, 2.0
_MIXED = ("forward_op_s", "forward_view_s", "backward_op_s")
_FEW_BUCKETS, _MANY_BUCKETS = 1, 21


def measure_host(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit every field of HostCost but its provenance."""
    end = time.monotonic() + budget_s
    bare_op_s = _bare_op_s(backend)
    backward_s, entry_s = _backward_costs(backend)
    found = {
        "bare_op_s": bare_op_s,
        "forward_op_s": _recording_s(backend),
        "forward_view_s": _view_s(backend),
        # The gradient of a product with a constant is one product: its kernel is a bare call.
        "backward_op_s": max(0.0, backward_s - bare_op_s),
        "module_call_s": _module_call_s(backend),
        "step_s": entry_s + _zero_grad_s(backend),
        "ddp_step_s": 0.0,
        "ddp_bucket_s": 0.0,
    }
    emit(found)
    # The host's code shares the caches with the kernels' data.
    if time.monotonic() < end and backend.kind == "cpu":
        cached, cold = mixing_costs(cools=False), mixing_costs(cools=True)
        for name, cached_s, cold_s in zip(_MIXED, cached, cold, strict=True):
            found[f"cached_{name}"] = found[name] + cached_s
            found[name] += max(cached_s, cold_s)
        emit(found)
    if time.monotonic() < end:
        found["ddp_step_s"], found["ddp_bucket_s"] = _ddp_costs(backend)
        emit(found)
    if time.monotonic() < end:
        found["shard_unit_s"], found["shard_update_tensor_s"] = shard_costs(backend)
        emit(found)
    if time.monotonic() < end:
        found |= dtensor_costs(backend)
        emit(found)


def _host_s(backend: Backend, call: Callable[[], object], *, rounds: int = _ROUNDS) -> float:
    """Median host seconds of `call`; the device is idle before and drained after each."""
    call()
    seconds = []
    for _ in range(rounds):
        backend.synchronize()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        backend.synchronize()
    return statistics.median(seconds)


def _slope(short_s: float, long_s: float) -> float:
    return max(0.0, (long_s - short_s) / (_LONG - _SHORT))


def _tiny(backend: Backend, *, requires_grad: bool = False) -> Any:
    import torch

    return torch.ones(4, 4, device=backend.device, requires_grad=requires_grad)


def _bare_op_s(backend: Backend) -> float:
    """One product of tiny tensors through torch.ops, as the kernel grid calls its operators."""
    import torch

    left, right = _tiny(backend), _tiny(backend)
    product = torch.ops.aten.mul.Tensor

    def chain(length: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(length):
                product(left, right)

        return call

    with torch.no_grad():
        return _slope(_host_s(backend, chain(_SHORT)), _host_s(backend, chain(_LONG)))


def _recording_s(backend: Backend) -> float:
    """What a recorded call from Python costs beyond the bare operator, per call.

    Half of the calls are tensor methods, half go through torch.nn.functional, as in models.
    """
    import torch

    leaf, right = _tiny(backend, requires_grad=True), _tiny(backend)
    left = _tiny(backend)
    product, activation = torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default

    def recorded() -> None:
        for _ in range(_LONG // 2):
            torch.nn.functional.relu(leaf * right)

    def bare() -> None:
        for _ in range(_LONG // 2):
            activation(product(left, right))

    calls = 2 * (_LONG // 2)
    return max(0.0, _host_s(backend, recorded) - _host_s(backend, bare)) / calls


def _backward_costs(backend: Backend) -> tuple[float, float]:
    """Seconds per product of the backward pass, kernel included, and to enter backward."""
    factor, leaf = _tiny(backend), _tiny(backend, requires_grad=True)
    seconds: dict[int, list[float]] = {_SHORT: [], _LONG: []}
    gradient = _tiny(backend)
    for round_number in range(_ROUNDS + 2):
        for length in (_SHORT, _LONG):
            leaf.grad = None
            x = leaf
            for _ in range(length):
                x = x * factor
            backend.synchronize()
            begin = time.perf_counter()
            x.backward(gradient)
            ended = time.perf_counter()
            backend.synchronize()
            if round_number >= 2:  # the first rounds start autograd's threads and fill its caches
                seconds[length].append(ended - begin)
    short_s, long_s = statistics.median(seconds[_SHORT]), statistics.median(seconds[_LONG])
    per_product = _slope(short_s, long_s)
    return per_product, max(0.0, short_s - _SHORT * per_product)


def mixing_costs(*, cools: bool) -> tuple[float, float, float]:
    """Seconds that each recorded op, recorded view and node of the backward pass takes more on a
    CPU where many kinds of op follow each other, as in a training step, than where one is repeated,
    as the grid does: the interpreter, the dispatcher, autograd and kernels find less of their code
    in the nearest caches.

    Where it `cools`, a kernel streams through more memory than the core's private caches hold
    between two ops: they then find it in the shared cache or in memory.
    """
    alone, mixed = _Loops(cools=False), _Loops(cools=cools)
    ops, views = _various_ops(), [lambda x: x.view(16), lambda x: x.transpose(0, 1)]
    idle = [lambda x: x] * len(ops) * _LOOPS
    count = len(idle)
    kinds = {"op": ops, "view": views, "node": ops}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    end = time.monotonic() + _MOST_MIXING_S
    for rounds in range(_MIXING_ROUNDS):
        if rounds and time.monotonic() > end:
            break
        for kind, some in kinds.items():
            measure = "backward_s" if kind == "node" else "forward_s"
            seconds = getattr(mixed, measure)
            mixed_s = seconds(some * (count // len(some))) - seconds(idle)
            seconds = getattr(alone, measure)
            alone_s = [seconds([op] * count) - seconds(idle) for op in some]
            found[kind].append((mixed_s - statistics.fmean(alone_s)) / count)
    op_s, view_s, node_s = (max(0.0, statistics.median(each)) for each in found.values())
    return op_s, view_s, node_s


class _Loops:
    """Time calls on a small tensor; where it `cools`, the private caches are evicted before each.

    The second of two passes counts: the first brings what is its own into the caches.
    """

    def __init__(self, *, cools: bool) -> None:
        import torch

        self.leaf = torch.randn(4, 4, requires_grad=True)
        self.streamed = torch.zeros(COOLING_BYTES // 4 if cools else 1)
        self.cool = cooling_backward(self.streamed)

    def forward_s(self, calls: Sequence[Callable[[Any], Any]]) -> float:
        for _ in range(2):
            begin = time.perf_counter()
            for call in calls:
                self.streamed.add_(1.0)
                call(self.leaf)
            seconds = time.perf_counter() - begin
        return seconds

    def backward_s(self, calls: Sequence[Callable[[Any], Any]]) -> float:
        for _ in range(2):
            x = self.leaf
            for call in calls:
                x = self.cool(call(x))
            begin = time.perf_counter()
            x.sum().backward()
            seconds = time.perf_counter() - begin
        return seconds


def _various_ops() -> list[Callable[[Any], Any]]:
    """Differentiable ops of many kinds on a tensor of 4 × 4."""
    import torch
    from torch.nn import functional

    weight, table = torch.ones(4, 4), torch.ones(4)
    return [
        lambda x: x * weight,
        lambda x: x + weight,
        functional.gelu,
        functional.relu,
        lambda x: functional.layer_norm(x, (4,), table, table),
        lambda x: functional.softmax(x, -1),
        lambda x: torch.matmul(x, weight),
        torch.tanh,
    ]


def _view_s(backend: Backend) -> float:
    """One recorded view called from Python; views have no kernel, so this is all they cost."""
    leaf = _tiny(backend, requires_grad=True)

    def chain(length: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(length // 2):
                leaf.view(16)
                leaf.transpose(0, 1)

        return call

    return _slope(_host_s(backend, chain(_SHORT)), _host_s(backend, chain(_LONG)))


def _module_call_s(backend: Backend) -> float:
    """One ``nn.Module.__call__`` beyond calling its forward."""
    from torch import nn

    module, x = nn.Identity(), _tiny(backend)

    def through_module() -> None:
        for _ in range(_LONG):
            module(x)

    def through_forward() -> None:
        forward = module.forward
        for _ in range(_LONG):
            forward(x)

    return max(0.0, _host_s(backend, through_module) - _host_s(backend, through_forward)) / _LONG


def _zero_grad_s(backend: Backend) -> float:
    """optimizer.zero_grad() over one parameter that has a gradient."""
    import torch

    weight = torch.nn.Parameter(_tiny(backend))
    optimizer, gradient = torch.optim.SGD([weight], lr=0.0), _tiny(backend)

    def with_zero() -> None:
        for _ in range(20):
            weight.grad = gradient
            optimizer.zero_grad()

    def without() -> None:
        for _ in range(20):
            weight.grad = gradient

    return max(0.0, _host_s(backend, with_zero) - _host_s(backend, without)) / 20


def _ddp_costs(backend: Backend) -> tuple[float, float]:
    """What DDP adds to a step of the host, and to it per bucket, in a world of one rank."""
    import torch
    from torch import nn

    def model() -> nn.Module:
        # 16 × 16 float32 is 1 KiB: one bucket under a cap of 25 MiB, a bucket each under 1 byte.
        # Every form has its own, since DDP leaves hooks on the parameters it is given.
        layers = [nn.Linear(16, 16, bias=False) for _ in range(_MANY_BUCKETS)]
        return nn.Sequential(*layers).to(backend.device)

    x = torch.ones(1, 16, device=backend.device)
    with world_of_one(backend):
        wrap = nn.parallel.DistributedDataParallel
        forms = {
            "bare": model(),
            "few": wrap(model(), bucket_cap_mb=25),
            "many": wrap(model(), bucket_cap_mb=1e-6),
        }
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for round_number in range(_ROUNDS + 4):
            for name, form in forms.items():
                form.zero_grad()
                backend.synchronize()
                begin = time.perf_counter()
                form(x).sum().backward()
                if round_number >= 4:  # DDP builds its buckets in the first steps
                    seconds[name].append(time.perf_counter() - begin)
    bare_s, few_s, many_s = (statistics.median(seconds[name]) for name in ("bare", "few", "many"))
    bucket_s = max(0.0, (many_s - few_s) / (_MANY_BUCKETS - _FEW_BUCKETS))
    return max(0.0, few_s - bare_s - bucket_s * _FEW_BUCKETS), bucket_s
