"""Put several profiles of one machine type together; the better provenance wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from estimator.errors import ProfileError
from estimator.machines.profile import (
    CollectiveCost,
    Contention,
    Device,
    KernelCost,
    Link,
    MachineProfile,
    OverlapCost,
    Source,
    UpdateCost,
)

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

    def values(name: str) -> Iterator[Any]:
        return (getattr(profile, name) for profile in profiles)

    merged: dict[str, Any] = {
        **{name: best_entries(values(name)) for name in _LISTS},
        **{name: _first(best_entries([filter(None, values(name))])) for name in _SINGLES},
        **{name: filled(values(name)) for name in ("software", "hardware")},
        **{name: _first(values(name)) for name in ("canary_s", "rank_jitter_ratio")},
    }
    return replace(
        first,
        devices=tuple(
            _merged_device([profile.devices[i] for profile in profiles])
            for i in range(len(first.devices))
        ),
        kernels=_merged_kernels(profiles),
        kernels_timed_ratio=max(filter(None, values("kernels_timed_ratio")), default=None),
        missing=tuple(dict.fromkeys(chain(*values("missing")))),
        **merged,
    )


def _check_same_devices(first: MachineProfile, other: MachineProfile) -> None:
    ours, theirs = first.devices, other.devices
    if len(ours) != len(theirs) or not all(
        one.kind == two.kind and may_be_alike(one.name, two.name)
        for one, two in zip(ours, theirs, strict=True)
    ):
        raise ProfileError(
            f"'{first.name}' has {len(ours)} × {ours[0].name} and '{other.name}' "
            f"{len(theirs)} × {theirs[0].name}; merge profiles of one machine type"
        )


class GpuName(NamedTuple):
    """What the name of a device says: its chip, and its form and memory where it names them."""

    words: tuple[str, ...]
    form: str | None
    memory_gb: int | None


def gpu_name(name: str) -> GpuName:
    """What a name says, as its driver or a datasheet writes it."""
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
    return GpuName(tuple(kept), forms[0] if forms else None, int(memory[1]) if memory else None)


def may_be_alike(one: str, two: str) -> bool:
    """Whether two names of devices contradict each other in nothing that both say."""
    first, second = gpu_name(one), gpu_name(two)
    return first.words == second.words and all(
        ours == theirs or ours is None or theirs is None
        for ours, theirs in zip(first[1:], second[1:], strict=True)
    )


def _merged_device(same: Sequence[Device]) -> Device:
    return replace(
        same[0],
        memory_bandwidth_bytes_per_s=_first(d.memory_bandwidth_bytes_per_s for d in same),
        peak_flops_per_s=filled(d.peak_flops_per_s for d in same),
        numa_node=_first(d.numa_node for d in same),
        details=filled(d.details for d in same),
    )


def _merged_kernels(profiles: Sequence[MachineProfile]) -> tuple[KernelCost, ...]:
    """The best group of each operator and dtype, with the calls that only its equals timed."""
    merged = []
    for best in best_entries(p.kernels for p in profiles):
        alike = [
            cost
            for profile in profiles
            for cost in profile.kernels
            if _key(cost) == _key(best) and cost.provenance.source == best.provenance.source
        ]
        points = {point.call: point for cost in (*reversed(alike), best) for point in cost.points}
        merged.append(replace(best, points=tuple(points.values())))
    return tuple(merged)


# The fields that tell two entries of a list apart; of those not named there is one.
_KEYS: Mapping[type, tuple[str, ...]] = {
    Link: ("kind", "locality", "pinned", "flows", "ring_devices", "peer_to_peer"),
    CollectiveCost: ("op", "backend", "group_size", "nodes", "hosts"),
    OverlapCost: ("compute", "backend", "group_size", "nodes", "size_bytes"),
    KernelCost: ("target", "dtype"),
    Contention: ("bound", "devices_busy"),
    UpdateCost: ("optimizer", "form", "device", "dtype"),
}
_LISTS = ("links", "network", "collectives", "overlaps", "contentions", "updates")
_SINGLES = ("pairs", "host", "memory", "input")


def _key(entry: Any) -> tuple[Any, ...]:
    return tuple(getattr(entry, name) for name in _KEYS.get(type(entry), ()))


def best_entries(groups: Iterable[Iterable[Entry]]) -> tuple[Entry, ...]:
    """One entry for each key, in the order in which keys are met."""
    found: dict[tuple[Any, ...], Entry] = {}
    for entry in chain.from_iterable(groups):
        known = found.get(_key(entry))
        if known is None or _is_better(entry, known):
            found[_key(entry)] = entry
    return tuple(found.values())


def _is_better(entry: Any, known: Any) -> bool:
    new, old = entry.provenance, known.provenance
    rank, known_rank = _BEST_FIRST.index(new.source), _BEST_FIRST.index(old.source)
    return rank < known_rank or (rank == known_rank and new.at > old.at)


def filled(maps: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Every fact, from the first that knows it."""
    facts: dict[Any, Any] = {}
    for more in maps:
        for name, value in more.items():
            if facts.get(name) is None:
                facts[name] = value
    return facts


def _first(values: Iterable[Entry | None]) -> Entry | None:
    return next((value for value in values if value is not None), None)
