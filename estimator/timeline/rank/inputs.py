"""Say what a loader adds to a step: its own work on the rank's cores, and waiting for batches.

Workers make batches in turn, each whole ones, and may be some ahead. In the long run a step takes
the longest of three periods, however many they are: the rank's own work; a worker's time for a
batch over the number of workers; the time of the disk that all ranks of a node share, and of the
cores that workers have.
A core that works for a worker of a CPU rank does not compute meanwhile, as with gloo's collectives.
`tests/timeline/rank/test_inputs.py` plays the queue by events, to the same period.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from estimator.elementwise import maximum
from estimator.errors import WorkloadError
from estimator.machines.profile import MachineProfile
from estimator.workload.loader import Loader


class InputCosts(NamedTuple):
    """What a rank's loader costs its step, of one rank or of one for each row.

    `own_s` is added to what the rank does itself, `period_s` is the least time from batch to batch.
    """

    own_s: Any = 0.0
    period_s: Any = 0.0

    def stall_s(self, step_s: Any) -> Any:
        """Seconds by which a step of `step_s` without a loader is longer with it."""
        return maximum(step_s + self.own_s, self.period_s) - step_s


NO_INPUT = InputCosts()


def with_rates(loader: Loader, profile: MachineProfile) -> Loader:
    """The loader at the machine's measured rates, where it names none itself.

    Preparing that was measured holds reading of the page cache. Raises WorkloadError where a rate
    is needed that was not measured.
    """
    rates = profile.input
    disk = loader.disk_bytes_per_s or (rates.disk_bytes_per_s if rates else None)
    if disk is None and loader.cached_ratio < 1.0:
        raise WorkloadError(
            f"a loader with {loader.cached_ratio:g} of its samples cached reads the rest of a disk "
            f"that '{profile.name}' does not describe; say how fast, as in disk=500MB/s"
        )
    cache = loader.cache_bytes_per_s
    if cache is None and rates is not None and loader.source == "assumed":
        cache = rates.cache_bytes_per_s
    prep_s = loader.prep_s
    for part, count in (("jpeg_pixels", loader.jpeg_pixels), ("tokens", loader.tokens)):
        rate = rates and getattr(rates, f"{part}_per_s")
        if count and not rate:
            raise WorkloadError(
                f"'{profile.name}' has no measured rate of {part.replace('_', ' ')}; probe it "
                "again, or give the seconds of a sample, as in prep=8ms"
            )
        prep_s += count / rate if rate else 0.0
    return replace(
        loader,
        disk_bytes_per_s=disk,
        cache_bytes_per_s=cache,
        prep_s=prep_s,
        jpeg_pixels=0.0,
        tokens=0.0,
    )


def input_costs(
    loader: Loader | None,
    profile: MachineProfile,
    *,
    samples: int,
    batches: int,
    ranks_per_node: int,
) -> InputCosts:
    """The costs of a rank that takes `batches` batches a step, `samples` in all."""
    if loader is None:
        return NO_INPUT
    loader = with_rates(loader, profile)
    own_s = copies_s(loader, profile, samples, batches)
    if not loader.workers:
        return InputCosts(own_s + loader.made_s(samples), 0.0)
    own_s += batches * loader.take_s
    cores = loader.cores
    if profile.kind == "cpu":
        own_s += loader.cpu_s(samples) / max(len(profile.devices[0].cores), 1)
    period_s = max(
        loader.made_s(samples) / loader.workers,
        loader.disk_s(samples) * ranks_per_node,
        loader.cpu_s(samples) / (cores or math.inf),
    )
    return InputCosts(own_s, period_s)


def copies_s(loader: Loader, profile: MachineProfile, samples: int, batches: int) -> float:
    """Copying a step's batches to an accelerator, in the stream that computes on them."""
    links = [link for link in profile.links if link.kind == "h2d"]
    if profile.kind == "cpu" or not links or not loader.sample_bytes:
        return 0.0
    # Of one device alone before all at once, and of the memory that the loader uses.
    links = [link for link in links if link.pinned == loader.pinned] or links
    link = max(links, key=lambda one: one.bandwidth_bytes_per_s)
    return batches * link.latency_s + samples * loader.sample_bytes / link.bandwidth_bytes_per_s
