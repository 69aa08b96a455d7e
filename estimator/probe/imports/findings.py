"""Hold and join what files of other tools say of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from estimator.errors import ImportedFileError, quoted
from estimator.machines.merging import best_entries, filled, gpu_name, may_be_alike
from estimator.machines.profile import (
    CollectiveCost,
    Device,
    Link,
    LinkKind,
    Locality,
    MachineProfile,
    Provenance,
)
from estimator.machines.typical import architecture_of
from estimator.placement.topology import Cluster
from estimator.units import GIB


@dataclass(frozen=True, slots=True)
class Route:
    """How two devices, or a device and a NIC, are joined within a node."""

    kind: LinkKind
    locality: Locality
    links: int = 0


Routes = Mapping[int, Mapping[int, Route]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What one file, or several, say: parts of a profile, or the cluster a scheduler knows.

    `device_names` are by device index on one node, `routes` by the indices of two devices.
    `latencies_s` are one-way latencies of network links whose bandwidth another file gives.
    """

    formats: tuple[str, ...]
    device_names: Mapping[int, str] = field(default_factory=dict)
    routes: Routes = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    network: tuple[Link, ...] = ()
    latencies_s: Mapping[LinkKind, float] = field(default_factory=dict)
    collectives: tuple[CollectiveCost, ...] = ()
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        hosts = (host for cost in self.collectives for host in cost.hosts)
        for text in (*self.device_names.values(), *hosts):
            if not text.isprintable():
                raise ImportedFileError(
                    f"{quoted(text)} has unprintable characters, which no device or host has; let "
                    "the tool write the file again"
                )


def imported(
    at: str, *, samples: int = 0, relative_error: float | None = None, note: str = ""
) -> Provenance:
    """Provenance of a number that another tool measured."""
    return Provenance(
        source="imported", at=at, samples=samples, relative_error=relative_error, note=note
    )


def join(parts: Sequence[Imported]) -> Imported:
    """Everything that the parts say; raises ImportedFileError where they contradict each other."""
    _check_same_machine(parts)

    def values(name: str) -> Iterator[Any]:
        return (getattr(part, name) for part in parts)

    listed: dict[str, Any] = {
        name: tuple(chain(*values(name))) for name in ("formats", "links", "network", "collectives")
    }
    known: dict[str, Any] = {name: filled(values(name)) for name in ("device_names", "latencies_s")}
    return _with_latencies(
        Imported(
            routes=next(filter(None, values("routes")), {}),
            cluster=parts[0].cluster,
            **listed,
            **known,
        )
    )


def _check_same_machine(parts: Sequence[Imported]) -> None:
    names: dict[int, str] = {}
    for index, name in chain(*(part.device_names.items() for part in parts)):
        if names.setdefault(index, name) != name:
            raise ImportedFileError(
                f"one file calls device {index} '{names[index]}' and another '{name}'; import the "
                "files of one machine type at a time"
            )
    if len(parts) > 1 and any(part.cluster for part in parts):
        # The cluster first.
        formats = [part.formats[0] for part in sorted(parts, key=lambda part: part.cluster is None)]
        raise ImportedFileError(
            f"a cluster ({formats[0]}) and {formats[1]} were given together; import them one after "
            "the other"
        )


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


_FARTHER: tuple[Locality, ...] = ("device_switch", "socket", "node")


class Ring(NamedTuple):
    """What a ring of the first devices of a node sends over, up to how many of them (None: all).

    Of NVLinks the route counts those that each device sends over.
    """

    route: Route
    devices: int | None


def rings_of(routes: Routes, *, links_to_switch: bool) -> list[Ring]:
    """Rings of devices in the order of their indices, as many as differ.

    With `links_to_switch` a pair's NVLinks are those to a switch, which reach all others too.
    """
    order = sorted(routes)
    found: list[Ring] = []
    for number in range(2, len(order) + 1):
        route = _ring(routes, order[:number], links_to_switch)
        if found and found[-1].route == route:
            found.pop()
        found.append(Ring(route, number if number < len(order) else None))
    return found


def _ring(routes: Routes, order: Sequence[int], links_to_switch: bool) -> Route:
    """All NVLinks among devices that these join, as rings in several orders fill them, or PCIe."""
    near = {
        one: {other: route for other in order if (route := routes[one].get(other)) is not None}
        for one in order
    }
    joined = {
        one: [other for other, route in peers.items() if route.kind == "nvlink"]
        for one, peers in near.items()
    }
    reached, ahead = {order[0]}, [order[0]]
    while ahead:
        fresh = set(joined[ahead.pop()]) - reached
        reached |= fresh
        ahead += fresh
    if len(reached) == len(order):
        counts = [[near[one][other].links for other in joined[one]] for one in order]
        links = min(min(each) if links_to_switch else sum(each) for each in counts)
        return Route("nvlink", "device_switch", links)
    hops = [near[index][order[number - 1]] for number, index in enumerate(order)]
    return max(
        (hop for hop in hops if hop.kind != "nvlink"),
        key=lambda hop: _FARTHER.index(hop.locality),
        default=Route("pcie", "node"),
    )


def is_line_rate(link: Link) -> bool:
    """Whether a link between devices is known by a datasheet or a topology alone."""
    return link.kind in ("nvlink", "pcie") and link.provenance.source == "datasheet"


def links_by_routes(
    profile: MachineProfile, routes: Routes, source: str
) -> tuple[Link, ...] | None:
    """The profile's links, those of its datasheet between devices in the classes of the routes.

    None where the routes are not those of all its devices, or where nothing says what a link of a
    class carries; as they were where they are of these classes already.
    """
    known = [link for link in profile.links if is_line_rate(link)]
    if sorted(routes) != [device.index for device in profile.devices] or len(routes) < 2:
        return None
    chip = architecture_of(profile.devices[0])
    most = max(sum(route.links for route in peers.values()) for peers in routes.values())
    rings = rings_of(routes, links_to_switch=chip is not None and most > chip.nvlinks)
    told = {(ring.route.kind, ring.devices) for ring in rings}
    if told == {(link.kind, link.ring_devices) for link in known}:
        return profile.links
    found = [link for ring in rings if (link := _link_of(profile, ring, known, source))]
    others = tuple(link for link in profile.links if link not in known)
    return (*others, *found) if len(found) == len(rings) else None


def _link_of(
    profile: MachineProfile, ring: Ring, known: Sequence[Link], source: str
) -> Link | None:
    """A link of the profile's datasheet in a ring's class; NVLinks also by their chip."""
    chip, route = architecture_of(profile.devices[0]), ring.route
    alike = [link for link in known if link.kind == route.kind]
    alike.sort(key=lambda link: link.locality != route.locality)
    like = alike[0] if alike else None
    if route.kind == "nvlink" and chip is not None and chip.nvlinks:
        rate = min(route.links, chip.nvlinks) * chip.nvlink_bytes_per_s
        like = like or Link(
            kind="nvlink",
            latency_s=0.0,
            bandwidth_bytes_per_s=rate,
            provenance=Provenance(source="datasheet"),
        )
        like = replace(like, bandwidth_bytes_per_s=rate)
    note = f"{source}: classes of links; line rates"
    return like and replace(
        like,
        locality=route.locality,
        ring_devices=ring.devices,
        provenance=Provenance(source="datasheet", note=note),
    )


def add_imports(profile: MachineProfile, found: Imported) -> MachineProfile:
    """The profile with what files of other tools say of the same machine type.

    Raises ImportedFileError where they name devices that the profile does not have.
    """
    _check_devices_known(profile, found)
    return replace(
        profile,
        links=best_entries(_links(profile, found)),
        network=best_entries((profile.network, found.network)),
        collectives=best_entries((profile.collectives, found.collectives)),
    )


def _links(profile: MachineProfile, found: Imported) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """The profile's links and those that the files add to them.

    Line rates of a topology add nothing where the datasheet has taken its classes.
    """
    own = links_by_routes(profile, found.routes, ", ".join(found.formats))
    if own is None:
        return profile.links, found.links
    return own, tuple(link for link in found.links if not is_line_rate(link))


def unlisted_devices(profile: MachineProfile, found: Imported) -> str | None:
    """What to tell where files describe only some of a machine's devices; None where all."""
    described = set(found.routes)
    if not described or len(described) >= len(profile.devices):
        return None
    return (
        f"the files describe {len(described)} of the {len(profile.devices)} devices of "
        f"'{profile.name}', as where a job sees only its own; the others stay as they were"
    )


def profile_of_imports(found: Imported, *, name: str) -> MachineProfile:
    """A new profile from files of other tools alone; raises ImportedFileError if they name no
    device or say nothing of its memory."""
    formats = ", ".join(dict.fromkeys(found.formats))
    if not found.device_names:
        raise ImportedFileError(
            f"{formats} names no device; add it to a profile with --into NAME, or import it with "
            "the output of nvbandwidth or nccl-tests"
        )
    devices = []
    for index, device_name in sorted(found.device_names.items()):
        memory_gb = gpu_name(device_name).memory_gb
        if memory_gb is None:
            raise ImportedFileError(
                f"{formats} does not say how much memory '{device_name}' has; probe the machine or "
                "add to a profile with --into NAME"
            )
        devices.append(
            Device(
                kind="cuda",
                index=index,
                name=device_name,
                # NVIDIA counts it in GiB: an H100 "80GB" has 81,559 MiB.
                memory_bytes=memory_gb * GIB,
            )
        )
    return MachineProfile(
        name=name,
        devices=tuple(devices),
        links=best_entries((found.links,)),
        network=best_entries((found.network,)),
        collectives=best_entries((found.collectives,)),
        missing=("kernels, host and updates: not in the imported files",),
        provenance=Provenance(source="imported", note=formats),
    )


def _check_devices_known(profile: MachineProfile, found: Imported) -> None:
    names = {device.index: device.name for device in profile.devices}
    listed = {*found.device_names, *found.routes}
    if listed and profile.kind != "cuda":
        raise ImportedFileError(
            f"{found.formats[0]} is about GPUs, and '{profile.name}' has {names[0]}; choose the "
            "profile of that machine with --into"
        )
    for index in sorted(listed - set(names)):
        raise ImportedFileError(
            f"{found.formats[0]} lists device {index}, and '{profile.name}' has {len(names)} "
            "devices; choose the profile of that machine with --into"
        )
    for index, name in found.device_names.items():
        if not may_be_alike(name, names[index]):
            raise ImportedFileError(
                f"device {index} is '{name}' by {found.formats[0]} and '{names[index]}' by "
                f"'{profile.name}'; choose the profile of that machine with --into"
            )
