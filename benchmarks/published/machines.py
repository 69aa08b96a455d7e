"""Find the machine of the catalogue that a published row was measured on."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import STREAMED_RATIO, with_typical_costs
from published.rows import NotMapped, PublishedRow

# GPU cells, in lower case and without punctuation, to machines; the first that matches counts.
with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    _MACHINES = [(row["gpu"], row["machine"]) for row in csv.DictReader(_table)]
# One-way latencies of the catalogue's networks.
_LATENCY_S: dict[LinkKind, float] = {"infiniband": 2e-6, "roce": 3e-6}
_OTHER_LATENCY_S = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a source says, or leads one to assume, of its machines beside the GPU's name.

    `network_bit_per_s` is the line rate of a node, each way, of which collectives get the usual
    share if not `network_ratio`; `source` says where that is from. `power_w` is a GPU's limit.
    Ranks `in_containers` of their own share no memory, so that NCCL takes the network inside nodes
    too. A trainer that works on gradients launches `tensor_kernels` for each before the update,
    which move `parameter_bytes` for each parameter.
    """

    machine: str | None = None
    network: LinkKind = "tcp"
    network_bit_per_s: float | None = None
    network_ratio: float | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    power_w: float | None = None
    in_containers: bool = False
    tensor_kernels: int = 0
    parameter_bytes: float = 0.0
    source: str = ""


def machine_name(gpu: str) -> str:
    """The catalogue's name of a GPU; raises NotMapped."""
    plain = re.sub(r"[^a-z0-9]+", " ", gpu.lower())
    for pattern, machine in _MACHINES:
        if re.search(pattern, plain):
            return machine
    raise NotMapped(f"no machine of the catalogue is called {gpu}")


def machine_of(row: PublishedRow, setting: Setting | None) -> MachineProfile:
    """The profile that stands for the row's machine; the same object for the same machine."""
    setting = setting or Setting()
    return variant(setting.machine or machine_name(row.step.gpu), setting, max(row.step.node_sizes))


@lru_cache(maxsize=256)
def variant(name: str, setting: Setting | None, most: int = 1) -> MachineProfile:
    """A machine of the catalogue in a source's setting, with at least `most` devices."""
    profile, setting = load_profile(name), setting or Setting()
    first = profile.devices[0]
    stated: dict[str, Any] = {
        "memory_bytes": setting.memory_bytes,
        "memory_bandwidth_bytes_per_s": setting.memory_bytes_per_s,
        "details": setting.power_w and {**first.details, "power_w": setting.power_w},
    }
    changed = {field: value for field, value in stated.items() if value is not None}
    devices = max(most, len(profile.devices))
    if changed or devices != len(profile.devices):
        alike = tuple(replace(first, index=index, **changed) for index in range(devices))
        profile = replace(profile, devices=alike)
    if setting.tensor_kernels:
        profile = _with_gradient_work(profile, setting)
    if setting.network_bit_per_s is None:
        return profile
    link = Link(
        kind=setting.network,
        locality="rack",
        latency_s=_LATENCY_S.get(setting.network, _OTHER_LATENCY_S),
        bandwidth_bytes_per_s=setting.network_bit_per_s / 8,
        achieved_ratio=setting.network_ratio,
        provenance=Provenance(source="datasheet", note=setting.source),
    )
    return replace(profile, network=(link,))


def _with_gradient_work(profile: MachineProfile, setting: Setting) -> MachineProfile:
    """The profile whose updates hold what a trainer does with gradients, and wait for it."""
    profile = with_typical_costs(profile)
    host, first = profile.host, profile.devices[0]
    assert host is not None
    assert first.memory_bandwidth_bytes_per_s is not None
    kernel_s = host.forward_op_s + host.bare_op_s
    rate = STREAMED_RATIO * first.memory_bandwidth_bytes_per_s
    updates = tuple(
        replace(
            update,
            per_tensor_s=update.per_tensor_s + setting.tensor_kernels * kernel_s,
            per_parameter_s=update.per_parameter_s + setting.parameter_bytes / rate,
        )
        for update in profile.updates
    )
    return replace(profile, updates=updates)
