"""Collect what the parts of a probe find, and turn it into the values of a profile."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from estimator.machines.profile import (
    CollectiveCost,
    Contention,
    Device,
    HostCost,
    InputCost,
    KernelCost,
    KernelPoint,
    Link,
    MemoryCost,
    OverlapCost,
    Provenance,
    UpdateCost,
)
from estimator.probe.memory import cache_sizes
from estimator.probe.updates import fit_lanes, fit_update
from estimator.tensors import ITEM_BYTES, OpCall

_UPDATES = "updates: "


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything found so far; grows while the probe runs, whole at any moment."""

    at: str
    points: list[KernelPoint] = field(default_factory=list)
    tf32_points: list[KernelPoint] = field(default_factory=list)
    kernels_done: int | None = None
    host: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    input: dict[str, float] = field(default_factory=dict)
    updates: list[UpdateCost] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    collectives: list[CollectiveCost] = field(default_factory=list)
    overlaps: list[OverlapCost] = field(default_factory=list)
    contentions: list[Contention] = field(default_factory=list)
    rank_jitter_ratio: float | None = None
    memory_resident: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    sustained: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def take(self, part: str, message: Mapping[str, Any]) -> None:
        """Keep one finding that a job emitted."""
        if "failed" in message:
            self.missing.append(f"{part}: {message['failed']}")
        elif part == "kernels":
            self._take_kernel(message)
        elif part == "updates":
            self._take_update(message)
        elif part == "host":
            self.host.update(message)
        elif part in ("first touch", "cold reads"):
            self.memory.update(message)
        elif part == "input":
            self.missing.extend(message.get("missing", ()))
            self.input.update({name: rate for name, rate in message.items() if name != "missing"})
        elif part == "device":
            self.facts.update(message.get("facts", {}))
            self.sustained.update(message.get("sustained", {}))
        elif "memory_resident" in message:
            self.memory_resident = message["memory_resident"]

    def described(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The devices, which are alike, with what was found; the first is the one seen at work."""
        return tuple(
            replace(
                device,
                details={**device.details, **self.facts, **(self.sustained if first else {})},
            )
            for device, first in zip(devices, (True, *(False for _ in devices)), strict=False)
        )

    def keep(self, finding: Link | CollectiveCost | OverlapCost | str) -> None:
        """Keep one measured link, collective or overlap, or a sentence on what is missing."""
        if isinstance(finding, str):
            self.missing.append(finding)
        elif isinstance(finding, Link):
            self.links.append(finding)
        elif isinstance(finding, CollectiveCost):
            self.collectives.append(finding)
        else:
            self.overlaps.append(finding)

    def _take_kernel(self, message: Mapping[str, Any]) -> None:
        if "call" in message:
            found = {name: value for name, value in message.items() if name != "math"}
            points = self.tf32_points if message.get("math") == "tf32" else self.points
            points.append(KernelPoint(**found))
            return
        self.kernels_done = message["done"]
        if message["done"] < message["grid"]:
            left = message["grid"] - message["done"]
            self.missing.append(
                f"kernels: {left} of {message['grid']} calls were not reached in the time"
            )
        if message["lacking"]:
            listed = "; ".join(message["lacking"][:5])
            self.missing.append(f"kernels: {len(message['lacking'])} calls do not run ({listed})")

    def _take_update(self, message: Mapping[str, Any]) -> None:
        if "points" not in message:
            # Of a part that was measured again what counts is what it skipped last.
            self.missing = [each for each in self.missing if not each.startswith(_UPDATES)]
            if message["skipped"]:
                self.missing.append(_UPDATES + ", ".join(message["skipped"]))
            return
        points = [(float(t), float(p), float(s)) for t, p, s in message["points"]]
        launch_s, per_tensor_s, per_parameter_s, relative_error = fit_update(points)
        if message.get("lanes"):
            launch_s, per_tensor_s, per_parameter_s = fit_lanes(message["lanes"])
        tensors, parameters, idle_s = message["zero_point"]
        busy_s = next(s for t, p, s in points if (t, p) == (tensors, parameters))
        measured = (message["optimizer"], message["form"], message["device"])
        # One that was measured again had been disturbed before.
        self.updates = [u for u in self.updates if (u.optimizer, u.form, u.device) != measured]
        self.updates.append(
            UpdateCost(
                optimizer=message["optimizer"],
                form=message["form"],
                device=message["device"],
                launch_s=launch_s,
                per_tensor_s=per_tensor_s,
                per_parameter_s=per_parameter_s,
                per_idle_parameter_s=max(0.0, idle_s - busy_s) / parameters,
                points=tuple(points),
                lanes=tuple(map(tuple, message.get("lanes", ()))),
                provenance=Provenance(
                    source="measured",
                    at=self.at,
                    samples=len(points),
                    relative_error=relative_error,
                ),
            )
        )

    def kernels_timed_ratio(self, grid_calls: int) -> float:
        """The share of the grid's calls that was reached, those that do not run here included."""
        done = self.kernels_done
        if done is None:  # cut short before it said
            done = sum(1 for points in (self.points, self.tf32_points) for _ in _latest(points))
        return min(1.0, done / grid_calls)

    def kernel_costs(self) -> tuple[KernelCost, ...]:
        """The points grouped by operator and dtype, in the order in which they were met."""
        groups: dict[tuple[str, str], list[KernelPoint]] = {}
        for point in _latest(self.points):
            call = OpCall.decode(dict(point.call))
            groups.setdefault((call.target, call.dtype), []).append(point)
        for point in _latest(self.tf32_points):
            groups.setdefault((str(point.call["target"]), "tfloat32"), []).append(point)
        return tuple(
            KernelCost(
                target=target,
                dtype=dtype,
                points=tuple(points),
                provenance=Provenance(
                    source="measured",
                    at=self.at,
                    samples=len(points),
                    relative_error=statistics.median(point.noise_ratio for point in points),
                    note="" if self.memory_resident is not False else "page faults included",
                ),
            )
            for (target, dtype), points in groups.items()
        )

    def host_cost(self) -> HostCost | None:
        """None where the part did not get that far."""
        if not self.host:
            return None
        provenance = Provenance(source="measured", at=self.at, samples=1)
        return HostCost(**self.host, provenance=provenance)

    def input_cost(self) -> InputCost | None:
        """None where the part did not get that far."""
        if not self.input:
            return None
        provenance = Provenance(source="measured", at=self.at, samples=len(self.input))
        return InputCost(**self.input, provenance=provenance)

    def memory_cost(self, hardware: Mapping[str, Any], device: Device) -> MemoryCost | None:
        """None where neither touching nor reading was measured."""
        if not self.memory:
            return None
        private, shared = cache_sizes(dict(hardware), device)
        found = {name: value for name, value in self.memory.items() if name != "points"}
        found["reuse_points"] = tuple(map(tuple, found.get("reuse_points", ())))
        rates = [seconds / size for size, seconds in self.memory.get("points", ())]
        middle = statistics.median(rates) if rates else 0.0
        error = statistics.median(abs(rate / middle - 1) for rate in rates) if rates else None
        return MemoryCost(
            **{"private_cache_bytes": private, "shared_cache_bytes": shared, **found},
            provenance=Provenance(
                source="measured", at=self.at, samples=len(rates), relative_error=error
            ),
        )


def _latest(points: Sequence[KernelPoint]) -> Iterable[KernelPoint]:
    """One point for each call: one that was timed again had been disturbed before."""
    return {json.dumps(dict(point.call), sort_keys=True): point for point in points}.values()


def with_best_rates(devices: Sequence[Device], points: Sequence[KernelPoint]) -> tuple[Device, ...]:
    """The devices with the best rates seen: matmuls and convolutions by dtype, a streaming sum.

    What a datasheet already says of a device stays.
    """
    peaks: dict[str, float] = {}
    bandwidth = 0.0
    most_moved = 0
    for point in points:
        call = OpCall.decode(dict(point.call))
        if call.target in ("aten.mm.default", "aten.addmm.default"):
            left, right = call.inputs[-2:]
            flops = 2.0 * math.prod(left.shape) * right.shape[1]
            peaks[call.dtype] = max(peaks.get(call.dtype, 0.0), flops / point.warm_s)
        elif call.target == "aten.convolution.default" and call.arguments[6] is False:
            weight, out = call.inputs[1], call.outputs[0]
            flops = 2.0 * out.numel * math.prod(weight.shape[1:])
            peaks[call.dtype] = max(peaks.get(call.dtype, 0.0), flops / point.warm_s)
        elif call.target == "aten.add.Tensor" and len(call.inputs) == 2:
            moved = 3 * call.outputs[0].numel * ITEM_BYTES.get(call.dtype, 4)
            contiguous = all(spec.strides is None for spec in call.inputs)
            if moved > most_moved and contiguous:
                most_moved, bandwidth = moved, moved / point.warm_s
    return tuple(
        replace(
            device,
            peak_flops_per_s={**peaks, **device.peak_flops_per_s},
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s or bandwidth or None,
        )
        for device in devices
    )
