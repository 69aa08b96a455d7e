"""Say how much of a device's memory tensors can have: what the driver and libraries keep of it.

Figures are of processes that ran out of memory, whose message says what the device has, what the
process holds and what of that is PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.machines.profile import MachineProfile
from estimator.units import MIB

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
