"""Probe this machine within a budget of time, and turn what its parts find into a profile."""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import (
    CollectiveCost,
    Contention,
    Device,
    DeviceKind,
    HostCost,
    InputCost,
    KernelCost,
    KernelPoint,
    Link,
    MachineProfile,
    MemoryCost,
    OverlapCost,
    Provenance,
    UpdateCost,
)
from estimator.probe.devices.backend import software_versions
from estimator.probe.devices.interference import (
    InterferenceWatch,
    check_interference,
    default_patience_s,
    read_cpu_times,
)
from estimator.probe.devices.inventory import Cpu, core_groups, read_cpu, read_gpus, usable_threads
from estimator.probe.devices.jobs import FINISHED, WATCH, InterferenceSettings, PinnedJob, run_jobs
from estimator.probe.devices.memory import cache_sizes
from estimator.probe.devices.updates import fit_lanes, fit_update
from estimator.probe.grid.kernels import kernel_grid
from estimator.probe.links.copies import host_link
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
        elif part == "copies alone":
            points = [(size, seconds) for size, seconds in message["points"]]
            self.links.append(host_link(message["kind"], points, pinned=message["pinned"], flows=1))
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


def with_best_rates(
    devices: Sequence[Device],
    points: Sequence[KernelPoint],
    tf32_points: Sequence[KernelPoint] = (),
) -> tuple[Device, ...]:
    """The devices with the best rates seen: matmuls and convolutions by dtype, a streaming sum.

    What a datasheet already says of a device stays. `tf32_points` are float32 matmuls on tensor
    cores, where cuDNN's convolutions of float32 run too (torch.backends.cudnn.allow_tf32).
    """
    peaks: dict[str, float] = {}
    for timed, in_tf32 in ((points, False), (tf32_points, True)):
        for point in timed:
            call = OpCall.decode(dict(point.call))
            on_tensor_cores = in_tf32 or (call.target == _CONVOLUTION and devices[0].kind == "cuda")
            is_rounded = on_tensor_cores and call.dtype == "float32"
            dtype = "tfloat32" if is_rounded else call.dtype
            if flops := _matrix_flops(call):
                peaks[dtype] = max(peaks.get(dtype, 0.0), flops / point.warm_s)
    bandwidth = _streamed_bytes_per_s(points)
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


def _streamed_bytes_per_s(points: Sequence[KernelPoint]) -> float | None:
    """What the largest sum of two contiguous tensors moved; None where none was timed."""
    most_moved, rate = 0, None
    for point in points:
        call = OpCall.decode(dict(point.call))
        if call.target != "aten.add.Tensor" or len(call.inputs) != 2:
            continue
        moved = 3 * call.outputs[0].numel * ITEM_BYTES.get(call.dtype, 4)
        if moved > most_moved and all(spec.strides is None for spec in call.inputs):
            most_moved, rate = moved, moved / point.warm_s
    return rate


Report = Callable[[str, float], None]

# How many times the budget a thorough probe takes.
THOROUGH_FACTOR = 5.0
# Of the budget, what is planned for measuring; processes take the rest to start and end.
_PLANNED_RATIO = 0.95
# Of its share of that: what a part gets where those before it took too long, until so many times
# the budget are over. A short probe loses detail, and none of its parts.
_LEAST_RATIO, _OVERTIME_FACTOR = 0.25, 1.5
# What can be cut at any moment comes last, and one bad kernel leaves a process without its GPU.
_JOBS = {
    "preparing": ("grid.kernels:prepare", 0.02),
    "host": ("devices.host:measure_host", 0.08),
    "cold reads": ("devices.memory:measure_cold_read", 0.02),
    "updates": ("devices.updates:measure_updates", 0.12),
    "kernels": ("grid.kernels:measure_kernels", 0.76),
}
_GPU_JOBS = {
    "preparing": _JOBS["preparing"],
    "device": ("devices.accelerator:measure_facts", 0.02),
    "copies alone": ("links.copies:measure_host_copies", 0.03),
    **{part: _JOBS[part] for part in ("host", "cold reads", "updates", "kernels")},
}


@dataclass(frozen=True, slots=True)
class _MachinePart:
    """A part of the probe: the share of the budget it may take, and the code that measures it.

    An `itemised` one says itself what it did not measure when it is cut short.
    """

    name: str
    share: float
    measure: Callable[[float], None]
    itemised: bool = False


def probe_machine(
    *,
    name: str = "local",
    devices: int | None = None,
    budget_s: float = 60.0,
    thorough: bool = False,
    report: Report | None = None,
    kind: DeviceKind | None = None,
    strict: bool = False,
    patience_s: float | None = None,
    earlier: MachineProfile | None = None,
    say: Callable[[str], None] | None = None,
) -> MachineProfile:
    """Measure this machine; interrupted, or out of time, it returns what it has.

    Without accelerators a device is a fixed group of cores, `devices` of them (by default one per
    NUMA node, at least two). `thorough` takes 5 × `budget_s`. `report(part, fraction of the budget
    used)` is called as it goes. What was not measured is listed in `missing`.

    Where other programs use the cores it waits for them, and measures again what they disturbed,
    for `patience_s` in all (by default a quarter of the budget, a minute at most), which it `say`s.
    Then it goes on; `strict`, it raises ProbeError where they leave too little. An `earlier`
    profile of the same machine tells how long the canary takes.
    """
    budget_s *= THOROUGH_FACTOR if thorough else 1.0
    cpu = read_cpu()
    found = choose_devices(cpu, devices=devices, kind=kind)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    # A GPU needs one core, which issues its work.
    needed = sum(len(device.cores) or 1 for device in found)
    watching = InterferenceSettings(
        pid=os.getpid(),
        threads=sorted(usable_threads()),
        cores=needed,
        spare_cores=max(0, len(cpu.cores) - needed),
        patience_s=default_patience_s(budget_s) if patience_s is None else patience_s,
        usual_canary_s=_usual_canary_s(earlier, found[0], cpu),
    )
    probe = _Probe(
        found, cpu, budget_s, thorough, Findings(at=at), report or _silent, watching, say
    )
    now = probe.watch.await_quiet()
    if strict:
        check_interference(now)
    probe.run()
    profile = probe.profile(name)
    if strict and profile.interference is not None:
        check_interference(profile.interference)
    return profile


def _usual_canary_s(earlier: MachineProfile | None, device: Device, cpu: Cpu) -> float | None:
    """What the canary took in a profile of the same machine in the same state; None without one."""
    if earlier is None or (earlier.devices[0].name, earlier.devices[0].cores) != (
        device.name,
        device.cores,
    ):
        return None
    same = dict(earlier.software) == software_versions(device) and earlier.hardware == cpu.facts()
    return earlier.canary_s if same else None


def choose_devices(
    cpu: Cpu, *, devices: int | None = None, kind: DeviceKind | None = None
) -> tuple[Device, ...]:
    """The accelerators if there are any that torch can use, else groups of cores."""
    gpus = () if kind == "cpu" else read_gpus()
    if gpus and not torch_sees_cuda():
        if kind == "cuda":
            raise ProbeError("this torch cannot use the GPUs; install a CUDA build of torch")
        gpus = ()
    if kind == "cuda" and not gpus:
        raise ProbeError("this machine has no NVIDIA GPU; probe it without asking for cuda")
    if not gpus:
        return core_groups(cpu, devices)
    if devices is not None and not 1 <= devices <= len(gpus):
        raise ProbeError(
            f"{devices} devices were asked for, and this machine has {len(gpus)} GPUs; "
            f"choose --devices from 1 to {len(gpus)}"
        )
    return gpus[:devices]


def torch_sees_cuda() -> bool:
    """Whether this torch can use a GPU of this machine."""
    import torch

    return bool(torch.cuda.is_available())


def _silent(_part: str, _fraction: float) -> None:
    pass


class _Probe:
    """One run over the parts: their order, their time, what they found."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        cpu: Cpu,
        budget_s: float,
        thorough: bool,
        findings: Findings,
        report: Report,
        watching: InterferenceSettings,
        say: Callable[[str], None] | None,
    ) -> None:
        self.devices, self.cpu, self.findings = devices, cpu, findings
        self.budget_s, self.thorough, self._report = budget_s, thorough, report
        self.watching, self._say = watching, say
        self.watch = InterferenceWatch(
            patience_s=watching.patience_s,
            cores=watching.cores,
            spare_cores=watching.spare_cores,
            read=partial(read_cpu_times, watching.pid, watching.threads),
            say=self._waits,
        )
        self._begun = time.monotonic()
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """Measure part after part; each gets its share of the time that is left."""
        parts = self._parts()
        planned_s = _PLANNED_RATIO * self.budget_s
        least_s = _LEAST_RATIO * planned_s / sum(part.share for part in parts)
        for number, part in enumerate(parts):
            left_s = planned_s - self._used_s()
            rest = parts[number:]
            if self._used_s() >= _OVERTIME_FACTOR * self.budget_s:
                self._skip(rest, "the budget was over")
                return
            try:
                self.tell(part.name)
                own_s = left_s * part.share / sum(each.share for each in rest)
                began, timed = time.monotonic(), len(self._seconds)
                part.measure(max(own_s, least_s * part.share))
                if len(self._seconds) == timed:
                    self._spend(part.name, began)
            except KeyboardInterrupt:
                self._skip(rest[1:] if part.itemised else rest, "interrupted")
                return
            except (ProbeError, ImportError) as error:
                self.findings.missing.append(f"{part.name}: {error}")

    def _spend(self, part: str, since: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - since

    def _waits(self, disturbance: str) -> None:
        self.tell(f"waiting: {disturbance}")
        if self._say is not None:
            self._say(f"{disturbance}: waiting {self.watch.left_s:.0f} s at most before going on")
            self._say = None

    def tell(self, part: str) -> None:
        self._report(part, min(1.0, self._used_s() / self.budget_s))

    def profile(self, name: str) -> MachineProfile:
        """Everything found, as a profile."""
        findings, hardware = self.findings, self.cpu.facts()
        grid = kernel_grid(self.devices[0].kind, thorough=self.thorough)
        return MachineProfile(
            name=name,
            devices=with_best_rates(
                findings.described(self.devices), findings.points, findings.tf32_points
            ),
            links=tuple(findings.links),
            collectives=tuple(findings.collectives),
            overlaps=tuple(findings.overlaps),
            kernels=findings.kernel_costs(),
            contentions=tuple(findings.contentions),
            host=findings.host_cost(),
            memory=findings.memory_cost(hardware, self.devices[0]),
            input=findings.input_cost(),
            updates=tuple(findings.updates),
            software=software_versions(self.devices[0]),
            hardware=hardware,
            canary_s=self.watch.seen.canary_s,
            rank_jitter_ratio=findings.rank_jitter_ratio,
            kernels_timed_ratio=findings.kernels_timed_ratio(len(grid)),
            missing=tuple(findings.missing),
            interference=self.watch.seen.interference(self.watching.usual_canary_s),
            provenance=Provenance(
                source="measured",
                at=findings.at,
                samples=len(findings.points),
                note=f"probed for {self._used_s():.0f} s ({self._parts_in_words()})",
            ),
        )

    def _parts_in_words(self) -> str:
        """The seconds of the parts that took any, those of the pinned process by its jobs."""
        return ", ".join(f"{part} {s:.0f}" for part, s in self._seconds.items() if s >= 0.5)

    def _used_s(self) -> float:
        return time.monotonic() - self._begun - self.watch.seen.waited_s

    def _skip(self, parts: Sequence[_MachinePart], reason: str) -> None:
        for part in parts:
            self.findings.missing.append(f"{part.name}: {reason}")

    def _parts(self) -> list[_MachinePart]:
        """In order of importance; alone on the machine first, then with all devices busy."""
        parts = [
            _MachinePart("kernels, host and updates", 0.76, self._one_device, itemised=True),
            _MachinePart("first touch", 0.02, self._first_touch),
            _MachinePart("input", 0.02, self._input),
        ]
        if len(self.devices) > 1:
            parts += [
                _MachinePart("collectives", 0.11, self._watched(self._collectives)),
                _MachinePart("contention", 0.06, self._watched(self._contention)),
                _MachinePart("overlap", 0.12, self._watched(self._overlaps)),
                _MachinePart("copies", 0.04, self._watched(self._copies)),
            ]
        if self.devices[0].kind == "cuda":
            parts.append(_MachinePart("updates on the CPU", 0.06, self._updates_on_cpu))
        return parts

    def _watched(self, measure: Callable[[float], None]) -> Callable[[float], None]:
        """A part that is measured again, from its beginning, where others disturbed it."""

        def run(budget_s: float) -> None:
            before = self.findings

            def once() -> None:
                self.findings = copy.deepcopy(before)
                measure(budget_s)

            self.watch.run(once)

        return run

    def _take(self, part: str, message: dict[str, Any]) -> None:
        self.findings.take(part, message)
        self.tell(part)

    def _one_device(self, budget_s: float) -> None:
        """Everything that one process on device 0 can measure."""
        jobs = [
            PinnedJob(
                part=part,
                function=f"estimator.probe.{function}",
                budget_s=budget_s * share,
                arguments={"thorough": self.thorough} if part in ("kernels", "updates") else {},
                in_pieces=part == "kernels",
            )
            for part, (function, share) in self._jobs().items()
        ]
        self._run_jobs(self.devices[0], jobs)

    def _jobs(self) -> dict[str, tuple[str, float]]:
        return _GPU_JOBS if self.devices[0].kind == "cuda" else _JOBS

    def _run_jobs(self, device: Device, jobs: Sequence[PinnedJob]) -> None:
        begun: set[str] = set()
        finished: set[str] = set()
        seen: dict[str, Any] = {}
        is_own = device.kind == self.devices[0].kind
        watching = replace(
            self.watching,
            patience_s=self.watch.left_s,
            usual_canary_s=self.watching.usual_canary_s if is_own else None,
        )

        started = time.monotonic()

        def take(part: str, message: dict[str, Any]) -> None:
            nonlocal started
            if part == WATCH:
                if "waiting" in message:
                    self._waits(message["waiting"])
                seen.update(message.get("seen", {}))
                return
            if not begun:
                self._spend("starting", started)
                started = time.monotonic()
            begun.add(part)
            if message == FINISHED:
                finished.add(part)
                self._spend(part, started)
                started = time.monotonic()
            else:
                self._take(part, message)

        try:
            run_jobs(device, jobs, take, watching)
        except (ProbeError, KeyboardInterrupt):
            for job in jobs:
                if job.part not in finished and job.part != "preparing":
                    how = "cut short" if job.part in begun else "not reached"
                    self.findings.missing.append(f"{job.part}: {how}")
            raise
        finally:
            # The canary of one kind of device says nothing of another's.
            self.watch.seen.add(seen if is_own else {**seen, "canaries_s": []})

    def _first_touch(self, budget_s: float) -> None:
        job = PinnedJob(
            part="first touch",
            function="estimator.probe.devices.memory:measure_first_touch",
            budget_s=budget_s,
        )
        self._run_jobs(self._cpu_device(), [job])

    def _input(self, budget_s: float) -> None:
        job = PinnedJob(
            part="input",
            function="estimator.probe.devices.storage:measure_input",
            budget_s=budget_s,
        )
        self._run_jobs(self._cpu_device(), [job])

    def _updates_on_cpu(self, budget_s: float) -> None:
        jobs = [
            PinnedJob(part=part, function=f"estimator.probe.{function}", budget_s=budget_s)
            for part, (function, _) in _JOBS.items()
            if part in ("preparing", "updates")
        ]
        self._run_jobs(self._cpu_device(), jobs)

    def _cpu_device(self) -> Device:
        """Device 0 where devices are core groups, else all cores as one."""
        return self.devices[0] if self.devices[0].cores else core_groups(self.cpu, 1)[0]

    def _contention(self, budget_s: float) -> None:
        from estimator.probe.devices.contention import probe_contention

        found = probe_contention(self.devices, budget_s=budget_s, at=self.findings.at)
        self.findings.contentions.extend(found.contentions)
        self.findings.rank_jitter_ratio = found.rank_jitter_ratio

    def _collectives(self, budget_s: float) -> None:
        from estimator.probe.links.collectives import probe_collectives

        probe_collectives(
            self.devices, self._communication(), budget_s=budget_s, report=self._keep("collectives")
        )

    def _overlaps(self, budget_s: float) -> None:
        from estimator.probe.links.overlap import probe_overlaps

        probe_overlaps(
            self.devices, self._communication(), budget_s=budget_s, report=self._keep("overlap")
        )

    def _copies(self, budget_s: float) -> None:
        from estimator.probe.links.copies import probe_copies

        probe_copies(self.devices, budget_s=budget_s, report=self._keep("copies"))

    def _keep(self, part: str) -> Callable[[Any], None]:
        def keep(finding: Any) -> None:
            self.findings.keep(finding)
            self.tell(part)

        return keep

    def _communication(self) -> str:
        return "nccl" if self.devices[0].kind == "cuda" else "gloo"
