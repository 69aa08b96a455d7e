"""Find the machine of the catalogue that a published row was measured on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import STREAMED_RATIO, with_typical_costs
from published.rows import NotMapped, PublishedRow

# GPU cells, in lower case and without punctuation, to machines; the first that matches counts.
_MACHINES: tuple[tuple[str, str], ...] = (
    (r"\bgb300", "gb300"),
    (r"\bb300", "b300"),
    (r"\bgb200", "gb200"),
    (r"\bb200", "b200"),
    (r"\bgh200", "gh200"),
    (r"\bh200", "h200"),
    (r"\bh100.*nvl", "h100-nvl"),
    (r"\bh100.*pcie", "h100-pcie"),
    (r"\bh100", "h100-sxm"),
    (r"\ba100.*pcie.*80", "a100-pcie-80gb"),
    (r"\ba100.*pcie", "a100-pcie-40gb"),
    (r"\ba100.*80", "a100-sxm-80gb"),
    (r"\ba100", "a100-sxm-40gb"),
    (r"\bv100.*p3dn", "v100-p3dn"),
    (r"\bv100.*p3", "v100-p3"),
    (r"\bv100.*pcie.*32", "v100-pcie-32gb"),
    (r"\bv100.*pcie", "v100-pcie"),
    (r"\bv100.*32", "v100-sxm-32gb"),
    (r"\bv100", "v100-sxm"),
    (r"\bp100.*sxm", "p100-sxm"),
    (r"\bp100", "p100-pcie"),
    (r"\bp4\b", "p4"),
    (r"\bt4\b", "t4"),
    (r"\bk80\b", "k80"),
    (r"titan rtx", "titan-rtx"),
    (r"(quadro|rtx) ?8000", "quadro-rtx-8000"),
    (r"2080 ?ti", "rtx-2080-ti"),
    (r"\b3090", "rtx-3090"),
    (r"\b4090", "rtx-4090"),
    (r"a6000", "rtx-a6000"),
    (r"\ba40\b", "a40"),
    (r"\ba10g", "a10g-g5"),
    (r"\ba10\b", "a10"),
    (r"\bl40s", "l40s"),
    (r"\bl4\b", "l4"),
    (r"\bh20\b", "h20"),
    (r"\bmi355x", "mi355x"),
    (r"\bmi325x", "mi325x"),
    (r"\bmi300x", "mi300x"),
    (r"\bmi250", "mi250x"),
    (r"\bmi210", "mi210"),
    (r"\bmi100", "mi100"),
)


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
    name = (
        setting.machine if setting is not None and setting.machine else machine_name(row.step.gpu)
    )
    return variant(name, setting, max(row.step.node_sizes))


@lru_cache(maxsize=256)
def variant(name: str, setting: Setting | None, most: int = 1) -> MachineProfile:
    """A machine of the catalogue in a source's setting, with at least `most` devices."""
    profile = load_profile(name)
    first = profile.devices[0]
    if setting is not None and setting.memory_bytes is not None:
        first = replace(first, memory_bytes=setting.memory_bytes)
    if setting is not None and setting.memory_bytes_per_s is not None:
        first = replace(first, memory_bandwidth_bytes_per_s=setting.memory_bytes_per_s)
    if setting is not None and setting.power_w is not None:
        first = replace(first, details={**first.details, "power_w": setting.power_w})
    devices = max(most, len(profile.devices))
    if first is not profile.devices[0] or devices != len(profile.devices):
        alike = tuple(replace(first, index=index) for index in range(devices))
        profile = replace(profile, devices=alike)
    if setting is not None and setting.tensor_kernels:
        profile = _with_gradient_work(profile, setting)
    if setting is None or setting.network_bit_per_s is None:
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
