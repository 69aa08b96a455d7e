"""Tell how far the ratio of two layouts' steps may be off: what both are off by cancels.

Kernels of one family, the host, the update and collectives over the same groups err alike in all
layouts of a model on the same devices, each as much as it takes of the step. What ranks wait for,
and what the model of a step itself misses, each layout has for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from estimator.accuracy import Z_80
from estimator.estimates import Estimate, interval_ratio
from estimator.timeline.plan import slowest_kind
from estimator.timeline.program import COPIES_ERROR, MEDIAN_TO_SIGMA


class StepErrors(NamedTuple):
    """One standard deviation of a step by its sources, as shares of the step.

    Of `shared` sources each is the same unknown in every layout; `own` is all the rest.
    """

    shared: Mapping[str, float]
    own: float

    def ratio_error(self, other: StepErrors) -> float:
        """One standard deviation of the logarithm of two steps' ratio.

        >>> slow, fast = StepErrors({"gemm": 0.3}, 0.03), StepErrors({"gemm": 0.26}, 0.0)
        >>> round(slow.ratio_error(fast), 6)
        0.05
        """
        sources = {**self.shared, **other.shared}
        apart = [self.shared.get(name, 0.0) - other.shared.get(name, 0.0) for name in sources]
        return math.hypot(*apart, self.own, other.own)


def step_errors(answer: Estimate) -> StepErrors:
    """What the interval of an estimate is made of, by the plan that it was answered with."""
    plan, parts, step_s = answer.plan, answer.breakdown, answer.step_time_s
    kind = slowest_kind(plan.kinds, plan.shards)
    program, lane = kind.program, kind.lane
    kernels_s = parts.forward_s + parts.backward_s
    spent_s = sum(seconds for seconds, _ in program.kernels.values()) or 1.0
    found = {
        f"kernels {family} {source}": MEDIAN_TO_SIGMA * error_s * kernels_s / spent_s
        for (family, source), (_, error_s) in program.kernels.items()
    }
    found["device"] = program.durations.shared_error * kernels_s
    exchanges = plan.members.table.shape.exchanges
    if exchanges is not None and program.exchanged.relative_error:
        error_s = program.exchanged.relative_error * parts.layer_communication_s
        found[f"exchanges {exchanges.groups}"] = MEDIAN_TO_SIGMA * error_s
    found["host"] = MEDIAN_TO_SIGMA * lane.host_error * parts.host_exposed_s
    found["update"] = MEDIAN_TO_SIGMA * lane.update_error * parts.update_s
    found["copies"] = MEDIAN_TO_SIGMA * COPIES_ERROR * parts.copies_exposed_s
    found["interference"] = lane.interference_error * (step_s - parts.input_stall_s)
    shared = {name: error_s / step_s for name, error_s in found.items()}
    whole = math.log(answer.high_s / answer.low_s) / (2 * Z_80)
    # A calibrated step is off by less than what it was made of.
    known = math.hypot(*shared.values())
    scale = min(1.0, whole / known) if known else 1.0
    own = math.sqrt(max(whole**2 - (scale * known) ** 2, 0.0))
    return StepErrors({name: scale * error for name, error in shared.items()}, own)


def are_alike(slower: tuple[float, StepErrors], faster: tuple[float, StepErrors]) -> bool:
    """Whether two steps cannot be told apart: their ratio may be 1 in its 80 % interval."""
    (slower_s, its), (faster_s, others) = slower, faster
    return bool(slower_s / faster_s <= interval_ratio(its.ratio_error(others)))
