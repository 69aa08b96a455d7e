"""Say what the machine that a table names lets believe of a job's communication.

A step's gradients take bytes / network rate, its compute operations / peak: how long the one is
beside the other goes with peak / network rate, machine by machine. Links within a node are left to
the neutral belief: rings over NVLink, PCIe or a mixture differ less in what a step shows of them
than their rates do (A100 against T4: 0.8 times, where the rates say 0.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from statistics import geometric_mean

from estimator.calibrate.priors import NEUTRAL, LogPrior, Priors
from estimator.calibrate.tables import MeasuredStep
from estimator.errors import ProfileError
from estimator.machines.catalogue import known_machines, load_profile
from estimator.machines.profile import LinkKind, MachineProfile
from estimator.machines.typical import LINK_RATIOS, achieved_bytes_per_s

# The neutral belief in the network is that of a machine of so many fp32 operations at peak in the
# time that its network takes for a byte: nodes of T4 (8.1 Tflop/s) on 50 Gbit/s Ethernet.
_NEUTRAL_FLOPS_PER_BYTE = 1750.0
# Machines of one GPU whose networks differ by more do not say which one a table is about.
_MOST_APART = 2.0
_NETWORKS: dict[LinkKind, re.Pattern[str]] = {
    "infiniband": re.compile(r"\bIB\b|infiniband", re.IGNORECASE),
    "roce": re.compile(r"\broce", re.IGNORECASE),
    "efa": re.compile(r"\bEFA\b", re.IGNORECASE),
    "tcp": re.compile(r"ethernet|\d *GbE\b|\bTCP\b", re.IGNORECASE),
}
_GBIT_PER_S = re.compile(r"(?:\b(\d{1,2}) ?[x×] ?)?\b(\d{1,3}) ?G(?:bE|bps|bit/s|b/s|b)\b")


def priors_of(step: MeasuredStep) -> Priors | None:
    """Beliefs about the job that a step belongs to; None where its machine is not known."""
    machines = _machines_with(step.gpu)
    peaks = [
        machine.devices[0].peak_flops_per_s["float32"]
        for machine in machines
        if "float32" in machine.devices[0].peak_flops_per_s
    ]
    rate = _told_bytes_per_s(step.interconnect) or _known_bytes_per_s(step, machines)
    if not peaks or rate is None:
        return None
    neutral = NEUTRAL.by_name["across"]
    ratio = geometric_mean(peaks) / rate / _NEUTRAL_FLOPS_PER_BYTE
    return NEUTRAL.centred(across=LogPrior(centre=neutral.centre * ratio, width=neutral.width))


def _told_bytes_per_s(interconnect: str) -> float | None:
    """What a node's network gives by the table's own words, such as ``2x 100Gb IB``."""
    told = _GBIT_PER_S.search(interconnect)
    if told is None or int(told[2]) == 0:
        return None
    line_rate = int(told[1] or 1) * int(told[2]) * 1e9 / 8
    return (line_rate * LINK_RATIOS[_network_kind(interconnect) or "tcp"]) or None


def _known_bytes_per_s(step: MeasuredStep, machines: Sequence[MachineProfile]) -> float | None:
    """What the profiles of such machines say of a network of the named kind, if they agree."""
    kind = _network_kind(step.interconnect)
    rates = [
        max(map(achieved_bytes_per_s, machine.network))
        for machine in machines
        if machine.network
        and step.gpus_per_node in (None, len(machine.devices))
        and machine.network[0].kind == kind
    ]
    if not rates or max(rates) > _MOST_APART * min(rates):
        return None
    return geometric_mean(rates)


def _network_kind(interconnect: str) -> LinkKind | None:
    return next((kind for kind, words in _NETWORKS.items() if words.search(interconnect)), None)


@lru_cache(maxsize=256)
def _machines_with(gpu: str) -> tuple[MachineProfile, ...]:
    """Profiles whose device has every word of a GPU's name."""
    wanted, found = _words(gpu), []
    for name in known_machines():
        try:
            machine = load_profile(name)
        except ProfileError:
            continue  # a damaged profile of the user's says nothing of the table
        if wanted <= _words(machine.devices[0].name):
            found.append(machine)
    return tuple(found)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
