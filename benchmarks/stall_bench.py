"""Run the scripts of the stall benchmarks, and throttle the disk that they read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from records import Record

from estimator.errors import ProbeError
from estimator.machines.catalogue import load_profile
from estimator.timeline.rank.lanes import input_costs
from estimator.waits.runs import Script, cores_of, run
from estimator.workload.loader import Loader

SCRIPTS = Path(__file__).parent / "stall_scripts"
_CONTROLLER = Path("/sys/fs/cgroup/blkio")


class Case(NamedTuple):
    """A name and what measures it: seconds expected and found, and how far they may differ.

    They differ by no more than `of_value` of what was expected or `of_step` of `step_s`.
    """

    name: str
    measure: Callable[[], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How often and how long scripts run; what several cases need is measured once."""

    steps: int
    repeats: int
    folder: Path
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def script(self, name: str, arguments: Sequence[object], *, devices: int = 1) -> Script:
        """A script of the benchmarks on cores of this machine."""
        return Script(
            path=SCRIPTS / name,
            arguments=tuple(map(str, arguments)),
            cores=cores_of(f"1x{devices}:local"),
            steps=self.steps,
        )

    def step_s(self, script: Script, *, is_synthetic: bool, devices: int = 0) -> float:
        """The median step of several runs, on all of the script's devices or on some."""
        key = (script, is_synthetic, devices)
        if key not in self.known:
            with tempfile.TemporaryDirectory() as folder:
                self.known[key] = median(
                    run(
                        script,
                        Path(folder),
                        devices=devices or len(script.cores),
                        is_synthetic=is_synthetic,
                    ).step_s
                    for _ in range(self.repeats)
                )
        return self.known[key]


def loader_of(script: Script) -> Loader:
    """The loader of a script, measured on its cores with as many threads as these."""
    (cores,) = script.cores
    command = [sys.executable, str(script.path), *script.arguments, "loader"]
    found = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
        capture_output=True,
        text=True,
        check=True,
    )
    return Loader(**json.loads(found.stdout))


def predicted_s(loader: Loader, without_s: float, samples: int) -> float:
    """The step with a loader of one that takes `without_s` without, on the probed machine."""
    profile = load_profile("local")
    costs = input_costs(loader, profile, samples=samples, batches=1, ranks_per_node=1)
    return float(without_s + costs.stall_s(without_s))


@contextlib.contextmanager
def throttled(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Let this process and its children read the disk under `folder` at a rate and no faster.

    By a control group of version 1 (blkio.throttle.read_bps_device); what is in the page cache is
    no read of the disk. The kernel lets a tenth of a second's bytes through at once, so the disk
    works while a step computes, as if somebody read ahead: in the long run a step takes the longer
    of its own time and the disk's. Raises ProbeError where there is no such group.
    """
    device = os.stat(folder).st_dev
    group = _CONTROLLER / f"stalls{os.getpid()}"
    limit = f"{os.major(device)}:{os.minor(device)} {round(bytes_per_s)}"
    try:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise ProbeError(
            f"cannot throttle reads in {group} ({error}); run as root where control groups have "
            "version 1"
        ) from None
    try:
        yield
    finally:
        (_CONTROLLER / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
