"""Find this machine's devices that an allocation names, as cores to run a script on."""

from __future__ import annotations

import os

from estimator.errors import AllocationError, UnknownMachineError
from estimator.machines.catalogue import named_profile
from estimator.placement.allocation import Allocation


def cores_of(text: str) -> tuple[tuple[int, ...], ...]:
    """The cores of each device of an allocation such as ``1x2:local``, none of accelerators.

    Where this machine was never probed, its cores are shared evenly. Raises AllocationError.
    """
    allocation = Allocation.parse(text)
    (group, *others) = allocation.groups
    if others or group.nodes > 1 or not (group.machine or "").startswith("local"):
        raise AllocationError(
            f"'{text}' is not on this machine, where a script runs; write 1x2:local, and name a "
            "second node by --node"
        )
    wanted = group.devices_per_node
    try:
        devices = named_profile(group.machine or "local").devices
    except UnknownMachineError:
        return _shared_evenly(wanted, text)
    if wanted > len(devices):
        raise AllocationError(
            f"'{text}' asks for {wanted} devices of this machine, which has {len(devices)}; ask "
            "for fewer"
        )
    return tuple(device.cores for device in devices[:wanted])


def _shared_evenly(wanted: int, text: str) -> tuple[tuple[int, ...], ...]:
    from torch import cuda  # a probed machine needs no look at what there is

    accelerators, cores = cuda.device_count(), sorted(os.sched_getaffinity(0))
    if wanted > (accelerators or len(cores)):
        raise AllocationError(
            f"'{text}' asks for {wanted} devices of this machine, which has "
            f"{accelerators or len(cores)}; ask for fewer"
        )
    if accelerators:
        return ((),) * wanted
    each = len(cores) // wanted
    return tuple(tuple(cores[rank * each : (rank + 1) * each]) for rank in range(wanted))
