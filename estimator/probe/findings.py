"""Gather what the parts of a probe found, and complete it with what datasheets say of the GPU."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from estimator.errors import ProfileError
from estimator.machines.catalogue import known_machines, load_profile
from estimator.machines.merging import may_be_alike
from estimator.machines.profile import (
    Device,
    DeviceKind,
    HostCost,
    InputCost,
    KernelCost,
    KernelPoint,
    Link,
    MachineProfile,
    MemoryCost,
    Provenance,
    UpdateCost,
)
from estimator.probe.cluster.findings import ClusterFindings
from estimator.probe.devices.inventory import Cpu
from estimator.probe.devices.memory import cache_sizes
from estimator.probe.devices.updates import fit_lanes, fit_update
from estimator.probe.links.copies import link_from
from estimator.tensors import ITEM_BYTES, OpCall

# By what a probe of a GPU's host was off in 39 training steps that wait for it, in the median, on
# an H100 and an H200 in virtual machines (docs/accuracy.md): these ran it 0.6 to 1.7 times as
# fast within minutes, and models have Python of their own around the operators that a graph shows.
_CUDA_HOST_ERROR = 0.21


# By the call, and whether float32 was multiplied on tensor cores.
KernelPoints = dict[tuple[OpCall, bool], KernelPoint]


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything found so far; grows while the probe runs, whole at any moment.

    `steps` is what all devices measured together, by the name of the step.
    """

    at: str
    points: KernelPoints = field(default_factory=dict)
    kernels_done: int = 0
    lacking: dict[str, None] = field(default_factory=dict)
    is_lost: bool = False
    host: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    input: dict[str, float] = field(default_factory=dict)
    updates: dict[tuple[str, ...], UpdateCost] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    steps: dict[str, ClusterFindings] = field(default_factory=dict)
    memory_resident: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    sustained: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def take(self, part: str, message: Mapping[str, Any]) -> None:
        """Keep one finding that a job emitted."""
        if "failed" in message:
            self.missing.append(f"{part}: {message['failed']}")
        elif "memory_resident" in message:
            self.memory_resident = message["memory_resident"]
        elif part == "kernels":
            self._take_kernel(message)
        elif part.startswith("updates"):
            self._take_update(part, message)
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
        elif part == "copies alone":
            kind, pinned = message["kind"], message["pinned"]
            self.links.append(link_from(kind, message["points"], pinned=pinned))

    def described(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The devices, which are alike, with what was found; the first is the one seen at work."""
        first, *others = (
            replace(device, details={**device.details, **self.facts}) for device in devices
        )
        return replace(first, details={**first.details, **self.sustained}), *others

    def all_of(self, what: str) -> tuple[Any, ...]:
        """The findings of that name of all parts."""
        steps = (getattr(step, what) for step in self.steps.values())
        return (*getattr(self, what, ()), *itertools.chain(*steps))

    @property
    def rank_jitter_ratio(self) -> float | None:
        """How unlike equal ranks run; None where that was not measured."""
        step = self.steps.get("contention")
        return step.rank_jitter_ratio if step else None

    def _take_kernel(self, message: Mapping[str, Any]) -> None:
        if "call" in message:
            entries = {name: value for name, value in message.items() if name != "math"}
            entries["call"] = OpCall.decode(entries["call"])
            # One that was timed again had been disturbed before.
            self.points[entries["call"], message.get("math") == "tf32"] = KernelPoint(**entries)
            return
        self.kernels_done, self.is_lost = message["done"], message["is_lost"]
        self.lacking |= dict.fromkeys(message["lacking"])

    def end_kernels(self, grid_calls: int) -> None:
        """Say which calls of the grid are missing."""
        if left := grid_calls - self.kernels_done:
            self.missing.append(
                f"kernels: {left} of {grid_calls} calls were not reached in the time"
            )
        if self.lacking:
            listed = "; ".join([*self.lacking][:5])
            self.missing.append(f"kernels: {len(self.lacking)} calls do not run ({listed})")

    def _take_update(self, part: str, message: Mapping[str, Any]) -> None:
        if "points" not in message:
            # Of a part that was measured again what counts is what it skipped last.
            self.missing = [line for line in self.missing if not line.startswith(f"{part}: ")]
            if message["skipped"]:
                self.missing.append(f"{part}: {', '.join(message['skipped'])}")
            return
        points = [(float(t), float(p), float(s)) for t, p, s in message["points"]]
        launch_s, per_tensor_s, per_parameter_s, relative_error = fit_update(points)
        if message.get("lanes"):
            launch_s, per_tensor_s, per_parameter_s = fit_lanes(message["lanes"])
        tensors, parameters, idle_s = message["zero_point"]
        busy_s = next(s for t, p, s in points if (t, p) == (tensors, parameters))
        form = {name: message[name] for name in ("optimizer", "form", "device")}
        # One that was measured again had been disturbed before.
        self.updates[tuple(form.values())] = UpdateCost(
            **form,
            launch_s=launch_s,
            per_tensor_s=per_tensor_s,
            per_parameter_s=per_parameter_s,
            per_idle_parameter_s=max(0.0, idle_s - busy_s) / parameters,
            points=tuple(points),
            lanes=tuple(map(tuple, message.get("lanes", ()))),
            provenance=self._measured(len(points), relative_error),
        )

    def kernels_timed_ratio(self, grid_calls: int) -> float:
        """The share of the grid's calls that was reached, those that do not run here included."""
        # What is cut short has not said how many are done.
        return min(1.0, max(self.kernels_done, len(self.points)) / grid_calls)

    def kernel_costs(self) -> tuple[KernelCost, ...]:
        """The points grouped by operator and dtype, in the order in which they were met."""
        groups: dict[tuple[str, str], list[KernelPoint]] = {}
        for (call, in_tf32), point in self.points.items():
            dtype = "tfloat32" if in_tf32 else call.dtype
            groups.setdefault((call.target, dtype), []).append(point)
        return tuple(
            KernelCost(
                target=target,
                dtype=dtype,
                points=tuple(points),
                provenance=self._measured(
                    len(points),
                    statistics.median(point.noise_ratio for point in points),
                    note="" if self.memory_resident is not False else "page faults included",
                ),
            )
            for (target, dtype), points in groups.items()
        )

    def host_cost(self, kind: DeviceKind) -> HostCost | None:
        """None where the part did not get that far."""
        if not self.host:
            return None
        error = _CUDA_HOST_ERROR if kind == "cuda" else None
        return HostCost(**self.host, provenance=self._measured(1, error))

    def input_cost(self) -> InputCost | None:
        """None where the part did not get that far."""
        if not self.input:
            return None
        return InputCost(**self.input, provenance=self._measured(len(self.input)))

    def memory_cost(self, cpu: Cpu, device: Device) -> MemoryCost | None:
        """None where neither touching nor reading was measured."""
        if not self.memory:
            return None
        private, shared = cache_sizes(cpu, device)
        known = {name: value for name, value in self.memory.items() if name != "points"}
        known["reuse_points"] = tuple(map(tuple, known.get("reuse_points", ())))
        rates = [seconds / size for size, seconds in self.memory.get("points", ())]
        middle = statistics.median(rates) if rates else 0.0
        error = statistics.median(abs(rate / middle - 1) for rate in rates) if rates else None
        return MemoryCost(
            **{"private_cache_bytes": private, "shared_cache_bytes": shared, **known},
            provenance=self._measured(len(rates), error),
        )

    def _measured(
        self, samples: int, relative_error: float | None = None, *, note: str = ""
    ) -> Provenance:
        return Provenance(
            source="measured",
            at=self.at,
            samples=samples,
            relative_error=relative_error,
            note=note,
        )


def with_best_rates(devices: Sequence[Device], points: KernelPoints) -> tuple[Device, ...]:
    """The devices with the best rates seen: matmuls and convolutions by dtype, a streaming sum.

    What a datasheet already says of a device stays. cuDNN's convolutions of float32 run on tensor
    cores too (torch.backends.cudnn.allow_tf32).
    """
    peaks: dict[str, float] = {}
    for (call, in_tf32), point in points.items():
        on_tensor_cores = in_tf32 or (call.target == _CONVOLUTION and devices[0].kind == "cuda")
        dtype = "tfloat32" if on_tensor_cores and call.dtype == "float32" else call.dtype
        if flops := _matrix_flops(call):
            peaks[dtype] = max(peaks.get(dtype, 0.0), flops / point.warm_s)
    bandwidth = _streamed_bytes_per_s(points.values())
    return tuple(
        replace(
            device,
            peak_flops_per_s={**peaks, **device.peak_flops_per_s},
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s or bandwidth,
        )
        for device in devices
    )


_CONVOLUTION = "aten.convolution.default"
_PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1, "aten._scaled_mm.default": 0}


def _matrix_flops(call: OpCall) -> float:
    """Of a matmul or a forward convolution; 0.0 of anything else."""
    if call.target in _PRODUCTS:
        left, right = call.inputs[_PRODUCTS[call.target] :][:2]
        return 2.0 * math.prod(left.shape) * right.shape[1]
    if call.target == _CONVOLUTION and call.arguments[6] is False:
        return 2.0 * call.outputs[0].numel * math.prod(call.inputs[1].shape[1:])
    return 0.0


def _streamed_bytes_per_s(points: Iterable[KernelPoint]) -> float | None:
    """What the largest sum of two contiguous tensors moved; None where none was timed."""
    most_moved, rate = 0, None
    for point in points:
        call = point.call
        if call.target != "aten.add.Tensor" or len(call.inputs) != 2:
            continue
        moved = 3 * call.outputs[0].numel * ITEM_BYTES.get(call.dtype, 4)
        if moved > most_moved and all(spec.strides is None for spec in call.inputs):
            most_moved, rate = moved, moved / point.warm_s
    return rate


_BETWEEN_DEVICES = ("d2d", "nvlink", "infinity_fabric", "pcie")


def with_datasheet(profile: MachineProfile) -> MachineProfile:
    """The profile of GPUs with what the catalogue knows of them and no measurement tells.

    That is facts of the chip; whether a link's switch adds and multicasts (NVLink SHARP), and what
    a hop over it takes beside what a copy does; the links themselves where copies were not timed.
    """
    known = _datasheet_of(profile.devices[0])
    if known is None:
        return profile
    facts = known.devices[0].details
    devices = tuple(
        replace(device, details={**facts, **_known(device.details)}) for device in profile.devices
    )
    classes = {link.kind: link for link in known.links if link.kind in _BETWEEN_DEVICES}
    links = tuple(_informed(link, classes.get(link.kind)) for link in profile.links)
    if len(devices) > 1 and not any(link.kind in _BETWEEN_DEVICES for link in links):
        has_nvlinks = bool(devices[0].details.get("nvlink_links"))
        links += tuple(link for kind, link in classes.items() if kind != "nvlink" or has_nvlinks)
    return replace(profile, devices=devices, links=links)


def _known(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if value is not None}


def _informed(link: Link, known: Link | None) -> Link:
    if known is None:
        return link
    return replace(link, reduces=known.reduces, latency_s=known.latency_s)


def _datasheet_of(device: Device) -> MachineProfile | None:
    """The catalogue's plainest machine with such a GPU; None where it has none."""
    if device.kind != "cuda":
        return None
    for name in sorted(known_machines(), key=lambda name: (len(name), name)):
        try:
            profile = load_profile(name)
        except ProfileError:  # a damaged one of the user's own
            continue
        its = profile.devices[0]
        is_datasheet = profile.provenance.source == "datasheet" and profile.kind == "cuda"
        if is_datasheet and may_be_alike(its.name, device.name):
            return profile
    return None
