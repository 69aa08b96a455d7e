"""A scheduler's loop: 40 jobs on 64 GPUs of three types, each asked on 32 allocations a round."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from clocks import cpu_seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# (machine, its nodes, devices of a node): 24 A100, 24 V100 and 16 T4.
FLEET = (("dgx-a100", 3, 8), ("v100-p3dn", 3, 8), ("t4-g4dn", 4, 4))
CANDIDATES, ROUNDS = 32, 10


def candidates() -> list[str]:
    """The smallest allocations of each machine, in turns: 1, 2, 4, … devices, then more nodes."""
    of_machine = [
        [
            f"{nodes}x{devices}:{machine}"
            for nodes in range(1, most_nodes + 1)
            for devices in range(1, most_devices + 1)
        ]
        for machine, most_nodes, most_devices in FLEET
    ]
    width = max(map(len, of_machine))
    turns = [texts[place] for place in range(width) for texts in of_machine if place < len(texts)]
    return turns[:CANDIDATES]


def ask(options: argparse.Namespace, *, is_prepared: bool = False) -> dict[str, Any]:
    """Some rounds in a process that has answered nothing yet, prepared or not."""
    from speed_cold import jobs

    import estimator as est

    queue, texts = jobs(Path(options.graphs)), candidates()
    machines = [machine for machine, _, _ in FLEET]

    def prepare() -> None:
        for job in queue:
            est.prepare(
                job.graph,
                machines,
                batch_per_gpu=job.batch,
                strategy=job.strategy,
                accumulation_steps=job.accumulation_steps,
            )

    def decide() -> None:
        for job in queue:
            table = est.estimate_many(
                job.graph,
                texts,
                batch_per_gpu=job.batch,
                strategy=job.strategy,
                accumulation_steps=job.accumulation_steps,
            )
            chosen.append(int(np.nanargmax(table.samples_per_s / np.sqrt(table.ranks))))

    chosen: list[int] = []
    prepared_s = cpu_seconds(prepare) if is_prepared else 0.0
    rounds = [cpu_seconds(decide) for _ in range(ROUNDS)]
    return {"prepare_s": prepared_s, "rounds_s": rounds, "jobs": len(queue), "chosen": chosen}


def loop(options: argparse.Namespace, in_child: Callable[..., Any]) -> Any:
    """The first and the later rounds of fresh processes, in seconds of their CPU."""
    cold = [in_child("loop", options) for _ in range(options.repeats)]
    ahead = [in_child("prepared", options) for _ in range(options.repeats)]
    name = f"loop, {cold[0]['jobs']} jobs x {CANDIDATES} allocations"
    later = [statistics.median(run["rounds_s"][1:]) * 1e3 for run in cold]
    return {
        f"{name}, first round, cold": (min(run["rounds_s"][0] for run in cold), "s", 2.0),
        f"{name}, later rounds": (min(later), "ms", 20.0),
        f"{name}, prepare": (min(run["prepare_s"] for run in ahead), "s", None),
        f"{name}, first round, prepared": (
            min(run["rounds_s"][0] for run in ahead) * 1e3,
            "ms",
            None,
        ),
    }
