"""Read the versions and settings that change how fast the same machine runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping

from estimator.machines.profile import Device
from estimator.probe.backend import allocator_text

_SETTINGS = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "NCCL_", "GLOO_", "CUDA_")


def software_versions(
    device: Device, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """By name; the threads are those of one device."""
    environment = os.environ if environment is None else environment
    versions = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "allocator": allocator_text(environment),
        "threads": str(max(1, len(device.cores))),
    }
    for package in ("torch", "numpy", "nvidia-ml-py"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    settings = [
        f"{key}={environment[key]}" for key in sorted(environment) if key.startswith(_SETTINGS)
    ]
    if settings:
        versions["settings"] = " ".join(settings)
    return versions
