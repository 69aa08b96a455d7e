"""Give cuDNN's fused attention its published rates, by chip, width of heads and tokens.

A card of the same architecture reaches them in proportion to its peak. Heads of latent attention
are wider for queries than for values. Of a window of few keys each block of queries waits for its
own, so that its rate is far lower and does not depend on the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from estimator.files import shipped_data
from estimator.graph.costs.call_costs import Features
from estimator.machines.profile import Device

# Transformer Engine's fused attention, by whose name its calls go.
PREFIX = "te."
# Of fewer queries a call is one of a window.
_WINDOW = 512.0
_FULL_HEAD, _LATENT_HEAD = 128.0, 192.0


@lru_cache(maxsize=1)
def _published() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(
        (shipped_data("fits") / "attention.json").read_text(encoding="utf-8")
    )
    return found


def has_rates(device: Device) -> bool:
    """Whether cuDNN's rates are known on a device."""
    return _chip(device) in _published()["tflops_per_s"]


def _chip(device: Device) -> str:
    """Under which name a device's rates are: Blackwell Ultra has faster exponentials."""
    return "gb110" if "B300" in device.name else str(device.details.get("architecture"))


def cudnn_seconds(features: Features, device: Device) -> float:
    """Seconds of a call of attention whose target says how it computes, without its launch."""
    published, architecture = _published(), _chip(device)
    _, queries, keys, size, causal = features.dims
    name, _, variant = features.target.removeprefix(PREFIX).rpartition(".")
    side = 1 if name.endswith("backward") else 0
    if queries <= _WINDOW:
        rate = float(published["window_tflops_per_s"][architecture][side])
    else:
        kinds = published["tflops_per_s"][architecture]
        kind = "latent" if size >= _LATENT_HEAD else "bfloat16"
        if "fp8" in variant and not (architecture == "gh100" and side):
            # On Hopper a backward pass in FP8 is slower than one in bf16.
            kind = "latent fp8" if kind == "latent" else "fp8"
        rates = [each[side] for each in kinds.get(kind, kinds["bfloat16"])]
        rate = float(np.interp(np.log(keys), np.log(published["tokens"]), rates))
        if size < _FULL_HEAD:
            rate *= published["half_head_ratio"][architecture][side]
        rate *= 1.0 if causal else published["unmasked_ratio"]
    if side and "deterministic" in variant:
        rate *= published["deterministic_ratio"]
    of_peak = device.peak_flops_per_s["bfloat16"] / published["peak_flops_per_s"][architecture]
    return float(features.cost.flops / (rate * 1e12 * of_peak))
