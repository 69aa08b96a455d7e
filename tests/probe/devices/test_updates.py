"""Splitting the cost of an optimizer step, with costs known beforehand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.errors import ProbeError
from estimator.kernels.contention import slowdown_ratio
from estimator.machines.profile import Contention, Device, MachineProfile, Provenance
from estimator.probe.devices import host, storage, updates
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.contention import rank_jitter_ratio, summarise
from estimator.probe.devices.inventory import Cpu
from estimator.probe.devices.memory import cache_sizes, measure_cold_read, measure_first_touch
from estimator.probe.devices.updates import fit_lanes, fit_update, measure_updates
from estimator.probe.findings import Findings
from tests.conftest import make_small_profile
from tests.synthetic import Machine


class SmallCache(CpuBackend):
    """A CPU whose last-level cache is said to be small, so that emptying it takes no time."""

    def last_level_cache_bytes(self) -> int:
        return 1 << 20


def test_the_fit_recovers_the_costs_it_was_made_from() -> None:
    launch, tensor, parameter = 2e-5, 3e-6, 4e-10
    points = [
        (float(tensors), float(parameters), launch + tensors * tensor + parameters * parameter)
        for tensors, parameters in ((1, 64), (100, 6400), (100, 10**6), (12, 2.4e7), (4, 4e6))
    ]
    found = fit_update(points)
    assert found[:3] == pytest.approx((launch, tensor, parameter), rel=1e-6)
    assert found[3] == pytest.approx(0.0, abs=1e-9)


def test_no_cost_is_negative_even_where_a_free_fit_would_make_it_so() -> None:
    # More tensors in less time: an unbounded fit would give tensors a negative cost.
    found = fit_update([(1.0, 100.0, 1.0), (100.0, 100.0, 0.5), (1.0, 10_000.0, 2.0)])
    assert min(found[:3]) >= 0.0


def test_the_host_pays_for_tensors_and_the_device_for_parameters() -> None:
    sets = ((1.0, 64.0), (400.0, 25_600.0), (100.0, 4e7), (300.0, 3e8))
    # 50 µs and 4 µs a tensor on the host; 3 µs to start and 30 ps a parameter on the device.
    lanes = [(t, n, 5e-5 + 4e-6 * t, 3e-6 + 3e-11 * n) for t, n in sets]
    assert fit_lanes(lanes) == pytest.approx((5e-5, 4e-6, 3e-11), rel=1e-6)


def test_on_an_accelerator_host_and_device_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beside(SmallCache):
        """An accelerator in name: what it runs is done when the host has issued it."""

        kind = "cuda"

    monkeypatch.setattr(updates, "_SETS", ((1, 64),))
    monkeypatch.setattr(updates, "_GPU_SETS", ((6, 10_000), (2, 100)))
    monkeypatch.setattr(updates, "_ZERO_SET", (1, 64))
    emitted: list[dict[str, Any]] = []
    measure_updates(Beside(), emitted.append, budget_s=0.2)
    (first, *_) = emitted
    assert (first["form"], first["device"]) == ("foreach", "cuda")
    assert [row[:2] for row in first["lanes"]] == [(1, 64), (6, 60_000), (2, 200)]
    # Here the host waits for the kernels: it is never done before them.
    assert all(host_s > 0 and device_s > 0 for _, _, host_s, device_s in first["lanes"])


def test_sets_that_a_small_gpu_cannot_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = updates._step_s

    def short_of_memory(*asked: Any, **more: Any) -> tuple[float, ...]:
        if asked[-1] > 10_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step_s(*asked, **more)

    monkeypatch.setattr(updates, "_step_s", short_of_memory)
    monkeypatch.setattr(updates, "_SETS", ((1, 64), (6, 10_000), (1, 20_000)))
    monkeypatch.setattr(updates, "_FEW_SETS", ((1, 64),))
    monkeypatch.setattr(updates, "_ZERO_SET", (1, 64))
    emitted: list[dict[str, Any]] = []
    measure_updates(SmallCache(), emitted.append, budget_s=0.01)
    assert [row[:2] for row in emitted[0]["points"]] == [(1, 64), (6, 60_000)]


def test_a_spent_budget_keeps_every_optimizer_and_names_the_forms_that_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates, "_step_s", lambda *_, **__: (1.0,))
    emitted: list[dict[str, Any]] = []
    measure_updates(CpuBackend(), emitted.append, budget_s=-1.0)
    *found, last = emitted
    assert [(each["optimizer"], each["form"]) for each in found] == [
        (optimizer, "loop") for optimizer in ("adamw", "sgd", "sgd-momentum", "adam")
    ]
    assert {len(each["points"]) for each in found} == {3}
    assert len(last["skipped"]) == 8
    assert "adamw (foreach)" in last["skipped"]


def test_emptying_a_large_cache_takes_its_share_of_the_time_and_three_steps_count_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(updates.time, "monotonic", lambda: now[0])
    emptied: list[float] = []

    def empty() -> None:
        now[0] += 0.08
        emptied.append(now[0])

    updates._step_s(CpuBackend(), "sgd", "loop", 2, 100, evict=empty)
    assert len(emptied) == 3


def test_the_memory_that_empties_the_caches_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    source = updates.TensorSource

    def make(backend: Any) -> Any:
        made.append(source(backend))
        return made[-1]

    monkeypatch.setattr(updates, "TensorSource", make)
    monkeypatch.setattr(updates, "_SETS", ((1, 64),))
    monkeypatch.setattr(updates, "_FEW_SETS", ((1, 64),))
    monkeypatch.setattr(updates, "_ZERO_SET", (1, 64))
    measure_updates(SmallCache(), lambda _: None, budget_s=60.0)
    assert len(made) == 1


def test_caches_are_emptied_before_each_update_as_forward_and_backward_leave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    step = torch.optim.SGD.step

    def told(optimizer: torch.optim.SGD) -> None:
        done.append("updated")
        step(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", told)
    updates._step_s(CpuBackend(), "sgd", "loop", 2, 100, evict=lambda: done.append("emptied"))
    # The first step makes the optimizer's state.
    assert done[0] == "updated"
    assert done[1:] == ["emptied", "updated"] * 9


def test_a_second_in_which_the_machine_was_slow_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def step_s(_: Any, optimizer: str, form: str, *rest: Any, **gradient: float) -> tuple[float]:
        known = (optimizer, form, *rest, *gradient)
        asked.append(known)
        # Slow for what is asked of sgd first, and of adam the second time.
        slow = (optimizer, asked.count(known)) in (("sgd", 1), ("adam", 2))
        return (3.0 if slow else 1.0,)

    monkeypatch.setattr(updates, "_step_s", step_s)
    emitted: list[dict[str, Any]] = []
    measure_updates(CpuBackend(), emitted.append, budget_s=60.0)
    last = {each["optimizer"]: each for each in emitted if each.get("form") == "loop"}
    assert set(last) == {"adamw", "sgd", "sgd-momentum", "adam"}
    for each in last.values():
        assert {seconds for *_, seconds in each["points"]} == {1.0}
        assert each["zero_point"][-1] == 1.0
    assert emitted[-1] == {"skipped": []}


def case(bound: str, size: int, alone_s: float, busy_s: float) -> dict[str, object]:
    return {"bound": bound, "bytes": size, "alone_s": alone_s, "busy_s": busy_s}


def test_each_rank_is_compared_with_itself_alone() -> None:
    fast = [case("memory", 100, 1.0, 1.5), case("compute", 10, 2.0, 2.0)]
    slow = [case("memory", 100, 4.0, 10.0), case("compute", 10, 3.0, 3.3)]
    memory, compute = summarise([fast, slow])
    # (1.5 + 2.5) / 2 and (1.0 + 1.1) / 2
    assert (memory.bound, memory.devices_busy) == ("memory", 2)
    assert memory.points == ((100.0, 2.0),)
    assert compute.points[0][1] == pytest.approx(1.05)


def test_only_what_sets_ranks_apart_for_many_windows_is_their_jitter() -> None:
    # Noise from window to window, and a machine that slows down for all, are none.
    one, two = (
        [{"windows_s": [0.9, 1.1, 1.0, 1.5, 1.0]}],
        [{"windows_s": [1.1, 0.9, 1.0, 1.0, 1.5]}],
    )
    assert rank_jitter_ratio([one, two]) == 0.0
    # Medians of 1.0 and 1.1 have a variance of 0.1² / 2, windows one of 0.0002 within each rank:
    # medians of five vary by pi / 2 / 5 of that.
    steady, slow = (
        [{"windows_s": [middle - 0.02, middle + 0.02, middle, middle, middle]}]
        for middle in (1.0, 1.1)
    )
    between = 0.1**2 / 2 - math.pi / 2 * 0.0002 / 5
    assert rank_jitter_ratio([steady, slow]) == pytest.approx(between**0.5 / 1.05)


def test_ranks_that_are_disturbed_more_than_they_differ_have_no_jitter() -> None:
    # Medians of 1.0 and 1.1 again; variances within of 0.055 and 0.005 explain 0.0094 of 0.005.
    disturbed = [{"windows_s": [0.9, 1.1, 1.0, 1.5, 1.0]}]
    slow = [{"windows_s": [1.1, 1.2, 1.1, 1.0, 1.1]}]
    assert rank_jitter_ratio([disturbed, slow]) == 0.0


def test_what_falls_with_the_bytes_moved_is_noise_of_the_measurement() -> None:
    points = ((1e5, 1.5), (1e6, 0.9), (1e7, 0.6), (1e8, 1.4))
    measured = Contention(
        bound="memory",
        devices_busy=2,
        points=points,
        provenance=Provenance(source="measured", samples=4),
    )
    profile = replace(make_small_profile(), contentions=(measured,))
    # The mean of the first three, which fall, is 1.0; between sizes by the logarithm.
    for size, ratio in ((1e5, 1.0), (1e7, 1.0), (1e7 * 10**0.5, 1.2), (1e8, 1.4)):
        assert slowdown_ratio(profile, "memory", 2, size) == pytest.approx(ratio)


def test_ops_of_many_kinds_are_compared_with_each_kind_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loops:
        """A call takes 1 s, and half a second more for each further kind beside it."""

        def __init__(self, _backend: Any, *, cools: bool) -> None:
            self.more_s = 2.0 if cools else 0.5

        def forward_s(self, calls: Sequence[Any]) -> float:
            return len(calls) * (1.0 + self.more_s * (len(set(calls)) - 1))

        backward_s = forward_s

    monkeypatch.setattr(host, "_Loops", Loops)
    backend = CpuBackend()
    # Eight kinds of ops and nodes, two of views.
    assert host.mixing_costs(backend, cools=False) == (3.5, 0.5, 3.5)
    assert host.mixing_costs(backend, cools=True) == (14.0, 2.0, 14.0)


def test_mixing_costs_of_this_machine_are_microseconds() -> None:
    costs = host.mixing_costs(CpuBackend(), cools=True)
    # A second would be another unit; cores that others keep busy take some times as long.
    assert all(0.0 <= seconds < 0.1 for seconds in costs)


def device(cores: tuple[int, ...]) -> Device:
    return Device(kind="cpu", index=0, name="cores", memory_bytes=1, cores=cores)


CPU = Cpu(
    model="cpu",
    threads=16,
    numa_cores={0: tuple(range(16))},
    memory_bytes=1,
    caches={1: (32 << 10, 1), 2: (1 << 20, 1), 3: (32 << 20, 8)},
)


def test_one_core_has_its_own_second_level_and_alone_the_whole_last_one() -> None:
    assert cache_sizes(CPU, device((0,))) == (1 << 20, 32 << 20)


def test_a_group_over_two_last_level_caches_has_both() -> None:
    assert cache_sizes(CPU, device(tuple(range(16)))) == (16 << 20, 64 << 20)


def test_fresh_memory_costs_a_page_fault_per_page() -> None:
    emitted: list[dict[str, Any]] = []
    measure_first_touch(CpuBackend(), emitted.append, budget_s=0.0)
    (found,) = emitted
    # From 0.1 µs to 4 ms (where others keep the core busy) for a page of 4 KiB.
    assert 1e-7 / 4096 < found["first_touch_s_per_byte"] < 4e-3 / 4096


def test_reads_cost_more_the_more_was_read_since(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of 32 MiB: pieces of a block of 128 MiB are read, of which others are 127.5.
    monkeypatch.setattr(CpuBackend, "last_level_cache_bytes", lambda self: 32 << 20)
    emitted: list[dict[str, Any]] = []
    measure_cold_read(CpuBackend(), emitted.append, budget_s=0.0)
    _, found = emitted
    distances, shares = zip(*found["reuse_points"], strict=True)
    assert [each / (1 << 20) for each in distances] == [1, 2, 4, 8, 16, 32, 127.5]
    assert sorted(shares) == list(shares)
    assert shares[0] < 1 == shares[-1]


def test_where_time_is_short_cold_reads_are_few_and_told_before_reuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuBackend, "last_level_cache_bytes", lambda self: 32 << 20)
    heard: list[Any] = []

    class Counting(CpuBackend):
        def time_calls(self, *args: Any, repeats: int, **named: Any) -> list[float]:
            heard.append(repeats)
            return super().time_calls(*args, repeats=repeats, **named)

    for budget_s, reads in ((0.0, 64), (60.0, 255)):
        heard.clear()
        measure_cold_read(Counting(), heard.append, budget_s=budget_s)
        first = next(place for place, each in enumerate(heard) if isinstance(each, dict))
        # As many are read warm. 128 MiB are 256 pieces, one of which is left out.
        assert sum(heard[:first]) == 2 * reads
        assert "cold_read_s_per_byte" in heard[first]
        assert "reuse_points" in heard[-1]


def test_files_are_read_in_bytes_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(1000))
    now = iter((10.0, 10.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert storage.read_bytes_per_s(paths) == 3000 / 0.5


def test_reading_ends_with_its_time_after_a_file_for_each_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    path.write_bytes(bytes(1000))
    now = iter((10.0, 10.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert storage.read_bytes_per_s([path] * 5, readers=2, budget_s=-1.0) == 2000 / 0.5


@pytest.mark.parametrize(
    ("measure", "name", "count"),
    [
        (storage.copied, "copy_bytes_per_s", 64 * 2**20),
        (storage.tokens_made, "tokens_per_s", 1024 * 32),
        (storage.jpeg_decoded, "jpeg_pixels_per_s", 500 * 375),
    ],
)
def test_a_core_copies_decodes_and_makes_records(
    measure: Any, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_timed", lambda call, _: call() or 0.5)
    if name.startswith("jpeg"):
        pytest.importorskip("PIL")
    assert measure(0.1) == {name: count / 0.5}


def test_a_folder_in_memory_has_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "resident_ratio", lambda _: 1.0)
    with pytest.raises(ProbeError, match="set TMPDIR to a folder on the disk"):
        storage.files_read(0.0)


def test_what_was_found_is_in_the_profile_and_the_rest_is_missing() -> None:
    findings = Findings(at="2026-11-22")
    assert findings.input_cost() is None
    findings.take("input", {"copy_bytes_per_s": 8e9})
    findings.take("input", {"missing": ["input: no disk"]})
    cost = findings.input_cost()
    assert cost is not None
    assert (cost.copy_bytes_per_s, cost.disk_bytes_per_s) == (8e9, None)
    assert findings.missing == ["input: no disk"]
    plain = Machine().profile().to_dict() | {"input": {**_plain(cost)}}
    assert MachineProfile.from_dict(plain).input == cost


def _plain(cost: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(cost)
