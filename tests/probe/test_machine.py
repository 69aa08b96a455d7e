"""The order of a probe, its budget, and what is left when it is cut short."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from estimator.errors import ProbeError
from estimator.machines.profile import Device, KernelPoint, MachineProfile
from estimator.probe import machine as machine_module
from estimator.probe.findings import Findings, with_best_rates
from estimator.probe.grid_calls import grid_call, tensor
from estimator.probe.jobs import FINISHED
from estimator.probe.machine import probe_machine, software_versions
from estimator.tensors import OpCall, TensorSpec

POINT = {"call": grid_call("relu.default", tensor(8)).call.encode(), "warm_s": 1e-6}


def cut_short(by: type[BaseException]) -> Callable[..., None]:
    """A first process that measures the canary and one kernel, then ends that way."""

    def run_jobs(_device: Device, _jobs: Any, on_finding: Callable[[str, Any], None]) -> None:
        on_finding("canary", {"canary_s": 0.004})
        on_finding("canary", FINISHED)
        on_finding("kernels", dict(POINT))
        raise by("the process died")

    return run_jobs


def test_interrupted_it_keeps_what_it_has_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "run_jobs", cut_short(KeyboardInterrupt))
    profile = probe_machine(devices=1, kind="cpu")
    assert profile.canary_s == 0.004
    assert [cost.target for cost in profile.kernels] == ["aten.relu.default"]
    assert "kernels: cut short" in profile.missing
    assert "updates: not reached" in profile.missing
    assert "first touch: interrupted" in profile.missing
    assert not any(part.startswith("canary") for part in profile.missing)
    assert MachineProfile.from_dict(profile.to_dict()) == profile


def test_a_part_that_dies_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "run_jobs", cut_short(ProbeError))
    profile = probe_machine(devices=1, kind="cpu", budget_s=5.0)
    assert profile.canary_s == 0.004
    assert "first touch: the process died" in profile.missing


def test_parts_share_what_is_left_and_none_starts_after_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    given: list[float] = []

    def run_jobs(_device: Device, jobs: Any, _on_finding: Any) -> None:
        given.append(sum(job.budget_s for job in jobs))
        now[0] += 60.0  # far longer than it was given

    monkeypatch.setattr(machine_module, "run_jobs", run_jobs)
    profile = probe_machine(devices=1, kind="cpu", budget_s=10.0)
    # 0.95 of the budget is planned; one device's parts have shares of 0.76, 0.02, 0.02 and 0.04.
    assert given == [pytest.approx(10.0 * 0.95 * 0.76 / 0.84)]
    assert "first touch: the budget was over" in profile.missing
    assert "copies: the budget was over" in profile.missing


def test_progress_names_the_part_and_never_passes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "run_jobs", cut_short(KeyboardInterrupt))
    seen: list[tuple[str, float]] = []
    probe_machine(devices=1, kind="cpu", report=lambda *told: seen.append(told))
    assert ("kernels") in [part for part, _ in seen]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_asking_for_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "read_gpus", lambda: ())
    with pytest.raises(ProbeError, match="no NVIDIA GPU"):
        probe_machine(kind="cuda")


def test_a_real_probe_of_a_few_seconds_gives_a_sound_profile() -> None:
    profile = probe_machine(devices=1, kind="cpu", budget_s=4.0)
    assert profile.host is not None
    assert profile.memory is not None
    assert profile.kernels
    assert profile.devices[0].peak_flops_per_s["float32"] > 1e8
    assert any(part.startswith("kernels:") for part in profile.missing)
    assert MachineProfile.from_dict(profile.to_dict()) == profile


def test_unreached_and_lacking_kernels_are_said() -> None:
    findings = Findings(at="2026-01-01")
    findings.take("kernels", {"done": 3, "grid": 10, "lacking": ["aten.a.default: no"]})
    assert findings.missing == [
        "kernels: 7 of 10 calls were not reached in the time",
        "kernels: 1 calls do not run (aten.a.default: no)",
    ]


def point(target: str, inputs: tuple[TensorSpec, ...], warm_s: float) -> KernelPoint:
    call = OpCall(target, inputs, outputs=(inputs[0],))
    return KernelPoint(call=call.encode(), warm_s=warm_s)


def test_a_devices_best_rates_come_from_products_and_the_largest_sum() -> None:
    square = TensorSpec((100, 100))
    million, small = TensorSpec((10**6,)), TensorSpec((10,))
    device = Device(kind="cpu", index=0, name="core", memory_bytes=1, cores=(0,))
    (rated,) = with_best_rates(
        [device],
        [
            point("aten.mm.default", (square, square), 1e-4),
            point("aten.mm.default", (square, square), 2e-4),
            point("aten.add.Tensor", (million, million), 1e-3),
            point("aten.add.Tensor", (small, small), 1e-12),
        ],
    )
    # 2 · 100³ flops in 0.1 ms; three arrays of 4 MB in 1 ms.
    assert rated.peak_flops_per_s == {"float32": pytest.approx(2e10)}
    assert rated.memory_bandwidth_bytes_per_s == pytest.approx(1.2e10)


def test_settings_that_change_speed_are_recorded() -> None:
    device = Device(kind="cpu", index=0, name="cores", memory_bytes=1, cores=(0, 1))
    versions = software_versions(device, {"OMP_PROC_BIND": "true", "HOME": "/somewhere"})
    assert versions["settings"] == "OMP_PROC_BIND=true"
    assert versions["threads"] == "2"
    assert versions["torch"]
