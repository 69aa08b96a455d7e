"""Say what a machine known only by its datasheet typically costs, by its architecture.

A datasheet promises peaks. What runs on such a machine is taken to reach the shares of them, and
to cost the host seconds, that are usual on machines of its kind; each number names its source.

Figures of memory are of processes that ran out of it, whose message says what the device has, what
the process holds and what of that is PyTorch's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from estimator.errors import ProfileError
from estimator.files import shipped_data
from estimator.machines.profile import (
    Device,
    DeviceKind,
    HostCost,
    Link,
    LinkKind,
    MachineProfile,
    OverlapCost,
    Provenance,
    UpdateCost,
)
from estimator.units import MIB
from estimator.workload.optimizers import RULES

# Where tensor cores take their operands from: the first two generations from registers, later ones
# from shared memory copied ahead of time (NVIDIA A100 architecture whitepaper, 2020), which from
# Hopper on groups of warps leave to compute by themselves (NVIDIA H100 whitepaper, 2023).
TensorCores = Literal["none", "registers", "asynchronous", "warp groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the chips of one architecture have in common.

    `process_nm` is the lithography, with which energy per operation falls. `flops_per_clock` are
    dense operations of one multiprocessor by dtype, matrix units included. `short_tlb` says that
    the translation caches reach less far than those of later chips. Cards for gamers raise their
    clock to `above_boost_ratio` times the rated boost while power and heat allow. What an operation
    takes at a power limit is counted at `power_clock_hz` at most: of a die that may clock higher
    it is no more.
    `nvlink_bytes_per_s` is one of `nvlinks` links, one way.
    """

    process_nm: float
    tensor_cores: TensorCores
    flops_per_clock: Mapping[str, float]
    source: str
    short_tlb: bool = False
    above_boost_ratio: float = 1.0
    power_clock_hz: float = math.inf
    nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        rates = {f"flops_per_clock[{dtype}]": rate for dtype, rate in self.flops_per_clock.items()}
        rates |= {"process_nm": self.process_nm, "above_boost_ratio": self.above_boost_ratio}
        for name, value in rates.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, found {value}")
        if self.tensor_cores not in get_args(TensorCores):
            raise ValueError(f"tensor_cores is {self.tensor_cores!r}")
        if (self.nvlinks > 0) != (self.nvlink_bytes_per_s > 0):
            raise ValueError("nvlinks and nvlink_bytes_per_s go together")
        if not self.source:
            raise ValueError("source is empty")


def architecture_of(device: Device) -> Architecture | None:
    """The architecture that a device names; None where it names none that is known."""
    return architectures().get(str(device.details.get("architecture")))


@lru_cache(maxsize=1)
def architectures() -> Mapping[str, Architecture]:
    """Every architecture that is known, by the name that devices give."""
    return read_architectures(shipped_data("architectures.json"))


def read_architectures(path: Path) -> Mapping[str, Architecture]:
    """The architectures of a file; raises ProfileError where one of them cannot be."""
    name = "the file"
    try:
        architectures = {}
        for name, row in json.loads(path.read_text(encoding="utf-8")).items():
            architectures[name] = Architecture(**row)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"{path} does not say what architectures are ({name}: {error}); install the package "
            "again or correct the file"
        ) from None
    return architectures


# What collectives get of a link's line rate. NVLink: nccl-tests on 8 A100 reach 235 of 300 GB/s
# each way; multiprocessors send 128 bytes at a time, which leaves 20 of each link's 25 GB/s
# (NVIDIA/nccl-tests, issue 149). PCIe: headers and flow control; NCCL takes 12 GB/s of 3.0 x16
# (PCI_BW in its src/graph/topo.h). InfiniBand and RoCE: headers at MTU 4096 and one queue's pauses.
# EFA and TCP: nccl-tests over aws-ofi-nccl and over sockets.
LINK_RATIOS: dict[LinkKind, float] = {
    "nvlink": 0.78,
    "infinity_fabric": 0.70,
    "pcie": 0.76,
    "infiniband": 0.93,
    "roce": 0.90,
    "efa": 0.80,
    "tcp": 0.75,
}
# Without peer-to-peer every hop goes through host memory: the sender writes, the receiver reads.
# nccl-tests and the like get 4.1, 5.0 and 5.3 of 15.75 GB/s over 2, 4 and 8 TITAN RTX, 12.7 and
# 15.0 of 31.5 over 4 and 8 RTX 4090, 35 and 28 of 63 over 4 and 8 RTX 5090 (NVIDIA/nccl, issue
# 1639): the host's generation counts, by the PCIe that it speaks. It is one share for all sizes of
# box, so that no more devices get more.
_HOST_STAGED_RATIOS = ((16e9, 0.33), (32e9, 0.44), (math.inf, 0.50))
# What NCCL's proxy thread and its flags add to each hop over a network: hwLat of the LL protocol in
# NVIDIA/nccl, src/graph/tuning.cc. EFA acknowledges in software: 2 nodes with EFA take 51 µs for 8
# bytes where InfiniBand takes 39 (dstackai/dstack, pull request 3961: 14 µs a hop; p4d.24xlarge
# with NCCL 2.7 takes several times that).
NETWORK_HOP_S = 5e-6
_SLOWER_HOPS_S: dict[LinkKind, float] = {"efa": 25e-6}
# What a byte streamed by one kernel costs, as a share of the memory's peak (BabelStream on V100 and
# A100: 0.85 to 0.92 for arrays far larger than the caches; optimizers walk many smaller tensors).
STREAMED_RATIO = 0.80
# What a GPU's share of the host's memory moves: DGX A100 has 2 sockets of 8 channels of DDR4-3200,
# 410 GB/s for 8 GPUs (NVIDIA DGX A100 datasheet, AMD EPYC 7742).
_HOST_BYTES_PER_S = 51e9
_HOST_UPDATE_ERROR = 0.6
# The calls around an update (`estimator probe` on an EPYC server: 16 to 45 µs a step).
_UPDATE_LAUNCH_S = 5e-5
_FP32_BYTES = 4
# One standard deviation of equal GPUs' compute. On four clusters of some hundred GPUs and more, the
# fastest and the slowest are 8 % apart on average (Sinha et al.: Not All GPUs Are Created Equal,
# SC22): six standard deviations of so many draws.
RANK_JITTER_RATIO = 0.013
# What a second of NCCL's collectives takes from compute beside it, on one node and on several: its
# kernel holds up to 24 of 108 to 132 multiprocessors, one for each channel, and a share of the
# memory's rate, so between nothing and 0.22; over a network it has fewer channels.
_EXPOSED_RATIOS = {1: 0.08, 2: 0.05}
_BESIDE_COMPUTE_RATIO = 1.1
_HOST_ERROR = 0.4
# The host is a property of the box: the same GPU's operators took 1.8 times these costs on an EPYC
# Rome with torch 1.x (micro-batch 1 of VIA-Research/vTrain), 2.75 times on one GB200's Grace
# (NVIDIA/TransformerEngine, issue 2053). Where a profile names no box, any of them may be meant.
_UNNAMED_HOST_ERROR = 0.6
_UPDATE_ERROR = 0.4
# Eager training issues some 60,000 operators a second from Python and 80,000 from autograd's C++,
# launches included: 16 and 12 µs each. Traces of fast processors show 8 to 12 and 5 to 8 µs, but a
# step that waits for the host all along takes longer: BERT-base's forward pass 6 to 8 ms. Machines
# whose processors are known to be slower say so themselves.
_HOST = HostCost(
    forward_op_s=8.5e-6,
    forward_view_s=5e-6,
    backward_op_s=4.5e-6,
    bare_op_s=7.5e-6,
    module_call_s=3e-6,
    step_s=1e-4,
    ddp_step_s=3e-4,
    ddp_bucket_s=3e-5,
    shard_unit_s=3e-4,
    shard_update_tensor_s=5e-6,
    provenance=Provenance(
        source="datasheet", relative_error=_HOST_ERROR, note="typical of servers with GPUs"
    ),
)
_UNNAMED_HOST = replace(
    _HOST, provenance=replace(_HOST.provenance, relative_error=_UNNAMED_HOST_ERROR)
)


def achieved_bytes_per_s(link: Link) -> float:
    """What collectives get of a link: its measured rate, or the usual share of a line rate."""
    if link.provenance.source != "datasheet":
        return link.bandwidth_bytes_per_s
    usual = LINK_RATIOS.get(link.kind, 1.0)
    if not link.peer_to_peer:
        usual = next(s for most, s in _HOST_STAGED_RATIOS if link.bandwidth_bytes_per_s <= most)
    return link.bandwidth_bytes_per_s * (link.achieved_ratio or usual)


def achieved_latency_s(link: Link, kind: DeviceKind) -> float:
    """Seconds of a hop of a collective between nodes whose devices are of a kind."""
    if link.provenance.source != "datasheet" or kind == "cpu":
        return link.latency_s
    return link.latency_s + _SLOWER_HOPS_S.get(link.kind, NETWORK_HOP_S)


def is_known_by_datasheet(profile: MachineProfile) -> bool:
    """Whether nothing of a machine's kernels was measured, but its peaks are known."""
    device = profile.devices[0]
    known = device.memory_bandwidth_bytes_per_s is not None and bool(device.peak_flops_per_s)
    return device.kind == "cuda" and known and not profile.kernels


def with_typical_costs(profile: MachineProfile) -> MachineProfile:
    """The profile, with typical host and update costs where it is known by its datasheet only."""
    if not is_known_by_datasheet(profile):
        return profile
    jitter_ratio = profile.rank_jitter_ratio
    is_box = "instance_type" in profile.hardware or "system" in profile.hardware
    return replace(
        profile,
        host=profile.host or (_HOST if is_box else _UNNAMED_HOST),
        updates=profile.updates or _updates(profile.devices[0]),
        rank_jitter_ratio=RANK_JITTER_RATIO if jitter_ratio is None else jitter_ratio,
    )


def typical_overlaps(profile: MachineProfile) -> tuple[OverlapCost, ...]:
    """How compute and collectives slow each other on a machine known by its datasheet only."""
    if not is_known_by_datasheet(profile):
        return ()
    return tuple(
        OverlapCost(
            compute="compute_bound",
            backend="nccl",
            group_size=2,
            nodes=nodes,
            size_bytes=1 << 26,
            exposed_ratio=exposed_ratio,
            collective_slowdown_ratio=_BESIDE_COMPUTE_RATIO,
            provenance=Provenance(source="datasheet", relative_error=1.0, note="typical of NCCL"),
        )
        for nodes, exposed_ratio in _EXPOSED_RATIOS.items()
    )


def _updates(device: Device) -> tuple[UpdateCost, ...]:
    """What every optimizer's update costs on a device and on its host, by the bytes moved."""
    own = device.memory_bandwidth_bytes_per_s or 0.0
    places: tuple[tuple[DeviceKind, float, float], ...] = (
        (device.kind, STREAMED_RATIO * own, _UPDATE_ERROR),
        ("cpu", STREAMED_RATIO * _HOST_BYTES_PER_S, _HOST_UPDATE_ERROR),
    )
    note = "bytes over memory bandwidth"
    return tuple(
        UpdateCost(
            optimizer=rule.measured_as,
            form=rule.form or ("foreach" if kind == "cuda" else "loop"),
            device=kind,
            launch_s=_UPDATE_LAUNCH_S,
            per_tensor_s=rule.tensor_s,
            per_parameter_s=rule.bytes_of(_FP32_BYTES) / rate,
            provenance=Provenance(source="datasheet", relative_error=error, note=note),
        )
        for kind, rate, error in places
        for rule in RULES.values()
    )


# What torch does not see of the memory on the box: 79.25 of 80 GiB (levihsu/OOTDiffusion, issue
# 235), 93.0 of 94 (ali-vilab/VACE, 56), 39.5 of 40 (TianheWu/CoSeR, 10), 31.37 of 32
# (Wan-Video/Wan2.1, 465), 23.7 of 24 (tatsu-lab/stanford_alpaca, 76), 10.76 of 11
# (RenYurui/StructureFlow, 35).
_DRIVER_BYTES = 200 * MIB
_DRIVER_RATIO = 0.007
# CUDA's context with the kernels of torch and its libraries, as what a process holds beyond
# PyTorch's own: 0.66 GiB on an H100 (VACE, 56), 0.58 on an RTX 5090 (Wan2.1, 465), 0.49 on an A100
# (CoSeR, 10), 0.1 on a T4 (hpcaitech/Open-Sora, 697).
CONTEXT_BYTES = 512 * MIB
# NCCL keeps some 10 MiB for each connection of each channel (NVIDIA/nccl, issue 1685): 688 MB for
# the 24 channels of more than two A100 (issue 964), and in proportion to channels (issue 986), of
# which PCIe takes 2 to 4.
_NVLINK_COMMUNICATOR_BYTES = 688 * 10**6
_PCIE_COMMUNICATOR_BYTES = 115 * 10**6
# cuBLAS: one workspace for the forward thread's handle, one for autograd's: 32 MiB each on Hopper
# and later, else 8 MiB and some (torch, aten/src/ATen/cuda/CublasHandlePool.cpp).
_CUBLAS_BYTES = 2 * 8320 * 1024
_CUBLAS_HOPPER_BYTES = 2 * 32 * MIB
# What the caching allocator holds beyond live tensors, over these: 0 and 1 % (THUDM/CogVideo, 36;
# stanford_alpaca, 76), 6 % (VACE, 56), 7 % (CoSeR, 10), 14 % (OOTDiffusion, 235), 25 %
# (wbfwonderful/Vad-R1, 11), all of them short of memory.
FRAGMENTATION_RATIO = 0.065


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Where the memory of one device goes beside live tensors, in bytes.

    `capacity_bytes` is what a process may have, with its context, the buffers of its communicators
    and workspaces; the allocator holds `fragmentation_ratio` of live tensors on top of them.
    """

    capacity_bytes: int
    context_bytes: int = 0
    communicators_bytes: int = 0
    workspaces_bytes: int = 0
    fragmentation_ratio: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """What live tensors can take at most."""
        kept = self.context_bytes + self.communicators_bytes + self.workspaces_bytes
        left = max(self.capacity_bytes - kept, self.capacity_bytes // 10)
        return int(left / (1 + self.fragmentation_ratio))


def device_memory(profile: MachineProfile, communicators: int) -> DeviceMemory:
    """The memory of a machine's devices for a rank that is in some groups of ranks.

    A core group has the memory that its profile says: nothing of it is kept.
    """
    device = profile.devices[0]
    if device.kind == "cpu":
        return DeviceMemory(capacity_bytes=device.memory_bytes)
    capacity = device.memory_bytes
    if profile.provenance.source == "datasheet":
        capacity -= round(_DRIVER_BYTES + _DRIVER_RATIO * capacity)
    quick = any(link.kind in ("nvlink", "infinity_fabric") for link in profile.links)
    hopper = (device.compute_capability or 0.0) >= 9
    return DeviceMemory(
        capacity_bytes=capacity,
        context_bytes=CONTEXT_BYTES,
        communicators_bytes=communicators
        * (_NVLINK_COMMUNICATOR_BYTES if quick else _PCIE_COMMUNICATOR_BYTES),
        workspaces_bytes=_CUBLAS_HOPPER_BYTES if hopper else _CUBLAS_BYTES,
        fragmentation_ratio=FRAGMENTATION_RATIO,
    )
