"""Measure what a training step costs the host when its kernels take next to no time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from estimator.probe.devices.backend import Backend
from estimator.probe.devices.jobs import Emit
from estimator.probe.devices.ranks import process_group

# More than the private caches of a core hold.
COOLING_BYTES = 4 << 20


def cooling_backward(streamed: Any) -> Callable[[Any], Any]:
    """A function of autograd that passes its argument on; its backward pass goes through a tensor.

    The caller goes through it in the forward pass (``streamed.add_(1.0)``).
    """
    import torch

    class Cool(torch.autograd.Function):
        """Passes its argument on, and evicts the private caches in the backward pass."""

        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            streamed.add_(1.0)
            return gradient

    apply: Callable[[Any], Any] = Cool.apply
    return apply


_RANKS, _WIDTH = 2, 16
_MODULES, _DTENSOR_ROUNDS, _DTENSOR_WARM_UPS = 12, 21, 3
# A tensor of fp32 and its states are more than the private caches of a core hold.
_UPDATED, _UPDATED_ELEMENTS = 4, 1 << 19


def dtensor_costs(backend: Backend) -> dict[str, float]:
    """The fields of HostCost that begin with `dtensor`, of one rank of two whose other is not
    there: collectives end at once.

    Linear layers divided by columns and by rows are timed beside whole ones of a rank's size.
    Columns are summed over ranks backward, rows forward. On CPUs each comes after a pass over more
    memory than the core's private caches hold: between two of them a layer's products evict the
    host's code, as the update of a large tensor does.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device = backend.device
    x = torch.ones(2, 2, _WIDTH, device=device, requires_grad=True)
    with _ranks_not_there():
        mesh = init_device_mesh(device.type, (_RANKS,))

        streamed = torch.zeros(COOLING_BYTES // 4 if backend.kind == "cpu" else 1)
        cool = cooling_backward(streamed)

        class Cooling(nn.Module):
            def forward(self, x: Any) -> Any:
                streamed.add_(1.0)
                return cool(x)

        def model(taken: int, given: int, style: Any) -> Any:
            layers = [nn.Linear(taken, given, bias=False, device=device) for _ in range(_MODULES)]
            if style is not None:
                for layer in layers:
                    parallelize_module(layer, mesh, style)
            return nn.Sequential(*[module for layer in layers for module in (Cooling(), layer)])

        forms = {
            "whole": model(_WIDTH, _WIDTH, None),
            "columns": model(_WIDTH, _RANKS * _WIDTH, ColwiseParallel()),
            "rows": model(_RANKS * _WIDTH, _WIDTH, RowwiseParallel()),
        }
        passes = _passes(backend, forms, x, warm_ups=_DTENSOR_WARM_UPS, rounds=_DTENSOR_ROUNDS)
        update = {"dtensor_update_tensor_s": _update_s(mesh)} if backend.kind == "cpu" else {}

    def more_s(slower: str, than: str, backward: bool) -> float:
        """What a layer of one form takes longer."""
        one_s, other_s = (
            _quicker_s([each[backward] for each in passes[form]]) for form in (slower, than)
        )
        return max(0.0, one_s - other_s) / _MODULES

    sums_s = more_s("rows", "columns", False), more_s("columns", "rows", True)
    return {
        "dtensor_forward_s": more_s("columns", "whole", False),
        "dtensor_backward_s": more_s("rows", "whole", True),
        "dtensor_exchange_s": statistics.fmean(sums_s),
        **update,
    }


@contextmanager
def _ranks_not_there() -> Iterator[None]:
    """A process group of more ranks than this process, in which collectives do nothing."""
    import torch.distributed as torch_distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist: Any = torch_distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _passes(
    backend: Backend,
    forms: Mapping[str, Any],
    x: Any,
    *,
    warm_ups: int,
    rounds: int,
    update: Callable[[], object] = lambda: None,
) -> dict[str, list[tuple[float, float, float]]]:
    """Host seconds of forward, of backward and of an `update` of each form, by turns.

    The device is idle before each pass and each update.
    """
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    for number in range(warm_ups + rounds):
        for name, form in forms.items():
            form.zero_grad()
            backend.synchronize()
            begun = time.perf_counter()
            loss = form(x).sum()
            middle = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            backend.synchronize()
            updating = time.perf_counter()
            update()
            if number >= warm_ups:
                update_s = time.perf_counter() - updating
                seconds[name].append((middle - begun, ended - middle, update_s))
    return seconds


def _update_s(mesh: Any) -> float:
    """What DTensor adds to AdamW's update of a tensor."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    def optimizer(is_dtensor: bool) -> Any:
        own = []
        for _ in range(_UPDATED):
            value, gradient = (torch.full((_UPDATED_ELEMENTS,), 0.5) for _ in range(2))
            if is_dtensor:
                value, gradient = (
                    DTensor.from_local(one, mesh, [Shard(0)]) for one in (value, gradient)
                )
            own.append(nn.Parameter(value))
            own[-1].grad = gradient
        return torch.optim.AdamW(own)

    forms = optimizer(False), optimizer(True)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_DTENSOR_WARM_UPS + _DTENSOR_ROUNDS):
        for form, own_s in zip(forms, seconds, strict=True):
            begin = time.perf_counter()
            form.step()
            own_s.append(time.perf_counter() - begin)
    plain_s, dtensor_s = (_quicker_s(own_s[_DTENSOR_WARM_UPS:]) for own_s in seconds)
    return max(0.0, dtensor_s - plain_s) / _UPDATED


def _quicker_s(seconds: Sequence[float]) -> float:
    """The first quartile: what disturbs a pass makes it longer."""
    return statistics.quantiles(seconds, n=4)[0]


_UNITS, _SHARD_ROUNDS, _SHARD_WARM_UPS = 12, 15, 3


def shard_costs(backend: Backend) -> tuple[float, float]:
    """Host seconds per unit of a step, and per tensor of an update, in a world of one rank.

    The unit's figure contains its three collectives among one rank, which move next to nothing.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    x = torch.ones(1, _WIDTH, device=backend.device)
    costs = []
    with world_of_one(backend):
        plain, sharded = (_layers(backend, _UNITS) for _ in range(2))
        for layer in (*sharded, sharded):
            fully_shard(layer)
        for form in (plain, sharded):
            optimizer = torch.optim.AdamW(form.parameters(), lr=0.0)
            turns = {"warm_ups": _SHARD_WARM_UPS, "rounds": _SHARD_ROUNDS}
            passes = _passes(backend, {"": form}, x, update=optimizer.step, **turns)[""]
            costs.append((_middle_s(passes), statistics.median(each[2] for each in passes)))
    (whole_s, whole_update_s), (sharded_s, sharded_update_s) = costs
    return (
        max(0.0, sharded_s - whole_s) / _UNITS,
        max(0.0, sharded_update_s - whole_update_s) / _UNITS,
    )


def _layers(backend: Backend, count: int) -> Any:
    """So many tiny linear layers: of 16 × 16 float32, 1 KiB each."""
    from torch import nn

    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)]
    return nn.Sequential(*layers).to(backend.device)


def _middle_s(passes: Sequence[tuple[float, float, float]]) -> float:
    """Of forward and backward together."""
    return statistics.median(forward_s + backward_s for forward_s, backward_s, _ in passes)


def world_of_one(backend: Backend) -> AbstractContextManager[None]:
    """A process group of this process alone, over what ranks on such a device talk over."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    return process_group(backend.kind, dist.HashStore(), rank=0, world_size=1, timeout_s=600.0)


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
    costs = {
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
    emit(costs)
    if time.monotonic() < end:
        cached = cold = mixing_costs(backend, cools=False)
        if backend.kind == "cpu":
            # The host's code shares the caches with the kernels' data.
            cold = mixing_costs(backend, cools=True)
        for name, cached_s, cold_s in zip(_MIXED, cached, cold, strict=True):
            if backend.kind == "cpu":
                costs[f"cached_{name}"] = costs[name] + cached_s
            costs[name] += max(cached_s, cold_s)
        emit(costs)
    if time.monotonic() < end:
        costs["ddp_step_s"], costs["ddp_bucket_s"] = _ddp_costs(backend)
        emit(costs)
    if time.monotonic() < end:
        costs["shard_unit_s"], costs["shard_update_tensor_s"] = shard_costs(backend)
        emit(costs)
    if time.monotonic() < end:
        costs |= dtensor_costs(backend)
        emit(costs)


def _host_s(backend: Backend, call: Callable[[], object]) -> float:
    """Median host seconds of `call`; the device is idle before and drained after each."""
    call()
    seconds = []
    for _ in range(_ROUNDS):
        backend.synchronize()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
        backend.synchronize()
    return statistics.median(seconds)


def _slope(short_s: float, long_s: float) -> float:
    return max(0.0, (long_s - short_s) / (_LONG - _SHORT))


def _one_more_s(backend: Backend, chain: Callable[[int], object]) -> float:
    """What one more call of a chain of so many costs the host."""
    return _slope(*(_host_s(backend, partial(chain, length)) for length in (_SHORT, _LONG)))


def _tiny(backend: Backend, *, requires_grad: bool = False) -> Any:
    import torch

    return torch.ones(4, 4, device=backend.device, requires_grad=requires_grad)


def _bare_op_s(backend: Backend) -> float:
    """One product of tiny tensors through torch.ops, as the kernel grid calls its operators."""
    import torch

    left, right = _tiny(backend), _tiny(backend)
    product = torch.ops.aten.mul.Tensor

    def chain(length: int) -> None:
        for _ in range(length):
            product(left, right)

    with torch.no_grad():
        return _one_more_s(backend, chain)


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


def mixing_costs(backend: Backend, *, cools: bool) -> tuple[float, float, float]:
    """Seconds that each recorded op, recorded view and node of the backward pass takes the host
    more where many kinds of op follow each other, as in a training step, than where one is
    repeated: the interpreter, the dispatcher, autograd and, on a CPU, kernels find less of their
    code in the nearest caches.

    Where it `cools`, a kernel streams through more memory than the core's private caches hold
    between two ops: they then find it in the shared cache or in memory.
    """
    alone, mixed = _Loops(backend, cools=False), _Loops(backend, cools=cools)
    ops, views = _various_ops(backend), [lambda x: x.view(16), lambda x: x.transpose(0, 1)]
    idle = [lambda x: x] * len(ops) * _LOOPS
    count = len(idle)
    kinds = {"op": ops, "view": views, "node": ops}
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
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
            times_s[kind].append((mixed_s - statistics.fmean(alone_s)) / count)
    op_s, view_s, node_s = (max(0.0, statistics.median(some_s)) for some_s in times_s.values())
    return op_s, view_s, node_s


class _Loops:
    """Time calls on a small tensor; where it `cools`, the private caches are evicted before each.

    The second of two passes counts: the first brings what is its own into the caches.
    """

    def __init__(self, backend: Backend, *, cools: bool) -> None:
        import torch

        self.backend = backend
        self.leaf = torch.randn(4, 4, device=backend.device, requires_grad=True)
        self.streamed = torch.zeros(COOLING_BYTES // 4 if cools else 1)
        self.cool = cooling_backward(self.streamed)

    def forward_s(self, calls: Sequence[Callable[[Any], Any]]) -> float:
        for _ in range(2):
            self.backend.synchronize()
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
            self.backend.synchronize()
            begin = time.perf_counter()
            x.sum().backward()
            seconds = time.perf_counter() - begin
        return seconds


def _various_ops(backend: Backend) -> list[Callable[[Any], Any]]:
    """Differentiable ops of many kinds on a tensor of 4 × 4."""
    import torch
    from torch.nn import functional

    weight, table = (torch.ones(*shape, device=backend.device) for shape in ((4, 4), (4,)))
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

    def chain(length: int) -> None:
        for _ in range(length // 2):
            leaf.view(16)
            leaf.transpose(0, 1)

    return _one_more_s(backend, chain)


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
    from torch.nn.parallel import DistributedDataParallel

    x = torch.ones(1, _WIDTH, device=backend.device)
    with world_of_one(backend):
        # One bucket under a cap of 25 MiB, a bucket each under 1 byte. Every form has layers of its
        # own, since DDP leaves hooks on the parameters it is given.
        bare, few, many = (_layers(backend, _MANY_BUCKETS) for _ in range(3))
        forms = {
            "bare": bare,
            "few": DistributedDataParallel(few, bucket_cap_mb=25),
            "many": DistributedDataParallel(many, bucket_cap_mb=1e-6),
        }
        # DDP builds its buckets in the first steps.
        passes = _passes(backend, forms, x, warm_ups=4, rounds=_ROUNDS)
    bare_s, few_s, many_s = map(_middle_s, passes.values())
    bucket_s = max(0.0, (many_s - few_s) / (_MANY_BUCKETS - _FEW_BUCKETS))
    return max(0.0, few_s - bare_s - bucket_s * _FEW_BUCKETS), bucket_s
