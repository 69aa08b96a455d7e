"""Replay a planned step with real tensors, op by op, timing each call, in a pinned process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.backend import Backend
from estimator.probe.calls import (
    find_operator,
    output_tensors,
    real_arguments,
    span_elements,
    torch_dtype,
)
from estimator.probe.canary import canary_s
from estimator.probe.jobs import Emit
from estimator.probe.kernels import float32_matmuls, noise_ratio
from estimator.probe.updates import optimizer_of
from estimator.tensors import OpCall, TensorSpec, decode_tree

_Arguments = tuple[list[Any], dict[str, Any]]
_WARM_UPS, _LEAST_PASSES, _MOST_PASSES = 2, 5, 15
# Once there are enough passes, more are made until this share of the time is left.
_SPARED_SHARE = 0.5
# A pass counts as disturbed by others where the canary beside it takes this much longer than the
# quickest; passes beyond the most wanted are then made for this share of the time at most.
_DISTURBED_RATIO = 1.15
_WAITING_SHARE = 0.25
_MASK_TRUE_RATIO = 0.9
_REASON_LENGTH = 160


def replay(
    backend: Backend,
    emit: Emit,
    *,
    budget_s: float,
    plan: Mapping[str, Any],
    usual_canary_s: float | None = None,
) -> None:
    """Emit ``timings`` rows [call, seconds, spread], ``skipped`` rows [call, reason], ``canary_s``.

    Passes beside which the canary ran slow, by the quickest seen here or the profile's
    `usual_canary_s`, are left out where enough others are made within the time; the median of the
    canary beside those that count tells in what state of the machine they were made.
    """
    import torch

    begin = time.monotonic()
    torch.manual_seed(0)
    step = Step(backend, plan, begin + budget_s)
    canaries: list[float] = []
    # Grad mode on and nothing requiring gradients: what runs below autograd in a training step.
    with torch.enable_grad(), float32_matmuls(on_tensor_cores=plan.get("tf32", False)):
        last_s = 0.0
        while True:
            started = time.monotonic()
            spent_s = started - begin
            quiet = len(quiet_passes(canaries[_WARM_UPS:], usual_canary_s))
            if _is_enough(len(canaries) - _WARM_UPS, quiet, spent_s / budget_s):
                break
            if canaries and budget_s - spent_s < last_s:
                break
            if not step.run():
                break
            canaries.append(canary_s(backend))
            last_s = time.monotonic() - started
            emit({"fraction": min(len(canaries) / (_WARM_UPS + _MOST_PASSES), 1.0)})
    steady = canaries[_WARM_UPS:] or canaries
    quiet_only = quiet_passes(canaries[_WARM_UPS:], usual_canary_s)
    found: dict[str, Any] = {"timings": step.summary(quiet_only), "skipped": step.skipped()}
    if steady:
        are_enough = len(quiet_only) >= _LEAST_PASSES
        counted = [steady[number] for number in quiet_only] if are_enough else steady
        found["canary_s"] = statistics.median(counted)
    emit(found)


def quiet_passes(canaries_s: Sequence[float], usual_s: float | None) -> list[int]:
    """Numbers of the passes beside which the canary took no longer than it should."""
    if not canaries_s:
        return []
    quickest_s = min(*canaries_s, usual_s or canaries_s[0])
    return [n for n, each in enumerate(canaries_s) if each <= _DISTURBED_RATIO * quickest_s]


def _is_enough(passes: int, quiet: int, spent_share: float) -> bool:
    if passes < _LEAST_PASSES:
        return False
    if spent_share >= _SPARED_SHARE or quiet >= _MOST_PASSES:
        return True
    return passes >= _MOST_PASSES and spent_share >= _WAITING_SHARE


class Step:
    """The tensors and calls of a step, and how long each call took in each pass."""

    def __init__(self, backend: Backend, plan: Mapping[str, Any], end: float) -> None:
        self.backend, self.end = backend, end
        self.calls = [OpCall.decode(call) for call in plan["calls"]]
        self.ops: Sequence[Sequence[Any]] = plan["ops"]
        self.made = {
            value: make_tensor(decode_tree(spec), kind, low, high, backend.device)
            for value, spec, kind, low, high in plan["made"]
        }
        self.samples: list[list[float]] = [[] for _ in self.ops]
        self.update = _Update(plan["update"], backend.device) if "update" in plan else None
        self.failed: dict[int, str] = {}
        self._operators: list[Callable[..., Any] | None] = []
        for index, call in enumerate(self.calls):
            try:
                self._operators.append(find_operator(call.target))
            except ProbeError as error:
                self._operators.append(None)
                self.failed[index] = str(error)

    def run(self) -> bool:
        """One pass; False if the time was over before its end."""
        live: dict[int, Any] = dict(self.made)
        current: list[Any] = [None]
        position = 0
        while position < len(self.ops):
            if time.monotonic() >= self.end:
                return False
            # Between two looks at the clock; a flight of a CUDA device holds no more calls anyway.
            count = min(64, len(self.ops) - position)
            ready = [self._arguments(position, live)]

            def call(
                offset: int, first: int = position, ready: list[_Arguments | None] = ready
            ) -> None:
                current[0] = self._call(self.ops[first + offset][0], ready[0])

            def after(
                offset: int, first: int = position, ready: list[_Arguments | None] = ready
            ) -> None:
                ready[0] = None
                self._settle(self.ops[first + offset], live, current)
                ready[0] = self._arguments(first + offset + 1, live)

            seconds = self.backend.time_sequence(call, count=count, after=after)
            for offset, each in enumerate(seconds):
                self.samples[position + offset].append(each)
            position += count
        if self.update is not None:
            self.update.run(live)
        return True

    def _arguments(self, position: int, live: dict[int, Any]) -> _Arguments | None:
        """Of the op at a position, put together outside the clock; None past the last one."""
        if position >= len(self.ops):
            return None
        index, _, inputs, _, _ = self.ops[position]
        tensors = iter([live[value] for value in inputs])
        return real_arguments(self.calls[index], tensors, device=self.backend.device)

    def _call(self, index: int, ready: _Arguments | None) -> Any:
        if index in self.failed or ready is None:
            return None
        operator = self._operators[index]
        assert operator is not None
        positional, keywords = ready
        try:
            return operator(*positional, **keywords)
        # Values that no real batch would hold, or an operator that this device lacks.
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            self.failed[index] = str(error).splitlines()[0][:_REASON_LENGTH]
            return None

    def _settle(self, row: Sequence[Any], live: dict[int, Any], current: list[Any]) -> None:
        """Name the outputs, make those that did not come, let go what is not read again."""
        index, _, _, outputs, freed = row
        found = output_tensors(current[0])
        current[0] = None
        specs = self.calls[index].outputs
        for place, value in enumerate(outputs):
            if place < len(found):
                live[value] = found[place]
            else:
                live[value] = make_tensor(specs[place], "activation", 0, 0, self.backend.device)
        for value in freed:
            live.pop(value, None)

    def summary(self, quiet: Sequence[int]) -> list[list[float]]:
        """[call, mean over occurrences of the median over the quiet passes, mean spread].

        With less than the least number of quiet passes, all count.
        """
        medians: dict[int, list[float]] = {}
        spreads: dict[int, list[float]] = {}
        rows = [
            (index, timed, s) for (index, timed, *_), s in zip(self.ops, self.samples, strict=True)
        ]
        if self.update is not None:
            rows.append((-1, self.update.timed, self.update.samples))
        for index, timed, samples in rows:
            steady = samples[_WARM_UPS:] or samples
            if len(quiet) >= _LEAST_PASSES:
                steady = [steady[number] for number in quiet]
            if timed < 0 or index in self.failed or not steady:
                continue
            medians.setdefault(timed, []).append(statistics.median(steady))
            spreads.setdefault(timed, []).append(noise_ratio(steady))
        return [
            [timed, statistics.fmean(values), statistics.fmean(spreads[timed])]
            for timed, values in medians.items()
        ]

    def skipped(self) -> list[list[Any]]:
        """[call, reason] of those that failed or were not reached."""
        reasons: dict[int, str] = {}
        for (index, timed, *_), samples in zip(self.ops, self.samples, strict=True):
            if timed >= 0 and index in self.failed:
                reasons[timed] = self.failed[index]
            elif timed >= 0 and not samples:
                reasons.setdefault(timed, "the time was over before it was reached")
        return [[timed, reason] for timed, reason in reasons.items()]


class _Update:
    """The optimizer's step with the gradients that a replayed step has left."""

    def __init__(self, plan: Mapping[str, Any], device: Any) -> None:
        import torch

        self.timed = int(plan["timed"])
        self.samples: list[float] = []
        self._trained = [
            (
                torch.nn.Parameter(make_tensor(decode_tree(spec), "parameter", 0, 0, device)),
                gradient,
            )
            for spec, gradient in plan["trained"]
        ]
        self._optimizer = optimizer_of(plan["optimizer"], [each for each, _ in self._trained])

    def run(self, live: Mapping[int, Any]) -> None:
        for parameter, gradient in self._trained:
            parameter.grad = live[gradient]
        begin = time.perf_counter()
        self._optimizer.step()
        self.samples.append(time.perf_counter() - begin)
        self._optimizer.zero_grad()


def make_tensor(spec: TensorSpec, kind: str, low: int | None, high: int | None, device: Any) -> Any:
    """A tensor with values such as training has: the time of some operators depends on them.

    Weights are scaled by their fan-in, so that a deep model's activations neither vanish into
    denormal numbers, which are slow, nor overflow. Buffers are positive, as variances must be.
    """
    import torch

    span = max(1, span_elements(spec))
    dtype = torch_dtype(spec.dtype)
    if spec.dtype == "bool":
        flat = torch.rand(span, device=device) < _MASK_TRUE_RATIO
    elif not (dtype.is_floating_point or dtype.is_complex):
        # Where nothing is known of an integer, 1 is valid as a divisor and as most indices.
        low, high = (1, 1) if high is None or low is None else (low, high)
        flat = torch.randint(low, high + 1, (span,), device=device).to(dtype)
    elif kind == "parameter":
        flat = _weights(spec, span, device).to(dtype)
    elif kind == "buffer":
        flat = torch.rand(span, device=device).add_(0.5).to(dtype)
    elif kind == "constant":
        flat = torch.ones(span, device=device, dtype=dtype)
    else:
        flat = torch.randn(span, device=device).to(dtype)
    if spec.strides is None:
        return flat[: spec.numel].view(spec.shape)
    return flat.as_strided(spec.shape, spec.strides)


def _weights(spec: TensorSpec, span: int, device: Any) -> Any:
    import torch

    if len(spec.shape) < 2:  # a bias, or the scale of a normalisation
        return torch.rand(span, device=device).add_(0.5)
    fan_in = max(1, spec.numel // max(1, spec.shape[0]))
    return torch.randn(span, device=device).mul_(fan_in**-0.5)
