"""Calls on machines known by their datasheet take what the kernel model says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.files import shipped_data
from estimator.graph.costs.call_costs import features_of
from estimator.kernels import datasheet_model
from estimator.kernels.datasheet_model import (
    AttentionModel,
    Chip,
    MatmulModel,
    MemoryBoundModel,
    attention_seconds,
    chip_of,
    convolution_kind,
    implicit_matmuls,
    load_kernel_model,
    matmul_seconds,
    memory_classes,
    sustained_ratio,
)
from estimator.kernels.roofline import Roofline, tensor_core_matrices
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, MachineProfile, Provenance
from estimator.tensors import OpCall, TensorSpec

# A model of round numbers: half of the peak for matmuls, whole tiles for free, power to spare.
COEFFICIENTS: dict[str, Any] = {
    "matmuls": {
        **{"vector_ratio": 0.5, "tensor_ratio": 0.5, "early_tensor_ratio": 0.5},
        **{"vector_half_tile": 0.0, "tensor_half_tile": 0.0},
        **{"vector_extra_inner": 0.0, "tensor_extra_inner": 0.0, "memory_ratio": 1.0},
        **{"vector_headroom": 1e-9, "tensor_headroom": 1e-9, "sustained_tensor_headroom": 1e-9},
        **{"process_exponent": 1.0, "long_inner": 0.0, "old_tlb_long_inner": 0.0, "start_s": 3e-6},
    },
    "convolutions": {
        "dense.forward": [1.5, 2.0],
        "vector dense.forward": [3.0, 1.0],
        "depthwise.forward": [4.0, 1.0],
    },
    "memory_bound": {
        "memory_ratios": {"HBM": 0.8, "other": 0.5},
        "shares": {"elementwise": 1.0, "other": 0.5},
        "cache_speedup": 2.5,
        "start_s": 2e-6,
    },
    "attention": {
        **{"forward_ratio": 0.5, "backward_ratio": 0.25, "padded_ratio": 1.0},
        **{"small_head": 0.0, "memory_ratio": 1.0, "start_s": 5e-6},
    },
    "errors": {"matmul": 0.1, "other": 0.3, "model": 0.2},
}


@pytest.fixture(scope="module")
def kernel_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "kernels.json"
    path.write_text(json.dumps(COEFFICIENTS), encoding="utf-8")
    return path


def machine(architecture: str = "gv100", **peaks: float) -> MachineProfile:
    """A GPU of 1 TB/s, 10 TFLOP/s in fp32 and 100 multiprocessors, with power to spare."""
    device = Device(
        kind="cuda",
        index=0,
        name="card",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13} | peaks,
        details={
            "sm_count": 100,
            "power_w": 1e6,
            "architecture": architecture,
            "memory_type": "HBM2",
        },
    )
    return MachineProfile(name="card", devices=(device,), provenance=Provenance(source="datasheet"))


def with_device(profile: MachineProfile, **changes: Any) -> MachineProfile:
    """The machine with a device of which these numbers differ."""
    return replace(profile, devices=(replace(profile.devices[0], **changes),))


def matmul(rows: int, inner: int, columns: int, dtype: str = "float32") -> OpCall:
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


def attention(heads: int, length: int, size: int) -> OpCall:
    each = TensorSpec((1, heads, length, size), "float16")
    return OpCall(
        "aten._scaled_dot_product_flash_attention.default", (each, each, each), outputs=(each,)
    )


def lstm(batch: int, steps: int, width: int, dtype: str) -> OpCall:
    states = TensorSpec((steps, batch, width), dtype)
    weights = (TensorSpec((4 * width, width), dtype),) * 2
    return OpCall("aten.lstm.input", (states, (states, states), weights), outputs=(states,))


def seconds(
    profile: MachineProfile, call: OpCall, kernel_model: Path | None = None, precision: str = "fp32"
) -> float:
    found = Roofline(profile, precision=precision, kernel_model=kernel_model).predict(call)
    assert found.source == "datasheet"
    return found.cold_s


OUTPUTS = 64 * 256 * 56 * 56
TENSOR = machine(float16=8e13)


@pytest.mark.parametrize(
    ("profile", "call", "expected_s", "rel"),
    [
        # Two tensors of 4 · 10⁸ bytes read, one written, at 0.8 of 1 TB/s: 1.5 ms, and 2 µs.
        pytest.param(machine(), addition(10**8), 1.5e-3 + 2e-6, 1e-6, id="a large sum"),
        # 12 bytes at 0.8 TB/s are 15 ps: the smallest call takes a start.
        pytest.param(machine(), addition(1), 2e-6 + 15e-12, 1e-6, id="the smallest call"),
        # A memory a thousand times as fast: 10⁹ additions at 0.3 of 10 Tflop/s.
        pytest.param(
            with_device(machine(), memory_bandwidth_bytes_per_s=1e15),
            addition(10**9),
            2e-6 + 1e9 / 3e12,
            1e-6,
            id="what only streams, far from its peak",
        ),
        # 10 · 10 tiles of 128 · 128 on 100 multiprocessors at half of 10 Tflop/s, and 3 µs to
        # start; its 11.8 MB take 12 µs beside 336 µs, and hide but for a millionth.
        pytest.param(
            machine(),
            matmul(1280, 512, 1280),
            2 * 1280 * 512 * 1280 / 5e12 + 3e-6,
            1e-5,
            id="a product of one whole wave",
        ),
        # 64 · 56 · 56 positions × 256 outputs over 256 · 9: small tiles fill 100 multiprocessors
        # all but 0.02 % of the time, at half of 80 Tflop/s, and half as long again; images read
        # and written, and filters, in 2 bytes each at 0.8 TB/s, twice.
        pytest.param(
            TENSOR,
            convolution(256),
            2e-6
            + 1.5 * 2 * 9 * 256 * OUTPUTS / 4e13
            + 2.0 * 2 * (2 * OUTPUTS + 256 * 256 * 9) / 0.8e12,
            1e-3,
            id="a convolution",
        ),
        # 2 · 9 operations an output at the 10 Tflop/s of fp32, four times as long, and its bytes.
        pytest.param(
            TENSOR,
            convolution(256, groups=256),
            2e-6 + 4.0 * 2 * 9 * OUTPUTS / 1e13 + 2 * (2 * OUTPUTS + 256 * 9) / 0.8e12,
            1e-6,
            id="depthwise filters, beside the vector units",
        ),
        # 100 heads of 128 queries fill the multiprocessors once: two products of 2 · 128 · 128 · 64
        # each at half of 80 Tflop/s; four tensors of 2 bytes at 1 TB/s on top, and 5 µs.
        pytest.param(
            TENSOR,
            attention(100, 128, 64),
            5e-6 + 100 * 2 * 2 * 128 * 128 * 64 / 4e13 + 4 * 2 * 100 * 128 * 64 / 1e12,
            1e-2,
            id="attention",
        ),
        # One sample: 128 steps each read 4 · 1024 · 1024 weights of 4 bytes (and some vectors) at
        # 1 TB/s and start a matmul and a kernel of its gates; all inputs at once are one matmul
        # more, of 64 · 64-tiles in 64 of 100 multiprocessors, at half of 10 Tflop/s.
        pytest.param(
            machine(),
            lstm(1, 128, 1024, "float32"),
            128 * (4 * (4 * 1024**2 + 2 * 4096 + 1024) / 1e12 + 5e-6)
            + 2e-6
            + 2 * 128 * 4096 * 1024 / (0.5 * 1e13),
            0.05,
            id="a recurrent layer, which reads its weights again in every step",
        ),
    ],
)
def test_a_call_takes_its_arithmetic_its_bytes_and_its_start(
    kernel_model: Path, profile: MachineProfile, call: OpCall, expected_s: float, rel: float
) -> None:
    assert seconds(profile, call, kernel_model) == pytest.approx(expected_s, rel=rel)


def test_what_is_still_in_the_cache_comes_faster(kernel_model: Path) -> None:
    found = Roofline(machine(), kernel_model=kernel_model).predict(addition(10**8))
    # 1.5 ms at 2.5 times the memory's rate.
    assert found.warm_s == pytest.approx(0.6e-3 + 2e-6)


def test_a_family_has_its_own_error_and_others_one_together(kernel_model: Path) -> None:
    found = Roofline(machine(), kernel_model=kernel_model)
    errors = [found.predict(call) for call in (matmul(8, 8, 8), addition(8))]
    assert [each.relative_error for each in errors if each] == [0.1, 0.3]
    assert found.shared_error == 0.2


@pytest.mark.parametrize(
    ("architecture", "dtype", "columns", "times"),
    [
        # Rows at odd elements of two bytes take kernels of an older generation.
        ("gv100", "float16", 6401, 2.5),
        ("gv100", "float16", 6402, 1.0),
        ("gv100", "float32", 6401, 1.0),
        # Hopper copies rows that start at multiples of 16 bytes.
        ("gh100", "float16", 6408, 1.0),
        ("gh100", "float16", 6402, 1 / 0.45),
        ("gh100", "float16", 6401, 1 / 0.21),
        ("gh100", "float32", 6401, 1.0),
    ],
)
def test_rows_of_two_bytes_are_fast_where_each_starts_as_its_generation_wants(
    kernel_model: Path, architecture: str, dtype: str, columns: int, times: float
) -> None:
    fits = Roofline(machine(architecture, float16=1e14), kernel_model=kernel_model)
    found, even = (fits.predict(matmul(12800, 12800, n, dtype)) for n in (columns, 6400))
    # Up to eight columns more than 50 whole tiles of 128 are a 51st one.
    assert found.cold_s / even.cold_s == pytest.approx(times * 51 / 50, rel=0.02)


def test_a_factor_stored_by_columns_has_rows_of_its_other_dimension() -> None:
    def found(rows: int, columns: int, inner: int, strides: tuple[int, int] | None) -> list[float]:
        left = TensorSpec((rows, inner), "float16", strides)
        right = TensorSpec((inner, columns), "float16")
        result = TensorSpec((rows, columns), "float16")
        call = OpCall("aten.mm.default", (left, right), outputs=(result,))
        features = features_of(call)
        return [
            matrix.bytes for matrix in tensor_core_matrices(features) if matrix.aligned_bytes < 4
        ]

    assert found(64, 66, 65, None) == [2 * 64 * 65]
    assert found(64, 66, 65, (1, 64)) == []
    assert found(65, 66, 64, (1, 65)) == [2 * 65 * 64]
    assert found(65, 66, 64, None) == []
    assert found(64, 65, 66, None) == [2 * 66 * 65, 2 * 64 * 65]
    assert found(64, 1, 65, None) == []


def test_a_compiler_pads_where_the_copies_take_less_than_they_save(kernel_model: Path) -> None:
    wide, narrow = matmul(12800, 12800, 6401, "float16"), matmul(12800, 2, 6401, "float16")
    eager, compiled = (
        Roofline(machine(float16=1e14), pads_matmuls=pads, kernel_model=kernel_model)
        for pads in (False, True)
    )
    slow, padded = eager.predict(wide), compiled.predict(wide)
    # Copies of (12800 x 6401) twice, read and written at 0.8 of 1 TB/s, beside 2.5 times as long.
    copies_s = 2 * 2 * 2 * 12800 * 6401 / 0.8e12
    assert padded.cold_s == pytest.approx(slow.cold_s / 2.5 + copies_s, rel=0.01)
    # What only waits for memory would wait twice.
    assert compiled.predict(narrow) == eager.predict(narrow)


def test_no_product_beats_its_peak() -> None:
    for rows, inner, columns in ((64, 64, 64), (320, 1024, 320), (4096, 4096, 4096)):
        least = 2 * rows * inner * columns / 1e13
        assert seconds(machine(), matmul(rows, inner, columns)) > least


def test_a_product_with_few_tiles_leaves_multiprocessors_idle() -> None:
    # one tile on 100 multiprocessors, a short sum: half of its rate is out of reach
    alone = seconds(machine(), matmul(128, 128, 128)) - seconds(machine(), matmul(1, 1, 1))
    assert alone > 2 * 2 * 128**3 / 1e13


def test_products_use_tf32_only_when_told(kernel_model: Path) -> None:
    profile = machine(tfloat32=8e13)
    call = matmul(4096, 4096, 4096)
    fp32, tf32 = (
        seconds(profile, call, kernel_model, precision) - 3e-6 for precision in ("fp32", "tf32")
    )
    assert fp32 == pytest.approx(2 * 4096**3 / 5e12, rel=1e-2)
    assert tf32 == pytest.approx(fp32 / 8, rel=1e-2)
    assert seconds(machine(), call, kernel_model, "tf32") == pytest.approx(fp32 + 3e-6)


def test_weights_of_a_recurrent_layer_may_stay_in_the_cache(kernel_model: Path) -> None:
    profile, call = machine(), lstm(1, 128, 1024, "float32")
    details = profile.devices[0].details | {"l2_cache_bytes": 17e6}
    held = with_device(profile, details=details)
    saved_s = seconds(profile, call, kernel_model) - seconds(held, call, kernel_model)
    # 16.8 MB a step come at 2.5 TB/s.
    assert saved_s == pytest.approx(128 * 16.8e6 * (1 - 1 / 2.5) / 1e12, rel=0.01)


def test_many_samples_share_the_weights_of_a_step(kernel_model: Path) -> None:
    one, many = (
        seconds(machine(), lstm(batch, 128, 1024, "float32"), kernel_model) for batch in (1, 64)
    )
    assert many < 64 / 4 * one


@pytest.mark.parametrize(
    ("inputs", "groups", "kernel", "tensor", "kind"),
    [
        (3, 1, 49, True, "first"),
        (64, 1, 1, True, "pointwise"),
        (64, 1, 9, True, "dense"),
        # Transforms are for 3 × 3 on images; 3 × 3 × 3 and 5 × 5 are not.
        (64, 1, 9, False, "vector transformed"),
        (64, 1, 27, False, "vector direct"),
        (64, 1, 25, False, "vector dense"),
        (8, 32, 9, True, "grouped"),
        (1, 64, 9, True, "depthwise"),
        (1, 64, 49, True, "wide depthwise"),
    ],
)
def test_kinds_of_convolutions_go_by_channels_groups_and_filters(
    inputs: int, groups: int, kernel: int, tensor: bool, kind: str
) -> None:
    dims = (8.0, float(inputs), 64.0, float(groups), 49.0, float(kernel), 49.0, 1.0)
    assert convolution_kind(dims, is_tensor=tensor) == kind


def test_an_operator_without_a_formula_has_no_time() -> None:
    assert Roofline(machine()).predict(OpCall("mine.unknown.default", ())) is None


def test_several_calls_take_what_each_takes_alone() -> None:
    roofline = Roofline(machine(float16=1e14))
    calls = [
        matmul(512, 256, 128),
        addition(10**6),
        matmul(4096, 64, 100, "float16"),
        convolution(64),
        matmul(512, 1024, 2048),
        OpCall("mine.unknown.default", ()),
    ]
    together = roofline.predict_each(calls, [features_of(call) for call in calls])
    assert together[-1] is None
    for call, found in zip(calls[:-1], together[:-1], strict=True):
        alone = roofline.predict(call)
        assert (found.warm_s, found.cold_s) == pytest.approx((alone.warm_s, alone.cold_s), 1e-12)


# Whole tiles cost nothing beyond their work, and memory never waits.
PLAIN = MatmulModel(**COEFFICIENTS["matmuls"] | {"early_tensor_ratio": 0.25, "start_s": 0.0})


CHIP = Chip(
    flops_per_s=1e13,
    memory_bytes_per_s=1e15,
    multiprocessors=100.0,
    headroom=1.0,
    process_ratio=1.0,
    is_tensor=False,
    is_early_tensor=False,
    has_warp_groups=False,
    has_old_tlb=False,
)


def kernel_seconds(model: MatmulModel, chip: Chip, m: float, n: float, k: float) -> float:
    found = matmul_seconds(
        model,
        chip,
        batch=1,
        rows=m,
        columns=n,
        inner=k,
        moved_bytes=2 * (m * k + k * n + m * n),
    )
    return float(found[0])


def test_early_tensor_cores_have_a_share_of_their_own() -> None:
    chip = replace(CHIP, is_tensor=True, is_early_tensor=True)
    assert kernel_seconds(PLAIN, chip, 1280, 1280, 512) == pytest.approx(
        2 * kernel_seconds(PLAIN, CHIP, 1280, 1280, 512)
    )


def test_a_long_sum_on_few_tiles_is_cut_into_pieces() -> None:
    # one tile of 128 · 128 alone would leave 99 of 100 multiprocessors idle
    uncut = 2 * 128 * 128 * 8192 / (5e12 / 100)
    assert kernel_seconds(PLAIN, CHIP, 128, 128, 8192) < 0.15 * uncut


def test_a_product_of_vectors_waits_for_memory() -> None:
    chip = replace(CHIP, memory_bytes_per_s=1e12)
    # 2 · 8192² bytes of the matrix
    assert kernel_seconds(PLAIN, chip, 1, 8192, 8192) == pytest.approx(2 * 8192**2 / 1e12, rel=0.05)


def test_half_the_power_that_full_speed_needs_halves_the_clock() -> None:
    model = replace(PLAIN, vector_headroom=2.0)
    # (1 + 2⁶)^(−1/6): the sharper the limit, the closer to a half
    assert float(sustained_ratio(model, CHIP)) == pytest.approx(65 ** (-1 / 6))
    assert float(sustained_ratio(model, replace(CHIP, headroom=20.0))) == pytest.approx(
        1.0, abs=1e-5
    )


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    k=st.integers(1, 9000),
    more=st.floats(1.0, 4.0),
)
def test_time_never_rises_with_the_chip_or_falls_with_the_product(
    m: int, n: int, k: int, more: float
) -> None:
    model = load_kernel_model().matmuls
    base = kernel_seconds(model, CHIP, m, n, k)
    faster = replace(CHIP, flops_per_s=1e13 * more, memory_bytes_per_s=1e15 * more)
    assert kernel_seconds(model, faster, m, n, k) <= base * (1 + 1e-9)
    assert kernel_seconds(model, CHIP, m, n, k + 64) >= base * (1 - 1e-9)


def test_a_share_between_two_row_lengths_is_interpolated_over_their_logarithm() -> None:
    model = MemoryBoundModel(
        memory_ratios={"other": 0.8},
        shares={"softmax.forward": ((256.0, 0.4), (4096.0, 0.8)), "other": 0.5},
        cache_speedup=2.0,
        start_s=0.0,
    )
    assert model.share(("softmax.forward", "softmax"), 1024.0) == pytest.approx(0.6)
    assert model.share(("softmax.forward",), 1e6) == pytest.approx(0.8)
    assert model.share(("index.forward", "index"), 100.0) == 0.5


def test_memory_goes_by_architecture_before_class() -> None:
    model = MemoryBoundModel(
        memory_ratios={"HBM": 0.9, "gp100": 0.7, "other": 0.8},
        shares={},
        cache_speedup=2.0,
        start_s=0.0,
    )
    ratios = [
        model.memory_ratio(load_profile(name).devices[0])
        for name in ("h100-sxm", "p100-pcie", "t4")
    ]
    assert ratios == [0.9, 0.7, 0.8]


def test_attention_pads_heads_and_fills_multiprocessors_in_waves() -> None:
    model = AttentionModel(
        forward_ratio=0.5,
        backward_ratio=0.25,
        padded_ratio=1.0,
        small_head=0.0,
        memory_ratio=1.0,
        start_s=0.0,
        waiting_ratio=0.8,
        overlapping_ratio=1.25,
    )

    def taken_s(
        heads: float,
        size: float,
        *,
        is_backward: bool = False,
        waits: bool = True,
        chip: Chip = CHIP,
    ) -> float:
        return float(
            attention_seconds(
                model,
                chip,
                sustained=1.0,
                heads=heads,
                queries=128,
                head_size=size,
                flops=1e9 * heads * size / 64,
                moved_bytes=0.0,
                is_backward=is_backward,
                waits=waits,
            )
        )

    # 100 blocks on 100 multiprocessors: one wave; 101: two
    assert taken_s(100, 64) == pytest.approx(100e9 / 5e12)
    assert taken_s(101, 64) == pytest.approx(200e9 / 5e12)
    assert taken_s(100, 64, is_backward=True) == pytest.approx(2 * taken_s(100, 64))
    # Tensor cores that compute while others load are kept waiting.
    hopper = replace(CHIP, has_warp_groups=True)
    assert taken_s(100, 64, chip=hopper) == pytest.approx(100e9 / (0.8 * 5e12))
    assert taken_s(100, 64, chip=hopper, waits=False) == pytest.approx(100e9 / 5e12)
    # Kernels that overlap exponentials and products gain by that with larger heads, there alone.
    assert taken_s(100, 128, chip=hopper, waits=False) == pytest.approx(200e9 / (1.25 * 5e12))
    assert taken_s(100, 96, chip=hopper, waits=False) == pytest.approx(150e9 / (1.125 * 5e12))
    assert taken_s(100, 128, waits=False) == pytest.approx(200e9 / 5e12)
    # a head of 40 runs as one of 64
    assert taken_s(100, 40) == pytest.approx(taken_s(100, 64))


def test_tensor_cores_are_known_by_architecture_and_dtype() -> None:
    v100, p100 = (load_profile(name).devices[0] for name in ("v100-sxm", "p100-pcie"))
    assert chip_of(v100, "float16").is_tensor
    assert chip_of(v100, "float16").is_early_tensor
    a100, h100 = (load_profile(name).devices[0] for name in ("a100-sxm-80gb", "h100-sxm"))
    assert not chip_of(a100, "bfloat16").has_warp_groups
    assert chip_of(h100, "bfloat16").has_warp_groups
    assert not chip_of(v100, "float32").is_tensor
    assert not chip_of(p100, "float16").is_tensor


def test_a_chosen_law_answers_in_place_of_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasheet_model, "_chosen", [])
    plain = json.loads((shipped_data("fits") / "kernels.json").read_text(encoding="utf-8"))
    plain["memory_bound"]["start_s"] = 1.0
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    datasheet_model.choose_kernel_model(path)
    assert load_kernel_model().memory_bound.start_s == 1.0


# 8 images of 64 channels, 3 × 3 filters to 128 channels, 28 · 28 positions to 14 · 14; the first
# layer of 7 × 7 on 3 channels; 2 × 2 filters transposed, at every input; 32 groups.
STRIDED = (8.0, 64.0, 128.0, 1.0, 196.0, 9.0, 784.0, 2.0)
FIRST = (8.0, 3.0, 64.0, 1.0, 196.0, 49.0, 784.0, 2.0)
GROWN = (8.0, 64.0, 128.0, 1.0, 784.0, 4.0, 196.0, 2.0)
GROUPED = (8.0, 8.0, 8.0, 32.0, 196.0, 9.0, 196.0, 1.0)
FLOPS = {
    STRIDED: 2 * 8 * 196 * 128 * 64 * 9,
    FIRST: 2 * 8 * 196 * 64 * 3 * 49,
    GROWN: 2 * 8 * 196 * 64 * 128 * 4,
    GROUPED: 2 * 8 * 32 * 196 * 8 * 8 * 9,
}


@pytest.mark.parametrize(
    ("dims", "passes", "is_tensor", "products"),
    [
        # Of positions and outputs over inputs and filter; groups are products of their own.
        (STRIDED, "forward", True, [(1.0, 8 * 196, 128.0, 64 * 9)]),
        (GROUPED, "forward", True, [(32.0, 8 * 196, 8.0, 72.0)]),
        # Of 9 places of a filter, every input meets 9 / 4 in the mean, as every fourth position
        # counts.
        (
            STRIDED,
            "both gradients",
            True,
            [(1.0, 128.0, 64 * 9, 8 * 196), (1.0, 8 * 784, 64.0, 128 * 9 / 4)],
        ),
        # The first layer has no gradient of its image, and channels go in eights.
        (FIRST, "one gradient", True, [(1.0, 64.0, 8 * 49, 8 * 196)]),
        (FIRST, "one gradient", False, [(1.0, 64.0, 3 * 49, 8 * 196)]),
    ],
)
def test_a_convolution_is_products_of_the_same_work(
    dims: tuple[float, ...], passes: str, is_tensor: bool, products: list[tuple[float, ...]]
) -> None:
    flops = FLOPS[dims] * len(products)
    backward = passes != "forward"
    assert implicit_matmuls(dims, flops, is_backward=backward, is_tensor=is_tensor) == products
    if dims != FIRST or not is_tensor:
        assert sum(2 * math.prod(each) for each in products) == flops


def test_a_transposed_convolution_applies_its_filter_at_every_input() -> None:
    (found,) = implicit_matmuls(GROWN, FLOPS[GROWN], is_backward=False, is_tensor=True)
    assert 2 * math.prod(found) == FLOPS[GROWN]


def test_memory_that_keeps_its_check_bits_among_the_data_is_a_class_of_its_own() -> None:
    found = {
        name: memory_classes(load_profile(name).devices[0])
        for name in ("t4", "rtx-a6000", "rtx-3090", "a100-sxm-80gb")
    }
    assert found == {
        "t4": ("GDDR ECC", "GDDR"),
        "rtx-a6000": ("GDDR",),
        "rtx-3090": ("GDDR",),
        "a100-sxm-80gb": ("HBM",),
    }
