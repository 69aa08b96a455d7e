"""Say in words what an estimate answers, for terminals, pages and notebooks alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from estimator import units
from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    format_split,
)

if TYPE_CHECKING:
    from estimator.advise.memory import Remedy
    from estimator.advise.scaling import Scaling
    from estimator.estimates.balance import Balance
    from estimator.estimates.estimate import Estimate

FITS_WORDS = {"yes": "fits", "no": "does not fit", "uncertain": "may not fit"}
_MOST_REMEDIES = 3


def heading(answer: Estimate) -> str:
    """The model, where it trains, and how."""
    return f"{answer.model} on {answer.allocation}, {_trained_how(answer)}"


def answer_facts(
    answer: Estimate,
    *,
    duration_s: float | None = None,
    scaling: Scaling | None = None,
    balance: Balance | None = None,
    remedies: Sequence[Remedy] = (),
) -> list[tuple[str, str]]:
    """The lines of an answer, each with its name; the time first."""
    rows = [("step time", format_interval(answer))]
    if answer.samples_per_s is not None:
        rows.append(("throughput", f"{format_count(answer.samples_per_s)}samples/s"))
    if answer.tokens_per_s is not None:
        rows.append(("", f"{format_count(answer.tokens_per_s)}tokens/s"))
    if answer.batches is not None:
        batch = f"{format_split(answer.batches)} per device, {answer.global_batch} in all"
        rows.append(("batch", batch))
    if balance is not None:
        rows.append(("balance", _balance_words(balance)))
    rows += [
        ("bottleneck", answer.bottleneck),
        *_waiting_for_data(answer),
        ("peak memory", f"{format_bytes(answer.peak_memory_bytes)} ({fits_words(answer)})"),
        *_kept_memory(answer),
    ]
    if answer.fits == "no":
        rows.append(("to fit", _remedies_words(remedies)))
    if answer.mfu_ratio is not None and answer.hfu_ratio is not None:
        hfu = f"HFU {format_ratio(answer.hfu_ratio)}, with what is computed again"
        rows.append(("MFU", f"{format_ratio(answer.mfu_ratio)} ({hfu}; attention counted whole)"))
    if duration_s is not None:
        rows.append(("duration", format_seconds(duration_s)))
    if scaling is not None:
        rows.append(("scaling", _scaling_words(scaling)))
    return rows


def format_interval(answer: Estimate) -> str:
    """Step time and its interval: ``179 ms (109–293)``."""
    return units.format_interval(answer.step_time_s, answer.low_s, answer.high_s)


def part_name(field_name: str) -> str:
    """The name of a field of seconds in words, without its unit."""
    return field_name.removesuffix("_s").replace("_", " ")


def fits_words(answer: Estimate) -> str:
    """Whether a step fits, and by how much."""
    spare = answer.spare_memory_bytes
    how = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
    return f"{FITS_WORDS[answer.fits]}, {how}"


def _waiting_for_data(answer: Estimate) -> list[tuple[str, str]]:
    """What a loader adds and what would hide it; nothing without a loader that is waited for."""
    remedy = answer.input_remedy
    stall = format_seconds(answer.breakdown.input_stall_s)
    return [("data", f"{stall} of waiting: {remedy}")] if remedy else []


def _kept_memory(answer: Estimate) -> list[tuple[str, str]]:
    """What a device keeps of its memory from tensors, part by part; nothing on CPUs."""
    device = answer.device_memory
    if not device.context_bytes:
        return []
    parts = [f"of {format_bytes(device.capacity_bytes)}: CUDA {format_bytes(device.context_bytes)}"]
    if device.communicators_bytes:
        parts.append(f"NCCL {format_bytes(device.communicators_bytes)}")
    parts.append(f"workspaces {format_bytes(device.workspaces_bytes)}")
    parts.append(f"fragmentation {format_ratio(device.fragmentation_ratio)} of tensors")
    return [("kept from tensors", ", ".join(parts))]


def _remedies_words(remedies: Sequence[Remedy]) -> str:
    """The cheapest changes that make a step fit, and what they cost."""
    more = "'estimator memory' looks for what can be swapped or computed again"
    if not remedies:
        return f"neither smaller batches, sharding nor more devices of the kind suffice; {more}"
    cheapest = [
        f"{remedy.change} ({format_ratio(abs(remedy.cost_ratio))} "
        f"{'more' if remedy.cost_ratio > 0 else 'less'} device time)"
        for remedy in remedies[:_MOST_REMEDIES]
    ]
    return f"{'; '.join(cheapest)}; {more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How far an estimate can be relied on: the share of its step that nothing measured backs, and
    its machines whose probe was disturbed or cut short, or had a GPU that was held back."""

    unmeasured_ratio: float
    disturbed_machines: tuple[str, ...]
    cut_machines: tuple[str, ...]
    device_faults: tuple[str, ...]


def checked_of(answer: Estimate) -> Checked:
    """What an estimate rests on."""
    profiles = [kind.profile for kind in answer.plan.placement.kinds]
    return Checked(
        unmeasured_ratio=sum(
            share_ratio
            for _, source, share_ratio, _ in answer.provenance
            if source in ("assumed", "datasheet")
        ),
        disturbed_machines=tuple(
            profile.name
            for profile in profiles
            if profile.interference and profile.interference.matters
        ),
        cut_machines=tuple(profile.name for profile in profiles if profile.is_cut),
        device_faults=tuple(
            f"{profile.name}: {fault}" for profile in profiles for fault in profile.device_faults
        ),
    )


def _balance_words(balance: Balance) -> str:
    even = balance.even
    return (
        f"split by speed, {format_ratio(balance.gain_ratio)} faster than {even.batch_per_gpu} on "
        f"every device ({format_seconds(even.step_time_s)})"
    )


def _scaling_words(scaling: Scaling) -> str:
    efficiency = format_ratio(scaling.efficiency_ratio)
    words = f"{efficiency} of linear against {scaling.against}"
    if not scaling.link or scaling.link_bytes_per_s is None:
        return words
    wanted = format_ratio(scaling.wanted_ratio)
    rate = f"{scaling.link}, {format_bandwidth(scaling.link_bytes_per_s)}"
    # Met where it reads so: nobody is sent after the last digit.
    if scaling.efficiency_ratio >= scaling.wanted_ratio or wanted == efficiency:
        return f"{words}; the slowest link is {rate}"
    if scaling.needed_bytes_per_s is None:
        return f"{words}; no faster link alone gives {wanted} (the slowest is {rate})"
    needed = format_bandwidth(scaling.needed_bytes_per_s)
    return f"{words}, held back by {rate}; {wanted} needs {needed}"


def _trained_how(answer: Estimate) -> str:
    ranks = "1 rank" if answer.ranks == 1 else f"{answer.ranks} ranks"
    layout = f"{answer.layout}, " if answer.layout else ""
    return f"{ranks}, {layout}{answer.strategy}, {answer.optimizer}, {answer.mode}"
