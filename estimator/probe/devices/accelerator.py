"""Read what an accelerator is, and what it runs at under sustained work."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.devices.backend import Backend
from estimator.probe.devices.inventory import Fact, clock_facts, nvml_answer
from estimator.probe.devices.jobs import Emit

_SIDE = 8192
# Work queued at once is some tens of milliseconds; the driver answers in less than one.
_QUEUED = 20
_LEAST_S, _MOST_S = 0.3, 1.5


def measure_facts(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit what torch and the driver say of a CUDA device, then its clocks and power at work."""
    import torch

    emit({"facts": device_facts(torch, backend.index)})
    emit({"facts": {"half_attention": half_attention(torch, backend.device)}})
    emit({"sustained": sustained_facts(torch, backend, seconds=budget_s)})


def device_facts(torch: Any, index: int) -> dict[str, Fact]:
    """What the CUDA runtime says of a device, and the versions of the libraries it runs."""
    found = torch.cuda.get_device_properties(index)
    return {
        "sm_count": int(found.multi_processor_count),
        "l2_cache_bytes": int(getattr(found, "L2_cache_size", 0)) or None,
        "compute_capability": f"{found.major}.{found.minor}",
        "cuda_version": str(torch.version.cuda),
        "cudnn_version": torch.backends.cudnn.version(),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())),
    }


def half_attention(torch: Any, device: Any) -> str:
    """The operator that scaled_dot_product_attention runs for causal bfloat16 tensors here.

    Which one that is depends on the device, on cuDNN's version and on torch's
    (check_prefer_cudnn_attention of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class OperatorNames(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    heads = torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with OperatorNames():
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return next((name for name in seen if "_scaled_dot_product" in name), "math")


def sustained_facts(
    torch: Any, backend: Backend, *, seconds: float, nvml: Any = None
) -> dict[str, Fact]:
    """Clocks and power read while bfloat16 matmuls of random numbers run."""
    nvml = import_module("pynvml") if nvml is None else nvml
    left, right = (
        torch.randn(_SIDE, _SIDE, device=backend.device, dtype=torch.bfloat16) for _ in range(2)
    )
    end = time.monotonic() + min(max(seconds, _LEAST_S), _MOST_S)
    found: dict[str, Fact] = {}
    try:
        nvml.nvmlInit()
        handle = _handle(nvml, torch, backend.index)
        while time.monotonic() < end:
            for _ in range(_QUEUED):
                torch.mm(left, right)
            found = clock_facts(nvml, handle)
            backend.synchronize()
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ProbeError(
            f"the NVIDIA driver does not say what its GPU runs at ({error}); run nvidia-smi and "
            "mend what it reports"
        ) from None
    return {f"{name}_at_work": value for name, value in found.items()}


def _handle(nvml: Any, torch: Any, index: int) -> Any:
    """The driver's handle of torch's device, which CUDA_VISIBLE_DEVICES may number otherwise."""
    unique = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if unique is not None:
        handle = nvml_answer(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{unique}")
        if handle is not None:
            return handle
    return nvml.nvmlDeviceGetHandleByIndex(index)
