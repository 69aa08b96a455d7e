"""Splitting the cost of an optimizer step, with costs known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from estimator.probe.devices import updates
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.updates import fit_lanes, fit_update, measure_updates


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
