"""Compare predicted with measured steps of scripts that read data, cached or of a slow disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from records import Record, say
from stall_bench import Bench, Case, loader_of, predicted_s, throttled
from stall_injected import DISK_BYTES_PER_S
from stall_scripts.injected import BATCH as COSTLY_BATCH
from stall_scripts.injected import FILE_BYTES, write_files
from stall_scripts.loaders import BATCH, KINDS, write_data
from testbed.network import unavailable_reason

from estimator.probe.devices.storage import evict, load, read_bytes_per_s
from estimator.waits.predicted import CACHED_RATIOS
from estimator.waits.runs import run

CACHED_WORKERS = 2


def loaders(bench: Bench) -> Iterator[Case]:
    """Steps with data: within 25 %."""
    folder = bench.folder / "loaders"
    write_data(folder)
    for kind in KINDS:
        for workers in (0, 1, 2):
            yield Case(f"{kind}, {workers} workers", partial(_step, bench, kind, workers, folder))


def _step(bench: Bench, kind: str, workers: int, folder: Path) -> Record:
    # Copies of batches are made without workers.
    alone = bench.script("loaders.py", [kind, 0, folder])
    script = bench.script("loaders.py", [kind, workers, folder])
    without_s = bench.step_s(alone, is_synthetic=True)
    loader = loader_of(script)
    measured_s = bench.step_s(script, is_synthetic=False)
    return {
        "predicted_s": predicted_s(loader, without_s, BATCH),
        "measured_s": measured_s,
        "without_s": without_s,
        "loader": loader.to_dict(),
        "step_s": measured_s,
        "of_value": 0.25,
        "of_step": 0.0,
    }


def cached(bench: Bench) -> Iterator[Case]:
    """Steps that read a share of their files of a throttled disk: within 5 %."""
    if reason := unavailable_reason():
        say(reason)
        return
    # Twice the steps, since the disk is let through in slices of time.
    longer = replace(bench, steps=2 * bench.steps)
    for ratio in CACHED_RATIOS:
        name = f"{ratio:.0%} cached, {CACHED_WORKERS} workers"
        yield Case(name, partial(_cached, longer, ratio))


def _cached(bench: Bench, ratio: float) -> Record:
    folder = bench.folder / "shares"
    # Each file is read once, those of batches that workers make ahead as well.
    files = write_files(folder, COSTLY_BATCH * (bench.steps + 2 * CACHED_WORKERS))
    script = bench.script("injected.py", ["none", 0, CACHED_WORKERS, folder])
    without_s = bench.step_s(bench.script("injected.py", ["none", 0, 0]), is_synthetic=True)
    load(files)
    warm = loader_of(script)
    disk = _disk_bytes_per_s(bench, files[:120])
    steps_s = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(bench.repeats):
            load(files)
            evict(_some_of(files, 1.0 - ratio))
            with throttled(folder, DISK_BYTES_PER_S):
                found = run(script, Path(place), devices=1, is_synthetic=False)
            steps_s.append(found.step_s)
    loader = replace(warm, cached_ratio=ratio, disk_bytes_per_s=disk, stored_bytes=FILE_BYTES)
    return {
        "predicted_s": predicted_s(loader, without_s, COSTLY_BATCH),
        "measured_s": median(steps_s),
        "runs_s": steps_s,
        "without_s": without_s,
        "loader": loader.to_dict(),
        "step_s": median(steps_s),
        "of_value": 0.05,
        "of_step": 0.0,
    }


def _disk_bytes_per_s(bench: Bench, files: Sequence[Path]) -> float:
    """What the throttled disk gives in the long run, by the probe's own measurement."""
    if ("disk",) not in bench.known:
        with throttled(files[0].parent, DISK_BYTES_PER_S):
            evict(files)
            # What the kernel lets through at once comes first.
            read_bytes_per_s(files[:20])
            bench.known["disk",] = read_bytes_per_s(files[20:])
    return bench.known["disk",]


def _some_of(files: Sequence[Path], ratio: float) -> list[Path]:
    """A share of the files, evenly spread over them."""
    return [
        path for number, path in enumerate(files) if int((number + 1) * ratio) > int(number * ratio)
    ]
