"""The fixed grid of calls, and timing one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.calls import (
    GridCall,
    TensorSource,
    grid_call,
    in_dtype,
    interleave,
    thinned,
)
from estimator.probe.grid import kernels
from estimator.probe.grid.kernels import float32_matmuls, kernel_grid, measure_call, noise_ratio
from estimator.probe.grid.tables import families
from estimator.tensors import TensorSpec

MM = "aten.mm.default"


def tensor(*shape: int) -> TensorSpec:
    return TensorSpec(shape)


class SmallCache(CpuBackend):
    """A CPU backend whose cache is said to be small, so that blocks and rings are short."""

    def last_level_cache_bytes(self) -> int:
        return 1 << 20


@pytest.fixture(scope="module")
def source() -> TensorSource:
    torch.set_num_threads(1)
    return TensorSource(SmallCache())


def calls_of(target: str, count: int) -> list[GridCall]:
    return [grid_call(target, tensor(size + 1)) for size in range(count)]


def test_a_prefix_of_the_grid_takes_from_every_family_in_proportion() -> None:
    grid = interleave([calls_of("relu.default", 40), calls_of("neg.default", 10)])
    head = [each.call.target for each in grid[:10]]
    assert head.count("aten.neg.default") == 2
    assert len(grid) == 50


def test_a_prefix_of_a_family_is_spread_over_its_sizes() -> None:
    grid = interleave([calls_of("relu.default", 100)])
    sizes = sorted(each.call.inputs[0].numel for each in grid[:10])
    # Ten of a hundred sizes, evenly spread: no gap of more than a quarter of the range.
    gaps = [b - a for a, b in zip([1, *sizes], [*sizes, 100], strict=True)]
    assert max(gaps) <= 25


def test_a_cut_budget_loses_detail_and_no_family() -> None:
    grid = kernel_grid("cpu")
    for share in (0.1, 0.4):
        head = {each.call for each in grid[: int(share * len(grid))]}
        for family in families("cpu").values():
            reached = sum(each.call in head for each in family)
            # At most one call less than its share.
            assert reached >= max(1, int(share * len(family)) - 1), family[0].call.target


def test_no_call_of_the_grid_is_measured_twice() -> None:
    for kind in ("cpu", "cuda"):
        grid = kernel_grid(kind, thorough=True)  # type: ignore[arg-type]
        assert len({(each.call, each.math) for each in grid}) == len(grid)


def smallest_of_each_operator() -> Iterator[GridCall]:
    smallest: dict[str, GridCall] = {}
    for each in kernel_grid("cpu"):
        known = smallest.get(each.call.target)
        if known is None or each.read_bytes < known.read_bytes:
            smallest[each.call.target] = each
    yield from smallest.values()


def test_every_operator_of_the_cpu_grid_runs(source: TensorSource) -> None:
    failed = []
    for each in smallest_of_each_operator():
        try:
            point = measure_call(QuickBackend(), source, each)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            failed.append(f"{each.call.target}: {error}")
        else:
            assert point.call.target == each.call.target
    assert failed == []


class QuickBackend(SmallCache):
    """Calls once and says how long it took, so that nothing is repeated."""

    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__()
        self.seconds = seconds

    def time_calls(self, call, *, repeats, before=lambda _: None):  # type: ignore[no-untyped-def]
        before(0)
        call(0)
        return [self.seconds]


def test_the_cuda_grid_has_every_dtype_of_products_and_every_attention() -> None:
    grid = kernel_grid("cuda")
    matmuls = {(each.call.dtype, each.math) for each in grid if each.call.target == MM}
    halves = {("bfloat16", ""), ("float16", "")}
    assert matmuls == {("float32", ""), ("float32", "tf32"), *halves}
    fused = {each.call.target.split(".")[1] for each in grid if "dot_product" in each.call.target}
    kinds = ("flash", "efficient", "cudnn")
    names = [f"_scaled_dot_product_{kind}_attention" for kind in kinds]
    assert fused == {*names, *(f"{name}_backward" for name in names)}
    # 8192 x 5120 x 5120: half a millisecond at 800 TFLOP/s, long beside any launch.
    products = [each.call for each in grid if each.call.target == MM]
    assert max(2 * call.inputs[0].numel * call.inputs[1].shape[1] for call in products) > 4e11


def test_the_cuda_grid_has_every_operator_of_the_cpu_grid_and_its_gradient() -> None:
    # Attention and LSTMs are other operators there.
    others = ("attention", "recurrent")
    written = [family for name, family in families("cpu").items() if name not in others]
    wanted = {each.call.target for family in written for each in family}
    assert wanted <= {each.call.target for each in kernel_grid("cuda")}


def test_statistics_of_norms_stay_in_float32_on_cuda_alone() -> None:
    norms = {each.call.target: each for each in families("cpu")["normalisations"]}
    backward = norms["aten.native_layer_norm_backward.default"]
    images = [norms["aten.native_batch_norm.default"]]
    on_cuda, on_cpu = (
        in_dtype([backward], "bfloat16", on_cuda=on_cuda)[0] for on_cuda in (True, False)
    )
    # Gradient, input, mean, 1 / deviation, weight, bias.
    low, exact = "bfloat16", "float32"
    assert [each.dtype for each in on_cuda.call.inputs] == [low, low, exact, exact, low, low]
    assert {each.dtype for each in on_cpu.call.inputs} == {low}
    forward = in_dtype(images, "bfloat16", on_cuda=True)[0]
    assert [each.dtype for each in forward.call.inputs] == [low, exact, exact, exact, exact]


def test_thinning_keeps_the_first_call_of_every_operator() -> None:
    family = [
        grid_call(f"{name}.default", tensor(n)) for n in range(1, 6) for name in ("relu", "neg")
    ]
    kept = [(each.call.target[5:9], each.call.inputs[0].numel) for each in thinned(family, 2)]
    assert kept == [(name, n) for n in (1, 3, 5) for name in ("relu", "neg.")]


def test_a_gradient_in_another_dtype_follows_a_forward_call_in_that_dtype() -> None:
    forward = grid_call("relu.default", tensor(4))
    (backward,) = in_dtype([grid_call("neg.default", tensor(4), follows=forward)], "bfloat16")
    assert backward.follows is not None
    assert backward.follows.call.dtype == "bfloat16"


def test_float8_tensors_are_made_as_any_other(source: TensorSource) -> None:
    spec = TensorSpec((32, 16), "float8_e4m3fn", (1, 32))
    (made,) = source.arguments(grid_call("clone.default", spec))
    assert (made.dtype, made.stride()) == (torch.float8_e4m3fn, (1, 32))


def test_the_call_that_a_gradient_follows_hands_over_the_output_it_names() -> None:
    """A forward call of which the second output, not the last, is the workspace."""
    values, picked = tensor(4, 8), TensorSpec((0,), "int64")
    forward = grid_call("topk.default", values, 2)
    backward = grid_call(
        "gather.default", values, -1, picked, index_high=8, follows=forward, handed=1
    )
    point = measure_call(QuickBackend(), TensorSource(SmallCache()), backward)
    assert point.call.arguments[2] == TensorSpec((4, 2), "int64")


def test_products_on_tensor_cores_are_asked_for_while_they_are_timed_only() -> None:
    with float32_matmuls(on_tensor_cores=True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_point_describes_the_outputs_that_the_call_gave(source: TensorSource) -> None:
    call = grid_call("mm.default", tensor(3, 5), TensorSpec((5, 4), "float32", (1, 5)))
    point = measure_call(QuickBackend(), source, call)
    decoded = point.call
    assert decoded.outputs == (TensorSpec((3, 4)),)
    assert decoded.inputs[1].strides == (1, 5)


def test_an_in_place_operator_leaves_the_block_of_random_numbers_alone(
    source: TensorSource,
) -> None:
    first = source.arguments(grid_call("add.Tensor", tensor(1000), tensor(1000)))
    before = first[0].clone()
    for _ in range(3):
        measure_call(QuickBackend(), source, grid_call("zero_.default", tensor(1000)))
    assert torch.equal(first[0], before)


def test_arguments_walk_over_the_whole_block_before_one_is_cut_there_again(
    source: TensorSource,
) -> None:
    call = grid_call("relu.default", tensor(1 << 20))  # 4 MiB
    copies = source.block_bytes // (4 << 20)
    addresses = {source.arguments(call)[0].data_ptr() for _ in range(copies - 1)}
    assert len(addresses) == copies - 1


def test_cold_inputs_are_timed_where_reading_them_could_tell(source: TensorSource) -> None:
    few, many = (grid_call("relu.default", tensor(count)) for count in (100, 100_000))
    # 800 kB at 0.1 ns per byte are 80 µs: all of a call of 10 µs, nothing of one of half a second.
    assert measure_call(QuickBackend(1e-5), source, many).cold_s == 1e-5
    assert measure_call(QuickBackend(0.5), source, many).cold_s is None
    assert measure_call(QuickBackend(1e-5), source, few).cold_s is None


def test_the_spread_is_half_the_middle_eighty_percent_over_the_median() -> None:
    # 0, 1, … 100: the 10th percentile is 10, the 90th is 90, the median 50.
    assert noise_ratio([float(value) for value in range(101)]) == pytest.approx(0.8)


class LostAfter(SmallCache):
    """A device that so many questions find usable, and none after them."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    def is_lost(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_after_an_error_that_loses_the_device_no_further_call_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: an illegal memory access was encountered\nmore",
    ]
    tried = []

    def fail(_backend: object, _source: object, each: GridCall) -> None:
        tried.append(each)
        raise RuntimeError(errors[len(tried) - 1])

    monkeypatch.setattr(kernels, "measure_call", fail)
    emitted: list[dict[str, Any]] = []
    # Neither what a library does not support nor a lack of memory is the device's end.
    kernels.measure_kernels(LostAfter(2), emitted.append, budget_s=5.0)
    (last,) = emitted
    assert len(tried) == last["done"] == 3
    assert last["is_lost"]
    assert "illegal memory access" in last["lacking"][2]


def test_the_grid_is_timed_in_pieces_from_any_of_its_calls_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = calls_of("relu.default", 6)
    monkeypatch.setattr(kernels, "kernel_grid", lambda *_, **__: grid)
    monkeypatch.setattr(kernels, "_measured", lambda *given: {"call": given[2].read_bytes})
    emitted: list[dict[str, Any]] = []
    # However little time there is, one call is timed.
    kernels.measure_kernels(SmallCache(), emitted.append, budget_s=0.0, first=1)
    kernels.measure_kernels(SmallCache(), emitted.append, budget_s=60.0, first=2)
    bytes_of = [each.read_bytes for each in grid]
    assert [each["call"] for each in emitted if "call" in each] == bytes_of[1:]
    assert [each["done"] for each in emitted if "done" in each] == [2, 6]


def test_the_first_of_a_long_call_counts_and_that_of_a_short_one_only_tells_how_many() -> None:
    class Counting(QuickBackend):
        """Says that a call took so long, and counts how many were asked for."""

        def time_calls(self, call, *, repeats, before=lambda _: None):  # type: ignore[no-untyped-def]
            asked.append(repeats)
            return [self.seconds] * repeats

    asked: list[int] = []
    # Three of 10 ms; 4 ms of 0.5 ms each.
    for seconds, calls, kept in ((0.010, [1, 2], 3), (0.0005, [1, 8], 8)):
        asked.clear()
        assert kernels._repeat(Counting(seconds), lambda _: None, 0.004) == [seconds] * kept
        assert asked == calls


def test_repeats_that_were_held_up_do_not_count() -> None:
    # Up to three of four may be.
    assert kernels.agreed_s([3.0, 1.0, 1.1, 4.0, 9.0, 9.0, 9.0, 9.0]) == 1.05
    # Where nothing was held up it is the median.
    assert kernels.agreed_s([1.0, 1.1, 1.2, 1.3, 1.4]) == 1.2
    assert kernels.agreed_s([7.0]) == 7.0
