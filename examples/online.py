"""Train a real model on this machine and watch the estimate learn from every run.

``python examples/online.py`` (after ``estimator probe``) trains GPT-2 with 6 layers on one and two
devices at several batch sizes. Before each run it says what the calibrator expects; the training
loop is watched by ``estimator.observe``. ``--picture FILE`` draws the error against observations.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from demo_models import gpt2
from torch.nn.parallel import DistributedDataParallel

import estimator as est

# (devices, samples per device), in the order of the runs.
RUNS = [(1, 4), (2, 4), (2, 8), (1, 8), (2, 2), (2, 4), (1, 4), (2, 8), (2, 2), (1, 8)]
STEPS = 25


def train(
    rank: int,
    devices: int,
    batch: int,
    store: str,
    meeting: str,
    make: Callable[[int], Any] = gpt2,
) -> None:
    """An ordinary data-parallel loop; rank 0 is watched."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    model, samples = make(batch)
    parallel: Any = model
    if devices > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=devices
        )
        parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    with est.observe(
        store,
        workload="gpt2",
        allocation=f"1x{devices}:local",
        batch_per_gpu=batch,
        rank=rank,
    ) as watch:
        for _ in range(STEPS):
            optimizer.zero_grad()
            parallel(**samples).loss.backward()
            optimizer.step()
            watch.step()
    if devices > 1:
        dist.destroy_process_group()


def main() -> None:
    """Predict, train, observe, fit; again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", type=Path, help="where to draw errors, as .svg or .png")
    options = parser.parse_args()
    model, samples = gpt2(RUNS[0][1])
    graph = est.trace_model(model, samples, name="gpt2")
    errors: list[tuple[float, float]] = []
    print("run                 engine alone        calibrated          observed")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "observations.db"))
        calibrator = est.Calibrator(store)
        for number, (devices, batch) in enumerate(RUNS):
            where = f"1x{devices}:local"
            cold = est.estimate(graph, where, batch_per_gpu=batch)
            answer = est.estimate(graph, where, batch_per_gpu=batch, calibration=calibrator)
            meeting = str(Path(folder, f"meeting{number}"))
            begun = time.time()
            processes.spawn(train, (devices, batch, store, meeting), nprocs=devices)
            observed = [one for one in calibrator.store if one.at.timestamp() >= begun]
            observed_s = observed[-1].step_time_s
            ratios = [found.step_time_s / observed_s - 1 for found in (cold, answer)]
            errors.append((ratios[0], ratios[1]))
            print(
                f"{where} batch {batch:<3d}"
                f"{1e3 * cold.step_time_s:8.0f} ms ({100 * ratios[0]:+5.1f} %)"
                f"{1e3 * answer.step_time_s:8.0f} ms ({100 * ratios[1]:+5.1f} %)"
                f"{1e3 * observed_s:8.0f} ms",
                flush=True,
            )
            calibrator.fit()
    if options.picture:
        draw(errors, options.picture)


def draw(errors: list[tuple[float, float]], path: Path) -> None:
    """Error of each prediction against the number of runs observed before it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for column, label, colour in ((0, "engine alone", "#999999"), (1, "calibrated", "#1f6fb4")):
        heights = [100 * abs(pair[column]) for pair in errors]
        axes.plot(range(len(errors)), heights, marker="o", color=colour, label=label)
    axes.set_xlabel("runs observed before")
    axes.set_ylabel("error of the predicted step (%)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
