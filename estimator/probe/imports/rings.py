"""Say over which links rings of a node's devices run, by how each pair of devices is joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from estimator.machines.architectures import architecture_of
from estimator.machines.profile import Link, Locality, MachineProfile, Provenance
from estimator.probe.imports.findings import Route, Routes

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
