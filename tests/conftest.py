"""Fixtures shared by the tests: a small machine, a store that holds it, a command line to run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from estimator.machines.profile import (
    KernelCost,
    KernelPoint,
    Link,
    MachineProfile,
    MemoryCost,
    Provenance,
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


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    from tests.synthetic import HOST, Machine, update

    made = Machine(
        devices=2, slowdown_ratio=1.5, memory_contention=1.5, rank_jitter_ratio=0.02
    ).profile()
    cores = (
        replace(core, name="one core", memory_bytes=8 << 30, memory_bandwidth_bytes_per_s=1e10)
        for core in made.devices
    )
    calls = {
        "aten.mm.default": [matmul(size, 4e10) for size in (64, 256, 1024)],
        "aten.add.Tensor": [sum_of_two(numel, 1e10) for numel in (1 << 10, 1 << 16, 1 << 22)],
    }
    measured = {"provenance": MEASURED}
    return replace(
        made,
        name=name,
        devices=tuple(cores),
        links=(Link(kind="h2d", latency_s=1e-6, bandwidth_bytes_per_s=1e10, **measured),),
        network=(),
        collectives=(replace(made.collectives[0], pair_ratio=(), **measured),),
        overlaps=tuple(replace(each, **measured) for each in made.overlaps),
        kernels=tuple(
            KernelCost(target=target, dtype="float32", points=tuple(points), **measured)
            for target, points in calls.items()
        ),
        contentions=tuple(replace(each, **measured) for each in made.contentions),
        host=replace(HOST, **measured),
        memory=MemoryCost(
            first_touch_s_per_byte=4e-10,
            cold_read_s_per_byte=5e-11,
            private_cache_bytes=1 << 20,
            shared_cache_bytes=16 << 20,
            **measured,
        ),
        updates=tuple(
            replace(update(optimizer, 3e-9), **measured)
            for optimizer in ("sgd", "sgd-momentum", "adam", "adamw")
        ),
        **measured,
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


TINY = """
import torch

def mlp(batch=4):
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers), torch.randn(batch, 32)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A MODEL of two linear layers with 32 inputs, 64 hidden and 8 outputs."""
    (tmp_path / "tiny.py").write_text(TINY)
    return f"{tmp_path / 'tiny.py'}:mlp"


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def content(self) -> Any:
        """What a command printed as JSON."""
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one line on stderr of a command that refused its input."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("estimator: ")
        assert len(line) > 30, "too short to say what to do"
        return line


Command = Callable[..., Answer]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
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
