"""Cost what training frameworks do to whole buffers beside the model: copies, sums, scaling."""

from __future__ import annotations

from estimator.cache import Cache
from estimator.graph.ops import BoundGraph
from estimator.profile import MachineProfile
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.durations import kernel_fits, slowdown_ratio

# Scale the loss, find infinities, read that, update the scale, its tracker, the inverse scale.
_SCALER_OPS = 6


def stream_s(profile: MachineProfile, target: str, elements: int, busy: int, cache: Cache) -> float:
    """Seconds of one elementwise pass over cold float32 memory, with `busy` devices busy."""
    spec = TensorSpec((max(elements, 1),))
    prediction = kernel_fits(profile, cache=cache).predict(
        OpCall(target, (spec, spec), (), (spec,))
    )
    if prediction is None:
        return 0.0
    return prediction.cold_s * slowdown_ratio(profile, "memory", busy, 8.0 * elements)


def copy_s(profile: MachineProfile, size_bytes: int, busy: int, cache: Cache) -> float:
    """DDP scales gradients by 1/world while it copies them into their bucket, one pass."""
    return stream_s(profile, "aten.copy_.default", size_bytes // 4, busy, cache)


def accumulate_s(bound: BoundGraph, profile: MachineProfile, busy: int, cache: Cache) -> float:
    """Adding one micro-batch's gradients to those of the ones before it, in place."""
    elements = sum(p.spec.nbytes // 4 for p in bound.graph.parameters if p.gradient is not None)
    if not elements:
        return 0.0
    return stream_s(profile, "aten.add_.Tensor", elements, busy, cache)


def unscale_s(bound: BoundGraph, profile: MachineProfile, busy: int, cache: Cache) -> float:
    """What a GradScaler adds: every gradient unscaled and checked in place, some small operators.

    torch/amp/grad_scaler.py: the loss and the scale are multiplied, the check is read by the host,
    which then has nothing issued ahead.
    """
    elements = sum(p.spec.numel for p in bound.graph.parameters if p.gradient is not None)
    spec = TensorSpec((max(elements, 1),))
    call = OpCall("aten.mul.Scalar", (spec, 1.0), (), (spec,))
    prediction = kernel_fits(profile, bound.graph.precision, cache=cache).predict(call)
    if prediction is None or profile.host is None:
        return 0.0
    slowdown = slowdown_ratio(profile, "memory", busy, 8.0 * elements)
    return prediction.cold_s * slowdown + _SCALER_OPS * profile.host.bare_op_s
