"""Probe this machine within a budget of time: its parts, their order and what each may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from pydantic import TypeAdapter

from estimator.errors import ProbeError
from estimator.machines.profile import Device, DeviceKind, MachineProfile, Provenance
from estimator.probe.cluster.findings import ClusterFindings
from estimator.probe.devices.backend import software_versions
from estimator.probe.devices.interference import (
    InterferenceWatch,
    check_interference,
    default_patience_s,
    others_cpu_s,
)
from estimator.probe.devices.inventory import (
    Cpu,
    choose_devices,
    core_groups,
    read_cpu,
    usable_threads,
)
from estimator.probe.devices.jobs import START_ALLOWANCE_S, run_job
from estimator.probe.devices.ranks import DeviceProcesses
from estimator.probe.findings import Findings, with_best_rates, with_datasheet
from estimator.probe.grid.kernels import kernel_grid

Report = Callable[[str, float], None]
_STEP_FINDINGS = TypeAdapter(ClusterFindings)

# How many times the budget a thorough probe takes.
THOROUGH_FACTOR = 5.0
# Of the budget, what is planned for measuring; processes take the rest to start and end.
_PLANNED_RATIO = 0.95
# Of its share of that: what a part gets where those before it took too long, until so many times
# the budget are over. A short probe loses detail, and none of its parts.
_LEAST_RATIO, _OVERTIME_FACTOR = 0.25, 1.5
# Of kernels, between two looks at what others do; CPU times of Linux advance in ticks of 10 ms.
_PIECE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the probe, the share of the budget it may take, and what measures it where.

    "alone" is a process on device 0 that goes from part to part, "fresh" one of its own and "cpu"
    one on the CPU; "all" is every device at once, in the step of `cluster.steps` of that name.
    """

    name: str
    share: float
    where: Literal["alone", "fresh", "cpu", "all"]
    function: str = ""


# In order of importance; what can be cut at any moment comes last of a process, and one bad kernel
# leaves a process without its GPU.
_PARTS = (
    _Part("device", 0.015, "alone", "devices.accelerator:measure_facts"),
    _Part("copies alone", 0.02, "alone", "links.copies:measure_host_copies"),
    _Part("host", 0.06, "alone", "devices.host:measure_host"),
    _Part("cold reads", 0.015, "alone", "devices.memory:measure_cold_read"),
    _Part("updates", 0.09, "alone", "devices.updates:measure_updates"),
    _Part("kernels", 0.58, "alone", "grid.kernels:measure_kernels"),
    _Part("first touch", 0.02, "fresh", "devices.memory:measure_first_touch"),
    _Part("input", 0.02, "fresh", "devices.storage:measure_input"),
    _Part("collectives", 0.11, "all"),
    _Part("contention", 0.06, "all"),
    _Part("overlap", 0.12, "all"),
    _Part("copies", 0.04, "all"),
    _Part("updates on the CPU", 0.06, "cpu", "devices.updates:measure_updates"),
)
_OF_GPUS = ("device", "copies alone", "updates on the CPU")


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
    chosen = choose_devices(cpu, devices=devices, kind=kind)
    probe = _Probe(
        chosen,
        cpu,
        budget_s,
        thorough,
        report or (lambda _part, _fraction: None),
        say,
        patience_s=default_patience_s(budget_s) if patience_s is None else patience_s,
        usual_canary_s=_usual_canary_s(earlier, chosen[0], cpu),
    )
    now = probe.watch.await_quiet()
    if strict:
        check_interference(now)
    with probe.ranks, probe.alone:
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


class _Probe:
    """One run over the parts: their order, their time, what they found."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        cpu: Cpu,
        budget_s: float,
        thorough: bool,
        report: Report,
        say: Callable[[str], None] | None,
        *,
        patience_s: float,
        usual_canary_s: float | None,
    ) -> None:
        self.devices, self.cpu = devices, cpu
        self.findings = Findings(at=datetime.now(UTC).isoformat(timespec="seconds"))
        self.budget_s, self.thorough, self._report = budget_s, thorough, report
        self._say = say
        # A GPU needs one core, which issues its work.
        needed = sum(len(device.cores) or 1 for device in devices)
        self.watch = InterferenceWatch(
            patience_s=patience_s,
            cores=needed,
            spare_cores=max(0, len(cpu.cores) - needed),
            kind=devices[0].kind,
            usual_canary_s=usual_canary_s,
            read_others_s=partial(others_cpu_s, os.getpid(), sorted(usable_threads())),
            canary=self._canary_s,
            say=self._waits,
        )
        # One process on a device goes from part to part, as do those on all devices at once.
        self.alone = DeviceProcesses(devices[:1])
        self.ranks = DeviceProcesses(devices, world=True)
        self._is_alone = False
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
            # A profile without kernels tells little, however late these come.
            is_over = self._used_s() >= _OVERTIME_FACTOR * self.budget_s
            if is_over and part.where != "alone":
                self._skip(rest, "the budget was over")
                return
            began = time.monotonic()
            try:
                self.tell(part.name)
                own_s = left_s * part.share / sum(other.share for other in rest)
                self._measure(part, max(own_s, least_s * part.share))
            except KeyboardInterrupt:
                self._skip(rest, "interrupted")
                return
            except (ProbeError, ImportError) as error:
                self.findings.missing.append(f"{part.name}: {error}")
            self._seconds[part.name] = time.monotonic() - began

    def _parts(self) -> list[_Part]:
        kept = _PARTS if len(self.devices) > 1 else [p for p in _PARTS if p.where != "all"]
        on_gpu = self.devices[0].kind == "cuda"
        return [part for part in kept if on_gpu or part.name not in _OF_GPUS]

    def _measure(self, part: _Part, budget_s: float) -> None:
        self._is_alone = part.where == "alone"
        if part.where == "all":
            self.alone.stop()
            # From its beginning again, where others disturbed it.
            self.watch.run(partial(self._run_step, part.name, budget_s))
            return
        # On the CPU that is device 0 where devices are core groups, else all cores as one.
        device = self.devices[0]
        if part.where != "alone" and not device.cores:
            device = core_groups(self.cpu, 1)[0]
        if part.where == "fresh" or self.alone.devices != (device,):
            self.alone.stop()
            self.alone.devices = (device,)
        # Before anything is watched the process is there and prepared.
        self._canary_s()
        measure = partial(
            run_job,
            self.alone,
            f"estimator.probe.{part.function}",
            partial(self._take, part.name),
            prepares=part.where != "fresh",
        )
        if part.name == "kernels":
            self._measure_kernels(measure, budget_s)
            return
        arguments = {"thorough": self.thorough} if part.name == "updates" else {}
        self.watch.run(partial(measure, budget_s=budget_s, arguments=arguments))

    def _measure_kernels(self, measure: Callable[..., None], budget_s: float) -> None:
        """The grid, piece by piece: calls that others disturbed are timed again."""
        findings, watch = self.findings, self.watch
        size = len(kernel_grid(self.devices[0].kind, thorough=self.thorough))
        end = time.monotonic() + budget_s - watch.waited_s
        while (left_s := end + watch.waited_s - time.monotonic()) > 0:
            first = findings.kernels_done
            arguments = {"thorough": self.thorough, "first": first}
            budget = min(_PIECE_S, left_s)
            watch.run(partial(measure, budget_s=budget, arguments=arguments))
            if findings.is_lost or findings.kernels_done in (first, size):
                break
        findings.end_kernels(size)

    def _canary_s(self) -> float | None:
        """How long the canary takes now where device 0 alone is measured."""
        found: dict[str, Any] = {}

        def take(message: dict[str, Any]) -> None:
            # The process also says how it is prepared.
            self.findings.take("canary", message)
            found.update(message)

        if self._is_alone:
            run_job(self.alone, "estimator.probe.devices.jobs:emit_canary", take)
        return found.get("canary_s")

    def _take(self, part: str, message: dict[str, Any]) -> None:
        self.findings.take(part, message)
        self.tell(part)

    def _run_step(self, step: str, budget_s: float) -> None:
        """One of the steps that all devices run together; what it found so far is kept."""

        def take(_rank: int, message: dict[str, Any]) -> None:
            self.findings.steps[step] = _STEP_FINDINGS.validate_python(message)
            self.tell(step)

        self.ranks.run(
            "estimator.probe.node:run_on_node",
            {
                "step": step,
                "devices": [asdict(device) for device in self.devices],
                "at": self.findings.at,
                "seconds": budget_s,
            },
            timeout_s=START_ALLOWANCE_S + 2 * budget_s,
            on_report=take,
        )

    def _waits(self, disturbance: str) -> None:
        self.tell(f"waiting: {disturbance}")
        if self._say is not None:
            self._say(f"{disturbance}: waiting {self.watch.left_s:.0f} s at most before going on")
            self._say = None

    def tell(self, part: str) -> None:
        self._report(part, min(1.0, self._used_s() / self.budget_s))

    def _used_s(self) -> float:
        return time.monotonic() - self._begun - self.watch.waited_s

    def _skip(self, parts: Sequence[_Part], reason: str) -> None:
        self.findings.missing += [f"{part.name}: {reason}" for part in parts]

    def profile(self, name: str) -> MachineProfile:
        """Everything found, as a profile."""
        findings, hardware = self.findings, self.cpu.facts()
        seconds = ", ".join(f"{part} {s:.0f}" for part, s in self._seconds.items() if s >= 0.5)
        grid = kernel_grid(self.devices[0].kind, thorough=self.thorough)
        profile = MachineProfile(
            name=name,
            devices=with_best_rates(findings.described(self.devices), findings.points),
            links=findings.all_of("links"),
            collectives=findings.all_of("collectives"),
            overlaps=findings.all_of("overlaps"),
            kernels=findings.kernel_costs(),
            contentions=findings.all_of("contentions"),
            host=findings.host_cost(self.devices[0].kind),
            memory=findings.memory_cost(self.cpu, self.devices[0]),
            input=findings.input_cost(),
            updates=tuple(findings.updates.values()),
            software=software_versions(self.devices[0]),
            hardware=hardware,
            canary_s=self.watch.canary_s,
            rank_jitter_ratio=findings.rank_jitter_ratio,
            kernels_timed_ratio=findings.kernels_timed_ratio(len(grid)),
            missing=findings.all_of("missing"),
            interference=self.watch.interference(),
            provenance=Provenance(
                source="measured",
                at=findings.at,
                samples=len(findings.points),
                note=f"probed for {self._used_s():.0f} s ({seconds})",
            ),
        )
        return with_datasheet(profile)
