"""Share the links between nodes among jobs that send over them at once.

A ring sends as fast as its slowest hop. While several send, each has its max-min fair share (every
flow the same, but for those that another hop holds back; Bertsekas and Gallager, Data Networks,
section 6.5.2); while others compute, a job has their part too. Jobs of unlike periods drift past
each other, so when one sends is taken as independent of when the others do; how much of its time a
job sends depends on its share in turn, and is found by iterating.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Flags
from estimator.placement.mesh import HopKey

# So many jobs on links in common are taken in every combination of who sends, more in drawn ones.
_MOST_COMBINED, _DRAWS = 8, 2048
_MOST_ROUNDS, _SETTLED = 100, 1e-9
_FULL = 1.0 - 1e-9


class Sender(NamedTuple):
    """A job: what its ring leaves (see `mesh.crossed`), its rate alone, how long it sends.

    `timing` is (seconds that it sends in a step, seconds of the step), by the share of its own rate
    that it has.
    """

    crossed: Mapping[HopKey, tuple[float, int]]
    bytes_per_s: float
    timing: Callable[[float], tuple[float, float]]


def link_ratios(jobs: Sequence[Sender]) -> list[float]:
    """The share of its own rate that each job has while it sends, in the mean.

    Two jobs that each send half of their time, on one link that either fills, have 3/4 of it: the
    whole while the other computes, half while it sends.

    >>> link = {("node", 0): (1e9, 1)}
    >>> link_ratios([Sender(link, 1e9, lambda ratio: (0.5, 1.0))] * 2)
    [0.75, 0.75]
    """
    ratios = [1.0] * len(jobs)
    for together in sharing([job.crossed for job in jobs]):
        some = [jobs[number] for number in together]
        hops = {hop: rate for job in some for hop, (rate, _) in job.crossed.items()}
        uses = np.array([[job.crossed.get(hop, (0.0, 0))[1] for job in some] for hop in hops])
        alone = np.array([job.bytes_per_s for job in some])
        limits = np.array(list(hops.values())), uses.astype(np.float64), alone
        link_shares = np.ones(len(some))
        for _ in range(_MOST_ROUNDS):
            timings = [job.timing(float(r)) for job, r in zip(some, link_shares, strict=True)]
            busy = np.array([min(sends_s / step_s, 1.0) for sends_s, step_s in timings])
            last, link_shares = link_shares, _mean_ratios(busy, *limits)
            # Slower jobs send for longer, which slows others: from all at their own rates down.
            if np.abs(link_shares - last).max() < _SETTLED:
                break
        for number, ratio in zip(together, link_shares.tolist(), strict=True):
            ratios[number] = ratio
    return ratios


def sharing(crossed: Sequence[Collection[HopKey]]) -> list[list[int]]:
    """Jobs with links in common, over others too, by what each leaves; without those alone."""
    groups: list[tuple[set[HopKey], list[int]]] = []
    for number, links in enumerate(crossed):
        hops, members = set(links), [number]
        apart = []
        for known in groups:
            if known[0] & hops:
                hops, members = hops | known[0], known[1] + members
            else:
                apart.append(known)
        groups = [*apart, (hops, members)]
    return [members for _, members in groups if len(members) > 1]


def _mean_ratios(busy: Array, rates: Array, uses: Array, alone: Array) -> Array:
    """Each job's share of its own rate, in the mean over who else sends while it does."""
    jobs = len(busy)
    if jobs <= _MOST_COMBINED:
        active = (np.arange(1 << jobs)[:, None] >> np.arange(jobs)) % 2 == 1
        weights = np.where(active, busy, 1.0 - busy).prod(axis=1)
    else:
        # The same draws each time, so that more sending is never less.
        active = np.random.default_rng(0).random((_DRAWS, jobs)) < busy
        weights = np.full(_DRAWS, 1.0 / _DRAWS)
    ratios = fair_rates(active, rates, uses, alone) / alone
    sending = weights @ active
    mean = (weights @ (ratios * active)) / np.where(sending > 0, sending, 1.0)
    return np.where(sending > 0, mean, 1.0)


def fair_rates(active: Flags, rates: Array, uses: Array, alone: Array) -> Array:
    """Max-min fair rates of the jobs that send in each row, by progressive filling: (rows, jobs).

    `rates` are those of the hops, `uses` how often each job crosses each of them, `alone` the most
    that a job sends.
    """
    shares, left = np.zeros(active.shape), np.tile(rates, (len(active), 1))
    rising = active.copy()
    while rising.any():
        flows = rising @ uses.T
        room = np.divide(left, flows, out=np.full(left.shape, math.inf), where=flows > 0)
        own = np.where(rising, alone - shares, math.inf)
        step = np.minimum(room.min(axis=1, initial=math.inf), own.min(axis=1))
        step = np.where(rising.any(axis=1), step, 0.0)
        shares += step[:, None] * rising
        left -= step[:, None] * flows
        full = left <= (1.0 - _FULL) * rates
        rising &= (shares < _FULL * alone) & ~((full @ uses) > 0)
    return shares
