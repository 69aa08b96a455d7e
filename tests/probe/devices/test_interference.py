"""What other programs take while a machine is probed: seen, waited for, measured again, refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from estimator.errors import ProbeError
from estimator.machines.profile import DeviceKind, Interference
from estimator.probe.devices.interference import (
    SHARED_GPU_RATIO,
    InterferenceWatch,
    check_interference,
    others_cpu_s,
)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two cores on a clock of its own, of which others use some until a moment."""

    def __init__(self, others: float = 0.0, until_s: float = float("inf")) -> None:
        self.others, self.until_s = others, until_s
        self.now_s = self.others_s = 0.0
        self.measured: list[float] = []
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.others_s += self.others * max(0.0, min(seconds, self.until_s - self.now_s))
        self.now_s += seconds

    def measure(self) -> None:
        """One second of work on one core."""
        self.sleep(1.0)
        self.measured.append(self.now_s)

    def watch(
        self,
        patience_s: float,
        canary: Callable[[], float | None] = lambda: None,
        cores: int = 2,
        spare_cores: int = 0,
    ) -> InterferenceWatch:
        return InterferenceWatch(
            patience_s=patience_s,
            cores=cores,
            spare_cores=spare_cores,
            read_others_s=lambda: self.others_s,
            canary=canary,
            say=self.said.append,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_own_work_disturbs_nothing() -> None:
    machine = Machine()
    watch = machine.watch(60.0)
    assert watch.await_quiet() == Interference()
    watch.run(machine.measure)
    assert len(machine.measured) == 1
    assert watch.interference() == Interference()
    assert not machine.said


def test_what_others_disturbed_is_measured_again_once_they_have_ended() -> None:
    machine = Machine(others=1.0, until_s=5.0)
    watch = machine.watch(60.0)
    watch.run(machine.measure)
    # Disturbed until second 1, quiet from second 5 on, and looked at every quarter of a second.
    assert machine.measured == [1.0, pytest.approx(6.25)]
    found = watch.interference()
    assert found.others_ratio == 0.0
    assert found.repeats == 1
    # The first second was measured in vain, the look that met others is not counted.
    assert found.waited_s == pytest.approx(1.0 + 4.0)
    assert machine.said == ["other programs used 50 % of the cores"]


def test_it_waits_no_longer_than_its_patience_and_keeps_what_it_has() -> None:
    machine = Machine(others=0.4)
    watch = machine.watch(10.0)
    watch.run(machine.measure)
    watch.run(machine.measure)
    assert len(machine.measured) == 2
    assert machine.now_s == pytest.approx(2.0 + 10.0, abs=1.0)
    # 0.4 of two cores all the time.
    assert watch.interference().others_ratio == pytest.approx(0.2)


def test_the_wait_for_a_quiet_machine_ends_with_the_patience() -> None:
    machine = Machine(others=0.4)
    assert machine.watch(10.0).await_quiet().others_ratio == pytest.approx(0.2)
    assert machine.now_s == pytest.approx(10.0, abs=0.5)
    # A twentieth of the cores disturbs nothing.
    machine = Machine(others=0.1)
    assert machine.watch(10.0).await_quiet().others_ratio == pytest.approx(0.05)
    assert machine.now_s < 0.5


def test_others_on_cores_that_nothing_needs_disturb_nothing() -> None:
    # Of eight cores a GPU needs one: seven are left for others, and 7.5 are half of one too many.
    for others, expected in ((5.0, 0.0), (7.5, 0.5)):
        machine = Machine(others=others)
        watch = machine.watch(0.0, cores=1, spare_cores=7)
        watch.run(machine.measure)
        assert watch.interference().others_ratio == pytest.approx(expected)


def test_a_canary_that_runs_slow_disturbs_where_no_load_is_seen() -> None:
    machine = Machine()
    times: Iterable[float] = iter([1.0, 1.0, 2.0, 2.0, 1.0, 1.0])
    watch = machine.watch(60.0, lambda: next(iter(times)))
    for _ in range(3):
        watch.run(machine.measure)
    # The third is disturbed, as is the look behind it; then it is measured again.
    assert len(machine.measured) == 4
    # No program was seen, so none is named.
    assert machine.said == ["a fixed matmul took 2.00 times as long as usual"]
    assert watch.canaries_s == [1.0, 1.0, 1.0]
    assert watch.interference().canary_ratio == 1.0
    watch.usual_canary_s = 0.5
    assert watch.interference().canary_ratio == 2.0


def test_a_profile_has_the_canary_of_the_whole_probe_not_that_of_its_first_moment() -> None:
    machine = Machine()
    # A quarter of the moments run 1.25 times as long, the first among them.
    times = iter([1.25, 1.0, 1.01, 1.02, 1.25, 1.0, 1.01, 1.02])
    watch = machine.watch(0.0, lambda: next(times))
    for _ in range(8):
        watch.run(machine.measure)
    assert watch.canary_s == pytest.approx(1.015)
    # Beside an earlier probe whose median was the same nothing looks slow.
    watch.usual_canary_s = 1.015
    assert watch.interference().canary_ratio == pytest.approx(1.015)
    assert InterferenceWatch().canary_s is None


def test_a_gpu_at_its_limit_of_power_is_not_disturbed_and_a_shared_one_is() -> None:
    canaries_s = [1.0, 1.0, 1.4, 1.4, 1.4]

    def ratio(kind: DeviceKind, usual_canary_s: float | None = None) -> float:
        watch = InterferenceWatch(kind=kind, canaries_s=canaries_s, usual_canary_s=usual_canary_s)
        return watch.interference().canary_ratio

    assert ratio("cpu") == 1.4
    assert ratio("cuda") == 1.0
    assert ratio("cuda", 0.7) == pytest.approx(2.0)
    # From 1980 to 1440 MHz its clock falls by a factor of 1.375, which is no other program.
    assert SHARED_GPU_RATIO > 1980 / 1440


def test_only_what_is_beyond_doubt_is_refused() -> None:
    check_interference(Interference(others_ratio=0.15, canary_ratio=1.5))
    with pytest.raises(ProbeError, match=r"used 16 % of the cores.*without --strict"):
        check_interference(Interference(others_ratio=0.16))
    with pytest.raises(ProbeError, match=r"1\.60 times as long"):
        check_interference(Interference(canary_ratio=1.6))


def test_sharing_a_core_half_of_the_time_takes_twice_as_long() -> None:
    assert Interference(others_ratio=0.5).relative_error == pytest.approx(math.log(2))
    assert Interference(others_ratio=0.2).relative_error == pytest.approx(math.log(1.25))
    assert Interference(canary_ratio=1.3).relative_error == pytest.approx(math.log(1.3))
    assert not Interference(others_ratio=0.05).matters


def process(folder: Path, pid: int, parent: int, ticks: tuple[int, int, int, int]) -> None:
    (folder / str(pid)).mkdir()
    before = " ".join("0" * 9)
    text = f"{pid} (a (name) 7) S {parent} {before} {' '.join(map(str, ticks))} 20 0"
    (folder / str(pid) / "stat").write_text(text)


def test_cpu_times_are_of_the_cores_and_of_a_process_with_all_below_it(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    # user nice system idle iowait irq softirq steal: idle time and interrupts do not count.
    (proc / "stat").write_text(
        "cpu  0 0 0 0 0 0 0 0 0 0\n"
        "cpu0 100 10 50 900 5 6 7 40 0 0\n"
        "cpu1 300 0 0 0 0 0 0 0 0 0\n"
        "cpu10 7000 0 0 0 0 0 0 0 0 0\n"
        "intr 1 2\n"
    )
    process(proc, 5, 1, (10, 20, 30, 40))
    process(proc, 6, 5, (1, 1, 0, 0))
    process(proc, 7, 6, (0, 0, 0, 4))
    process(proc, 8, 1, (5000, 0, 0, 0))
    # 500 ticks of both cores, 106 of which are of process 5 and of 6 and 7 below it.
    assert others_cpu_s(5, (0, 1), tmp_path) == (500 - 106) / TICKS_PER_S
    assert others_cpu_s(5, (0,), tmp_path / "nowhere") is None
