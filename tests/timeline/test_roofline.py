"""Calls on machines known by their datasheet take what the shipped kernel law says."""

from __future__ import annotations

import pytest

from estimator.graph.costs import features_of
from estimator.machines.profile import Device, MachineProfile, Provenance
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.kernel_law import convolution_kind, load_law
from estimator.timeline.roofline import Roofline


def machine(**peaks: float) -> MachineProfile:
    """A GPU of 1 TB/s, 10 TFLOP/s in fp32 and 100 multiprocessors, with power to spare."""
    device = Device(
        kind="cuda",
        index=0,
        name="card",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13} | peaks,
        details={"sm_count": 100, "power_w": 1e6, "architecture": "gv100", "memory_type": "HBM2"},
    )
    return MachineProfile(name="card", devices=(device,), provenance=Provenance(source="datasheet"))


def product(rows: int, inner: int, columns: int, dtype: str = "float32") -> OpCall:
    left, right = TensorSpec((rows, inner), dtype), TensorSpec((inner, columns), dtype)
    return OpCall("aten.mm.default", (left, right), outputs=(TensorSpec((rows, columns), dtype),))


def addition(elements: int) -> OpCall:
    line = TensorSpec((elements,))
    return OpCall("aten.add.Tensor", (line, line), outputs=(line,))


def convolution(channels: int, kernel: int = 3, groups: int = 1) -> OpCall:
    image = TensorSpec((64, channels, 56, 56), "float16")
    filters = TensorSpec((channels, channels // groups, kernel, kernel), "float16")
    arguments = (image, filters, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    return OpCall("aten.convolution.default", arguments, outputs=(image,))


def seconds(profile: MachineProfile, call: OpCall, precision: str = "fp32") -> float:
    found = Roofline(profile, precision=precision).predict(call)
    assert found is not None
    assert found.source == "datasheet"
    return found.cold_s


def test_a_large_sum_streams_at_the_share_of_stacked_memory() -> None:
    # two tensors of 4 · 10⁸ bytes read, one written
    streams = load_law().streams
    expected = streams.start_s + 12 * 10**8 / (streams.memory_ratios["HBM"] * 1e12)
    assert seconds(machine(), addition(10**8)) == pytest.approx(expected)


def test_what_is_still_in_the_cache_comes_faster() -> None:
    found = Roofline(machine()).predict(addition(10**8))
    assert found is not None
    law = load_law().streams
    ratio = (found.cold_s - law.start_s) / (found.warm_s - law.start_s)
    assert ratio == pytest.approx(law.cache_speedup)


def test_the_smallest_call_takes_a_start() -> None:
    assert seconds(machine(), addition(1)) == pytest.approx(load_law().streams.start_s, rel=1e-3)


def test_no_product_beats_its_peak() -> None:
    for rows, inner, columns in ((64, 64, 64), (320, 1024, 320), (4096, 4096, 4096)):
        least = 2 * rows * inner * columns / 1e13
        assert seconds(machine(), product(rows, inner, columns)) > least


def test_a_product_with_few_tiles_leaves_multiprocessors_idle() -> None:
    # one tile on 100 multiprocessors, a short sum: half of its rate is out of reach
    alone = seconds(machine(), product(128, 128, 128)) - load_law().products.start_s
    assert alone > 2 * 2 * 128**3 / 1e13


def test_products_use_tf32_only_when_told() -> None:
    profile = machine(tfloat32=8e13)
    call = product(4096, 4096, 4096)
    fp32, tf32 = seconds(profile, call), seconds(profile, call, "tf32")
    assert tf32 < 0.25 * fp32
    assert seconds(machine(), call, "tf32") == pytest.approx(fp32)


def test_a_convolution_adds_its_bytes_to_its_flops() -> None:
    # 2 · 9 · 256 operations for each of the 64 · 256 · 56 · 56 outputs, images read and written
    law = load_law()
    flops, moved = law.convolutions.factors("dense", "forward", "contiguous")
    outputs = 64 * 256 * 56 * 56
    bytes_s = 2 * (2 * outputs + 256 * 256 * 9) / (law.streams.memory_ratios["HBM"] * 1e12)
    expected = law.streams.start_s + flops * 2 * 9 * 256 * outputs / 8e13 + moved * bytes_s
    assert seconds(machine(float16=8e13), convolution(256)) == pytest.approx(expected, rel=1e-6)


def test_depthwise_filters_run_on_the_vector_units() -> None:
    call = convolution(256, groups=256)
    slow, fast = machine(float16=8e13), machine(float16=16e13)
    assert seconds(slow, call) == pytest.approx(seconds(fast, call))


def test_kinds_of_convolutions_go_by_channels_groups_and_filters() -> None:
    def kind(inputs: int, groups: int, kernel: int, *, tensor: bool = True) -> str:
        dims = (8.0, float(inputs), 64.0, float(groups), 49.0, float(kernel), 49.0, 1.0)
        return convolution_kind(dims, is_tensor=tensor)

    assert kind(3, 1, 49) == "first"
    assert kind(64, 1, 1) == "pointwise"
    assert kind(64, 1, 9) == "dense"
    assert kind(64, 1, 9, tensor=False) == "vector dense"
    assert kind(8, 32, 9) == "grouped"
    assert kind(1, 64, 9) == "depthwise"
    assert kind(1, 64, 49) == "wide depthwise"


def test_an_operator_without_a_formula_has_no_time() -> None:
    assert Roofline(machine()).predict(OpCall("mine.unknown.default", ())) is None


def test_several_calls_take_what_each_takes_alone() -> None:
    roofline = Roofline(machine(float16=1e14))
    calls = [
        product(512, 256, 128),
        addition(10**6),
        product(4096, 64, 100, "float16"),
        convolution(64),
        product(512, 1024, 2048),
        OpCall("mine.unknown.default", ()),
    ]
    together = roofline.predict_each(calls, [features_of(call) for call in calls])
    assert together[-1] is None
    for call, found in zip(calls[:-1], together[:-1], strict=True):
        alone = roofline.predict(call)
        assert alone is not None
        assert found is not None
        assert (found.warm_s, found.cold_s) == pytest.approx((alone.warm_s, alone.cold_s), 1e-12)
