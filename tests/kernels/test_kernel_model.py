"""The kernel model: tiles in waves, streams at shares, clocks under a power limit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.files import shipped_data
from estimator.kernels import datasheet_model
from estimator.kernels.datasheet_model import (
    AttentionModel,
    Chip,
    MatmulModel,
    MemoryBoundModel,
    attention_seconds,
    chip_of,
    implicit_matmuls,
    load_kernel_model,
    matmul_seconds,
    memory_classes,
    sustained_ratio,
)
from estimator.machines.catalogue import load_profile

# Whole tiles cost nothing beyond their work, and memory never waits.
PLAIN = MatmulModel(
    vector_ratio=0.5,
    tensor_ratio=0.5,
    early_tensor_ratio=0.25,
    vector_half_tile=0.0,
    tensor_half_tile=0.0,
    vector_extra_inner=0.0,
    tensor_extra_inner=0.0,
    memory_ratio=1.0,
    vector_headroom=1e-9,
    tensor_headroom=1e-9,
    sustained_tensor_headroom=1e-9,
    process_exponent=1.0,
    long_inner=0.0,
    old_tlb_long_inner=0.0,
    start_s=0.0,
)
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


def seconds(model: MatmulModel, chip: Chip, m: float, n: float, k: float) -> float:
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


def test_one_whole_wave_runs_at_the_share_of_the_peak() -> None:
    # 10 · 10 tiles of 128 · 128 on 100 multiprocessors at 0.5 of 10 TFLOP/s
    assert seconds(PLAIN, CHIP, 1280, 1280, 512) == pytest.approx(2 * 1280 * 1280 * 512 / 5e12)


def test_early_tensor_cores_have_a_share_of_their_own() -> None:
    chip = replace(CHIP, is_tensor=True, is_early_tensor=True)
    assert seconds(PLAIN, chip, 1280, 1280, 512) == pytest.approx(
        2 * seconds(PLAIN, CHIP, 1280, 1280, 512)
    )


def test_a_long_sum_on_few_tiles_is_cut_into_pieces() -> None:
    # one tile of 128 · 128 alone would leave 99 of 100 multiprocessors idle
    uncut = 2 * 128 * 128 * 8192 / (5e12 / 100)
    assert seconds(PLAIN, CHIP, 128, 128, 8192) < 0.15 * uncut


def test_a_product_of_vectors_waits_for_memory() -> None:
    chip = replace(CHIP, memory_bytes_per_s=1e12)
    # 2 · 8192² bytes of the matrix
    assert seconds(PLAIN, chip, 1, 8192, 8192) == pytest.approx(2 * 8192**2 / 1e12, rel=0.05)


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
    base = seconds(model, CHIP, m, n, k)
    faster = replace(CHIP, flops_per_s=1e13 * more, memory_bytes_per_s=1e15 * more)
    assert seconds(model, faster, m, n, k) <= base * (1 + 1e-9)
    assert seconds(model, CHIP, m, n, k + 64) >= base * (1 - 1e-9)


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


# 8 images of 64 channels, 3 × 3 filters to 128 channels, 28 · 28 positions to 14 · 14.
STRIDED = (8.0, 64.0, 128.0, 1.0, 196.0, 9.0, 784.0, 2.0)
FLOPS = 2 * 8 * 196 * 128 * 64 * 9


def products(
    dims: tuple[float, ...], flops: float, *, is_backward: bool = False, is_tensor: bool = True
) -> list[tuple[float, float, float, float]]:
    return implicit_matmuls(dims, flops, is_backward=is_backward, is_tensor=is_tensor)


def test_a_convolution_is_a_product_of_positions_and_outputs_over_inputs_and_filter() -> None:
    assert products(STRIDED, FLOPS) == [(1.0, 8 * 196, 128.0, 64 * 9)]


def test_its_gradients_are_two_products_of_the_same_work() -> None:
    filters, image = products(STRIDED, 2 * FLOPS, is_backward=True)
    assert filters == (1.0, 128.0, 64 * 9, 8 * 196)
    # Of 9 places of a filter, every input meets 9 / 4 in the mean, as every fourth position counts.
    assert image == (1.0, 8 * 784, 64.0, 128 * 9 / 4)
    assert 2 * math.prod(filters) == 2 * math.prod(image) == FLOPS


def test_the_first_layer_has_no_gradient_of_its_image_and_channels_go_in_eights() -> None:
    first = (8.0, 3.0, 64.0, 1.0, 196.0, 49.0, 784.0, 2.0)
    flops = 2 * 8 * 196 * 64 * 3 * 49
    assert products(first, flops, is_backward=True) == [(1.0, 64.0, 8 * 49, 8 * 196)]
    found = products(first, flops, is_backward=True, is_tensor=False)
    assert found == [(1.0, 64.0, 3 * 49, 8 * 196)]


def test_a_transposed_convolution_applies_its_filter_at_every_input() -> None:
    grown = (8.0, 64.0, 128.0, 1.0, 784.0, 4.0, 196.0, 2.0)
    (found,) = products(grown, 2 * 8 * 196 * 64 * 128 * 4)
    assert 2 * math.prod(found) == 2 * 8 * 196 * 64 * 128 * 4


def test_groups_are_products_of_their_own() -> None:
    grouped = (8.0, 8.0, 8.0, 32.0, 196.0, 9.0, 196.0, 1.0)
    flops = 2 * 8 * 32 * 196 * 8 * 8 * 9
    assert products(grouped, flops) == [(32.0, 8 * 196, 8.0, 72.0)]


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
