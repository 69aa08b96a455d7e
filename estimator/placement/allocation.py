"""Name a set of devices: parse and print ``2x8:h100-sxm`` and ``a1[0,1]+a2[3]``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from estimator.errors import AllocationError, quoted

_COUNTED = re.compile(r"\s*([0-9]+)x([0-9]+):([A-Za-z0-9][\w.\-]*(?:@[\w.]+)?)\s*")
_RANGE = "[0-9]+(?:-[0-9]+)?"
_EXPLICIT = re.compile(rf"\s*([A-Za-z0-9][\w.\-]*)\[({_RANGE}(?:,{_RANGE})*)\]\s*")
# The number of the last device on any node has not more digits.
_MOST_DIGITS = 6
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`nodes` nodes with the same number of devices each.

    Either `machine` names the machine type and any devices of such nodes will do, or `host` names
    one node of a cluster file and `devices` its device indices.
    """

    nodes: int
    devices_per_node: int
    machine: str | None = None
    host: str | None = None
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise AllocationError(
                f"'{self}' asks for no device; write at least 1x1, as in 1x2:local"
            )
        if self.devices and len(set(self.devices)) != len(self.devices):
            raise AllocationError(f"'{self}' lists a device twice; list each device once")

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        if self.host is not None:
            return f"{self.host}[{','.join(map(str, self.devices))}]"
        return f"{self.nodes}x{self.devices_per_node}:{self.machine}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Groups of devices in rank order; one rank per device.

    >>> str(Allocation.parse("1x8:v100-sxm + 2x4:t4-g4dn"))
    '1x8:v100-sxm+2x4:t4-g4dn'
    """

    groups: tuple[DeviceGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise AllocationError("the allocation is empty; write one such as 1x2:local")
        ranks = self.ranks
        if ranks > MOST_RANKS:
            raise AllocationError(
                f"the allocation has {ranks} ranks; at most {MOST_RANKS} are supported"
            )
        if len(self.groups) > 1:
            self._check_hosts()

    def _check_hosts(self) -> None:
        seen: set[tuple[str, int]] = set()
        for group in self.groups:
            for device in group.devices:
                key = (group.host or "", device)
                if key in seen:
                    raise AllocationError(
                        f"device {device} of '{group.host}' is listed twice; list each device once"
                    )
                seen.add(key)

    @property
    def ranks(self) -> int:
        return sum([group.nodes * group.devices_per_node for group in self.groups])

    @property
    def nodes(self) -> int:
        return sum(1 for _ in self.node_sizes())

    def node_sizes(self) -> Iterator[tuple[DeviceGroup, int]]:
        """Each node with how many devices are used on it, in rank order."""
        for group in self.groups:
            for _ in range(group.nodes):
                yield group, group.devices_per_node

    def __str__(self) -> str:
        return "+".join(str(group) for group in self.groups)

    @classmethod
    def parse(cls, text: str | Allocation) -> Allocation:
        """Read an allocation; parse and str are inverse. Raises AllocationError."""
        if isinstance(text, Allocation):
            return text
        if not isinstance(text, str):
            raise AllocationError(
                f"an allocation is text such as 1x2:local, found {quoted(text)}; write one"
            )
        return _parsed(text)

    @classmethod
    def _of_text(cls, text: str) -> Allocation:
        groups = []
        for part in text.split("+"):
            if counted := _COUNTED.fullmatch(part):
                nodes, devices, machine = counted.groups()
                if len(nodes) + len(devices) > 12:
                    raise AllocationError(
                        f"{quoted(part.strip())} asks for an absurd number of devices; at most "
                        f"{MOST_RANKS} ranks are supported"
                    )
                groups.append(
                    DeviceGroup(nodes=int(nodes), devices_per_node=int(devices), machine=machine)
                )
            elif explicit := _EXPLICIT.fullmatch(part):
                host, listed = explicit.groups()
                indices = _indices(part.strip(), listed)
                groups.append(
                    DeviceGroup(nodes=1, devices_per_node=len(indices), host=host, devices=indices)
                )
            else:
                raise AllocationError(
                    f"{quoted(part.strip() or text)} is not an allocation; write "
                    "NODESxDEVICES:MACHINE, as in 1x2:local, or HOST[0,1], joined by +"
                )
        return cls(tuple(groups))


@lru_cache(maxsize=1 << 12)
def _parsed(text: str) -> Allocation:
    """A scheduler writes the same allocations again and again."""
    return Allocation._of_text(text)


def _indices(part: str, listed: str) -> tuple[int, ...]:
    """The devices that ``0,2-5`` lists; raises AllocationError.

    >>> _indices("a1[0,2-5]", "0,2-5")
    (0, 2, 3, 4, 5)
    """
    indices: list[int] = []
    for span in listed.split(","):
        first, _, last = span.partition("-")
        if max(len(first), len(last)) > _MOST_DIGITS:
            raise AllocationError(
                f"{quoted(part)} names a device of more than {_MOST_DIGITS} digits; write HOST[0,1]"
            )
        low, high = int(first), int(last or first)
        if high < low:
            raise AllocationError(
                f"{quoted(part)} counts from {low} down to {high}; write HOST[{high}-{low}]"
            )
        indices += range(low, high + 1)
        if len(indices) > MOST_RANKS:
            break
    return tuple(indices)
