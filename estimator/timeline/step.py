"""Say how long a step takes and what its parts are, for one placement or for a row of each of many.

The step of the slowest rank is its compute, what it waits for, the spread between ranks, and the
update with the copies around it. What ranks wait for is told by their strategy (`strategies`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from estimator.elementwise import expected_maximum
from estimator.timeline.rank.inputs import InputCosts
from estimator.timeline.rank.ranks import LaneCosts, UpdateCosts

# What a step may spend most of its time on.
BOTTLENECKS = ("compute", "host", "communication", "update", "stragglers", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Exclusive parts of the step of the slowest rank; they add up to the step time.

    In seconds, of one step or a row for each. `idle_s` is what pipelines wait in; data-parallel
    ranks wait for communication alone. `input_stall_s` is what a loader adds: work of the rank's
    own cores, copies to the device, waiting for batches. `layer_communication_s` is what ranks that
    share the layers of a micro-batch exchange, beside nothing else.
    """

    forward_s: Any
    backward_s: Any
    host_exposed_s: Any
    communication_exposed_s: Any
    straggler_s: Any
    update_s: Any
    copies_exposed_s: Any
    idle_s: Any = 0.0
    input_stall_s: Any = 0.0
    layer_communication_s: Any = 0.0

    @property
    def total_s(self) -> Any:
        return sum(_PARTS(self))

    @property
    def waiting_s(self) -> Any:
        """What ranks wait for each other and for the network."""
        return self.communication_exposed_s + self.straggler_s + self.idle_s

    @property
    def by_bottleneck(self) -> tuple[Any, ...]:
        """Seconds of each of `BOTTLENECKS`."""
        return (
            self.forward_s + self.backward_s,
            self.host_exposed_s,
            self.communication_exposed_s + self.copies_exposed_s + self.layer_communication_s,
            self.update_s,
            self.straggler_s + self.idle_s,
            self.input_stall_s,
        )

    @property
    def largest_share(self) -> tuple[str, float]:
        """What takes most of one step, one of `BOTTLENECKS`, and its share."""
        seconds = self.by_bottleneck
        most = max(seconds)
        return BOTTLENECKS[seconds.index(most)], most / self.total_s


_PARTS = attrgetter(*(item.name for item in fields(Breakdown)))


class Ratios(NamedTuple):
    """Calibration's factors on the parts of a step, or of a step in each row."""

    compute: Any = 1.0
    update: Any = 1.0
    communication: Any = 1.0


UNCALIBRATED_RATIOS = Ratios()


def breakdown_of(
    slowest: LaneCosts,
    last: UpdateCosts,
    *,
    lane_s: Any,
    ranks: Any,
    share: Any,
    jitter_ratio: Any,
    waiting_s: Any,
    ratios: Ratios,
) -> Breakdown:
    """The parts of a step by its slowest rank and by the one whose update takes longest.

    `lane_s` is the slowest one's whole compute without calibration, `share` the part of the update
    that a rank does, `jitter_ratio` one standard deviation of ranks' compute, `waiting_s` the
    exposed communication.
    """
    compute = ratios.compute
    sharded_s = lane_s - slowest.lane_s
    return Breakdown(
        forward_s=slowest.forward_s * compute,
        backward_s=slowest.backward_s * compute,
        host_exposed_s=slowest.host_s * compute,
        communication_exposed_s=waiting_s,
        straggler_s=lane_s * compute * jitter_ratio * expected_maximum(ranks),
        update_s=last.update_s(share) * ratios.update,
        copies_exposed_s=(slowest.copies_s + sharded_s + last.copy_back_s) * compute,
        layer_communication_s=slowest.layer_collectives_s * compute,
    )


def with_input(parts: Breakdown, costs: InputCosts) -> Breakdown:
    """A step with what its loader adds."""
    return replace(parts, input_stall_s=costs.stall_s(parts.total_s))


def after_s(update: UpdateCosts, share: Any, ratios: Ratios) -> Any:
    """Seconds from the last collective to the end of the update."""
    return update.copy_back_s * ratios.compute + update.update_s(share) * ratios.update
