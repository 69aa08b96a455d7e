"""The seam between CPU and CUDA, with clocks that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from estimator.errors import ProbeError
from estimator.probe.devices.backend import (
    CpuBackend,
    CudaBackend,
    allocator_name,
    allocator_text,
    device_seconds,
    filling_side,
)


class FakeCuda:
    """A device whose every call takes `call_ms`, and a log of what was queued."""

    def __init__(self, call_ms: float) -> None:
        self.now_ms = 0.0
        self.call_ms = call_ms
        self.log: list[str] = []

    def is_available(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        self.log.append(f"device {index}")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.log.append("spin")
        self.now_ms += 1000.0

    def work(self, _number: int) -> None:
        self.log.append("call")
        self.now_ms += self.call_ms

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at_ms = cuda, 0.0

    def record(self) -> None:
        self.at_ms = self.cuda.now_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_cuda_times_are_seconds_without_the_spin() -> None:
    cuda = FakeCuda(call_ms=2.5)
    backend = CudaBackend(1, cuda=cuda, clock=lambda: 0.0)
    assert backend.time_calls(cuda.work, repeats=3) == pytest.approx([0.0025] * 3)
    assert cuda.log[0] == "device 1"


def test_cuda_calls_are_queued_behind_a_spin_and_awaited_once_per_flight() -> None:
    cuda = FakeCuda(call_ms=1.0)
    backend = CudaBackend(0, cuda=cuda, clock=lambda: 0.0)
    cuda.log.clear()
    assert len(backend.time_calls(cuda.work, repeats=100, once=True)) == 100
    flights = " ".join(cuda.log).split("synchronize")[:-1]
    assert [flight.split().count("call") for flight in flights] == [64, 36]
    assert all(flight.split()[0] == "spin" for flight in flights)


def test_a_sequence_calls_everything_exactly_once() -> None:
    cuda = FakeCuda(call_ms=1.0)
    numbers: list[int] = []
    CudaBackend(0, cuda=cuda).time_calls(numbers.append, repeats=70, once=True)
    assert numbers == list(range(70))


def test_issuing_a_call_is_timed_by_the_hosts_clock_on_an_idle_device() -> None:
    cuda, seconds = FakeCuda(call_ms=5.0), iter([0.0, 80e-6, 1.0, 1.0 + 64e-6, 2.0, 2.0 + 96e-6])
    backend = CudaBackend(0, cuda=cuda, clock=lambda: next(seconds))
    cuda.log.clear()
    # The quickest of three rounds of eight calls: 64 µs.
    assert backend.issue_s(cuda.work) == pytest.approx(8e-6)
    assert cuda.log == 3 * ["synchronize", *8 * ["call"]] + ["synchronize"]
    assert CpuBackend().issue_s(cuda.work) is None


def test_what_events_add_to_a_call_is_taken_off() -> None:
    class SlowEvents(FakeCuda):
        """Recording an event takes the device 1 ms."""

        def Event(self, *, enable_timing: bool) -> Any:
            self.now_ms += 1.0
            return super().Event(enable_timing=enable_timing)

    cuda = SlowEvents(call_ms=2.0)
    backend = CudaBackend(0, cuda=cuda, clock=lambda: 0.0)
    assert backend.time_calls(cuda.work, repeats=2) == pytest.approx([0.003] * 2)
    backend.measure_events(cuda.work)
    # 64 calls between two events take 64 · 2 + 1 ms, 129 / 64 ms each: nearly 1 ms less than 3.
    assert backend.time_calls(cuda.work, repeats=2) == pytest.approx([129e-3 / 64] * 2)


def test_a_slow_host_makes_the_next_spin_of_a_sequence_longer() -> None:
    now, spins = [0.0], []

    class Spinning(FakeCuda):
        def _sleep(self, cycles: int) -> None:
            spins.append(cycles)

    def slow(_number: int) -> None:
        now[0] += 1e-3

    backend = CudaBackend(0, cuda=Spinning(1.0), clock=lambda: now[0])
    backend.time_calls(slow, repeats=128, once=True)
    # Two spins of 64 calls each; the host turned out to need 1 ms a call, twice that is allowed.
    assert spins[1] == pytest.approx(2.5e9 * 2 * 64e-3, rel=0.01)
    assert spins[1] > 5 * spins[0]


def test_preparing_a_call_on_the_cpu_is_not_timed() -> None:
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    backend = CpuBackend(clock=lambda: now[0])
    seconds = backend.time_calls(lambda _: advance(2.0), repeats=2, before=lambda _: advance(50.0))
    assert seconds == [2.0, 2.0]


def test_only_an_error_that_stays_loses_the_device() -> None:
    class Broken(FakeCuda):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not CudaBackend(0, cuda=FakeCuda(1.0)).is_lost()
    assert CudaBackend(0, cuda=Broken(1.0)).is_lost()


def test_a_batch_of_collectives_is_timed_from_where_the_devices_met() -> None:
    cuda = FakeCuda(call_ms=2.0)

    def meet() -> None:
        cuda.now_ms += 500.0  # another rank is late

    def batch() -> None:
        for number in range(4):
            cuda.work(number)

    assert device_seconds(batch, cuda, meet=meet) == pytest.approx(0.008)
    # Behind a spin: the host issues all of it before the first of it runs.
    assert cuda.log == ["synchronize", "spin", *["call"] * 4, "synchronize"]


@pytest.mark.parametrize(
    ("multiprocessors", "major", "flops_per_s"),
    [(132, 9, 989e12), (72, 8, 125e12), (148, 10, 2250e12)],
    ids=["H100", "A10G", "B200"],
)
def test_a_product_that_fills_a_gpu_takes_a_millisecond_at_its_peak(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, major: int, flops_per_s: float
) -> None:
    facts = SimpleNamespace(multi_processor_count=multiprocessors, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: facts)
    side = filling_side(CudaBackend(0, cuda=FakeCuda(1.0)))
    # Dense bfloat16 peaks of the datasheets; of cards with half of an A100's rate twice as long.
    assert 0.9e-3 < 2 * side**3 / flops_per_s < 3e-3


def test_no_cuda_is_refused_in_words() -> None:
    class NoCuda:
        def is_available(self) -> bool:
            return False

    with pytest.raises(ProbeError, match="no CUDA device"):
        CudaBackend(0, cuda=NoCuda())


def test_a_preloaded_allocator_is_recognised() -> None:
    assert allocator_name("7f00 r-xp /lib/libjemalloc.so.2\n7f10 /lib/libc.so.6") == "jemalloc"
    assert allocator_name("7f10 r-xp /lib/x86_64-linux-gnu/libc.so.6") == "glibc"


def test_settings_of_the_allocator_are_part_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"MALLOC_ARENA_MAX": "1", "HOME": "x", "GLIBC_TUNABLES": "a=b"}
    monkeypatch.setattr("os.environ", settings)
    assert allocator_text().endswith("GLIBC_TUNABLES=a=b MALLOC_ARENA_MAX=1")
