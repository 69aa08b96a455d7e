"""Measure what a training script waits for, by runs that leave out one thing each.

After Stash (Sharma et al., ICDCS 2023) and DS-Analyzer (Mohan et al., VLDB 2021): T0 has synthetic
batches on one device, T1 on all devices of the node, T5 on as many devices of two nodes; T3 has
real batches from a warm page cache, T2 from a cold one. Interconnect = T1 − T0 and network =
T5 − T1 are shares of T1; prep = T3 − T1 and fetch = T2 − T3 of the step that they lengthen. Host is
what of T0 (of T1 for one device) the accelerator does not work, by the profiler of one more run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot, sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from estimator.coefficients import Z_80
from estimator.probe.devices.storage import evict, load, resident_ratio
from estimator.waits.predicted import Stall
from estimator.waits.runs import FILES_LOG, RunRecord, Script, run

RunName = Literal["T0", "T1", "T2", "T3", "T5"]
StallName = Literal["host", "prep", "fetch", "interconnect", "network"]
# Longer run, shorter run, whose difference is the stall; the run of which it is a share.
STALLS: dict[StallName, tuple[RunName, RunName, RunName]] = {
    "prep": ("T3", "T1", "T3"),
    "fetch": ("T2", "T3", "T2"),
    "interconnect": ("T1", "T0", "T1"),
    "network": ("T5", "T1", "T1"),
}
# Pages that stay in the cache make a cold run warm.
MOST_RESIDENT_RATIO = 0.05
# What belongs to Python and to the system is no data.
_NO_DATA = (".py", ".pyc", ".so", ".pth", ".toml", ".cfg")


class TimedRun(NamedTuple):
    """Seconds per step: the median of several runs, what it is uncertain by, and all of them.

    The uncertainty is half of what the runs span, or that of the mean of a run's own steps if that
    is more: 80 % of errors are less.
    """

    step_s: float
    noise_s: float
    runs_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStalls:
    """What a script waits for; `missing` says of each stall that is not known why.

    `samples` are those of one device's batch; `waited_s` is what a step with real batches spends in
    its loader.
    """

    script: str
    devices: int
    samples: int
    workers: int
    waited_s: float
    runs: dict[RunName, TimedRun]
    stalls: dict[StallName, Stall]
    missing: dict[StallName, str]

    @property
    def rates(self) -> dict[str, float]:
        """DS-Analyzer's samples per second: G without loading, P with it warm, F of storage."""
        seconds = {"G": self.runs["T1"].step_s, "P": self.runs["T3"].step_s}
        if "fetch" in self.stalls:
            seconds["F"] = self.stalls["fetch"].stall_s
        samples = self.samples * self.devices
        return {name: samples / each_s for name, each_s in seconds.items() if each_s > 0}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        runs = {name: run._asdict() for name, run in self.runs.items()}
        return asdict(self) | {"runs": runs, "rates": self.rates}


def measure_stalls(
    script: Script,
    *,
    repeats: int = 3,
    data: Sequence[Path] = (),
    report: Callable[[str, float], None] = lambda what, done: None,
) -> MeasuredStalls:
    """Run the script in all ways, in turn, `repeats` times; raises ModelError where it fails.

    `data` are the files that it reads, or folders of them; by default those that Python opened in a
    first run that is not timed, and their like in the same folders.
    """
    from torch import cuda

    devices = len(script.cores)
    missing: dict[StallName, str] = {}
    names: list[RunName] = ["T3", "T1", *(("T0",) if devices > 1 else ())]
    if devices == 1:
        missing["interconnect"] = "one device has no other to wait for"
    if len(script.node_commands) == 2 and devices > 1:
        names.append("T5")
    else:
        missing["network"] = "no second node was named; give --node twice"
    with tempfile.TemporaryDirectory(prefix="estimator-stalls-") as text:
        folder = Path(text)
        report("looking for its data", 0.0)
        files = _data_files(script, folder, data)
        load(files)
        why = _why_not_cold(files)
        if why is None:
            names.append("T2")
        else:
            missing["fetch"] = why
        records: dict[RunName, list[RunRecord]] = {name: [] for name in names}
        for repeat in range(repeats):
            for number, name in enumerate(names):
                report(name, (repeat * len(names) + number) / (repeats * len(names)))
                # The pages of a cold run are in the cache when it ends.
                (evict if name == "T2" else load)(files)
                records[name].append(_run(script, folder, name))
        busy_s = None
        if cuda.is_available() and not any(script.cores):
            report("the accelerator's work", 1.0)
            busy_s = run(script, folder, devices=1, is_synthetic=True, is_profiled=True).busy_s
    if not busy_s:
        missing["host"] = "no accelerator worked, and cores are their own host"
    answer = _answer(script, records, missing)
    if not busy_s:
        return answer
    alone = answer.runs["T0" if "T0" in answer.runs else "T1"]
    host = _stall(alone, TimedRun(busy_s, 0.0, (busy_s,)), alone)
    return replace(answer, stalls={"host": host, **answer.stalls})


def _run(script: Script, folder: Path, name: RunName) -> RunRecord:
    return run(
        script,
        folder,
        devices=1 if name == "T0" else len(script.cores),
        is_synthetic=name in ("T0", "T1", "T5"),
        on_two_nodes=name == "T5",
    )


def _answer(
    script: Script, by_name: dict[RunName, list[RunRecord]], missing: dict[StallName, str]
) -> MeasuredStalls:
    runs = {name: _timed(records) for name, records in by_name.items()}
    real = by_name["T3"]
    return MeasuredStalls(
        script=str(script.path),
        devices=len(script.cores),
        samples=real[0].samples,
        workers=real[0].workers,
        waited_s=statistics.median(record.waited_s for record in real),
        runs=runs,
        stalls={
            name: _stall(runs[longer], runs[shorter], runs[step])
            for name, (longer, shorter, step) in STALLS.items()
            if longer in runs and shorter in runs
        },
        missing=missing,
    )


def _timed(records: Sequence[RunRecord]) -> TimedRun:
    runs_s = [record.step_s for record in records]
    span_s = (max(runs_s) - min(runs_s)) / 2
    own_s = statistics.median(
        Z_80 * statistics.stdev(record.steps_s) / sqrt(len(record.steps_s)) for record in records
    )
    return TimedRun(statistics.median(runs_s), max(span_s, own_s), tuple(runs_s))


def _stall(longer: TimedRun, shorter: TimedRun, step: TimedRun) -> Stall:
    noise_s = hypot(longer.noise_s, shorter.noise_s)
    return Stall.within(longer.step_s - shorter.step_s, noise_s, step_s=step.step_s)


def _data_files(script: Script, folder: Path, data: Sequence[Path]) -> list[Path]:
    """The files whose pages make a run warm or cold."""
    log = folder / "files"
    environment = {} if data else {FILES_LOG: str(log)}
    look = replace(script, steps=min(script.steps, script.warmup + 1))
    run(look, folder, devices=len(script.cores), is_synthetic=False, environment=environment)
    if data:
        places = [[*path.rglob("*")] if path.is_dir() else [path] for path in data]
        return sorted({path for place in places for path in place if not path.is_dir()})
    opened = log.read_bytes().decode(errors="surrogateescape").splitlines() if log.exists() else []
    kinds = {(path.parent, path.suffix) for path in map(Path, set(opened)) if _is_data(path)}
    return sorted(
        path
        for parent, suffix in kinds
        for path in parent.iterdir()
        if path.suffix == suffix and path.is_file()
    )


def _is_data(path: Path) -> bool:
    system = ("/proc", "/sys", "/dev", "/usr", "/etc", "/lib", sys.prefix, sys.base_prefix)
    named = str(path)
    return (
        path.is_file()
        and path.suffix not in _NO_DATA
        and not any(named.startswith(f"{folder}/") for folder in system)
        and "estimator-stalls-" not in named
    )


def _why_not_cold(files: Sequence[Path]) -> str | None:
    """Why no run can read its data from a cold cache, or None if one can."""
    if not files:
        return "no file was opened that could be put out of the page cache; name them with --data"
    evict(files)
    ratio = resident_ratio(files)
    if ratio > MOST_RESIDENT_RATIO:
        return (
            f"{ratio:.0%} of the pages of {len(files)} files stay in memory when they are put out "
            "of the page cache: another process maps them, or their file system has no disk"
        )
    return None
