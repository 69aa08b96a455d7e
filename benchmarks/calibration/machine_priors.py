"""Derive the prior of a job's communication from the machine that a table names.

Synchronising gradients takes bytes / network rate, computing them operations / peak: the ratio of
both times is proportional to peak / network rate, the machine balance. Links inside a node keep the
weakly informative prior: what rings over NVLink, PCIe or a mixture cost a step differs less than
their rates do (A100 against T4: 0.8 times, where the rates say 0.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from statistics import geometric_mean

from estimator.calibrate.observation_files import MeasuredStep
from estimator.calibrate.performance_model import WEAK_PRIORS, LogNormalPrior, Priors
from estimator.errors import ProfileError
from estimator.machines.catalogue import known_machines, load_profile
from estimator.machines.profile import LinkKind, MachineProfile
from estimator.machines.typical import LINK_RATIOS, achieved_bytes_per_s

# Machine balance (peak fp32 operations per byte of the network) that the weakly informative prior
# stands for: nodes of T4 (8.1 Tflop/s) on 50 Gbit/s Ethernet.
_REFERENCE_FLOPS_PER_BYTE = 1750.0
# Where the networks of the known machines with a GPU differ by more, a table's network is unknown.
_LARGEST_RATIO = 2.0
_NETWORKS: dict[LinkKind, re.Pattern[str]] = {
    "infiniband": re.compile(r"\bIB\b|infiniband", re.IGNORECASE),
    "roce": re.compile(r"\broce", re.IGNORECASE),
    "efa": re.compile(r"\bEFA\b", re.IGNORECASE),
    "tcp": re.compile(r"ethernet|\d *GbE\b|\bTCP\b", re.IGNORECASE),
}
_GBIT_PER_S = re.compile(r"(?:\b(\d{1,2}) ?[x×] ?)?\b(\d{1,3}) ?G(?:bE|bps|bit/s|b/s|b)\b")


def priors_of(step: MeasuredStep) -> Priors | None:
    """Priors of the job that a step belongs to; None where its machine is not known."""
    machines = _machines_with(step.gpu)
    peaks = [
        machine.devices[0].peak_flops_per_s["float32"]
        for machine in machines
        if "float32" in machine.devices[0].peak_flops_per_s
    ]
    rate = _stated_bytes_per_s(step.interconnect) or _profiled_bytes_per_s(step, machines)
    if not peaks or rate is None:
        return None
    prior = WEAK_PRIORS.by_name["inter_node"]
    ratio = geometric_mean(peaks) / rate / _REFERENCE_FLOPS_PER_BYTE
    return WEAK_PRIORS.updated(
        inter_node=LogNormalPrior(median=prior.median * ratio, sigma=prior.sigma)
    )


def _stated_bytes_per_s(interconnect: str) -> float | None:
    """The rate of a node's network as the table states it, such as ``2x 100Gb IB``."""
    stated = _GBIT_PER_S.search(interconnect)
    if stated is None or int(stated[2]) == 0:
        return None
    line_rate = int(stated[1] or 1) * int(stated[2]) * 1e9 / 8
    return (line_rate * LINK_RATIOS[_network_kind(interconnect) or "tcp"]) or None


def _profiled_bytes_per_s(step: MeasuredStep, machines: Sequence[MachineProfile]) -> float | None:
    """The rate of a network of that kind in the profiles of such machines, if they agree."""
    kind = _network_kind(step.interconnect)
    rates = [
        max(map(achieved_bytes_per_s, machine.network))
        for machine in machines
        if machine.network
        and step.gpus_per_node in (None, len(machine.devices))
        and machine.network[0].kind == kind
    ]
    if not rates or max(rates) > _LARGEST_RATIO * min(rates):
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
            continue  # a profile of the user's that cannot be read
        if wanted <= _words(machine.devices[0].name):
            found.append(machine)
    return tuple(found)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
