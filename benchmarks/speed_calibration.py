"""Time what calibration costs: taking an observation in, refitting, and estimates after it."""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from clocks import seconds
from speed_cases import BATCHES, STRATEGY, Machines, model

from estimator import Calibrator, estimate
from estimator.calibrate.observed import Observation

OBSERVATIONS, TURNS, ESTIMATES, ROUNDS = 1000, 20, 300, 5


def refit(_options: Any) -> dict[str, tuple[float, str, float | None]]:
    """Medians over single new observations, each followed by a refit on all there are."""
    random.seed(0)
    graph, machines = model(), Machines(1)

    def step_s(allocation: str, batch: int, calibration: Calibrator | None = None) -> float:
        return estimate(
            graph, allocation, batch_per_gpu=batch, strategy=STRATEGY, calibration=calibration
        ).step_time_s

    def observation(allocation: str) -> Observation:
        batch = random.choice(BATCHES)
        # As a machine that is a tenth slower than its profile and noisy would be seen.
        seen_s = step_s(allocation, batch) * random.lognormvariate(0.1, 0.05)
        return Observation(
            workload=graph.name,
            allocation=allocation,
            batch_per_gpu=batch,
            strategy=STRATEGY,
            step_time_s=seen_s,
        )

    asked = machines.texts(OBSERVATIONS + ESTIMATES, groups=1, machines=1)
    seen = [observation(text) for text in asked[:OBSERVATIONS]]
    with tempfile.TemporaryDirectory() as folder:
        calibrator = Calibrator(Path(folder, "observations.db"))
        calibrator.add_many(seen[:-TURNS])
        first_s = seconds(lambda: step_s(asked[-1], 8, calibrator))
        taken_s, refit_s = [], []
        for one in seen[-TURNS:]:
            taken_s.append(seconds(lambda one=one: calibrator.add_many([one])))  # type: ignore[misc]
            refit_s.append(seconds(calibrator.fit))
        cold_s, new_s, known_s = [], [], []
        texts = asked[OBSERVATIONS:]
        for text in texts:
            step_s(text, 16)
            new_s.append(seconds(lambda text=text: step_s(text, 16, calibrator)))  # type: ignore[misc]
        # As a scheduler asks in one round after another: with and without by turns.
        for _ in range(ROUNDS):
            for times, calibration in ((cold_s, None), (known_s, calibrator)):
                times += [seconds(lambda t=text, c=calibration: step_s(t, 16, c)) for text in texts]  # type: ignore[misc]
    median = statistics.median
    return {
        f"refit on {OBSERVATIONS} observations": (median(refit_s) * 1e3, "ms", 100),
        "one observation taken in": (median(taken_s) * 1e3, "ms", 5),
        "first learning of a workload": (first_s * 1e3, "ms", None),
        "an estimate without calibration": (median(cold_s) * 1e6, "µs", None),
        "a calibrated estimate of a step asked for before": (median(known_s) * 1e6, "µs", None),
        "that over one without": (median(known_s) / median(cold_s), "x", 1.3),
        "a calibrated estimate of a new step": (median(new_s) * 1e6, "µs", 200),
    }
