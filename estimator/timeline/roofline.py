"""Give operator calls their seconds on a machine known by its datasheet, by the fitted kernel law.

What the law covers by a shape of its own (products, convolutions, attention) it computes on the
chip's multiprocessors; every other operator streams its bytes. Bytes that are still in the
last-level cache come faster, which is what `Prediction` calls warm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from estimator.graph.cost_registry import Family
from estimator.graph.costs import Features, features_of
from estimator.profile import MachineProfile
from estimator.tensors import OpCall
from estimator.timeline.kernel_fits import Prediction
from estimator.timeline.kernel_law import (
    Chip,
    attention_seconds,
    chip_of,
    convolution_kind,
    load_law,
    peak_flops_per_s,
    product_seconds,
    sustained_ratio,
)

# Recurrent layers by cuDNN: a small product per step, whose weights stay where they are; small
# products leave tensor cores idle more than other units.
_RECURRENT_RATIO = 0.45
_TENSOR_RECURRENT_RATIO = 0.30
# Operators of other families compute in fp32 whatever their tensors hold, far from its peak.
_OTHER_COMPUTE_RATIO = 0.30
# torch lets cuDNN round fp32 convolutions to TF32 unless told otherwise; products only when told
# (torch.backends.cudnn.allow_tf32 is True, torch.backends.cuda.matmul.allow_tf32 False).
_TF32_BY_DEFAULT = ("convolution", "recurrent")


class Roofline:
    """Seconds of calls on a machine known by its datasheet; stands in for `KernelFits`."""

    def __init__(
        self, profile: MachineProfile, *, precision: str = "fp32", law: Path | None = None
    ) -> None:
        self.threads = 1
        self.exact: dict[OpCall, tuple[float, float]] = {}
        self._device = profile.devices[0]
        self._precision = precision
        self.law = load_law(law)
        self.shared_error = self.law.errors["model"]
        self._products = self.law.products.sustained
        self._chips: dict[str, Chip] = {}
        streams = self.law.streams
        rate = self._device.memory_bandwidth_bytes_per_s or 0.0
        self._bytes_per_s = rate * streams.memory_ratio(self._device)
        cache = self._device.details.get("l2_cache_bytes")
        self.cache_bytes = float(cache) if isinstance(cache, int | float) else 0.0

    def predict(self, call: OpCall) -> Prediction | None:
        """Seconds of a call; None where its operator has no formula."""
        features = features_of(call)
        if features is None:
            return None
        speedup = self.law.streams.cache_speedup
        warm_s, cold_s = (self._seconds(features, cached) for cached in (speedup, 1.0))
        errors = self.law.errors
        error = errors.get(features.family, errors["other"])
        return Prediction(warm_s, max(cold_s, warm_s), error, "datasheet")

    def _seconds(self, features: Features, cached: float) -> float:
        compute = _COMPUTED.get(features.family)
        if compute is not None:
            return compute(self, features, self._chip(features), cached)
        rate = _OTHER_COMPUTE_RATIO * peak_flops_per_s(self._device, "float32")
        compute_s = features.cost.flops / rate
        return self.law.streams.start_s + max(compute_s, self._stream_s(features, cached))

    def _chip(self, features: Features) -> Chip:
        dtype = features.dtype
        if dtype == "float32" and (
            self._precision == "tf32" or features.family in _TF32_BY_DEFAULT
        ):
            dtype = "tfloat32"
        return self._chip_in(dtype)

    def _chip_in(self, dtype: str) -> Chip:
        if dtype not in self._chips:
            self._chips[dtype] = chip_of(self._device, dtype)
        return self._chips[dtype]

    def _product_s(self, features: Features, chip: Chip, cached: float) -> float:
        law = self._products
        batch, rows, columns, inner = features.dims[:4]
        seconds = product_seconds(
            law,
            chip,
            batch=batch,
            rows=rows,
            columns=columns,
            inner=inner,
            moved_bytes=features.cost.moved_bytes,
            cached=cached,
        )
        # A gradient of several products is costed as one; its flops say how many there are.
        times = features.cost.flops / max(2.0 * batch * rows * columns * inner, 1.0)
        return law.start_s + float(seconds[0]) * max(times, 1.0)

    def _attention_s(self, features: Features, chip: Chip, cached: float) -> float:
        law = self.law.attention
        seconds = attention_seconds(
            law,
            chip,
            sustained=sustained_ratio(self._products, chip),
            heads=features.dims[0],
            queries=features.dims[1],
            head_size=features.dims[3],
            flops=features.cost.flops,
            moved_bytes=features.cost.moved_bytes,
            is_backward=phase_of(features) == "backward",
            cached=cached,
        )
        return law.start_s + float(seconds)

    def _convolution_s(self, features: Features, chip: Chip, cached: float) -> float:
        kind, rate = self.convolution(features)
        flops, moved = self.law.convolutions.factors(kind, phase_of(features), features.layout)
        bytes_s = features.cost.moved_bytes / (self._bytes_per_s * cached)
        return self.law.streams.start_s + flops * features.cost.flops / rate + moved * bytes_s

    def convolution(self, features: Features) -> tuple[str, float]:
        """(kind of convolution, flops/s that its units can hold) of a call."""
        chip = self._chip(features)
        kind = convolution_kind(features.dims, is_tensor=bool(chip.is_tensor))
        if kind.endswith("depthwise"):  # too little to multiply for tensor cores
            chip = self._chip_in("float32")
        return kind, float(chip.flops_per_s) * float(sustained_ratio(self._products, chip))

    def _recurrent_s(self, features: Features, chip: Chip, cached: float) -> float:
        ratio = _TENSOR_RECURRENT_RATIO if chip.is_tensor else _RECURRENT_RATIO
        compute_s = features.cost.flops / (ratio * float(chip.flops_per_s))
        return self.law.streams.start_s + max(compute_s, self._stream_s(features, cached))

    def _stream_s(self, features: Features, cached: float) -> float:
        if not self._bytes_per_s:
            return 0.0
        keys = stream_keys(features)
        length = features.dims[1] if len(features.dims) > 1 else 1.0
        share = self.law.streams.share(keys, length)
        return features.cost.moved_bytes / (share * self._bytes_per_s * cached)


def stream_keys(features: Features) -> tuple[str, ...]:
    """Under which names the law may know what a call reaches of a stream, the closest first."""
    phase = phase_of(features)
    kinds = (kind for kind in _OWN_SHARES if kind in features.target)
    return (*(f"{kind}.{phase}" for kind in kinds), f"{features.family}.{phase}", features.family)


def phase_of(features: Features) -> str:
    """ "forward" or "backward", by the operator's name."""
    return "backward" if "backward" in features.target else "forward"


# Kinds of operators whose kernels are unlike the rest of their family.
_OWN_SHARES = ("batch_norm", "group_norm")
_COMPUTED: Mapping[Family, Callable[[Roofline, Features, Chip, float], float]] = {
    "matmul": Roofline._product_s,
    "convolution": Roofline._convolution_s,
    "attention": Roofline._attention_s,
    "recurrent": Roofline._recurrent_s,
}
