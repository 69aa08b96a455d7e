"""Transformer Engine's casts and products take as long as NVIDIA publishes.

Its benchmark (docs/examples/gemm_profiling of TransformerEngine, 2026) times the twelve products of
a layer of 4,096 with an inner size of 16,384 and 15,872 tokens, with factors cast before, and with
the casts of both factors.
"""

from __future__ import annotations

import pytest

from estimator.kernels.roofline import Roofline
from estimator.machines.catalogue import load_profile
from estimator.tensors import OpCall, TensorSpec

TOKENS = 15872
# Rows and columns of weights: queries, keys and values, what attention gives, the MLP's two.
WEIGHTS = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
SHAPES = [
    shape
    for rows, columns in WEIGHTS
    for shape in (
        (TOKENS, rows, columns),
        (TOKENS, columns, rows),
        (columns, TOKENS, rows),
    )
]
BLOCKS_OF_32 = 33 / 32


def seconds(machine: str, calls: list[OpCall]) -> float:
    roofline = Roofline(load_profile(machine), precision="bf16")
    predictions = [roofline.predict(call) for call in calls]
    return sum(prediction.cold_s for prediction in predictions if prediction is not None)


def product(shape: tuple[int, int, int], dtype: str, target: str) -> OpCall:
    rows, inner, columns = shape
    factors = TensorSpec((rows, inner), dtype), TensorSpec((inner, columns), dtype)
    return OpCall(target, factors, outputs=(TensorSpec((rows, columns), "bfloat16"),))


def products(machine: str, dtype: str = "bfloat16", target: str = "aten.mm.default") -> float:
    return seconds(machine, [product(shape, dtype, target) for shape in SHAPES])


# Milliseconds of all twelve in bf16 and in the narrow type, factors cast before.
@pytest.mark.parametrize(
    ("machine", "dtype", "overload", "bf16_ms", "narrow_ms"),
    [
        ("h200", "float8_e4m3fn", "default", 31.968, 16.785),
        ("b300", "float8_e4m3fn", "default", 13.102, 6.812),
        ("b300", "float8_e4m3fn", "mxfp8", 13.102, 7.161),
        ("b300", "float4_e2m1fn_x2", "default", 13.102, 3.764),
    ],
)
def test_products_of_narrow_factors_gain_less_than_their_units(
    machine: str, dtype: str, overload: str, bf16_ms: float, narrow_ms: float
) -> None:
    narrow_s = products(machine, dtype, f"aten._scaled_mm.{overload}")
    assert products(machine) / narrow_s == pytest.approx(bf16_ms / narrow_ms, rel=0.03)
    if machine == "b300":  # the other card was one of 600 W, for PCIe
        assert narrow_s * 1e3 == pytest.approx(narrow_ms, rel=0.06)


def cast(elements: int, dtype: str, target: str, times: int = 1) -> OpCall:
    rows = TensorSpec((elements // 4096, 4096), dtype)
    given = TensorSpec((elements // 4096, 4096), "bfloat16")
    return OpCall(target, (given,), outputs=(rows,) * times)


def casts(machine: str, scaling: str) -> float:
    """Both factors of each product: the left one by rows and columns, the right one by rows."""
    calls = []
    for rows, inner, columns in SHAPES:
        for elements, times in ((rows * inner, 2), (inner * columns, 1)):
            if scaling == "mxfp8":
                wide = int(elements * BLOCKS_OF_32)
                calls.append(cast(wide, "float8_e4m3fn", "te.quantize.default", times))
                continue
            given = TensorSpec((elements,), "bfloat16")
            number = TensorSpec((1,), "float32")
            calls.append(OpCall("aten.amax.default", (given,), outputs=(number,)))
            if scaling == "nvfp4":
                calls += [cast(elements, "float4_e2m1fn_x2", "te.quantize.nvfp4")] * times
            else:
                target = "te.quantize.turned" if times > 1 else "te.quantize.default"
                calls.append(cast(elements, "float8_e4m3fn", target, times))
    return seconds(machine, calls)


# Milliseconds with casts less those without.
@pytest.mark.parametrize(
    ("machine", "scaling", "published_ms"),
    [
        ("b300", "current", 9.147 - 6.812),
        ("b300", "mxfp8", 8.984 - 7.161),
        ("b300", "nvfp4", 6.453 - 3.764),
        ("h200", "current", 20.285 - 16.785),
    ],
)
def test_casts_take_as_long_as_published(machine: str, scaling: str, published_ms: float) -> None:
    assert casts(machine, scaling) * 1e3 == pytest.approx(published_ms, rel=0.15)


def test_a_cast_by_rows_and_columns_takes_as_long_as_on_a_b200() -> None:
    # 8192 × 8192, bf16 to MXFP8: 52.34 µs (ROCm/TransformerEngine, pull request 598).
    elements = int(8192 * 8192 * BLOCKS_OF_32)
    found_s = seconds("b200", [cast(elements, "float8_e4m3fn", "te.quantize.default", 2)])
    assert found_s == pytest.approx(52.34e-6, rel=0.15)


def test_blackwell_turns_nothing_that_has_one_scale() -> None:
    turn = OpCall(
        "te.quantize.turn",
        (TensorSpec((8192, 8192), "float8_e4m3fn"),),
        outputs=(TensorSpec((8192, 8192), "float8_e4m3fn"),),
    )
    assert seconds("b200", [turn]) == 0.0
    assert seconds("h100-sxm", [turn]) > 0.0
