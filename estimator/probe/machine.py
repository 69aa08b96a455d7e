"""Probe this machine within a budget of time: its parts, their order and what each may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, DeviceKind, MachineProfile, Provenance
from estimator.probe.cluster.findings import ClusterFindings
from estimator.probe.devices.backend import software_versions
from estimator.probe.devices.interference import (
    InterferenceWatch,
    check_interference,
    default_patience_s,
    read_cpu_times,
)
from estimator.probe.devices.inventory import (
    Cpu,
    choose_devices,
    core_groups,
    read_cpu,
    usable_threads,
)
from estimator.probe.devices.jobs import FINISHED, WATCH, InterferenceSettings, PinnedJob, run_jobs
from estimator.probe.devices.ranks import DeviceProcesses
from estimator.probe.findings import Findings, with_best_rates, with_datasheet
from estimator.probe.grid.kernels import kernel_grid

Report = Callable[[str, float], None]

# How many times the budget a thorough probe takes.
THOROUGH_FACTOR = 5.0
# Of the budget, what is planned for measuring; processes take the rest to start and end.
_PLANNED_RATIO = 0.95
# Of its share of that: what a part gets where those before it took too long, until so many times
# the budget are over. A short probe loses detail, and none of its parts.
_LEAST_RATIO, _OVERTIME_FACTOR = 0.25, 1.5
# What the start of processes may take beyond that.
_START_ALLOWANCE_S = 60.0
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
# What all devices measure together (`cluster.steps.NODE_STEPS`).
_STEPS = (("collectives", 0.11), ("contention", 0.06), ("overlap", 0.12), ("copies", 0.04))


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
    chosen = choose_devices(cpu, devices=devices, kind=kind)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    # A GPU needs one core, which issues its work.
    needed = sum(len(device.cores) or 1 for device in chosen)
    watching = InterferenceSettings(
        pid=os.getpid(),
        threads=sorted(usable_threads()),
        cores=needed,
        spare_cores=max(0, len(cpu.cores) - needed),
        patience_s=default_patience_s(budget_s) if patience_s is None else patience_s,
        usual_canary_s=_usual_canary_s(earlier, chosen[0], cpu),
    )
    probe = _Probe(
        chosen, cpu, budget_s, thorough, Findings(at=at), report or _silent, watching, say
    )
    now = probe.watch.await_quiet()
    if strict:
        check_interference(now)
    with probe.ranks:
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
        # All devices at once: their processes start once for all that is measured so.
        self.ranks = DeviceProcesses(devices, world=True)
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
                own_s = left_s * part.share / sum(other.share for other in rest)
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
        profile = MachineProfile(
            name=name,
            devices=with_best_rates(
                findings.described(self.devices), findings.points, findings.tf32_points
            ),
            links=findings.all_of("links"),
            collectives=findings.all_of("collectives"),
            overlaps=findings.all_of("overlaps"),
            kernels=findings.kernel_costs(),
            contentions=findings.all_of("contentions"),
            host=findings.host_cost(self.devices[0].kind),
            memory=findings.memory_cost(hardware, self.devices[0]),
            input=findings.input_cost(),
            updates=tuple(findings.updates),
            software=software_versions(self.devices[0]),
            hardware=hardware,
            canary_s=self.watch.seen.canary_s,
            rank_jitter_ratio=findings.rank_jitter_ratio,
            kernels_timed_ratio=findings.kernels_timed_ratio(len(grid)),
            missing=findings.all_of("missing"),
            interference=self.watch.seen.interference(
                self.watching.usual_canary_s, on_gpu=self.devices[0].kind == "cuda"
            ),
            provenance=Provenance(
                source="measured",
                at=findings.at,
                samples=len(findings.points),
                note=f"probed for {self._used_s():.0f} s ({self._parts_in_words()})",
            ),
        )
        return with_datasheet(profile)

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
            self._cpu_part("first touch", "memory:measure_first_touch"),
            self._cpu_part("input", "storage:measure_input"),
        ]
        if len(self.devices) > 1:
            parts += [_MachinePart(step, share, self._in_step(step)) for step, share in _STEPS]
        if self.devices[0].kind == "cuda":
            parts.append(_MachinePart("updates on the CPU", 0.06, self._updates_on_cpu))
        return parts

    def _in_step(self, step: str) -> Callable[[float], None]:
        """A part that is measured again, from its beginning, where others disturbed it."""
        return lambda budget_s: self.watch.run(partial(self._run_step, step, budget_s))

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

    def _cpu_part(self, part: str, function: str) -> _MachinePart:
        """A part of one job on the CPU."""

        def run(budget_s: float) -> None:
            path = f"estimator.probe.devices.{function}"
            job = PinnedJob(part=part, function=path, budget_s=budget_s)
            self._run_jobs(self._cpu_device(), [job])

        return _MachinePart(part, 0.02, run)

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

    def _run_step(self, step: str, budget_s: float) -> None:
        """One of the steps that all devices run together; what it found so far is kept."""

        def take(_rank: int, message: dict[str, Any]) -> None:
            self.findings.steps[step] = ClusterFindings.from_dict(message)
            self.tell(step)

        self.ranks.run(
            "estimator.probe.cluster.steps:run_on_node",
            {
                "step": step,
                "devices": [asdict(device) for device in self.devices],
                "at": self.findings.at,
                "seconds": budget_s,
            },
            timeout_s=_START_ALLOWANCE_S + 2 * budget_s,
            on_report=take,
        )
