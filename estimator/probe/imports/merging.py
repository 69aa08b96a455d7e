"""Put together what several files say of one machine type; the better provenance wins."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from estimator.errors import ImportedFileError, ProfileError
from estimator.machines.profile import (
    CollectiveCost,
    Contention,
    Device,
    KernelCost,
    Link,
    MachineProfile,
    OverlapCost,
    Provenance,
    Source,
    UpdateCost,
)
from estimator.probe.imports.findings import Imported
from estimator.probe.imports.rings import is_line_rate, links_by_routes
from estimator.units import GIB

Entry = TypeVar("Entry")

_BEST_FIRST: tuple[Source, ...] = ("measured", "imported", "fitted", "datasheet")
# What the name of a GPU says of its memory: "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3".
_MEMORY_IN_NAME = re.compile(r"(?<![\d.])(\d+) ?GB\b")
# Words that drivers and datasheets leave out at will.
_MAKERS_WORDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "gcd"})
_FORM_FACTOR = re.compile(r"(sxm|pcie|nvl|oam)\d*")
_MEMORY_TYPE = re.compile(r"hbm\d\w*")


def merge_profiles(profiles: Sequence[MachineProfile]) -> MachineProfile:
    """One profile of a machine type from several: later ones add what earlier ones lack.

    A quantity that several have is taken from the best source, and among equals from the newest.
    Raises ProfileError where the devices are not the same.
    """
    first = profiles[0]
    for other in profiles[1:]:
        _check_same_devices(first, other)
    return replace(
        first,
        devices=tuple(
            _merged_device([profile.devices[i] for profile in profiles])
            for i in range(len(first.devices))
        ),
        links=_best((p.links for p in profiles), _link_key),
        network=_best((p.network for p in profiles), _link_key),
        pairs=_best_of(p.pairs for p in profiles),
        collectives=_best((p.collectives for p in profiles), _collective_key),
        overlaps=_best((p.overlaps for p in profiles), _overlap_key),
        kernels=_merged_kernels(profiles),
        contentions=_best((p.contentions for p in profiles), _contention_key),
        host=_best_of(p.host for p in profiles),
        memory=_best_of(p.memory for p in profiles),
        input=_best_of(p.input for p in profiles),
        updates=_best((p.updates for p in profiles), _update_key),
        software=_filled(p.software for p in profiles),
        hardware=_filled(p.hardware for p in profiles),
        canary_s=_first(p.canary_s for p in profiles),
        rank_jitter_ratio=_first(p.rank_jitter_ratio for p in profiles),
        kernels_timed_ratio=max(
            (p.kernels_timed_ratio for p in profiles if p.kernels_timed_ratio is not None),
            default=None,
        ),
        missing=tuple(dict.fromkeys(text for p in profiles for text in p.missing)),
    )


def add_imports(profile: MachineProfile, found: Imported) -> MachineProfile:
    """The profile with what files of other tools say of the same machine type.

    Raises ImportedFileError where they name devices that the profile does not have.
    """
    _check_devices_known(profile, found)
    return replace(
        profile,
        devices=tuple(_informed(device, found) for device in profile.devices),
        links=_best(_links(profile, found), _link_key),
        network=_best((profile.network, found.network), _link_key),
        collectives=_best((profile.collectives, found.collectives), _collective_key),
        hardware=_filled((profile.hardware, found.hardware)),
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
    described = set(found.device_facts)
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
        memory = _MEMORY_IN_NAME.search(device_name)
        if memory is None:
            raise ImportedFileError(
                f"{formats} does not say how much memory '{device_name}' has; probe the machine or "
                "add to a profile with --into NAME"
            )
        devices.append(
            _informed(
                Device(
                    kind="cuda",
                    index=index,
                    name=device_name,
                    # NVIDIA counts it in GiB: an H100 "80GB" has 81,559 MiB.
                    memory_bytes=int(memory[1]) * GIB,
                ),
                found,
            )
        )
    return MachineProfile(
        name=name,
        devices=tuple(devices),
        links=_best((found.links,), _link_key),
        network=_best((found.network,), _link_key),
        collectives=_best((found.collectives,), _collective_key),
        hardware=found.hardware,
        missing=("kernels, host and updates: not in the imported files",),
        provenance=Provenance(source="imported", note=formats),
    )


def _informed(device: Device, found: Imported) -> Device:
    numa_node = found.numa_nodes.get(device.index)
    return replace(
        device,
        numa_node=numa_node if device.numa_node is None else device.numa_node,
        details=_filled((device.details, found.device_facts.get(device.index, {}))),
    )


def _check_devices_known(profile: MachineProfile, found: Imported) -> None:
    names = {device.index: device.name for device in profile.devices}
    listed = {*found.device_names, *found.device_facts}
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
        if not _may_be_alike(name, names[index]):
            raise ImportedFileError(
                f"device {index} is '{name}' by {found.formats[0]} and '{names[index]}' by "
                f"'{profile.name}'; choose the profile of that machine with --into"
            )


def _check_same_devices(first: MachineProfile, other: MachineProfile) -> None:
    ours, theirs = first.devices, other.devices
    if len(ours) != len(theirs) or not all(
        one.kind == two.kind and _may_be_alike(one.name, two.name)
        for one, two in zip(ours, theirs, strict=True)
    ):
        raise ProfileError(
            f"'{first.name}' has {len(ours)} × {ours[0].name} and '{other.name}' "
            f"{len(theirs)} × {theirs[0].name}; merge profiles of one machine type"
        )


class _Chip(NamedTuple):
    """What the name of a device says: its chip, and its form and memory where it names them."""

    words: tuple[str, ...]
    form: str | None
    memory_gb: int | None


def _chip(name: str) -> _Chip:
    # A Grace Hopper's driver gives the memory of its CPU, 480 GB (NVIDIA GH200 datasheet).
    name = name.replace(" 480GB", "") if "GH200" in name else name
    memory = _MEMORY_IN_NAME.search(name)
    tokens = re.findall(r"[a-z0-9]+", _MEMORY_IN_NAME.sub("", name).lower())
    forms = [match[1] for match in map(_FORM_FACTOR.fullmatch, tokens) if match]
    # "NVIDIA H100 80GB HBM3" is the SXM one: that on PCIe has HBM2e (NVIDIA H100 datasheets).
    if not forms and {"h100", "hbm3"} <= set(tokens):
        forms = ["sxm"]
    kept = (
        token
        for token in tokens
        if token not in _MAKERS_WORDS
        and not _FORM_FACTOR.fullmatch(token)
        and not _MEMORY_TYPE.fullmatch(token)
    )
    return _Chip(tuple(kept), forms[0] if forms else None, int(memory[1]) if memory else None)


def _may_be_alike(one: str, two: str) -> bool:
    """Whether two names of devices contradict each other in nothing that both say."""
    first, second = _chip(one), _chip(two)
    return first.words == second.words and all(
        ours == theirs or ours is None or theirs is None
        for ours, theirs in zip(first[1:], second[1:], strict=True)
    )


def _merged_device(same: Sequence[Device]) -> Device:
    return replace(
        same[0],
        memory_bandwidth_bytes_per_s=_first(d.memory_bandwidth_bytes_per_s for d in same),
        peak_flops_per_s=_filled(d.peak_flops_per_s for d in same),
        numa_node=_first(d.numa_node for d in same),
        details=_filled(d.details for d in same),
    )


def _merged_kernels(profiles: Sequence[MachineProfile]) -> tuple[KernelCost, ...]:
    """The best group of each operator and dtype, with the calls that only its equals timed."""
    merged = []
    for best in _best((p.kernels for p in profiles), _kernel_key):
        alike = [
            cost
            for profile in profiles
            for cost in profile.kernels
            if _kernel_key(cost) == _kernel_key(best)
            and cost.provenance.source == best.provenance.source
        ]
        points = {
            repr(sorted(point.call.items())): point
            for cost in (*reversed(alike), best)
            for point in cost.points
        }
        merged.append(replace(best, points=tuple(points.values())))
    return tuple(merged)


def _best(groups: Iterable[Sequence[Entry]], key: Callable[[Entry], Hashable]) -> tuple[Entry, ...]:
    """One entry for each key, in the order in which keys are met."""
    found: dict[Hashable, Entry] = {}
    for entry in (entry for group in groups for entry in group):
        known = found.get(key(entry))
        if known is None or _is_better(entry, known):
            found[key(entry)] = entry
    return tuple(found.values())


def _best_of(entries: Iterable[Entry | None]) -> Entry | None:
    present = [entry for entry in entries if entry is not None]
    return next(iter(_best((present,), lambda _: None)), None)


def _is_better(entry: Any, known: Any) -> bool:
    new, old = entry.provenance, known.provenance
    rank, known_rank = _BEST_FIRST.index(new.source), _BEST_FIRST.index(old.source)
    return rank < known_rank or (rank == known_rank and new.at > old.at)


def _filled(maps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Every fact, from the first that knows it."""
    facts: dict[str, Any] = {}
    for more in maps:
        for name, value in more.items():
            if facts.get(name) is None:
                facts[name] = value
    return facts


def _first(values: Iterable[Entry | None]) -> Entry | None:
    return next((value for value in values if value is not None), None)


def _link_key(link: Link) -> Hashable:
    return link.kind, link.locality, link.pinned, link.flows, link.ring_devices, link.peer_to_peer


def _collective_key(cost: CollectiveCost) -> Hashable:
    return cost.op, cost.backend, cost.group_size, cost.nodes, cost.hosts


def _overlap_key(cost: OverlapCost) -> Hashable:
    return cost.compute, cost.backend, cost.group_size, cost.nodes, cost.size_bytes


def _kernel_key(cost: KernelCost) -> Hashable:
    return cost.target, cost.dtype


def _contention_key(cost: Contention) -> Hashable:
    return cost.bound, cost.devices_busy


def _update_key(cost: UpdateCost) -> Hashable:
    return cost.optimizer, cost.form, cost.device, cost.dtype
