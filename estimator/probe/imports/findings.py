"""Hold what files of other tools say of a machine, and join what several of them say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from estimator.errors import ImportedFileError, quoted
from estimator.machines.profile import CollectiveCost, Link, LinkKind, Locality, Provenance
from estimator.placement.topology import Cluster

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Route:
    """How two devices, or a device and a NIC, are joined within a node."""

    kind: LinkKind
    locality: Locality
    links: int = 0

    def __str__(self) -> str:
        counted = f":{self.links}" if self.links else ""
        return f"{self.kind}:{self.locality}{counted}"


Routes = Mapping[int, Mapping[int, Route]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What one file, or several, say: parts of a profile, or the cluster a scheduler knows.

    `device_names`, `device_facts` and `numa_nodes` are by device index on one node, `routes` by the
    indices of two devices. `latencies_s` are one-way latencies of network links whose bandwidth
    another file gives.
    """

    formats: tuple[str, ...]
    device_names: Mapping[int, str] = field(default_factory=dict)
    device_facts: Mapping[int, Mapping[str, Fact]] = field(default_factory=dict)
    numa_nodes: Mapping[int, int] = field(default_factory=dict)
    routes: Routes = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    network: tuple[Link, ...] = ()
    latencies_s: Mapping[LinkKind, float] = field(default_factory=dict)
    collectives: tuple[CollectiveCost, ...] = ()
    hardware: Mapping[str, Fact] = field(default_factory=dict)
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        hosts = (host for cost in self.collectives for host in cost.hosts)
        facts = (fact for each in self.device_facts.values() for fact in each.values())
        for text in (*self.device_names.values(), *hosts, *facts):
            if isinstance(text, str) and not text.isprintable():
                raise ImportedFileError(
                    f"{quoted(text)} has unprintable characters, which no device or host has; let "
                    "the tool write the file again"
                )


def routes_fact(paths: Mapping[Any, Route]) -> str:
    """Paths as one fact of a device: ``1:nvlink:device_switch:12 2:pcie:node``."""
    return " ".join(f"{end}:{path}" for end, path in paths.items())


def imported(
    at: str, *, samples: int = 0, relative_error: float | None = None, note: str = ""
) -> Provenance:
    """Provenance of a number that another tool measured."""
    return Provenance(
        source="imported", at=at, samples=samples, relative_error=relative_error, note=note
    )


def join(parts: Sequence[Imported]) -> Imported:
    """Everything that the parts say; raises ImportedFileError where they contradict each other."""
    whole = parts[0]
    for part in parts[1:]:
        _check_same_machine(whole, part)
        whole = Imported(
            formats=(*whole.formats, *part.formats),
            device_names={**part.device_names, **whole.device_names},
            device_facts=_joined_facts(whole, part),
            numa_nodes={**part.numa_nodes, **whole.numa_nodes},
            routes=whole.routes or part.routes,
            links=(*whole.links, *part.links),
            network=(*whole.network, *part.network),
            latencies_s={**part.latencies_s, **whole.latencies_s},
            collectives=(*whole.collectives, *part.collectives),
            hardware={**part.hardware, **whole.hardware},
            cluster=whole.cluster or part.cluster,
        )
    return _with_latencies(whole)


def _check_same_machine(whole: Imported, part: Imported) -> None:
    for index, name in part.device_names.items():
        known = whole.device_names.get(index, name)
        if known != name:
            raise ImportedFileError(
                f"one file calls device {index} '{known}' and another '{name}'; import the files "
                "of one machine type at a time"
            )
    if part.cluster is not None and whole.formats:
        raise ImportedFileError(
            f"a cluster ({part.formats[0]}) and {whole.formats[0]} were given together; import "
            "them one after the other"
        )
    if whole.cluster is not None:
        raise ImportedFileError(
            f"a cluster ({whole.formats[0]}) and {part.formats[0]} were given together; import "
            "them one after the other"
        )


def _joined_facts(whole: Imported, part: Imported) -> dict[int, dict[str, Fact]]:
    indices = sorted({*whole.device_facts, *part.device_facts})
    return {
        index: {**part.device_facts.get(index, {}), **whole.device_facts.get(index, {})}
        for index in indices
    }


def _with_latencies(whole: Imported) -> Imported:
    lacking = [
        kind for kind in whole.latencies_s if all(link.kind != kind for link in whole.network)
    ]
    if lacking:
        raise ImportedFileError(
            f"a latency of {lacking[0]} was given without its bandwidth; import the output of a "
            "bandwidth test such as ib_write_bw with it"
        )
    network = tuple(
        replace(link, latency_s=link.latency_s or whole.latencies_s.get(link.kind, 0.0))
        for link in whole.network
    )
    return replace(whole, network=network)
