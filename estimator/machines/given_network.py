"""Give a machine the network that its description lacks, as a person says it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from estimator.machines.profile import Link, MachineProfile, Provenance
from estimator.units import format_bandwidth, parse_bandwidth_bytes_per_s

Kind = Literal["tcp", "roce", "infiniband"]

# Typical of a hop between nodes, as in the catalogue's entries.
_LATENCIES_S: dict[Kind, float] = {"tcp": 2.5e-5, "roce": 3e-6, "infiniband": 2e-6}


@dataclass(frozen=True, slots=True)
class GivenNetwork:
    """What a node sends to others, each way, and over what."""

    bytes_per_s: float
    kind: Kind = "tcp"

    @classmethod
    def parse(cls, text: str) -> GivenNetwork:
        """Read a rate, or a rate and a kind; raises ValueError.

        >>> GivenNetwork.parse("100Gbit/s"), GivenNetwork.parse("200 Gbit/s,infiniband").kind
        (GivenNetwork(bytes_per_s=12500000000.0, kind='tcp'), 'infiniband')
        """
        rate, _, wanted = text.partition(",")
        for kind in _LATENCIES_S:
            if kind == (wanted.strip() or "tcp"):
                return cls(parse_bandwidth_bytes_per_s(rate), kind)
        raise ValueError(
            f"'{wanted.strip()}' is no kind of network; write one of {', '.join(_LATENCIES_S)}"
        )

    def of(self, machine: MachineProfile) -> MachineProfile:
        """The machine on this network instead of its own."""
        note = f"{format_bandwidth(self.bytes_per_s)} as given; latency is a typical value"
        link = Link(
            kind=self.kind,
            locality="rack",
            latency_s=_LATENCIES_S[self.kind],
            bandwidth_bytes_per_s=self.bytes_per_s,
            provenance=Provenance(source="datasheet", note=note),
        )
        hardware = {
            key: value
            for key, value in machine.hardware.items()
            if key not in ("nic_count", "nic_bit_per_s")
        }
        return replace(machine, network=(link,), hardware=hardware)
