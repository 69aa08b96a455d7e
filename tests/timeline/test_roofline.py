"""Without measurements a call takes a start, then the longer of computing and moving its bytes."""

from __future__ import annotations

import pytest

from estimator.profile import Device, MachineProfile, Provenance
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.roofline import Roofline

START_S = 2.5e-6


def machine(**peaks: float) -> MachineProfile:
    """A GPU of 1 TB/s, 10 TFLOP/s in fp32 and 100 multiprocessors."""
    device = Device(
        kind="cuda",
        index=0,
        name="card",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13} | peaks,
        details={"sm_count": 100},
    )
    return MachineProfile(name="card", devices=(device,), provenance=Provenance(source="datasheet"))


def product(rows: int, inner: int, columns: int, dtype: str = "float32") -> OpCall:
    left, right = TensorSpec((rows, inner), dtype), TensorSpec((inner, columns), dtype)
    return OpCall("aten.mm.default", (left, right), outputs=(TensorSpec((rows, columns), dtype),))


def addition(elements: int) -> OpCall:
    line = TensorSpec((elements,))
    return OpCall("aten.add.Tensor", (line, line), outputs=(line,))


def seconds(profile: MachineProfile, call: OpCall, precision: str = "fp32") -> float:
    found = Roofline(profile, precision=precision).predict(call)
    assert found is not None
    assert found.source == "datasheet"
    return found.warm_s


def test_a_large_product_reaches_the_usual_share_of_the_peak() -> None:
    # 2 · 4096³ operations at 0.70 of 10 TFLOP/s
    expected = START_S + 2 * 4096**3 / (0.70 * 1e13)
    assert seconds(machine(), product(4096, 4096, 4096)) == pytest.approx(expected)


def test_a_large_sum_reaches_the_usual_share_of_the_memory_bandwidth() -> None:
    # two tensors of 4 · 10⁸ bytes read, one written, at 0.80 of 1 TB/s
    expected = START_S + 12 * 10**8 / (0.80 * 1e12)
    assert seconds(machine(), addition(10**8)) == pytest.approx(expected)


def test_the_smallest_call_takes_a_start() -> None:
    assert seconds(machine(), addition(1)) == pytest.approx(START_S, rel=1e-3)


def test_a_product_with_few_tiles_leaves_multiprocessors_idle() -> None:
    # 5 · 5 tiles of 64 · 64 on 100 multiprocessors, no long sum to cut: a quarter of the rate
    expected = START_S + 2 * 320 * 320 * 1024 / (0.25 * 0.70 * 1e13)
    assert seconds(machine(), product(320, 1024, 320)) == pytest.approx(expected)


def test_half_precision_runs_at_its_own_peak_or_at_that_of_fp32() -> None:
    call = product(4096, 4096, 4096, "bfloat16")
    fast, slow = seconds(machine(bfloat16=1e14), call), seconds(machine(), call)
    assert slow - START_S == pytest.approx(10 * (fast - START_S))


def test_products_use_tf32_only_when_told_and_convolutions_unless_told() -> None:
    profile = machine(tfloat32=8e13)
    call = product(4096, 4096, 4096)
    fp32, tf32 = seconds(profile, call), seconds(profile, call, "tf32")
    assert fp32 - START_S == pytest.approx(8 * (tf32 - START_S))
    image, filters = TensorSpec((64, 256, 56, 56)), TensorSpec((256, 256, 3, 3))
    arguments = (image, filters, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    convolution = OpCall("aten.convolution.default", arguments, outputs=(image,))
    # 2 · 9 · 256 operations for each of the outputs, at half of 80 TFLOP/s
    expected = START_S + 2 * 9 * 256 * image.numel / (0.50 * 8e13)
    assert seconds(profile, convolution) == pytest.approx(expected)


def test_an_operator_without_a_formula_has_no_time() -> None:
    assert Roofline(machine()).predict(OpCall("mine.unknown.default", ())) is None
