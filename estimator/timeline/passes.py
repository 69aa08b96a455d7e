"""Cost what training frameworks do to whole buffers beside the model: copies, sums, scaling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.costs import features_of
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.contention import slowdown_curve, slowdown_ratio
from estimator.timeline.durations import kernel_fits
from estimator.timeline.kernel_fits import KernelFits
from estimator.timeline.roofline import Roofline
from estimator.timeline.updates import Trained

Array = NDArray[np.float64]

# Scale the loss, find infinities, read that, update the scale, its tracker, the inverse scale.
_SCALER_OPS = 6
# An elementwise pass reads and writes each fp32 element.
FP32_PASS_BYTES = 8.0


def memory_bound_s(
    profile: MachineProfile, target: str, elements: Sequence[int], devices_busy: int, cache: Cache
) -> Array:
    """Seconds of elementwise passes over cold float32 memory, with `devices_busy` devices busy."""
    sizes = tuple(elements)
    alone_s = cache.get(
        "memory-bound",
        (profile,),
        lambda: _memory_bound_alone_s(kernel_fits(profile, cache=cache), target, sizes),
        *(target, sizes),
    )
    moved_bytes = FP32_PASS_BYTES * np.array(sizes, dtype=np.float64)
    return np.asarray(alone_s * slowdown_curve(profile, "memory", devices_busy).at(moved_bytes))


def _memory_bound_alone_s(
    fits: KernelFits | Roofline, target: str, sizes: tuple[int, ...]
) -> Array:
    numbers: dict[int, int] = {}
    of = [numbers.setdefault(max(size, 1), len(numbers)) for size in sizes]
    specs = [TensorSpec((size,)) for size in numbers]
    calls = [OpCall(target, (spec, spec), (), (spec,)) for spec in specs]
    found = fits.predict_each(calls, [features_of(call) for call in calls])
    return np.array([each.cold_s if each else 0.0 for each in found], dtype=np.float64)[of]


def copies_s(
    profile: MachineProfile, sizes_bytes: Sequence[int], devices_busy: int, cache: Cache
) -> Array:
    """DDP scales gradients by 1/world while it copies them into their buckets, one pass each."""
    elements = [size // 4 for size in sizes_bytes]
    return memory_bound_s(profile, "aten.copy_.default", elements, devices_busy, cache)


def accumulate_s(
    trained: Trained, profile: MachineProfile, devices_busy: int, cache: Cache
) -> float:
    """Adding one micro-batch's gradients to those of the ones before it, in place."""
    if not trained.words:
        return 0.0
    return float(
        memory_bound_s(profile, "aten.add_.Tensor", [trained.words], devices_busy, cache)[0]
    )


def unscale_s(
    trained: Trained, graph: OpGraph, profile: MachineProfile, devices_busy: int, cache: Cache
) -> float:
    """What a GradScaler adds: every gradient unscaled and checked in place, some small operators.

    torch/amp/grad_scaler.py: the loss and the scale are multiplied, the check is read by the host,
    which then has nothing issued ahead.
    """
    spec = TensorSpec((max(trained.elements, 1),))
    call = OpCall("aten.mul.Scalar", (spec, 1.0), (), (spec,))
    prediction = kernel_fits(profile, graph.precision, cache=cache).predict(call)
    if prediction is None or profile.host is None:
        return 0.0
    slowdown = slowdown_ratio(profile, "memory", devices_busy, FP32_PASS_BYTES * trained.elements)
    return prediction.cold_s * slowdown + _SCALER_OPS * profile.host.bare_op_s
