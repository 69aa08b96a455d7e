"""Hold what was measured of kernels, of the host that issues them and of updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from estimator.machines.devices import DeviceKind
from estimator.machines.provenance import (
    LEAST,
    MOST,
    Provenance,
    check_not_negative,
    check_points,
    check_positive,
)
from estimator.tensors import OpCall


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """One probed kernel call: `call` is `OpCall.encode()`.

    `warm_s`: inputs as the previous op left them (in cache where they fit), output memory already
    touched. `cold_s`: inputs read from main memory; None where the device has no such difference.
    Neither includes the host's dispatch cost beyond the bare operator call. `noise_ratio` is half
    the 10–90 % range of the repeats over their median.
    """

    call: Mapping[str, Any]
    warm_s: float
    cold_s: float | None = None
    noise_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "warm_s", "cold_s")
        check_not_negative(self, "noise_ratio")
        try:
            OpCall.decode(dict(self.call))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"KernelPoint.call is no call of an operator: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """Every probed call of one operator in one dtype."""

    target: str
    dtype: str
    points: tuple[KernelPoint, ...]
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much slower a kernel runs on each of `devices_busy` devices busy at once.

    `points` are (bytes touched by the call, seconds busy / seconds alone).
    """

    bound: Literal["compute", "memory", "update"]
    devices_busy: int
    points: tuple[tuple[float, float], ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        check_positive(self, "devices_busy")
        check_points(self, self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds of host work: what a step costs when kernels take no time at all.

    forward_op_s: one differentiable op called from Python, recorded by autograd, beyond the bare
    operator call that `KernelPoint` times; forward_view_s: the same for a view; backward_op_s: one
    backward node beyond its kernels; bare_op_s: the bare call of the smallest kernel;
    module_call_s: one `nn.Module.__call__`; step_s: an empty training step (zero_grad, backward
    entry, update entry). ddp_step_s / ddp_bucket_s: what DDP adds per step and per bucket.
    cached_forward_op_s, cached_forward_view_s and cached_backward_op_s: the same three where the
    kernel before has left the host's code and data in the private caches that it shares with them;
    None where that makes no difference.
    shard_unit_s: what FSDP adds per step and unit that it gathers; shard_update_tensor_s: what an
    update adds per sharded tensor. dtensor_forward_s, dtensor_backward_s: what DTensor adds to one
    call of a module that ranks divide; dtensor_exchange_s: what it adds to a collective;
    dtensor_update_tensor_s: what it adds to the update of a tensor too large for the private
    caches, None where that was not measured (then `shard_update_tensor_s` for all sizes).
    """

    forward_op_s: float
    forward_view_s: float
    backward_op_s: float
    bare_op_s: float
    module_call_s: float
    cached_forward_op_s: float | None = None
    cached_forward_view_s: float | None = None
    cached_backward_op_s: float | None = None
    step_s: float = 0.0
    ddp_step_s: float = 0.0
    ddp_bucket_s: float = 0.0
    shard_unit_s: float = 0.0
    shard_update_tensor_s: float = 0.0
    dtensor_forward_s: float = 0.0
    dtensor_backward_s: float = 0.0
    dtensor_exchange_s: float = 0.0
    dtensor_update_tensor_s: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(
            self, *(item.name for item in dataclasses.fields(self) if item.name != "provenance")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Optimizer step: launch_s + tensors · per_tensor_s + parameters · per_parameter_s.

    `per_idle_parameter_s` comes on top for a parameter whose gradient has always been zero, as in
    rows of an embedding that no batch has picked: some CPUs take the square root of zero slowly.

    On CUDA the first two are the host's, the last the device's, and `lanes` are (tensors,
    parameters, host seconds, device seconds) of measured steps: in a training loop the two overlap.

    `form` is how torch runs it: ``loop`` (one tensor at a time), ``foreach`` or ``fused``.
    `zero_grad` costs are part of the step's host cost.
    """

    optimizer: str
    form: Literal["loop", "foreach", "fused"]
    device: DeviceKind
    dtype: str = "float32"
    launch_s: float
    per_tensor_s: float
    per_parameter_s: float
    per_idle_parameter_s: float = 0.0
    points: tuple[tuple[float, float, float], ...] = ()
    lanes: tuple[tuple[float, float, float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(
            self, "launch_s", "per_tensor_s", "per_parameter_s", "per_idle_parameter_s"
        )
        for tensors, parameters, seconds in self.points:
            if not all(LEAST <= value <= MOST for value in (tensors, parameters, seconds)):
                raise ValueError("UpdateCost.points must be (tensors, parameters, seconds) > 0")
        if not all(0 <= value <= MOST for lane in self.lanes for value in lane):
            raise ValueError("UpdateCost.lanes must be numbers from 0 on")

    def update_time_s(self, *, tensors: float, parameters: float, idle: float = 0.0) -> float:
        """Seconds of a step; `idle` of the `parameters` elements in `tensors` tensors are idle."""
        busy_s = self.launch_s + tensors * self.per_tensor_s + parameters * self.per_parameter_s
        return busy_s + idle * self.per_idle_parameter_s
