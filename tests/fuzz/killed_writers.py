"""Kill writers of an observation store and probes at random points, and let many write at once.

Bounds: after every kill -9 the store opens, is whole and holds each
observation whose writer was told that it is kept, and of two probes of one name that are killed a
whole profile stays; of 8 processes that write 10,000 observations
each, in transactions of 1 to 40 and some of them twice, none is lost and none doubled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from estimator.calibrate.store import Observation, ObservationStore
from estimator.errors import ProfileError
from estimator.machines.catalogue import load_profile

# Pairs of probes of one name, and the budget of each.
PROBES, PROBE_BUDGET_S = 50, 1
KILLS, WRITERS, OBSERVATIONS = 100, 8, 10_000
# Kills fall within this much of a writer's first look at the file, or of its first observation.
LATEST_KILL_S = 0.15
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """What was left after killing one writer after the other."""

    kills: int
    acknowledged: int
    lost: int
    damaged: int

    @property
    def is_sound(self) -> bool:
        return self.acknowledged > 0 and self.lost == self.damaged == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What was in the place of a profile whose probes were killed, two of one name at once.

    After each pair the file is `damaged` or loads; `written` counts those that a probe of the pair
    had written, and `left` the drafts beside the file once a probe has ended in peace.
    """

    kills: int
    ended: int
    written: int
    damaged: int
    left: int

    @property
    def is_sound(self) -> bool:
        return self.kills > 0 and self.written > 0 and self.damaged == self.left == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What a store held after several processes wrote at once, and how long an `add` took."""

    writers: int
    written: int
    kept: int
    lost: int
    doubled: int
    median_add_s: float
    slowest_hundredth_s: float
    seconds: float

    @property
    def is_sound(self) -> bool:
        return self.kept == self.written and self.lost == self.doubled == 0


def observation(identity: str) -> Observation:
    """One of a hundred allocations and batches."""
    number = sum(identity.encode())
    return Observation(
        workload=f"workload {number % 3}",
        allocation=f"{1 + number % 4}x{1 + number % 8}:t4",
        batch_per_gpu=1 + number % 5,
        step_time_s=0.1 + number * 1e-4,
        identity=identity,
    )


def write_until_killed(path: Path, name: str, told: Connection) -> None:
    """Keep observations, one or some at a time, and tell which are kept."""
    told.send([])
    store = ObservationStore(path)
    chance = random.Random(name)
    for turn in range(sys.maxsize):
        identities = [f"{name}-{turn}-{index}" for index in range(chance.choice((1, 1, 1, 40)))]
        store.add_many([observation(identity) for identity in identities])
        told.send(identities)


def kill_writers(path: Path, *, kills: int, seed: int = 0) -> Kills:
    """Start a writer, kill it, and look at the store, `kills` times.

    Every fourth writer starts with no file, so that its making is interrupted as well.
    """
    chance = random.Random(seed)
    acknowledged = lost = damaged = 0
    kept: set[str] = set()
    for turn in range(kills):
        if is_new := turn % 4 == 0:
            path, kept = path.with_name(f"{turn}-{path.name}"), set()
        after_s = chance.uniform(0, LATEST_KILL_S)
        kept |= told_before_kill(path, f"{turn}", after_s, is_writing=not is_new)
        acknowledged += len(kept)
        with ObservationStore(path) as store:
            found = {one.identity for one in store}
        lost += len(kept - found)
        # A damaged file would have been moved aside.
        damaged += len(list(path.parent.glob(f"{path.name}.corrupt-*")))
        damaged += not is_whole(path)
    return Kills(kills=kills, acknowledged=acknowledged, lost=lost, damaged=damaged)


def told_before_kill(path: Path, name: str, after_s: float, *, is_writing: bool) -> set[str]:
    """The identities that a writer said it had kept before it was killed.

    The time runs from its first look at the file, or once it `is_writing`.
    """
    reader, writer = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=write_until_killed, args=(path, name, writer))
    process.start()
    writer.close()
    reader.recv()
    told: set[str] = set(reader.recv()) if is_writing else set()
    deadline_s = time.monotonic() + after_s
    # EOFError: it was killed, maybe in the middle of a message, which then told nothing.
    with contextlib.suppress(EOFError, OSError):
        while (left_s := deadline_s - time.monotonic()) > 0:
            if reader.poll(left_s):
                told.update(reader.recv())
        os.kill(process.pid or 0, signal.SIGKILL)
        while True:
            told.update(reader.recv())
    process.join()
    return told


def is_whole(path: Path) -> bool:
    """Whether SQLite finds no fault in a file; there may be none yet."""
    if not path.exists():
        return True
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def kill_probes(home: Path, *, pairs: int, seed: int = 0) -> Probes:
    """Start two ``estimator probe`` of one name, kill each with its ranks, and load what is there.

    The moments are drawn over the time that a pair takes that nobody kills, and a tenth more.
    """
    chance = random.Random(seed)
    path = home / "machines" / "shared.json"
    begun_s = time.monotonic()
    for process in (_probe(home), _probe(home)):
        process.wait()
    whole_s = time.monotonic() - begun_s
    kills = ended = written = 0
    damaged = int(not _loads(path))
    for _ in range(pairs):
        before = path.stat().st_ino
        begun_s = time.monotonic()
        for after_s, process in sorted(
            ((chance.uniform(0, 1.1 * whole_s), _probe(home)) for _ in range(2)),
            key=lambda drawn: drawn[0],
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(begun_s + after_s - time.monotonic(), 0.0))
            is_over = process.returncode is not None
            ended, kills = ended + is_over, kills + (not is_over)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written += path.stat().st_ino != before
        damaged += not _loads(path)
    # A draft is given an hour; as if that had passed, the next probe clears what the killed left.
    for draft in path.parent.glob(".*"):
        os.utime(draft, (0, 0))
    _probe(home).wait()
    left = len(list(path.parent.iterdir())) - 1
    return Probes(kills=kills, ended=ended, written=written, damaged=damaged, left=left)


def _probe(home: Path) -> subprocess.Popen[bytes]:
    options = ("--name", "shared", "--devices", "2", "--budget", str(PROBE_BUDGET_S))
    return subprocess.Popen(
        [sys.executable, "-m", "estimator", "probe", *options],
        env={**os.environ, "ESTIMATOR_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _loads(path: Path) -> bool:
    try:
        load_profile(str(path))
    except ProfileError:
        return False
    return True


def write_share(path: Path, name: str, count: int, told: Connection) -> None:
    """Keep `count` observations in transactions of 1 to 40, every tenth of them twice."""
    chance = random.Random(name)
    store = ObservationStore(path)
    durations_s: list[float] = []
    done = 0
    while done < count:
        size = min(chance.choice((1, 1, 1, 40)), count - done)
        batch = [observation(f"{name}-{done + index}") for index in range(size)]
        begun_s = time.perf_counter()
        store.add_many(batch)
        durations_s.append(time.perf_counter() - begun_s)
        if chance.random() < 0.1:
            store.add_many(batch)
        done += size
    told.send(durations_s)


def write_together(path: Path, *, writers: int, observations: int) -> Crowd:
    """Let `writers` processes keep `observations` each at the same time."""
    begun_s = time.monotonic()
    started = []
    for number in range(writers):
        reader, writer = SPAWN.Pipe(duplex=False)
        arguments = (path, f"writer {number}", observations, writer)
        process = SPAWN.Process(target=write_share, args=arguments)
        process.start()
        writer.close()
        started.append((process, reader))
    durations_s = [duration_s for _, reader in started for duration_s in reader.recv()]
    for process, _ in started:
        process.join()
    seconds = time.monotonic() - begun_s
    with contextlib.closing(sqlite3.connect(path)) as connection:
        kept = [row[0] for row in connection.execute("SELECT identity FROM observations")]
    written = {f"writer {n}-{index}" for n in range(writers) for index in range(observations)}
    return Crowd(
        writers=writers,
        written=len(written),
        kept=len(kept),
        lost=len(written - set(kept)),
        doubled=len(kept) - len(set(kept)),
        median_add_s=statistics.median(durations_s),
        slowest_hundredth_s=statistics.quantiles(durations_s, n=100)[-1],
        seconds=seconds,
    )


def main() -> int:
    """Kill and crowd as often as asked, and print what was left as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--probes", type=int, default=PROBES, help="pairs of probes to kill")
    parser.add_argument("--writers", type=int, default=WRITERS)
    parser.add_argument("--observations", type=int, default=OBSERVATIONS, help="of each writer")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crowd = write_together(
            Path(folder) / "crowd.db", writers=chosen.writers, observations=chosen.observations
        )
        killed = kill_writers(Path(folder) / "kills.db", kills=chosen.kills)
        probes = kill_probes(Path(folder) / "probes", pairs=chosen.probes)
    left = {"kills": asdict(killed), "probes": asdict(probes), "crowd": asdict(crowd)}
    print(json.dumps(left, indent=1))
    return 0 if killed.is_sound and probes.is_sound and crowd.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
