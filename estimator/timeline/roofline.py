"""Turn a datasheet's peaks into seconds for operator calls, by what kernels usually reach of them.

A kernel takes a start, then the longer of computing and of moving its bytes (Williams, Waterman,
Patterson: Roofline, 2009), each at the usual share of its peak for the operator's family, on as
many multiprocessors as the call has tiles of work for.
"""

from __future__ import annotations

import math

from estimator.graph.cost_registry import Family
from estimator.graph.costs import Features, features_of
from estimator.profile import Device, MachineProfile
from estimator.tensors import OpCall
from estimator.timeline.kernel_fits import Prediction
from estimator.typical import STREAMED_RATIO

# Share of the dense peak that large calls reach. Matrix products: 0.60 (MI300X) to 0.87 (A100) of
# bf16 at the best shapes (Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS",
# 2025), less at those of models. Attention: FlashAttention-2 on A100 forward 0.5 to 0.7, backward
# 0.4 to 0.6 (Dao, 2023). Convolutions and recurrent layers by cuDNN: about half on tensor cores.
_COMPUTE_RATIOS: dict[Family, float] = {
    "matmul": 0.70,
    "convolution": 0.50,
    "attention": 0.45,
    "recurrent": 0.30,
}
# Operators of other families compute in fp32 whatever their tensors hold, far from its peak.
_OTHER_COMPUTE_RATIO = 0.30
# Rows walked by another order than memory's, or in several passes, reach less than a stream.
_MEMORY_RATIOS: dict[Family, float] = {
    "elementwise": STREAMED_RATIO,
    "copy": STREAMED_RATIO,
    "fill": STREAMED_RATIO,
    "index": 0.40,
    "pooling": 0.50,
    "other": 0.50,
}
_OTHER_MEMORY_RATIO = 0.65
# From the launch on an idle device to the end of a kernel that does nothing: 2 to 3 µs.
_START_S = 2.5e-6
# Libraries cut products into tiles of 64 to 256 rows and columns, and long sums into pieces where
# tiles are few (CUTLASS documentation, "Efficient GEMM", split-K).
_TILE = 64
_SPLIT = 1024
# What the shares miss by for one call, typically.
_RELATIVE_ERROR = 0.3
# torch lets cuDNN round fp32 convolutions to TF32 unless told otherwise; products only when told
# (torch.backends.cudnn.allow_tf32 is True, torch.backends.cuda.matmul.allow_tf32 False).
_TF32_BY_DEFAULT = ("convolution", "recurrent")


class Roofline:
    """Seconds of calls on a machine known by its datasheet; stands in for `KernelFits`."""

    def __init__(self, profile: MachineProfile, *, precision: str = "fp32") -> None:
        self.threads = 1
        self.exact: dict[OpCall, tuple[float, float]] = {}
        self._device = profile.devices[0]
        self._precision = precision
        self._multiprocessors = _count(self._device)

    def predict(self, call: OpCall) -> Prediction | None:
        """Seconds of a call; None where its operator has no formula."""
        features = features_of(call)
        if features is None:
            return None
        seconds = _START_S + max(self._compute_s(features), self._memory_s(features))
        return Prediction(seconds, seconds, _RELATIVE_ERROR, "datasheet")

    def _compute_s(self, features: Features) -> float:
        ratio = _COMPUTE_RATIOS.get(features.family)
        if ratio is None:
            rate = _OTHER_COMPUTE_RATIO * peak_flops_per_s(self._device, "float32")
            return features.cost.flops / rate
        dtype = features.dtype
        if dtype == "float32" and (
            self._precision == "tf32" or features.family in _TF32_BY_DEFAULT
        ):
            dtype = "tfloat32"
        rate = ratio * peak_flops_per_s(self._device, dtype) * self._filled(features)
        return features.cost.flops / rate

    def _memory_s(self, features: Features) -> float:
        ratio = _MEMORY_RATIOS.get(features.family, _OTHER_MEMORY_RATIO)
        rate = self._device.memory_bandwidth_bytes_per_s
        return features.cost.moved_bytes / (ratio * rate) if rate else 0.0

    def _filled(self, features: Features) -> float:
        """The share of the multiprocessors that a product of matrices has tiles for."""
        if features.family != "matmul":
            return 1.0
        batch, rows, columns, inner = features.dims[:4]
        tiles = batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        pieces = max(inner / _SPLIT, 1.0)
        return min(tiles * pieces / self._multiprocessors, 1.0)


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """The dense peak in a dtype; that of fp32, in which the rest is computed, where it has none."""
    peaks = device.peak_flops_per_s
    return peaks.get(dtype) or peaks.get("float32") or max(peaks.values())


def _count(device: Device) -> float:
    count = device.details.get("sm_count")
    return float(count) if isinstance(count, int | float) and count > 0 else 1.0
