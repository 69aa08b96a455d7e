"""The fixed grid of calls, and timing one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from estimator.probe.backend import CpuBackend
from estimator.probe.grid import GridCall, grid_call, interleave, kernel_grid, tensor
from estimator.probe.kernels import measure_call, spread_ratio
from estimator.probe.source import TensorSource
from estimator.tensors import OpCall, TensorSpec


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


def test_no_call_of_the_grid_is_measured_twice() -> None:
    for kind in ("cpu", "cuda"):
        grid = kernel_grid(kind, thorough=True)  # type: ignore[arg-type]
        assert len({each.call for each in grid}) == len(grid)


def smallest_of_each_operator() -> Iterator[GridCall]:
    smallest: dict[str, GridCall] = {}
    for each in kernel_grid("cpu"):
        known = smallest.get(each.call.target)
        if known is None or each.read_bytes + each.flops < known.read_bytes + known.flops:
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
            assert OpCall.decode(dict(point.call)).target == each.call.target
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


def test_a_point_describes_the_outputs_that_the_call_gave(source: TensorSource) -> None:
    call = grid_call("mm.default", tensor(3, 5), TensorSpec((5, 4), "float32", (1, 5)))
    point = measure_call(QuickBackend(), source, call)
    decoded = OpCall.decode(dict(point.call))
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
    assert spread_ratio([float(value) for value in range(101)]) == pytest.approx(0.8)
