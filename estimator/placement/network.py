"""Say what the ranks of a node get of its network, which may be several cards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.elementwise import Array
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import achieved_bytes_per_s
from estimator.placement.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """Payload rates, each way, of all network cards of a node and of one card.

    The cards are spread evenly over the node's devices.
    """

    bytes_per_s: float
    card_bytes_per_s: float
    cards: int
    devices: int

    def cards_near(self, ranks: int) -> int:
        """How many cards the first `ranks` devices of the node send over.

        NCCL gives each GPU the cards nearest to it, an equal part of them where several GPUs are as
        near (NVIDIA/nccl, src/graph/topo.cc, ncclTopoGetLocalNet: local cards over local GPUs,
        rounded up), and enters and leaves a node over the cards of the GPUs that take part
        (search.cc, ncclTopoSelectNets). To fill several they need NVLink or its like between them
        (NVIDIA/nccl#412), as all machines of the catalogue with several cards have.
        """
        return -(-ranks * self.cards // self.devices)

    def sent_bytes_per_s(self, ranks: int) -> float:
        """What the first `ranks` devices of the node get together."""
        return min(self.bytes_per_s, self.cards_near(ranks) * self.card_bytes_per_s)


def network_of(profile: MachineProfile) -> NodeNetwork | None:
    """The network of a node by its profile; None where nothing is known of it.

    The fastest single flow measured is what any number of ranks gets. A datasheet's line rate is
    that of all cards together, and counts with what collectives usually get of it.
    """
    links = [link for link in profile.network if link.flows == 1]
    if not links:
        return None
    best = max(links, key=achieved_bytes_per_s)
    rate = achieved_bytes_per_s(best)
    cards = _cards(profile)[0] if best.provenance.source == "datasheet" else 1
    return NodeNetwork(
        bytes_per_s=rate,
        card_bytes_per_s=rate / cards,
        cards=cards,
        devices=len(profile.devices),
    )


def network_in_cluster(profile: MachineProfile, cluster: Cluster, host: str) -> NodeNetwork | None:
    """The network of a named node: the uplink that its cluster file gives, else its profile's.

    Where the machine's datasheet gives the rate of a card, some ranks get no more than their cards.
    """
    uplink = cluster.nodes[host].uplink_bytes_per_s
    if uplink is None:
        return network_of(profile)
    cards, card_bytes_per_s = _cards(profile)
    return NodeNetwork(
        bytes_per_s=cluster.payload_bytes_per_s(uplink),
        card_bytes_per_s=cluster.payload_bytes_per_s(max(card_bytes_per_s, uplink / cards)),
        cards=cards,
        devices=len(profile.devices),
    )


def _cards(profile: MachineProfile) -> tuple[int, float]:
    """(network cards of a node, line rate of one in bytes per second); (1, 0.0) if unknown."""
    cards, rate = profile.hardware.get("nic_count"), profile.hardware.get("nic_bit_per_s")
    if not isinstance(cards, int) or cards < 1 or not isinstance(rate, int | float):
        return 1, 0.0
    return cards, rate / 8


def rates_by_ranks(networks: Sequence[NodeNetwork | None], most: int) -> Array:
    """For each network and for none, what 0 to `most` ranks of a node get of it; inf if unknown."""
    unknown = [math.inf] * (most + 1)
    rows: dict[NodeNetwork | None, list[float]] = {
        network: [math.inf, *map(network.sent_bytes_per_s, range(1, most + 1))]
        for network in dict.fromkeys(networks)
        if network is not None
    }
    return np.array([*(rows.get(network, unknown) for network in networks), unknown])
