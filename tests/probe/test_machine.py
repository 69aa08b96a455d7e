"""The order of a probe, its budget, and what is left when it is cut short."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, permutations
from typing import Any

import pytest

from estimator.errors import ProbeError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import (
    Device,
    KernelPoint,
    Link,
    MachineProfile,
    Provenance,
)
from estimator.probe import machine as machine_module
from estimator.probe.cluster.findings import ClusterFindings, Member, World
from estimator.probe.cluster.steps import ProbePlan
from estimator.probe.devices import inventory
from estimator.probe.devices.backend import software_versions
from estimator.probe.devices.calls import grid_call
from estimator.probe.devices.inventory import read_cpu
from estimator.probe.findings import Findings, with_best_rates, with_datasheet
from estimator.probe.grid.kernels import kernel_grid
from estimator.probe.links.copies import peer_links
from estimator.probe.machine import probe_machine
from estimator.probe.node import links_of_node
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.collectives.algorithms import widest_link

POINT = {"call": grid_call("relu.default", TensorSpec((8,))).call.encode(), "warm_s": 1e-6}


def cut_short(by: type[BaseException]) -> Callable[..., None]:
    """Parts that find nothing, but for one kernel, after which all ends that way."""
    canaries_s = cycle([0.009, 0.003, 0.004])

    def run_job(_processes: Any, function: str, on_finding: Any, **_: Any) -> None:
        if "kernels" in function:
            on_finding(dict(POINT))
            raise by("the process died")
        if "canary" in function:
            on_finding({"canary_s": next(canaries_s)})

    return run_job


def test_interrupted_it_keeps_what_it_has_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "run_job", cut_short(KeyboardInterrupt))
    profile = probe_machine(devices=1, kind="cpu", patience_s=0.0)
    assert profile.canary_s == 0.004
    assert [cost.target for cost in profile.kernels] == ["aten.relu.default"]
    rest = ["kernels", "first touch", "input"]
    assert profile.missing == tuple(f"{part}: interrupted" for part in rest)
    assert MachineProfile.from_dict(profile.to_dict()) == profile


def test_a_part_that_dies_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "run_job", cut_short(ProbeError))
    profile = probe_machine(devices=1, kind="cpu", patience_s=0.0, budget_s=5.0)
    assert profile.canary_s == 0.004
    assert profile.missing == ("kernels: the process died",)


def slow_parts(monkeypatch: pytest.MonkeyPatch, *taken_s: float) -> list[float]:
    """What each part is given, on a clock that each moves on by so much, and then by 0.5 s."""
    now, given, left = [0.0], list[float](), list(taken_s)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    # All kernels in one piece.
    monkeypatch.setattr(machine_module, "_PIECE_S", 1e9)

    def run_job(
        _: Any, function: str, on_finding: Any, *, budget_s: float = 0.0, **__: Any
    ) -> None:
        if "canary" in function:
            return
        given.append(budget_s)
        now[0] += left.pop(0) if left else 0.5
        if "kernels" in function:
            size = len(kernel_grid("cpu"))
            on_finding({"done": size, "lacking": [], "is_lost": False})

    monkeypatch.setattr(machine_module, "run_job", run_job)
    return given


# Of one device of cores: host, cold reads, updates, kernels, first touch, input.
SHARES = (0.06, 0.015, 0.09, 0.58, 0.02, 0.02)


def test_parts_share_what_is_left_and_none_starts_after_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = slow_parts(monkeypatch, 2.5, 60.0)
    profile = probe_machine(devices=1, kind="cpu", patience_s=0.0, budget_s=10.0)
    # 0.95 of the budget is planned.
    first, second = 9.5 * 0.06 / sum(SHARES), 7.0 * 0.015 / sum(SHARES[1:])
    # What a profile is for is measured all the same, with a quarter of its time.
    late = [9.5 * share / sum(SHARES) / 4 for share in (0.09, 0.58)]
    assert given == pytest.approx([first, second, *late])
    assert profile.missing == tuple(f"{n}: the budget was over" for n in ("first touch", "input"))


def test_a_short_probe_that_takes_too_long_loses_none_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = slow_parts(monkeypatch, 11.0)
    profile = probe_machine(devices=1, kind="cpu", patience_s=0.0, budget_s=10.0)
    assert profile.missing == ()
    # After 11 of 10 s the others still have a quarter of what was planned for them.
    assert given[1:] == pytest.approx([9.5 * share / sum(SHARES) / 4 for share in SHARES[1:]])


def test_progress_names_the_part_and_never_passes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "run_job", cut_short(KeyboardInterrupt))
    seen: list[tuple[str, float]] = []
    probe_machine(devices=1, kind="cpu", patience_s=0.0, report=lambda *told: seen.append(told))
    assert ("kernels") in [part for part, _ in seen]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_asking_for_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "read_gpus", lambda: ())
    with pytest.raises(ProbeError, match="no NVIDIA GPU"):
        probe_machine(kind="cuda")


def test_a_real_probe_of_a_few_seconds_gives_a_sound_profile() -> None:
    # Beside other work, what comes before the kernels may take all the time of a short probe.
    for budget_s in (6.0, 30.0):
        profile = probe_machine(devices=1, kind="cpu", patience_s=0.0, budget_s=budget_s)
        if profile.kernels:
            break
    assert profile.host is not None
    assert profile.memory is not None
    assert profile.kernels
    assert profile.devices[0].peak_flops_per_s["float32"] > 1e8
    assert any(part.startswith("kernels:") for part in profile.missing)
    assert MachineProfile.from_dict(profile.to_dict()) == profile


def test_unreached_and_lacking_kernels_are_said() -> None:
    findings = Findings(at="2026-01-01")
    for done in (2, 3):
        findings.take(
            "kernels", {"done": done, "lacking": ["aten.a.default: no"], "is_lost": False}
        )
    findings.end_kernels(10)
    assert findings.missing == [
        "kernels: 7 of 10 calls were not reached in the time",
        "kernels: 1 calls do not run (aten.a.default: no)",
    ]


def test_a_profile_says_which_share_of_its_calls_the_probe_came_to() -> None:
    findings = Findings(at="2026-01-01")
    assert findings.kernels_timed_ratio(10) == 0.0
    # Interrupted, it counts what there is: a call that was measured again is one.
    for warm_s in (1e-6, 2e-6):
        findings.take("kernels", POINT | {"warm_s": warm_s})
    assert findings.kernels_timed_ratio(10) == pytest.approx(0.1)
    findings.take("kernels", {"done": 3, "lacking": ["aten.a.default: no"], "is_lost": False})
    assert findings.kernels_timed_ratio(10) == pytest.approx(0.3)


def point(target: str, inputs: tuple[TensorSpec, ...], warm_s: float) -> KernelPoint:
    call = OpCall(target, inputs, outputs=(inputs[0],))
    return KernelPoint(call=call, warm_s=warm_s)


def test_a_devices_best_rates_come_from_products_and_the_largest_sum() -> None:
    square, wider = TensorSpec((100, 100)), TensorSpec((100, 200))
    million, small = TensorSpec((10**6,)), TensorSpec((10,))
    device = Device(kind="cpu", index=0, name="core", memory_bytes=1, cores=(0,))
    points = (
        point("aten.mm.default", (square, square), 1e-4),
        point("aten.mm.default", (square, wider), 4e-4),
        point("aten.add.Tensor", (million, million), 1e-3),
        point("aten.add.Tensor", (small, small), 1e-12),
    )
    (rated,) = with_best_rates([device], {(each.call, False): each for each in points})
    # 2 · 100³ flops in 0.1 ms; three arrays of 4 MB in 1 ms.
    assert rated.peak_flops_per_s == {"float32": pytest.approx(2e10)}
    assert rated.memory_bandwidth_bytes_per_s == pytest.approx(1.2e10)


def test_convolutions_of_float32_run_on_tensor_cores_of_gpus() -> None:
    gpu = Device(kind="cuda", index=0, name="gpu", memory_bytes=1)
    x, weight = TensorSpec((1, 10, 10, 10)), TensorSpec((20, 10, 1, 1))
    steps, nothing, one = (1, 1), (0, 0), (1, 1)
    arguments = (x, weight, None, steps, nothing, one, False, nothing, 1)
    call = OpCall("aten.convolution.default", arguments, (), (TensorSpec((1, 20, 10, 10)),))
    convolution = KernelPoint(call=call, warm_s=5e-7)
    square = TensorSpec((100, 100))
    exact = point("aten.mm.default", (square, square), 1e-4)
    rounded = replace(exact, warm_s=5e-5)
    points = {(call, False): convolution, (exact.call, False): exact, (exact.call, True): rounded}
    (rated,) = with_best_rates([gpu], points)
    # 2 · 100³ flops in 0.1 ms and in 50 µs; 2 · 2000 · 10 flops of the convolution in 0.5 µs.
    assert rated.peak_flops_per_s == pytest.approx({"float32": 2e10, "tfloat32": 8e10})


def test_settings_that_change_speed_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(kind="cpu", index=0, name="cores", memory_bytes=1, cores=(0, 1))
    monkeypatch.setattr("os.environ", {"OMP_PROC_BIND": "true", "HOME": "/somewhere"})
    versions = software_versions(device)
    assert versions["settings"] == "OMP_PROC_BIND=true"
    assert versions["threads"] == "2"
    assert versions["torch"]


def busy(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    """Let others seem to use that share of the cores, by a clock that goes on only in sleep."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def others_cpu_s(_pid: int, _threads: Any) -> float:
        return others * now_s * len(read_cpu().cores)

    monkeypatch.setattr(machine_module, "others_cpu_s", others_cpu_s)
    watch = partial(machine_module.InterferenceWatch, clock=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(machine_module, "InterferenceWatch", watch)


def test_a_busy_machine_is_probed_after_a_quarter_of_the_budget_and_refused_by_a_strict_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy(monkeypatch, 0.5)
    monkeypatch.setattr(machine_module, "run_job", cut_short(KeyboardInterrupt))
    said: list[str] = []
    profile = probe_machine(devices=1, kind="cpu", budget_s=8.0, say=said.append)
    assert [cost.target for cost in profile.kernels] == ["aten.relu.default"]
    assert profile.interference is not None
    assert profile.interference.waited_s == pytest.approx(2.0)
    waits = "other programs used 50 % of the cores: waiting 2 s at most before going on"
    assert said == [waits]
    with pytest.raises(ProbeError, match=r"other programs used 50 % of the cores"):
        probe_machine(devices=1, kind="cpu", budget_s=8.0, strict=True, say=said.append)
    assert said == [waits, waits]


def test_pieces_of_the_grid_that_others_disturbed_are_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = kernel_grid("cpu")[:4]
    monkeypatch.setattr(machine_module, "kernel_grid", lambda *_, **__: grid)
    pieces: list[int] = []

    def run_job(
        _: Any, function: str, on_finding: Any, *, arguments: Any = None, **__: Any
    ) -> None:
        if "kernels" in function:
            pieces.append(arguments["first"])
            done = arguments["first"] + 1
            on_finding({"done": done, "lacking": [], "is_lost": False})

    class Watch(machine_module.InterferenceWatch):
        """Finds every second piece disturbed, and has it measured again."""

        def run(self, measure: Callable[[], None]) -> None:
            before = len(pieces)
            measure()
            if len(pieces) > before and pieces[-1] % 2:
                measure()

    monkeypatch.setattr(machine_module, "run_job", run_job)
    monkeypatch.setattr(machine_module, "InterferenceWatch", Watch)
    profile = probe_machine(devices=1, kind="cpu", patience_s=0.0)
    assert pieces == [0, 1, 1, 2, 3, 3]
    assert profile.kernels_timed_ratio == 1.0
    assert profile.missing == ()


def test_an_earlier_profile_of_the_same_state_tells_how_long_the_canary_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy(monkeypatch, 0.0)
    monkeypatch.setattr(machine_module, "run_job", cut_short(KeyboardInterrupt))
    first = probe_machine(devices=1, kind="cpu", patience_s=0.0)
    assert first.canary_s == 0.004
    other_state = replace(first, software={**first.software, "threads": "99"}, canary_s=0.002)
    quick = replace(first, canary_s=0.002)
    ratios = []
    for earlier in (quick, other_state):
        profile = probe_machine(devices=1, kind="cpu", patience_s=0.0, earlier=earlier)
        assert profile.interference is not None
        ratios.append(profile.interference.canary_ratio)
    # 4 ms, of which 2 ms, or 3 ms as the quickest here, are usual.
    assert ratios == pytest.approx([2.0, 4 / 3])


def test_what_is_measured_again_takes_the_place_of_what_was_disturbed() -> None:
    findings = Findings(at="2026-01-01")
    findings.take("kernels", dict(POINT))
    findings.take("kernels", POINT | {"warm_s": 5e-7})
    (cost,) = findings.kernel_costs()
    assert [point.warm_s for point in cost.points] == [5e-7]
    update = {"optimizer": "sgd", "form": "loop", "device": "cpu", "zero_point": (1, 10, 1.0)}
    for factor in (3.0, 1.0):
        points = [(1, 10, factor), (2, 10, 1.5 * factor), (1, 20, 1.5 * factor)]
        findings.take("updates", {**update, "points": points})
    assert [cost.points[0][2] for cost in findings.updates.values()] == [1.0]
    for skipped in (["adam (fused)", "sgd (fused)"], ["sgd (fused)"]):
        findings.take("updates", {"skipped": skipped})
    assert findings.missing == ["updates: sgd (fused)"]


def gpus(name: str, peers: Callable[[int, int], str], count: int = 8) -> tuple[Device, ...]:
    """So many GPUs; `peers` says over what one of them reads another."""
    return tuple(
        Device(
            kind="cuda",
            index=index,
            name=name,
            memory_bytes=80 << 30,
            details={
                "nvlink_links": 18 if peers(index, index ^ 1) == "nvlink" else 0,
                "peer_access": " ".join(
                    f"{other}:{peers(index, other)}" for other in range(count) if other != index
                ),
            },
        )
        for index in range(count)
    )


def copied(devices: tuple[Device, ...], rate: Callable[[int, int], float]) -> tuple[Link, ...]:
    """The links of copies at so many bytes a second between any two, of two sizes each."""
    indices = [device.index for device in devices]
    found = {
        (one, other): [(size, 5e-6 + size / rate(one, other)) for size in (1e6, 1e8)]
        for one, other in permutations(indices, 2)
    }
    return peer_links(devices, found)


def probed(devices: tuple[Device, ...], links: tuple[Link, ...]) -> MachineProfile:
    provenance = Provenance(source="measured")
    profile = MachineProfile(name="box", devices=devices, links=links, provenance=provenance)
    return with_datasheet(profile)


def test_one_process_measures_all_of_a_gpu_alone_and_others_what_is_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = gpus("NVIDIA A10G", lambda *_: "no", count=2)
    monkeypatch.setattr(machine_module, "choose_devices", lambda *_, **__: devices)
    ran: list[tuple[str, str, bool]] = []
    stops: list[int] = []

    class Processes(machine_module.DeviceProcesses):
        def stop(self) -> None:
            stops.append(len(ran))

        def run(self, _function: str, arguments: Any, **_: Any) -> list[Any]:
            assert (len(self.devices), self.world) == (2, True)
            ran.append((arguments["step"], "all", True))
            return []

    def run_job(
        processes: Processes, function: str, on_finding: Any, *, prepares: bool = True, **_: Any
    ) -> None:
        name = function.rpartition(":")[2]
        if name != "emit_canary":
            ran.append((name, processes.devices[0].kind, prepares))
        if name == "measure_kernels":
            size = len(kernel_grid("cuda"))
            on_finding({"done": size, "lacking": [], "is_lost": False})

    monkeypatch.setattr(machine_module, "DeviceProcesses", Processes)
    monkeypatch.setattr(machine_module, "run_job", run_job)
    profile = probe_machine(patience_s=0.0)
    alone = ("facts", "host_copies", "host", "cold_read", "updates", "kernels")
    assert ran[:6] == [(f"measure_{what}", "cuda", True) for what in alone]
    # Nothing ended that process before, and pages are fresh in no process that keeps its memory.
    assert min(stops) == 6
    assert ran[6:8] == [(f"measure_{what}", "cpu", False) for what in ("first_touch", "input")]
    steps = ("collectives", "contention", "overlap", "copies")
    assert ran[8:12] == [(step, "all", True) for step in steps]
    assert ran[12:] == [("measure_updates", "cpu", True)]
    assert profile.missing == ()


def test_a_probed_box_of_h100_keeps_what_its_switch_adds_and_multicasts() -> None:
    devices = gpus("NVIDIA H100 80GB HBM3", lambda *_: "nvlink")
    box = probed(devices, copied(devices, lambda *_: 3.8e11))
    (link,) = [each for each in box.links if each.kind == "nvlink"]
    # What was measured is the rate; no copy tells of NVLink SHARP, nor how long a hop takes.
    assert link.provenance.source == "measured"
    assert link.bandwidth_bytes_per_s == pytest.approx(3.8e11, rel=1e-3)
    (known,) = [each for each in load_profile("h100-sxm").links if each.kind == "nvlink"]
    assert known.latency_s < 2e-6 < 5e-6, "what the copies take"
    assert (link.reduces, link.latency_s, link.ring_devices) == (True, known.latency_s, None)
    assert widest_link(box, 8) == link
    assert box.devices[3].details["architecture"] == "gh100"
    assert box.devices[3].details["nvlink_links"] == 18


def test_where_copies_were_not_timed_the_datasheet_says_over_what_gpus_reach_each_other() -> None:
    switched = probed(gpus("NVIDIA H100 80GB HBM3", lambda *_: "nvlink"), ())
    assert [(link.kind, link.reduces) for link in switched.links] == [("nvlink", True)]
    # The same name without its links, as behind a hypervisor that hides them.
    assert probed(gpus("NVIDIA H100 80GB HBM3", lambda *_: "pcie"), ()).links == ()
    assert probed(gpus("NVIDIA H100 80GB HBM3", lambda *_: "no", count=1), ()).links == ()


def test_copies_of_gpus_without_peer_to_peer_go_over_the_host() -> None:
    devices = gpus("NVIDIA A10G", lambda *_: "no", count=4)
    box = probed(devices, copied(devices, lambda *_: 9e9))
    (link,) = box.links
    assert (link.kind, link.peer_to_peer, link.reduces) == ("pcie", False, False)
    assert link.bandwidth_bytes_per_s == pytest.approx(9e9, rel=1e-3)


class _AtHome:
    """A group of all GPUs of a node, whose every rank finds the same, in the order asked for."""

    kind = "cuda"

    def __init__(self, devices: tuple[Device, ...], *found: list[Any]) -> None:
        members = [
            Member(rank=rank, host="", device=device, machine="")
            for rank, device in enumerate(devices)
        ]
        self.world, self.found = World(members=tuple(members)), list(found)

    def measured(self, ranks: Sequence[int], _measure: Any) -> list[list[Any]]:
        own = self.found.pop(0)
        return [own for _ in ranks]


def test_links_of_gpus_are_those_to_the_host_with_all_busy_and_those_between_any_two() -> None:
    devices = gpus("NVIDIA A10G", lambda *_: "no", count=2)
    sizes = (1e6, 1e8)
    over_host = [
        {"kind": kind, "pinned": pinned, "points": [(size, size / 1e10) for size in sizes]}
        for kind in ("h2d", "d2h")
        for pinned in (True, False)
    ]
    between = [
        {"from": one, "to": other, "points": [(size, size / 5e9) for size in sizes]}
        for one, other in ((0, 1), (1, 0))
    ]
    plan = ProbePlan(findings=ClusterFindings(at="now"))
    links_of_node(_AtHome(devices, over_host, between), plan, 1.0)  # type: ignore[arg-type]
    links = plan.findings.links
    assert [(link.kind, link.pinned, link.flows) for link in links] == [
        ("h2d", True, 2),
        ("h2d", False, 2),
        ("d2h", True, 2),
        ("d2h", False, 2),
        ("pcie", False, 1),
    ]
    assert links[-1].bandwidth_bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert not links[-1].peer_to_peer


def test_bridged_pairs_are_rings_of_two_beside_the_bus_of_all() -> None:
    devices = gpus(
        "NVIDIA GeForce RTX 3090",
        lambda one, other: "nvlink" if one ^ 1 == other else "pcie",
        count=4,
    )
    links = copied(devices, lambda one, other: 5e10 if one ^ 1 == other else 2e10)
    assert [(link.kind, link.ring_devices) for link in links] == [("nvlink", 2), ("pcie", None)]
    box = probed(devices, links)
    assert widest_link(box, 2).kind == "nvlink"  # type: ignore[union-attr]
    assert widest_link(box, 4).kind == "pcie"  # type: ignore[union-attr]


def test_a_gpu_that_no_catalogue_knows_stays_as_it_was_measured() -> None:
    devices = gpus("NVIDIA Prototype 9000", lambda *_: "pcie", count=2)
    assert "architecture" not in probed(devices, ()).devices[0].details
