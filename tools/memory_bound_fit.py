"""Fit what kernels that only move memory reach of its rate to published operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_tables import OpRow, device_of
from numpy.typing import NDArray
from sklearn.linear_model import HuberRegressor

from estimator.kernels.datasheet_model import memory_classes

Array = NDArray[np.float64]

# Where the fit of the fixed seconds of a call starts, by source.
FIXED_S = {
    "neusight_ops": 1e-5,
    "aic_gemm": 3e-6,
    "aic_attention": 2e-5,
    "hpc_train_ops": 2e-5,
    "sailor_ops": 3e-5,
}
FIXED_CHOICES_S = (2e-6, 5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5)
ROW_LENGTHS = (256.0, 1024.0, 1025.0, 4096.0, 8192.0, 32768.0)
BY_ROW_LENGTH = ("softmax.forward", "normalization.forward")
# What kernels of families that no table measures reach of a stream: those that walk rows in another
# order than memory's, or in several passes, less.
SHARE_PRIORS = {
    "elementwise": 1.0,
    "copy": 1.0,
    "fill": 1.0,
    "softmax.forward": 0.7,
    "softmax.backward": 0.5,
    "normalization.forward": 0.65,
    "normalization.backward": 0.4,
    "reduction": 0.8,
    "pooling": 0.6,
    "index": 0.5,
    "loss": 0.6,
    "other": 0.55,
    # What Transformer Engine's benchmark of a layer's products takes longer where it casts, too: on
    # a B300 1.82 ms in MXFP8 (9.2 GB) and 2.34 with one scale (12.4 GB, 5.0 of them read for the
    # largest), on an H200 NVL 3.50 (14.0 GB; docs/examples/gemm_profiling). 8192 × 8192 are cast
    # to MXFP8 by rows and columns in 52 µs on a B200 (ROCm/TransformerEngine, pull request 598).
    "quantize.forward": 0.72,
    "quantize.gh100": 1.0,
}
# The first HBM2 runs its pins at 1.4 of 2 Gbit/s and reaches less of even that.
OWN_MEMORY = ("gp100",)


def timing_key(row: OpRow) -> str:
    """Under which name a row's fixed seconds are fitted: a source times each family its own way."""
    return f"{row.source}.{row.family}"


def usual_fixed_s(timing: str) -> float:
    """Where the fit of a source's fixed seconds starts."""
    return FIXED_S[timing.split(".")[0]]


def fit_memory_bound(rows: Sequence[OpRow]) -> tuple[dict[str, Any], dict[str, float]]:
    """(section "memory_bound", fixed seconds by timing), by Huber's regression.

    log(measured / seconds at the peak rate) is a sum of what the memory and what the kernel leave
    unused; an elementwise pass forward leaves nothing. Fixed seconds are chosen one by one.
    """
    design = _MemoryBound(rows)
    fixed_s = {timing: usual_fixed_s(timing) for timing in design.timings}
    for timing in design.timings:
        fixed_s[timing] = min(
            FIXED_CHOICES_S, key=lambda value: design.loss({**fixed_s, timing: value})
        )
    weights = design.fit(fixed_s)
    return design.section(weights), fixed_s


class _MemoryBound:
    """The regression's columns: classes of memory, then kernels by the length of their rows."""

    def __init__(self, rows: Sequence[OpRow]) -> None:
        self.rows = rows
        self.timings = sorted({timing_key(row) for row in rows})
        self.memories = sorted({memory_key(row) for row in rows})
        self.kernels = sorted({memory_bound_key(row) for row in rows} - {"elementwise.forward"})
        self.columns = [("memory", key, 0.0) for key in self.memories]
        for key in self.kernels:
            lengths = ROW_LENGTHS if key in BY_ROW_LENGTH else (1.0,)
            self.columns += [("kernel", key, length) for length in lengths]
        self.measured = np.array([row.seconds for row in rows])
        rates = np.array([device_of(row.machine).memory_bandwidth_bytes_per_s for row in rows])
        self.ideal_s = np.array([row.moved_bytes for row in rows]) / rates
        self.matrix = np.array([self._row(row) for row in rows])

    def _row(self, row: OpRow) -> list[float]:
        key, memory = memory_bound_key(row), memory_key(row)
        shares = dict(zip(ROW_LENGTHS, _hats(row.dims[1]), strict=True))
        return [
            float(name == memory)
            if kind == "memory"
            else float(name == key) * (shares[length] if name in BY_ROW_LENGTH else 1.0)
            for kind, name, length in self.columns
        ]

    def _target(self, fixed_s: dict[str, float]) -> Array:
        fixed = np.array([fixed_s[timing_key(row)] for row in self.rows])
        return np.log(np.maximum(self.measured - fixed, 0.1 * self.measured) / self.ideal_s)

    def fit(self, fixed_s: dict[str, float]) -> Array:
        """Logs of how many times longer than at the peak rate, column by column.

        Elementwise passes say what the memory gives, all others what their kernels leave of it.
        """
        target = self._target(fixed_s)
        memories = len(self.memories)
        plain = ~self.matrix[:, memories:].any(axis=1)
        weights = np.zeros(len(self.columns))
        weights[:memories] = _huber(self.matrix[plain, :memories], target[plain])
        if not plain.all():
            rest = target[~plain] - self.matrix[~plain, :memories] @ weights[:memories]
            weights[memories:] = _huber(self.matrix[~plain, memories:], rest)
        return weights

    def loss(self, fixed_s: dict[str, float]) -> float:
        """Mean relative error of all rows under these fixed seconds."""
        fixed = np.array([fixed_s[timing_key(row)] for row in self.rows])
        predicted = fixed + np.exp(self.matrix @ self.fit(fixed_s)) * self.ideal_s
        return float(np.mean(np.abs(predicted / self.measured - 1.0)))

    def section(self, weights: Array) -> dict[str, Any]:
        ratios: dict[str, float] = {}
        shares: dict[str, Any] = dict(SHARE_PRIORS)
        shares.update((key, []) for key in BY_ROW_LENGTH if key in self.kernels)
        for (kind, name, length), weight in zip(self.columns, weights, strict=True):
            value = round(float(np.exp(-weight)), 4)
            if kind == "memory":
                ratios[name] = value
            elif name in BY_ROW_LENGTH:
                shares[name].append([length, value])
            else:
                shares[name] = value
        general = [value for name, value in ratios.items() if name not in OWN_MEMORY]
        ratios["other"] = round(float(np.mean(general)), 4)
        return {"memory_ratios": ratios, "shares": shares}


def _huber(matrix: Array, target: Array) -> Array:
    regressor = HuberRegressor(alpha=1e-3, fit_intercept=False, max_iter=1000)
    return np.asarray(regressor.fit(matrix, target).coef_)


def _hats(length: float) -> Array:
    """Weights of the row lengths around this one, over the logarithm."""
    logs = np.log(ROW_LENGTHS)
    at = float(np.clip(np.log(max(length, 1.0)), logs[0], logs[-1]))
    return np.array([np.interp(at, logs, unit) for unit in np.eye(len(logs))])


def memory_key(row: OpRow) -> str:
    """Under which name the memory of a row's device is fitted."""
    return row.die if row.die in OWN_MEMORY else memory_classes(row.device)[0]


def memory_bound_key(row: OpRow) -> str:
    """Under which name a row's kernel is fitted."""
    return f"{row.family}.{'backward' if row.is_backward else 'forward'}"
