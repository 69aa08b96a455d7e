"""Kernel fits recover known machines and tell algorithms apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from estimator.graph.costs.call_costs import features_of, nonnegative_fit
from estimator.kernels.fits import KernelFits, terms, variant
from estimator.kernels.roofline import Roofline
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, KernelCost, KernelPoint, MachineProfile, Provenance
from estimator.tensors import OpCall, TensorSpec

MEASURED = Provenance(source="measured")


def _mm(rows: int, inner: int, columns: int) -> OpCall:
    factors = TensorSpec((rows, inner)), TensorSpec((inner, columns))
    return OpCall("aten.mm.default", factors, (), (TensorSpec((rows, columns)),))


def _pointwise(batch: int, channels: int, filters: int, side: int) -> OpCall:
    image = TensorSpec((batch, channels, side, side))
    tail = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    arguments = (image, TensorSpec((filters, channels, 1, 1)), None, *tail)
    found = TensorSpec((batch, filters, side, side))
    return OpCall("aten.convolution.default", arguments, (), (found,))


def _profile(calls: list[tuple[OpCall, float]]) -> MachineProfile:
    points = tuple(KernelPoint(call=call, warm_s=s, cold_s=2 * s) for call, s in calls)
    kernel = KernelCost(
        target="aten.mm.default", dtype="float32", points=points, provenance=MEASURED
    )
    device = Device(kind="cpu", index=0, name="c", memory_bytes=1 << 30, cores=(0,))
    return MachineProfile(name="m", devices=(device,), kernels=(kernel,), provenance=MEASURED)


def test_of_very_many_points_some_are_fitted() -> None:
    # A profile of 4 MB may hold 20,000 points: set beside each other they would take 9 GiB.
    few = [(_mm(side, side, side), 1e-6 + 2 * side**3 / 1e11) for side in range(8, 168, 8)]
    many = KernelFits(_profile(few * 1000))
    asked = _mm(50, 60, 70)
    found, expected = many.predict(asked), KernelFits(_profile(few)).predict(asked)
    assert found.warm_s == pytest.approx(expected.warm_s, rel=0.05)


def test_what_one_call_alone_has_does_not_grow_without_bound() -> None:
    def total(shape: tuple[int, ...], over: tuple[int, ...]) -> OpCall:
        kept = tuple(size for axis, size in enumerate(shape) if axis not in over)
        return OpCall("aten.sum.dim_IntList", (TensorSpec(shape), over), (), (TensorSpec(kept),))

    # Across rows at 3 TB/s; one sum along them, 18 µs for 40 rows, which is its launch.
    sizes = ((16_000, 640), (6_000, 800), (25_000, 384), (8_192, 2_560), (2_000, 1_200))
    calls = [(total(shape, (0,)), 5e-6 + 4 * shape[0] * shape[1] / 3e12) for shape in sizes]
    calls.append((total((4, 40, 30, 30), (0, 2, 3)), 1.8e-5))
    found = KernelFits(_profile(calls)).predict(total((128, 1_152, 7, 7), (2, 3)))
    # 147,456 rows, 29 MB: not 18 µs for every 40 of them, which is 66 ms.
    assert found.warm_s < 1e-3


def seconds(side: int) -> float:
    return 1e-6 + 2 * side**3 / 1e11


def batched(side: int) -> OpCall:
    square = TensorSpec((1, side, side))
    return OpCall("aten.bmm.default", (square, square), (), (square,))


MANY = [(_mm(side, side, side), seconds(side)) for side in range(8, 648, 16)]


def test_few_noisy_calls_of_an_operator_do_not_tell_what_far_larger_ones_take() -> None:
    # As a probe that was cut short leaves them: close together, the larger ones held up a little.
    few = [(batched(side), held_up * seconds(side)) for side, held_up in ((16, 1), (18, 1.1))]
    few.append((batched(20), 1.25 * seconds(20)))
    found = KernelFits(_profile([*MANY, *few])).predict(batched(512))
    # Their own form through three points would say almost five times as long.
    assert found.warm_s == pytest.approx(seconds(512), rel=0.15)


def test_few_calls_of_an_operator_tell_how_much_longer_all_of_its_calls_are() -> None:
    few = [(batched(side), 3 * seconds(side)) for side in (64, 96, 128)]
    found = KernelFits(_profile([*MANY, *few])).predict(batched(1024))
    # Far from all of them; the form of all matmuls alone would say a tenth longer.
    assert 2 < found.warm_s / seconds(1024) < 3


def test_matmuls_take_the_time_of_tensor_cores_only_where_the_precision_says_so() -> None:
    sizes = [(a, b, 256) for a in (64, 512, 4096) for b in (64, 512)]
    slow = [(_mm(*size), 1e-3) for size in sizes]
    profile = _profile(slow)
    (kernel,) = profile.kernels
    quick = tuple(replace(point, warm_s=1e-4, cold_s=1e-4) for point in kernel.points)
    tf32 = replace(kernel, dtype="tfloat32", points=quick)
    both = replace(profile, kernels=(kernel, tf32))
    asked = _mm(500, 400, 300)
    plain, rounded = (KernelFits(both, precision=p).predict(asked) for p in ("fp32", "tf32"))
    # Every call took 1 ms, or 0.1 ms on tensor cores.
    assert plain.warm_s == pytest.approx(1e-3, rel=0.01)
    assert rounded.warm_s == pytest.approx(1e-4, rel=0.01)


def test_half_precision_attention_takes_the_time_of_the_operator_that_the_device_runs() -> None:
    def attention(kind: str, length: int, seconds: float) -> KernelCost:
        call = OpCall(f"aten._scaled_dot_product_{kind}_attention.default", *_heads(length))
        point = KernelPoint(call=call, warm_s=seconds, cold_s=seconds)
        return KernelCost(
            target=call.target, dtype="bfloat16", points=(point,), provenance=MEASURED
        )

    kernels = [attention("flash", n, 2e-3) for n in (64, 128, 256)]
    kernels += [attention("cudnn", n, 1e-3) for n in (64, 128, 256)]
    device = Device(
        kind="cuda",
        index=0,
        name="g",
        memory_bytes=1 << 30,
        details={"half_attention": "aten._scaled_dot_product_cudnn_attention.default"},
    )
    profile = MachineProfile(
        name="m", devices=(device,), kernels=tuple(kernels), provenance=MEASURED
    )
    asked = OpCall("aten._scaled_dot_product_flash_attention.default", *_heads(200))
    found = KernelFits(profile).predict(asked)
    # Another operator of the family counts as far away, so a little of flash remains.
    assert found.warm_s == pytest.approx(1e-3, rel=0.2)


def _heads(length: int) -> tuple[tuple[object, ...], tuple[()], tuple[TensorSpec, ...]]:
    heads = TensorSpec((2, 4, length, 64), "bfloat16")
    return (heads, heads, heads, 0.0, True), (), (heads,)


def test_a_machine_of_constant_rate_is_recovered_between_and_beyond_its_points() -> None:
    def seconds(call: OpCall) -> float:
        (rows, inner), (_, columns) = call.inputs[0].shape, call.inputs[1].shape
        return 2e-6 + 2.0 * rows * inner * columns / 1e11

    sizes = [(a, b, c) for a in (16, 128, 1024) for b in (64, 512) for c in (64, 512)]
    fits = KernelFits(_profile([(_mm(*size), seconds(_mm(*size))) for size in sizes]))
    for asked in ((200, 300, 400), (4096, 512, 2048)):
        found = fits.predict(_mm(*asked))
        assert found.source == "fitted"
        assert found.warm_s == pytest.approx(seconds(_mm(*asked)), rel=0.02)
        assert found.cold_s == pytest.approx(2 * seconds(_mm(*asked)), rel=0.02)


def test_a_call_of_the_grid_takes_exactly_what_was_measured() -> None:
    fits = KernelFits(_profile([(_mm(n, n, n), n * 1e-6) for n in (8, 64, 512)]))
    found = fits.predict(_mm(64, 64, 64))
    assert (found.warm_s, found.source) == (64e-6, "measured")


def test_an_operator_whose_family_was_not_probed_has_no_prediction() -> None:
    fits = KernelFits(_profile([(_mm(n, n, n), n * 1e-6) for n in (8, 64, 512)]))
    assert fits.predict(_pointwise(1, 8, 8, 4)) is None


@pytest.mark.parametrize(
    ("batch", "threads", "expected"),
    [(8, 1, "matmul"), (16, 1, "pointwise"), (8, 4, "pointwise")],
)
def test_small_batches_on_one_thread_run_pointwise_convolutions_as_products(
    batch: int, threads: int, expected: str
) -> None:
    call = _pointwise(batch, 64, 64, 14)
    assert variant(call, features_of(call), threads) == expected


@pytest.mark.parametrize(
    ("side", "groups", "expected"),
    [(4, 1, "matmul"), (3, 1, "matmul narrow"), (3, 64, "matmuls by group")],
)
def test_products_narrower_than_a_vector_and_those_by_group_are_told_apart(
    side: int, groups: int, expected: str
) -> None:
    image = TensorSpec((2, 64, side, side))
    weight = TensorSpec((64, 64 // groups, 1, 1))
    tail = ((1, 1), (0, 0), (1, 1), False, (0, 0), groups)
    call = OpCall("aten.convolution.default", (image, weight, None, *tail), (), (image,))
    features = features_of(call)
    assert variant(call, features, 1) == expected
    # What each image and group costs is told from what each image does.
    assert terms(features, expected)[1] == (64 if groups == 64 else 2)


def _gradient(
    channels: int, kernel: int, *, groups: int = 1, channels_last: bool = False
) -> OpCall:
    strides = (channels * 100, 1, channels * 10, channels) if channels_last else None
    image = TensorSpec((16, channels, 10, 10), "float32", strides)
    weight = TensorSpec((channels, channels // groups, kernel, kernel))
    side = kernel // 2
    tail = ((1, 1), (side, side), (1, 1), False, (0, 0), groups, (True, True, False))
    arguments = (image, image, weight, None, *tail)
    return OpCall("aten.convolution_backward.default", arguments, (), (image, weight))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_gradient(64, 3, groups=64), "depthwise"),
        (_gradient(64, 5, groups=64), "depthwise wide"),
        (_gradient(64, 3), "dense"),
        (_gradient(64, 3, channels_last=True), "dense, channels last"),
    ],
)
def test_filter_width_and_layout_choose_the_algorithm_of_a_gradient(
    call: OpCall, expected: str
) -> None:
    assert variant(call, features_of(call), 1) == expected


def test_channels_beyond_a_block_cost_a_whole_further_block() -> None:
    features = features_of(_gradient(24, 3))
    as_they_are, filled = terms(features, "matmul"), terms(features, "dense")
    # 24 channels take two blocks of 16, in and out: (32 / 24)² of the work, 32 / 24 of the bytes.
    assert filled[2] == pytest.approx(as_they_are[2] * 16 / 9)
    assert filled[3] == pytest.approx(as_they_are[3] * 4 / 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_fit_that_is_not_negative_is_scipys(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.lognormal(0.0, 3.0, (30, 6)) * draw.integers(0, 2, (30, 6))
    rows[:, 5] = 2 * rows[:, 4]  # alike but for their unit
    seconds = rows @ draw.normal(0.0, 1.0, 6)
    seconds = np.abs(seconds) + draw.lognormal(0.0, 1.0, 30)
    found, scipys = nonnegative_fit(rows, seconds), nnls(rows / seconds[:, None], np.ones(30))[0]
    assert (found >= 0).all()
    np.testing.assert_allclose(rows @ found / seconds, rows @ scipys / seconds, atol=1e-9)


def test_a_fit_of_columns_that_are_alike_but_for_rounding_is_as_good_as_scipys() -> None:
    for seed in range(400):
        draw = np.random.default_rng(seed)
        base = draw.lognormal(0.0, 1.0, (20, 2))
        rows = np.column_stack([base, base @ draw.random((2, 3)), np.ones(20)])
        rows *= 1 + 1e-13 * draw.normal(size=rows.shape)
        seconds = np.abs(rows @ draw.normal(0.0, 1.0, 6)) + draw.lognormal(0.0, 1.0, 20)
        found, scipys = (
            nonnegative_fit(rows, seconds),
            nnls(rows / seconds[:, None], np.ones(20))[0],
        )
        missed, least = (((rows @ fit / seconds - 1) ** 2).sum() for fit in (found, scipys))
        assert missed <= least + 1e-9


def test_rows_that_tensor_cores_read_unaligned_are_a_variant_of_their_own() -> None:
    profile = _profile([(_mm(64, 64, columns), 1e-5) for columns in (50257, 50304)])
    on_tensor_cores = replace(profile.kernels[0], dtype="tfloat32")
    fits = KernelFits(replace(profile, kernels=(on_tensor_cores,)), precision="tf32")
    variants = [point.variant for point in fits.fit("matmul", "tfloat32").points]
    assert [variant.endswith("unaligned") for variant in variants] == [True, False]


def test_several_calls_take_what_each_takes_alone() -> None:
    sizes = [(a, b, c) for a in (64, 512, 4096) for b in (64, 512) for c in (32, 256)]
    profile = _profile([(_mm(*size), 1e-6 + 1e-12 * np.prod(size)) for size in sizes])
    fits = KernelFits(profile)
    calls = [_mm(*sizes[0]), _mm(100, 200, 300), _mm(3000, 70, 90), OpCall("mine.own.default", ())]
    alone = [fits.predict(call) for call in calls]
    together = fits.predict_each(calls, [features_of(call) for call in calls])
    assert [found and found.source for found in together] == ["measured", "fitted", "fitted", None]
    for one, other in zip(alone, together, strict=True):
        assert (one is None) == (other is None)
        if one and other:
            assert other.warm_s == pytest.approx(one.warm_s, rel=1e-12)
            assert other.cold_s == pytest.approx(one.cold_s, rel=1e-12)


def test_a_family_that_no_probe_times_is_predicted_by_its_stand_in() -> None:
    rows = TensorSpec((64, 512))
    ordered = [
        (
            OpCall(
                "aten.sort.default", (TensorSpec((count, 512)),), (), (TensorSpec((count, 512)),)
            ),
            s,
        )
        for count, s in ((16, 1e-5), (64, 4e-5), (256, 1.6e-4))
    ]
    spectrum = TensorSpec((64, 257), "complex64")
    transform = OpCall("aten._fft_r2c.default", (rows, (1,), 0, True), (), (spectrum,))
    predicted = KernelFits(_profile(ordered)).predict(transform)
    assert predicted.source == "fitted"


def _gpu_profile(calls: list[tuple[OpCall, float]]) -> MachineProfile:
    """The same on an H100 known by its datasheet."""
    known = load_profile("h100-sxm").devices
    return replace(_profile(calls), devices=known[:1])


def _half(rows: int, inner: int, columns: int) -> OpCall:
    left, right = TensorSpec((rows, inner), "bfloat16"), TensorSpec((inner, columns), "bfloat16")
    return OpCall("aten.mm.default", (left, right), (), (TensorSpec((rows, columns), "bfloat16"),))


@pytest.mark.parametrize("size", [(2000, 1000, 1000), (4096, 1024, 5120), (4096, 1024, 50257)])
def test_a_gpus_matmuls_know_of_tiles_waves_and_alignment(size: tuple[int, int, int]) -> None:
    # Every call takes 1.3 times what the datasheet says; whole tiles of aligned rows are timed, and
    # products whose rows start at odd elements of other sizes.
    sides = (256, 512, 768, 1024, 2048, 3072, 4096, 8192)
    sizes = [(m, 1024, n) for m in sides for n in sides]
    sizes += [(m, 768, n) for m in (1024, 2048, 4096, 8192) for n in (10_001, 30_001)]
    by_datasheet = Roofline(_gpu_profile([]))

    def seconds(call: OpCall) -> float:
        predicted = by_datasheet.predict(call)
        return 1.3 * predicted.warm_s

    fits = KernelFits(_gpu_profile([(_half(*one), seconds(_half(*one))) for one in sizes]))
    found = fits.predict(_half(*size))
    assert found.warm_s == pytest.approx(seconds(_half(*size)), rel=0.02)


def test_few_calls_of_each_variant_are_fitted_together_where_they_are_of_one_kind() -> None:
    def gradient(channels: int, side: int, kernel: int, groups: int, strides: bool) -> OpCall:
        shape = (8, channels, side, side)
        last = (channels * side * side, 1, side * channels, channels) if strides else None
        image = TensorSpec(shape, strides=last)
        weight = TensorSpec((channels, channels // groups, kernel, kernel))
        half = kernel // 2
        tail = (None, (1, 1), (half, half), (1, 1), False, (0, 0), groups, (True, True, False))
        outputs = (image, weight, TensorSpec((0,)))
        return OpCall(
            "aten.convolution_backward.default", (image, image, weight, *tail), (), outputs
        )

    def seconds(call: OpCall, flops_per_s: float) -> float:
        features = features_of(call)
        return 1e-5 + features.cost.flops / flops_per_s

    dense = [gradient(c, s, 3, 1, False) for c in (16, 32, 64, 96, 128) for s in (8, 16, 32)]
    # Depthwise kernels reach a fiftieth of the rate; of either layout and width four are timed.
    sizes = ((32, 16), (64, 32), (128, 24), (256, 16))
    depthwise = [
        gradient(c, s, kernel, c, last)
        for c, s in sizes
        for kernel in (3, 7)
        for last in (True, False)
    ]
    calls = [(call, seconds(call, 1e12)) for call in dense]
    calls += [(call, seconds(call, 2e10)) for call in depthwise]
    asked = gradient(512, 56, 7, 512, False)
    found = KernelFits(_profile(calls)).predict(asked)
    assert found.warm_s == pytest.approx(seconds(asked, 2e10), rel=0.15)


def test_few_long_rows_of_a_normalisation_take_as_long_as_one() -> None:
    def normalised(channels: int, side: int) -> OpCall:
        image, channel = TensorSpec((64, channels, side, side)), TensorSpec((channels,))
        arguments = (image, channel, channel, channel, channel, True, 0.1, 1e-5)
        return OpCall("aten.native_batch_norm.default", arguments, (), (image, channel, channel))

    # 64 × side² elements of a channel, one after the other at 0.6 per ns, whatever the channels.
    calls = [
        (normalised(channels, side), 1e-5 + 64 * side**2 / 0.6e9)
        for channels in (16, 32, 64, 96, 128)
        for side in (7, 14, 28, 56)
    ]
    found = KernelFits(_profile(calls)).predict(normalised(24, 112))
    assert found.warm_s == pytest.approx(1e-5 + 64 * 112**2 / 0.6e9, rel=0.1)
