"""Time real torch.optim steps and split their cost into launch, tensors and parameters."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from estimator.errors import TrainingError
from estimator.machines.profile import DeviceKind
from estimator.probe.devices.backend import Backend
from estimator.probe.devices.calls import TensorSource
from estimator.probe.devices.jobs import Emit
from estimator.workload.optimizers import RULES

# (tensors, parameters in each): the step's entry, many tensors, then sets whose state is far beyond
# any cache, as that of a model which has run forward and backward in between.
_SETS = ((1, 64), (100, 64), (100, 60_000), (30, 200_000), (6, 1_000_000))
_FEW_SETS = ((1, 64), (100, 64), (6, 1_000_000))
# On a GPU a step of few parameters is all launches: as many more as models for GPUs have.
_GPU_SETS = ((6, 1_000_000), (400, 64), (100, 400_000), (40, 4_000_000), (300, 1_000_000))
_ZERO_SET = (6, 1_000_000)
Evict = Callable[[], None]
# By tensors and parameters: seconds from start to end; on CUDA also of host and device alone.
_Times = dict[tuple[int, int], tuple[float, ...]]
# The key of the set whose gradients are zero.
_ZERO = (0, 0)
TORCH_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-4}),
    "sgd": ("SGD", {"lr": 1e-4}),
    "sgd-momentum": ("SGD", {"lr": 1e-4, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-4}),
}
_FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Emptying the caches of a CPU takes as long as some steps.
_REPEATS, _MOST_S = 9, {"cpu": 0.15, "cuda": 0.06}
# Steps of a GPU that are not timed: its kernels are loaded and its queue is filled.
_WARM_UPS = {"cpu": 0, "cuda": 3}
# Steps queued behind one spinning kernel: some hundred kernels each, and a queue holds a thousand.
_FLIGHT = 3


def optimizer_of(name: str, parameters: Sequence[Any], *, shared: bool = False) -> Any:
    """The optimizer of that name; `shared` among the ranks as ZeRO-1 does. Raises TrainingError."""
    import torch

    rule = RULES[name]
    if rule.measured_as not in TORCH_OPTIMIZERS:
        raise TrainingError(f"this command trains with optimizers of PyTorch, found {name}")
    form_name, known = TORCH_OPTIMIZERS[rule.measured_as]
    form: Any = getattr(torch.optim, form_name)
    # So small a rate that no weight leaves the range in which arithmetic has its usual speed.
    options: dict[str, Any] = {**known, "lr": 1e-5}
    if rule.form == "fused":
        options["fused"] = True
    if not shared:
        return form(parameters, **options)
    from torch.distributed import optim as distributed_optim

    sharing: Any = distributed_optim
    return sharing.ZeroRedundancyOptimizer(parameters, optimizer_class=form, **options)


def default_form(kind: DeviceKind) -> str:
    """How torch runs an optimizer that was given no foreach or fused argument."""
    return "foreach" if kind == "cuda" else "loop"


def measure_updates(
    backend: Backend, emit: Emit, *, budget_s: float, thorough: bool = False
) -> None:
    """Emit each optimizer's points, the default form of every one first, and that again at the end.

    A machine may be slow for a second: of the two times the quicker counts. Out of time, the
    default forms are measured with few sets of parameters, and no others.
    """
    end = time.monotonic() + budget_s
    skipped: list[str] = []
    quickest: dict[tuple[str, str], _Times] = {}
    # What puts the caches of a CPU into the state in which forward and backward leave them. A GPU
    # runs an update of few parameters as long as it launches, and reads all others anew.
    evict = TensorSource(backend).flush if backend.kind == "cpu" else lambda: None
    order = _order(backend.kind)
    first = [pair for pair in order if pair[1] == default_form(backend.kind)]
    again = first if backend.kind == "cpu" else order[:_OFTEN_USED]
    for number, (optimizer, form) in enumerate([*order, *again]):
        is_late = time.monotonic() >= end
        if is_late and (number >= len(order) or (optimizer, form) not in first):
            skipped += [f"{optimizer} ({form})"] if number < len(order) else []
            continue
        sets = _FEW_SETS if is_late else _sets(backend.kind, form, thorough=thorough)
        try:
            times = _times(backend, optimizer, form, sets, evict=evict)
        except RuntimeError as error:  # a form that this build lacks on this device
            skipped.append(f"{optimizer} ({form}): {str(error).splitlines()[0]}")
            continue
        known = quickest.setdefault((optimizer, form), times)
        for key, seconds in times.items():
            known[key] = tuple(map(min, known.get(key, seconds), seconds))
        emit(_message(optimizer, form, backend.kind, known))
    emit({"skipped": skipped})


def _message(optimizer: str, form: str, kind: DeviceKind, times: _Times) -> dict[str, Any]:
    points = [(*key, seconds) for key, seconds in times.items() if key != _ZERO]
    return {
        "optimizer": optimizer,
        "form": form,
        "device": kind,
        "points": [(tensors, count, seconds[0]) for tensors, count, seconds in points],
        "lanes": [(t, n, *seconds[1:]) for t, n, seconds in points if len(seconds) > 1],
        "zero_point": (_ZERO_SET[0], _ZERO_SET[0] * _ZERO_SET[1], times[_ZERO][0]),
    }


def _sets(kind: DeviceKind, form: str, *, thorough: bool) -> tuple[tuple[int, int], ...]:
    sets = _SETS if thorough or form == default_form(kind) else _FEW_SETS
    if kind == "cuda":
        # A loop launches several kernels for each tensor, whatever their sizes.
        larger = _GPU_SETS if thorough or form != "loop" else _GPU_SETS[:3]
        sets = tuple(dict.fromkeys((*sets, *larger)))
    return sets + (((200, 500_000),) if thorough else ())


def _times(
    backend: Backend,
    optimizer: str,
    form: str,
    sets: Sequence[tuple[int, int]],
    *,
    evict: Evict,
) -> _Times:
    """Seconds of each set, and of one whose gradients are zero."""
    import torch

    times: _Times = {}
    for tensors, elements in sets:
        # The largest sets take some 7 GB with their gradients and state.
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = _step_s(backend, optimizer, form, tensors, elements, evict=evict)
            times[tensors, tensors * elements] = seconds
    zero = _step_s(backend, optimizer, form, *_ZERO_SET, evict=evict, gradient=0.0)
    return {**times, _ZERO: zero}


# AdamW as torch runs it by default, and fused as training of large models does.
_OFTEN_USED = 2


def _order(kind: DeviceKind) -> list[tuple[str, str]]:
    """(optimizer, form), what is used most first."""
    forms = ("foreach", "fused", "loop") if kind == "cuda" else ("loop", "foreach", "fused")
    pairs = [(optimizer, form) for form in forms for optimizer in TORCH_OPTIMIZERS]
    if kind == "cuda":
        pairs.sort(key=lambda pair: pair[0] != "adamw" or pair[1] == "loop")
    return pairs


def _step_s(
    backend: Backend,
    optimizer: str,
    form: str,
    tensors: int,
    elements: int,
    *,
    evict: Evict,
    gradient: float = 0.01,
) -> tuple[float, ...]:
    """Median seconds of optimizer.step() from start to end; on CUDA also of host and device alone.

    In a training loop the two overlap: the host issues the step while the device still computes.
    """
    import torch

    weights = [
        torch.nn.Parameter(torch.full((elements,), 0.1, device=backend.device))
        for _ in range(tensors)
    ]
    for weight in weights:
        weight.grad = torch.full_like(weight, gradient)
    name, options = TORCH_OPTIMIZERS[optimizer]
    stepper = getattr(torch.optim, name)(weights, **options, **_FORMS[form])
    seconds: list[float] = []
    issued: list[float] = []
    stepper.step()  # makes the optimizer's state
    for _ in range(_WARM_UPS[backend.kind]):
        stepper.step()
    backend.synchronize()
    end = time.monotonic() + _MOST_S[backend.kind]
    while len(seconds) < _REPEATS and (len(seconds) < 3 or time.monotonic() < end):
        evict()
        begin = time.perf_counter()
        stepper.step()
        issued.append(time.perf_counter() - begin)
        backend.synchronize()
        seconds.append(time.perf_counter() - begin)
    both_s = statistics.median(seconds)
    if backend.kind == "cpu":
        return (both_s,)
    device_s = statistics.median(backend.time_calls(lambda _: stepper.step(), repeats=_FLIGHT))
    return both_s, statistics.median(issued), device_s


def fit_update(
    points: Sequence[tuple[float, float, float]],
) -> tuple[float, float, float, float]:
    """(launch_s, per_tensor_s, per_parameter_s, median relative error), none below zero.

    Least squares on relative errors, since points span six orders of magnitude.

    >>> launch, tensor, parameter, _ = fit_update([(1, 10, 2.1), (9, 10, 10.1), (1, 1000, 12.0)])
    >>> round(launch, 3), round(tensor, 3), round(parameter, 4)
    (1.0, 1.0, 0.01)
    """
    import numpy as np

    from estimator.graph.costs.call_costs import nonnegative_fit

    rows = np.array([(1.0, tensors, parameters) for tensors, parameters, _ in points])
    seconds = np.array([measured for _, _, measured in points])
    costs = nonnegative_fit(rows, seconds)
    errors = np.abs(rows @ costs / seconds - 1.0)
    return float(costs[0]), float(costs[1]), float(costs[2]), float(np.median(errors))


def fit_lanes(lanes: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """(launch_s, per_tensor_s, per_parameter_s) of (tensors, parameters, host s, device s).

    What a step costs per launch and tensor is the host's; per parameter it is the device's.
    """
    launch_s, per_tensor_s, _, _ = fit_update([(t, n, host_s) for t, n, host_s, _ in lanes])
    *_, per_parameter_s, _ = fit_update([(t, n, device_s) for t, n, _, device_s in lanes])
    return launch_s, per_tensor_s, per_parameter_s
