"""Kill writers of an observation store at random points, and let many write at once.

After every kill -9 the store opens, is whole and holds each observation whose writer was told that
it is kept; of processes that write at once, in transactions of 1 to 40 and some of them twice, no
observation is lost and none doubled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from estimator.calibrate.store import Observation, ObservationStore

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
class Crowd:
    """What a store held after several processes wrote at once."""

    written: int
    kept: int
    lost: int
    doubled: int

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


def write_share(path: Path, name: str, count: int) -> None:
    """Keep `count` observations in transactions of 1 to 40, every tenth of them twice."""
    chance = random.Random(name)
    store = ObservationStore(path)
    done = 0
    while done < count:
        size = min(chance.choice((1, 1, 1, 40)), count - done)
        batch = [observation(f"{name}-{done + index}") for index in range(size)]
        store.add_many(batch)
        if chance.random() < 0.1:
            store.add_many(batch)
        done += size


def write_together(path: Path, *, writers: int, observations: int) -> Crowd:
    """Let `writers` processes keep `observations` each at the same time."""
    started = []
    for number in range(writers):
        arguments = (path, f"writer {number}", observations)
        started.append(SPAWN.Process(target=write_share, args=arguments))
        started[-1].start()
    for process in started:
        process.join()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        kept = [row[0] for row in connection.execute("SELECT identity FROM observations")]
    written = {f"writer {n}-{index}" for n in range(writers) for index in range(observations)}
    return Crowd(
        written=len(written),
        kept=len(kept),
        lost=len(written - set(kept)),
        doubled=len(kept) - len(set(kept)),
    )
