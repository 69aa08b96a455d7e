"""Cost the copies of shards between devices and their host, where FSDP keeps them there.

torch.distributed.fsdp's CPUOffloadPolicy (torch 2.13, _fsdp_param.py): a unit's shard is copied to
the device before it is gathered, on the stream of the gather, and the shard of its gradient back to
the host once it is reduced. Both are in the dtype of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import maximum
from estimator.errors import ProfileError
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import LINK_RATIOS
from estimator.placement.process_groups import ProcessGroup
from estimator.timeline.nearest import Lookup
from estimator.timeline.shard_costs import ShardedPasses

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """What each unit's shards take over the link between a device and its host, by machine."""

    parameters_bytes: Array
    gradients_bytes: Array
    h2d: tuple[Lookup, Lookup]
    d2h: tuple[Lookup, Lookup]

    @classmethod
    def of(cls, profiles: Sequence[MachineProfile], passes: ShardedPasses) -> HostCopies:
        """The copies of all units; raises ProfileError for a machine without such links."""
        stored_ratio = passes.stored_ratio
        return cls(
            parameters_bytes=passes.gathered_bytes * stored_ratio,
            gradients_bytes=passes.gradient_bytes * stored_ratio,
            h2d=_links(profiles, "h2d"),
            d2h=_links(profiles, "d2h"),
        )

    def to_device_s(self, groups: Sequence[ProcessGroup]) -> Any:
        """Seconds of each unit before it is gathered, on the slowest group's devices."""
        return _slowest_s(self.parameters_bytes, groups, *self.h2d)

    def to_host_s(self, groups: Sequence[ProcessGroup]) -> Any:
        """Seconds of each unit's gradients after they are reduced."""
        return _slowest_s(self.gradients_bytes, groups, *self.d2h)


def _links(
    profiles: Sequence[MachineProfile], kind: Literal["h2d", "d2h"]
) -> tuple[Lookup, Lookup]:
    """(latency, bytes a second) of each machine's pinned copies."""
    latencies_s, rates = [], []
    for profile in profiles:
        found = [link for link in profile.links if link.kind == kind]
        if not found:
            raise ProfileError(
                f"profile '{profile.name}' has no {kind} link, over which shards reach the host; "
                "run 'estimator probe' on a machine with GPUs"
            )
        link = max(found, key=lambda each: each.pinned)
        datasheet = link.provenance.source == "datasheet"
        latencies_s.append(link.latency_s)
        rates.append(link.bandwidth_bytes_per_s * (LINK_RATIOS["pcie"] if datasheet else 1.0))
    return Lookup(latencies_s), Lookup(rates)


def _slowest_s(
    sizes_bytes: Array, groups: Sequence[ProcessGroup], latency_s: Lookup, rate: Lookup
) -> Any:
    found: Any = np.zeros(len(sizes_bytes))
    for group in groups:
        per_byte_s = 1.0 / (rate[group.network] * group.ranks)
        rows = np.ndim(per_byte_s) > 0
        sizes = sizes_bytes[:, None] if rows else sizes_bytes
        seconds = np.where(sizes > 0, latency_s[group.network] + sizes * per_byte_s, 0.0)
        found = maximum(found[:, None] if rows and found.ndim == 1 else found, seconds)
    return found
