"""Tables in chunks on two workers of a Dask cluster, beside one process: time, memory, a death.

Of every chunk its best row and the sums of its columns are made where it was worked out. Needs the
extra [dask].
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np

import estimator as est
from estimator.estimates.table import COLUMNS

PATTERN = "1..64x1..8:h100-sxm+1..64x1..8:a100-p4d+1..48x1..8:v100-sxm"
WARMING = "1..8x1..8:h100-sxm+1..8x1..8:a100-p4d+1..8x8:v100-sxm"
TARGET_RATIO = 1.6
# Dask has its workers give freed memory back at once (MALLOC_TRIM_THRESHOLD_), and arrays then meet
# new pages again and again: more time than the estimates take.
SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    """Time one process, two workers, and two workers of which one is killed in the middle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", type=Path, required=True, help="As 'estimator trace' wrote it.")
    parser.add_argument("--pattern", default=PATTERN, help="Of allocations; default: 10⁸ of them.")
    parser.add_argument("--chunk", type=int, default=1 << 18)
    options = parser.parse_args()
    if SETTINGS.items() - os.environ.items():
        # One process is timed as the workers are; the settings are read where a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    graph, pattern = est.OpGraph.load(options.graph), options.pattern
    rows = len(est.AllocationGrid(pattern))
    dask.config.set({"distributed.nanny.pre-spawn-environ": SETTINGS})
    run(graph, WARMING, 1 << 10, None, kill_at=None)
    found = {"one process": run(graph, pattern, options.chunk, None, kill_at=None)}
    for name, kill_at in (("two workers", None), ("two workers, one killed", rows // 2)):
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
            ) as cluster,
            distributed.Client(cluster, direct_to_workers=True) as client,
        ):
            run(graph, WARMING, 1 << 10, client, kill_at=None)  # every worker becomes warm
            found[name] = run(graph, pattern, options.chunk, client, kill_at=kill_at)
    alone = found["one process"]
    for each in found.values():
        each["speedup"] = alone["seconds"] / each["seconds"]
        each["same"] = (each["best"], each["sums"]) == (alone["best"], alone["sums"])
    for name, each in found.items():
        del each["sums"]
        print(f"{name}: {json.dumps(each)}", flush=True)
    is_met = found["two workers"]["speedup"] >= TARGET_RATIO
    sys.exit(0 if is_met and all(each["same"] for each in found.values()) else 1)


def best_and_sums(table: est.EstimateTable) -> tuple[float, str, tuple[float, ...]]:
    """The most samples per second, on which allocation, and the sums of all columns."""
    row = int(np.nanargmax(table.samples_per_s))
    sums = tuple(float(np.nansum(getattr(table, name))) for name in COLUMNS)
    return float(table.samples_per_s[row]), str(table.allocation(row)), sums


def run(
    graph: est.OpGraph, pattern: str, chunk: int, client: Any, *, kill_at: int | None
) -> dict[str, Any]:
    """What one pass over all rows takes and finds."""
    executor: Executor | None = None if client is None else client.get_executor()
    grid, resident = est.AllocationGrid(pattern), []
    best, sums, done = (0.0, ""), np.zeros(len(COLUMNS)), 0
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    for samples_per_s, allocation, more in est.estimate_chunks(
        graph, grid, rows=chunk, executor=executor, reduce=best_and_sums
    ):
        best = max(best, (samples_per_s, allocation))
        sums += more
        done = min(done + chunk, len(grid))
        resident.append(resident_mib())
        if kill_at is not None and done >= kill_at:
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
            kill_at = None
    seconds = time.perf_counter() - begun_s
    cpu_s = time.process_time() - begun_cpu_s
    half = len(resident) // 2
    return {
        "rows": done,
        "seconds": round(seconds, 2),
        "cpu_s_here": round(cpu_s, 2),
        "rows_per_s": round(done / seconds),
        "mib_after_half": round(max(resident[: half + 1])),
        "mib_after_all": round(max(resident)),
        "best": best[1],
        "sums": sums.tolist(),
    }


def resident_mib() -> float:
    """Memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
