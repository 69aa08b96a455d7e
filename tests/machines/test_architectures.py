"""Architectures are data: checked when read, and what a device does not say is assumed aloud."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.errors import ProfileError
from estimator.kernels.datasheet_model import assumed_of, chip_of
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device
from estimator.machines.typical import architectures, read_architectures
from tests.synthetic import perceptron

ROW: dict[str, Any] = {
    "process_nm": 2,
    "tensor_cores": "asynchronous",
    "flops_per_clock": {"float32": 256},
    "source": "a whitepaper, 2027",
}


def unknown_gpu(**details: Any) -> Device:
    return Device(
        kind="cuda",
        index=0,
        name="a GPU",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13, "bfloat16": 1e14},
        details=details,
    )


def test_every_architecture_names_its_source() -> None:
    assert all(re.search(r"20\d\d", each.source) for each in architectures().values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"process_nm": 0}, "process_nm must be positive, found 0"),
        ({"tensor_cores": "many"}, "tensor_cores is 'many'"),
        ({"flops_per_clock": {"float32": -1}}, r"flops_per_clock\[float32\] must be positive"),
        ({"nvlinks": 4}, "go together"),
        ({"source": ""}, "source is empty"),
        ({"tensor_core": "none"}, "tensor_core"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused_by_name(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "architectures.json"
    path.write_text(json.dumps({"good": ROW, "bad": ROW | wrong}), encoding="utf-8")
    with pytest.raises(ProfileError, match=f"bad: .*{said}"):
        read_architectures(path)


def test_what_a_chip_does_not_say_is_taken_of_v100_and_listed() -> None:
    device = unknown_gpu()
    assert assumed_of(device) == [
        "80 multiprocessors",
        "a power limit of 300 W",
        "a boost clock of 1.5 GHz",
        "a process of 5 nm and today's tensor cores",
    ]
    chip = chip_of(device, "bfloat16")
    assert chip.multiprocessors == 80
    # 300 W over 100 TFLOP/s are 3 pJ a flop, at 1.5 GHz.
    assert chip.headroom == pytest.approx(3.0 / 1.5)
    assert chip.process_ratio == pytest.approx(5 / 12)
    assert chip.is_tensor
    assert not chip.is_early_tensor


def test_a_device_that_says_all_has_nothing_assumed() -> None:
    device = unknown_gpu(
        architecture="gp100", sm_count=56, power_w=300, boost_clock_hz=1_480_000_000
    )
    assert assumed_of(device) == []
    assert chip_of(device, "float32").process_ratio == pytest.approx(16 / 12)


def test_a_device_without_memory_bandwidth_is_refused() -> None:
    device = replace(unknown_gpu(), memory_bandwidth_bytes_per_s=None)
    with pytest.raises(ProfileError, match="'a GPU' has no memory_bandwidth_bytes_per_s"):
        chip_of(device, "float32")


def test_an_estimate_lists_what_it_assumed_of_a_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    profile = replace(load_profile("t4"), name="riddle", devices=(unknown_gpu(sm_count=40),))
    profile.save(tmp_path / "machines" / "riddle.json")
    graph = replace(perceptron([64, 64]), target="cuda")
    (text,) = (
        each for each in est.estimate(graph, "1x1:riddle").assumptions if "asks of a chip" in each
    )
    assert text == (
        "'riddle' does not say all that the kernel model asks of a chip: a power limit of 300 W, a "
        "boost clock of 1.5 GHz, a process of 5 nm and today's tensor cores assumed"
    )
