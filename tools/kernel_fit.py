"""Fit the kernel model to published operators.

Every source times its operators in its own way, so each has its own fixed cost per call, fitted
beside the kernel model and then forgotten: what ships as a kernel's start is that of a source that
times whole CUDA graphs. Groups (source, pass, machine, dtype) weigh the same, whatever their rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from kernel_tables import OpRow, device_of
from memory_bound_fit import FIXED_S, fit_memory_bound, memory_bound_key, timing_key, usual_fixed_s
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from estimator.kernels.datasheet_model import (
    AttentionModel,
    Chip,
    MatmulModel,
    MemoryBoundModel,
    attention_seconds,
    chip_of,
    matmul_seconds,
    sustained_ratio,
)

Array = NDArray[np.float64]

ROWS_PER_FIT = 3000
# Errors beyond this weigh less than their square (soft L1).
ROBUST_FROM = 0.15
# Where the fit starts and is drawn to, and how strongly (1 / standard deviation of the prior, in
# the scale in which it is fitted): the shape of tiles is known, shares of peaks are not.
PRODUCT_PRIOR: dict[str, tuple[float, float]] = {
    "vector_ratio": (0.97, 10.0),
    "tensor_ratio": (0.95, 2.0),
    "early_tensor_ratio": (0.82, 2.0),
    "vector_half_tile": (4.0, 30.0),
    "tensor_half_tile": (14.8, 2.0),
    "vector_extra_inner": (7.4, 2.0),
    "tensor_extra_inner": (55.0, 2.0),
    "memory_ratio": (0.82, 2.0),
    "vector_headroom": (11.0, 2.0),
    "tensor_headroom": (1.4, 4.0),
    "process_exponent": (0.9, 12.0),
    "long_inner": (0.05, 20.0),
    "old_tlb_long_inner": (0.5, 40.0),
}
RATIOS = (
    "vector_ratio",
    "tensor_ratio",
    "early_tensor_ratio",
    "memory_ratio",
    "forward_ratio",
    "backward_ratio",
    "padded_ratio",
)
AS_THEY_ARE = ("process_exponent", "long_inner", "old_tlb_long_inner")
# Matmuls of 4096³ in fp16, one after another, on a T4 of 65 Tflop/s and 70 W: a user's
# measurement, explained by the power limit (NVIDIA developer forum, thread 264462).
SUSTAINED_SIZE, SUSTAINED_FLOPS_PER_S = 4096, 24e12
ATTENTION_PRIOR: dict[str, tuple[float, float]] = {
    "forward_ratio": (0.6, 1.0),
    "backward_ratio": (0.5, 1.0),
    "padded_ratio": (0.9, 1.0),
    "small_head": (30.0, 1.0),
    "memory_ratio": (0.6, 1.0),
}
# What the last-level cache gives over memory: 2 to 3 times on A100 and H100 (their whitepapers);
# a kernel after another on one stream starts within 2 µs.
CACHE_SPEEDUP = 2.5
START_S = 2e-6


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model's sections as they are written, and fixed seconds per call by way of timing."""

    matmuls: dict[str, float]
    attention: dict[str, float]
    memory_bound: dict[str, Any]
    fixed_s: dict[str, dict[str, float]]


def fit_kernel_model(rows: Sequence[OpRow], *, seed: int = 0) -> Fitted:
    """Fit every section of the kernel model to rows of operators."""
    families: dict[str, list[OpRow]] = defaultdict(list)
    for row in rows:
        families[_kind(row)].append(row)
    matmuls, matmuls_fixed_s = fit_matmuls(drawn(families["matmul"], seed))
    attention, attention_fixed_s = fit_attention(drawn(families["attention"], seed), matmuls)
    memory_bound, memory_bound_fixed_s = fit_memory_bound(drawn(families["memory_bound"], seed))
    return Fitted(
        matmuls,
        attention,
        memory_bound,
        {
            "matmul": matmuls_fixed_s,
            "attention": attention_fixed_s,
            "memory_bound": memory_bound_fixed_s,
        },
    )


def drawn(rows: Sequence[OpRow], seed: int) -> list[OpRow]:
    """As many rows of each (source, operator pass, machine, dtype), drawn at random."""
    groups: dict[tuple[str, ...], list[OpRow]] = defaultdict(list)
    for row in rows:
        phase = f"{row.family}.{row.is_backward}" if row.family != "matmul" else ""
        groups[row.source, phase, row.machine, row.dtype].append(row)
    random = np.random.default_rng(seed)
    each = max(ROWS_PER_FIT // max(len(groups), 1), 1)
    chosen: list[OpRow] = []
    for key in sorted(groups):
        group = groups[key]
        picked = random.choice(len(group), min(len(group), each), replace=False)
        chosen.extend(group[index] for index in picked)
    return chosen


def chips_of(rows: Sequence[OpRow]) -> Chip:
    """The chips of rows as one Chip of arrays."""
    found = [chip_of(device_of(row.machine), row.dtype) for row in rows]
    names = [item.name for item in fields(Chip)]
    return Chip(**{name: np.array([getattr(chip, name) for chip in found]) for name in names})


def matmul_columns(rows: Sequence[OpRow]) -> dict[str, Any]:
    """Arguments of `matmul_seconds`, but for the kernel model."""
    sizes = np.array([row.dims for row in rows]).T
    named = dict(zip(("batch", "rows", "columns", "inner"), sizes, strict=True))
    moved = np.array([row.moved_bytes for row in rows])
    return {"chip": chips_of(rows), **named, "moved_bytes": moved}


def attention_columns(rows: Sequence[OpRow], matmuls: dict[str, float]) -> dict[str, Any]:
    """Arguments of `attention_seconds`, but for the kernel model."""
    chip = chips_of(rows)
    sizes = np.array([row.dims for row in rows]).T
    return {
        "chip": chip,
        "sustained": sustained_ratio(MatmulModel(**matmuls), chip),
        **dict(zip(("heads", "queries", "head_size"), sizes, strict=True)),
        "flops": np.array([row.flops for row in rows]),
        "moved_bytes": np.array([row.moved_bytes for row in rows]),
        "is_backward": np.array([row.is_backward for row in rows]),
    }


def fit_matmuls(rows: Sequence[OpRow]) -> tuple[dict[str, float], dict[str, float]]:
    """(section "matmuls", fixed seconds by timing) that minimise the robust log error."""
    columns = matmul_columns(rows)

    def seconds(found: dict[str, float]) -> Array:
        return matmul_seconds(
            MatmulModel(**found, sustained_tensor_headroom=0.0, start_s=0.0), **columns
        )

    found, fixed_s = _fit(rows, PRODUCT_PRIOR, seconds)
    start_s = fixed_s.get("aic_gemm.matmul", FIXED_S["aic_gemm"])
    burst = MatmulModel(**found, sustained_tensor_headroom=0.0, start_s=start_s)
    sustained = sustained_tensor_headroom(burst)
    return {**found, "sustained_tensor_headroom": sustained, "start_s": start_s}, fixed_s


def sustained_tensor_headroom(model: MatmulModel) -> float:
    """The headroom from which a T4 that multiplies without pause runs as fast as it is known to.

    Operators are timed in bursts with pauses, often of zeros, which draw less power than training.
    """
    chip = chip_of(device_of("t4"), "float16")
    size = SUSTAINED_SIZE
    free = replace(model, tensor_headroom=1e-9)
    shape = {"batch": 1, "rows": size, "columns": size, "inner": size}
    burst_s = matmul_seconds(free, chip, **shape, moved_bytes=6 * size**2)[0]
    wanted = SUSTAINED_FLOPS_PER_S / (2 * size**3 / burst_s)

    def miss(headroom: float) -> float:
        return float(sustained_ratio(replace(model, tensor_headroom=headroom), chip)) - wanted

    return float(brentq(miss, 1e-3, 1e2))


def fit_attention(
    rows: Sequence[OpRow], matmuls: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """(section "attention", fixed seconds by timing); the prior itself where there are no rows."""
    if not rows:
        prior = {name: value for name, (value, _) in ATTENTION_PRIOR.items()}
        return {**prior, "start_s": matmuls["start_s"]}, {}
    columns = attention_columns(rows, matmuls)

    def seconds(found: dict[str, float]) -> Array:
        return attention_seconds(AttentionModel(**found, start_s=0.0), **columns)

    found, fixed_s = _fit(rows, ATTENTION_PRIOR, seconds)
    return {**found, "start_s": matmuls["start_s"]}, fixed_s


def _fit(
    rows: Sequence[OpRow],
    prior: dict[str, tuple[float, float]],
    seconds: Callable[[dict[str, float]], Array],
) -> tuple[dict[str, float], dict[str, float]]:
    """Least squares of log(predicted / measured) with a prior on every number (scipy)."""
    names = list(prior)
    timings = sorted({timing_key(row) for row in rows})
    timing = np.array([timings.index(timing_key(row)) for row in rows])
    measured = np.array([row.seconds for row in rows])
    start = [_free(name, prior[name][0]) for name in names]
    start += [float(np.log(usual_fixed_s(name))) for name in timings]
    strength = np.array([prior[name][1] for name in names] + [1.0] * len(timings))

    def misses(free: Array) -> Array:
        found = {name: _bound(name, value) for name, value in zip(names, free, strict=False)}
        predicted = seconds(found) + np.exp(free[len(names) :])[timing]
        return np.concatenate([np.log(predicted / measured), strength * (free - start)])

    solution = least_squares(misses, start, loss="soft_l1", f_scale=ROBUST_FROM, max_nfev=40).x
    found = {name: _bound(name, value) for name, value in zip(names, solution, strict=False)}
    fixed = np.exp(solution[len(names) :])
    return found, dict(zip(timings, map(float, fixed), strict=True))


def _free(name: str, value: float) -> float:
    """A bounded number in a scale without bounds: ratios by their logit, others by their log."""
    if name in AS_THEY_ARE:
        return value
    return float(np.log(value / (1.0 - value)) if name in RATIOS else np.log(value))


def _bound(name: str, free: float) -> float:
    if name in AS_THEY_ARE:
        return max(float(free), 0.0)
    return float(1.0 / (1.0 + np.exp(-free)) if name in RATIOS else np.exp(free))


def predict(fitted: Fitted, rows: Sequence[OpRow]) -> Array:
    """Seconds of rows as their sources time them: the model's, and the source's fixed seconds."""
    seconds = np.zeros(len(rows))
    for kind, model in (
        ("matmul", _matmuls_s),
        ("attention", _attention_s),
        ("memory_bound", _memory_bound_s),
    ):
        mine = [index for index, row in enumerate(rows) if _kind(row) == kind]
        if mine:
            chosen = [rows[index] for index in mine]
            fixed_s = fitted.fixed_s[kind]
            timings = [timing_key(row) for row in chosen]
            fixed = [fixed_s.get(timing, usual_fixed_s(timing)) for timing in timings]
            seconds[mine] = model(fitted, chosen) + np.array(fixed)
    return seconds


def _kind(row: OpRow) -> str:
    return row.family if row.family in ("matmul", "attention") else "memory_bound"


def _matmuls_s(fitted: Fitted, rows: Sequence[OpRow]) -> Array:
    return matmul_seconds(MatmulModel(**fitted.matmuls), **matmul_columns(rows))


def _attention_s(fitted: Fitted, rows: Sequence[OpRow]) -> Array:
    columns = attention_columns(rows, fitted.matmuls)
    return attention_seconds(AttentionModel(**fitted.attention), **columns)


def _memory_bound_s(fitted: Fitted, rows: Sequence[OpRow]) -> Array:
    model = MemoryBoundModel(**fitted.memory_bound, cache_speedup=CACHE_SPEEDUP, start_s=START_S)
    seconds = []
    for row in rows:
        device = row.device
        share = model.share((memory_bound_key(row), row.family), row.dims[1])
        rate = (device.memory_bandwidth_bytes_per_s or 0.0) * model.memory_ratio(device)
        seconds.append(row.moved_bytes / (rate * share))
    return np.array(seconds)
