"""Fixtures shared by the tests: a small machine, a store that holds it, a command line to run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from estimator.machines.profile import (
    CollectiveCost,
    Contention,
    Device,
    HostCost,
    KernelCost,
    KernelPoint,
    Link,
    MachineProfile,
    MemoryCost,
    OverlapCost,
    Provenance,
    UpdateCost,
)
from estimator.tensors import OpCall, TensorSpec

# Read where torch and numpy are first imported, which is after this, and in processes that tests
# start: two workers' threads on two cores wait for one another longer than they compute.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# The same examples each time, as long as each takes; --hypothesis-profile=default draws others, and
# thorough ten times as many.
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=1000)
settings.load_profile("ci")

MEASURED = Provenance(source="measured", at="2026-01-01", samples=5, relative_error=0.05)


def matmul(size: int, flops_per_s: float) -> KernelPoint:
    """A square aten.mm at a given rate."""
    square = TensorSpec((size, size))
    call = OpCall("aten.mm.default", (square, square), outputs=(square,))
    return KernelPoint(call=call, warm_s=2e-6 + 2 * size**3 / flops_per_s)


def sum_of_two(numel: int, bytes_per_s: float) -> KernelPoint:
    """An elementwise aten.add at a given rate."""
    line = TensorSpec((numel,))
    call = OpCall("aten.add.Tensor", (line, line), outputs=(line,))
    return KernelPoint(call=call, warm_s=2e-6 + 12 * numel / bytes_per_s)


def make_small_profile(name: str = "local") -> MachineProfile:
    """Two one-core devices with one entry in every group of numbers, in round figures."""
    cores = [
        Device(
            kind="cpu",
            index=index,
            name="one core",
            memory_bytes=8 << 30,
            memory_bandwidth_bytes_per_s=1e10,
            peak_flops_per_s={"float32": 5e10},
            cores=(index,),
        )
        for index in range(2)
    ]
    all_reduce = CollectiveCost(
        op="all_reduce",
        backend="gloo",
        group_size=2,
        points=tuple((2.0**k, 1e-4 + 2.0**k / 1e9) for k in range(10, 27, 4)),
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        provenance=MEASURED,
    )
    matmuls = tuple(matmul(size, 4e10) for size in (64, 256, 1024))
    sums = tuple(sum_of_two(numel, 1e10) for numel in (1 << 10, 1 << 16, 1 << 22))
    return MachineProfile(
        name=name,
        devices=tuple(cores),
        links=(Link(kind="h2d", latency_s=1e-6, bandwidth_bytes_per_s=1e10, provenance=MEASURED),),
        collectives=(all_reduce,),
        overlaps=(
            OverlapCost(
                compute="compute_bound",
                backend="gloo",
                group_size=2,
                size_bytes=1 << 24,
                exposed_ratio=0.8,
                collective_slowdown_ratio=1.5,
                provenance=MEASURED,
            ),
        ),
        kernels=(
            KernelCost(
                target="aten.mm.default", dtype="float32", points=matmuls, provenance=MEASURED
            ),
            KernelCost(target="aten.add.Tensor", dtype="float32", points=sums, provenance=MEASURED),
        ),
        contentions=(
            Contention(
                bound="memory",
                devices_busy=2,
                points=((1e6, 1.0), (1e8, 1.5)),
                provenance=MEASURED,
            ),
        ),
        host=HostCost(
            forward_op_s=4e-6,
            forward_view_s=2e-6,
            backward_op_s=3e-6,
            bare_op_s=2e-6,
            module_call_s=3e-6,
            step_s=2e-5,
            ddp_step_s=2e-4,
            ddp_bucket_s=3e-5,
            provenance=MEASURED,
        ),
        memory=MemoryCost(
            first_touch_s_per_byte=4e-10,
            cold_read_s_per_byte=5e-11,
            private_cache_bytes=1 << 20,
            shared_cache_bytes=16 << 20,
            provenance=MEASURED,
        ),
        updates=tuple(
            UpdateCost(
                optimizer=optimizer,
                form="loop",
                device="cpu",
                launch_s=1e-5,
                per_tensor_s=2e-5,
                per_parameter_s=3e-9,
                provenance=MEASURED,
            )
            for optimizer in ("sgd", "sgd-momentum", "adam", "adamw")
        ),
        rank_jitter_ratio=0.02,
        provenance=MEASURED,
    )


@pytest.fixture
def small_profile() -> MachineProfile:
    """A machine of two one-core devices."""
    return make_small_profile()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_profile: MachineProfile) -> Path:
    """A user's store that knows the small machine as 'local'."""
    folder = tmp_path / "store"
    monkeypatch.setenv("ESTIMATOR_HOME", str(folder))
    small_profile.save(folder / "machines" / "local.json")
    return folder


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on stderr of a command that refused its input."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("estimator: ")
        assert len(line) > 30, "too short to say what to do"
        return line


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run a command line in this process."""
    from estimator.cli.main import main

    def run(*words: object) -> Answer:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Answer(code, out, err)

    return run
