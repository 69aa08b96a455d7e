"""Run a scheduler's loop: estimate every allocation, place the best, observe, learn.

``python examples/scheduler.py`` trains 40 jobs on 64 catalogue GPUs of three types, played in
rounds of ten minutes: true steps are the engine's times a hidden factor that the calibrator has to
find. ``--run`` (after ``estimator probe``) really trains one model on 1x2:local and learns from it.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from demo_models import gpt2, resnet18
from online import train
from torch import multiprocessing as processes

import estimator as est

FREE = {"dgx-a100": 16, "v100-p3": 24, "t4-g4dn": 24}
SIZES = {"dgx-a100": 8, "v100-p3": 8, "t4-g4dn": 4}
ROUND_S = 600.0


def texts(free: dict[str, int]) -> list[str]:
    """Every power of two that is free, on as few nodes as can be."""
    pairs = [(m, 1 << power) for m, n in free.items() for power in range(4) if 1 << power <= n]
    return [f"{max(n // SIZES[m], 1)}x{min(n, SIZES[m])}:{m}" for m, n in pairs]


def main() -> None:
    """Play rounds until every job has ended."""
    rng = random.Random(0)
    calibrator = est.Calibrator(Path(tempfile.mkdtemp()) / "observations.db")
    graphs = [est.trace_model(*make(8), target="cuda") for make in (gpt2, resnet18)]
    left = {(n, rng.randrange(2)): rng.uniform(2e5, 4e6) for n in range(40)}
    hidden = {graph.workload: rng.lognormvariate(0, 0.25) for graph in graphs}
    errors: list[float] = []
    rounds = 0
    while left:
        free = dict(FREE)
        for job in sorted(left, key=left.__getitem__):
            graph, choices = graphs[job[1]], texts(free)
            if not choices:
                break
            table = est.estimate_many(graph, choices, calibration=calibrator)  # estimate
            # Over √devices: twice as many must bring 1.4 times the rate.
            best = int(np.nanargmax(table.samples_per_s / np.sqrt(table.ranks)))
            allocation = table.allocation(best)
            free[allocation.groups[0].machine or ""] -= allocation.ranks  # place
            step_s = est.estimate(graph, allocation).step_time_s * hidden[graph.workload]
            errors.append(abs(table.step_time_s[best] / step_s - 1))
            calibrator.observe(graph, allocation, step_time_s=step_s, batch_per_gpu=8)  # observe
            left[job] -= ROUND_S * 8 * allocation.ranks / step_s
        calibrator.fit()  # learn
        left = {job: samples for job, samples in left.items() if samples > 0}
        rounds += 1
    first, last = np.mean(errors[:10]), np.mean(errors[-10:])
    print(f"40 jobs on 64 GPUs in {rounds * ROUND_S / 3600:.1f} h")
    print(f"error of the step: {first:.0%} in the first ten choices, {last:.0%} in the last ten")


def run(make: Callable[[int], Any] = gpt2, turns: int = 3) -> None:
    """The same loop for GPT-2, really trained on two devices of this machine."""
    graph = est.trace_model(*make(4), name="gpt2")
    with tempfile.TemporaryDirectory() as folder:
        calibrator = est.Calibrator(Path(folder, "observations.db"))
        for turn in range(turns):
            answer = est.estimate(graph, "1x2:local", calibration=calibrator)
            # Each rank's loop is inside `est.observe`.
            meeting = str(Path(folder, f"meeting{turn}"))
            processes.spawn(train, (2, 4, str(calibrator.store.path), meeting, make), nprocs=2)
            (*_, seen) = calibrator.store
            calibrator.fit()
            print(f"expected {answer.step_time_s:.3f} s, observed {seen.step_time_s:.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="train on 1x2:local")
    (run if parser.parse_args().run else main)()
