"""What spot instances that are taken away cost a training in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from estimator.advise.checkpoints import best_interval_s, check_times, expected_time_s
from estimator.errors import WorkloadError, quoted
from estimator.placement.allocation import Allocation

# Restarts and checkpoints over the time between revocations, from which on nobody waits: e^20.
_MOST_TRIES = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What taking spot instances means: one that is taken sets the training back.

    Each instance is revoked after `mtbf_s` on average, a time for all or one by machine type; see
    `checkpoints.expected_time_s`. Raises WorkloadError.
    """

    mtbf_s: float | Mapping[str, float]
    checkpoint_s: float = 60.0
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        check_times(checkpoint_s=self.checkpoint_s, restart_s=self.restart_s)
        each = self.mtbf_s.values() if isinstance(self.mtbf_s, Mapping) else (self.mtbf_s,)
        for mtbf_s in each:
            check_times(mtbf_s=mtbf_s)

    def allocation_mtbf_s(self, allocation: Allocation) -> float:
        """The time between revocations of any of an allocation's instances."""
        return 1 / sum(group.nodes / self._mtbf_s(group.machine) for group in allocation.groups)

    def _mtbf_s(self, machine: str | None) -> float:
        if not isinstance(self.mtbf_s, Mapping):
            return self.mtbf_s
        if machine is None or machine not in self.mtbf_s:
            raise WorkloadError(
                f"it is not said how long a spot instance of {quoted(str(machine))} stays; give "
                "the time between its revocations too"
            )
        return self.mtbf_s[machine]

    def can_end(self, allocation: Allocation) -> bool:
        """Whether all instances stay long enough to keep a checkpoint."""
        tries = (self.checkpoint_s + self.restart_s) / self.allocation_mtbf_s(allocation)
        return tries < _MOST_TRIES

    def expected_s(self, work_s: float, allocation: Allocation) -> tuple[float, float]:
        """(expected time, work between checkpoints) of training on an allocation."""
        mtbf_s = self.allocation_mtbf_s(allocation)
        interval_s = min(best_interval_s(self.checkpoint_s, mtbf_s), work_s)
        found = expected_time_s(
            work_s,
            interval_s,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.restart_s,
            mtbf_s=mtbf_s,
        )
        return found, interval_s
