"""Lay out the probe's fixed grid of operator calls; it contains no model code.

A family is a list of calls that vary size and layout; the grid interleaves the families and spreads
each one, so that any prefix of it covers every family from small to large.
"""

from __future__ import annotations

from estimator.machines.profile import DeviceKind
from estimator.probe import (
    grid_convolutions,
    grid_cuda,
    grid_cuda_memory_bound,
    grid_matmuls,
    grid_memory_bound,
    grid_shapes,
)
from estimator.probe.grid_calls import GridCall, in_dtype, interleave


def kernel_grid(kind: DeviceKind, *, thorough: bool = False) -> list[GridCall]:
    """Every call of the probe, the most informative first; bfloat16 where `thorough` or on GPUs."""
    dense, light = _dense(), _light()
    if kind == "cuda":
        return _cuda_grid(dense, light)
    own = [grid_matmuls.attention_on_cpu(), grid_matmuls.recurrent_on_cpu()]
    grid = interleave([*dense, *own, *light])
    if not thorough:
        return grid
    return grid + interleave([in_dtype(family, "bfloat16") for family in [*dense, *light[:4]]])


def _cuda_grid(dense: list[list[GridCall]], light: list[list[GridCall]]) -> list[GridCall]:
    """The sizes that fill a GPU in every dtype that its matmuls take; then every other small one.

    Small calls are bound by their launch, which is alike for all of them.
    """
    matmuls = grid_cuda.large_matmuls()
    large = [
        matmuls,
        grid_cuda.large_convolutions(),
        grid_cuda.large_convolutions(gradient=True),
        grid_cuda_memory_bound.pointwise(),
        grid_cuda_memory_bound.rows(),
        grid_cuda_memory_bound.strided(),
        grid_cuda_memory_bound.lookups(),
        grid_cuda_memory_bound.pools(),
    ]
    own = [
        grid_cuda.matmuls_in_tf32(),
        grid_cuda.attention(),
        grid_cuda.recurrent(),
        grid_cuda_memory_bound.batch_norms_by_cudnn(),
    ]
    low = [in_dtype(family, "bfloat16") for family in [*large, grid_cuda.recurrent()]]
    low.append(in_dtype(matmuls[::3], "float16"))
    small = [family[::2] for family in [*dense, *light]]
    small_low = [in_dtype(family, "bfloat16") for family in [*small[:4], *small[4:12]]]
    return interleave([interleave([*large, *own, *low]), interleave([*small, *small_low])])


def _dense() -> list[list[GridCall]]:
    return [
        grid_matmuls.matmuls(),
        grid_matmuls.batched_matmuls(),
        grid_convolutions.convolutions(),
        grid_convolutions.convolutions(gradient=True),
    ]


def _light() -> list[list[GridCall]]:
    return [
        grid_memory_bound.pointwise(),
        grid_memory_bound.pointwise_gradients(),
        grid_memory_bound.in_place(),
        grid_memory_bound.broadcasts(),
        grid_memory_bound.strided(),
        grid_memory_bound.reductions(),
        grid_memory_bound.softmaxes(),
        grid_memory_bound.normalisations(),
        grid_shapes.lookups(),
        grid_shapes.joins(),
        grid_shapes.fills(),
        grid_shapes.pools(),
        grid_shapes.losses(),
        grid_shapes.orders(),
    ]
