"""Watch what other programs take of the cores under measurement, and wait for them to end."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from estimator.errors import ProbeError
from estimator.machines.profile import DeviceKind, Interference

# Of the time of the cores, by others: beyond the first a measurement is made again, beyond the
# second a strict probe is refused: at 17 % steps of models came out up to 11 % too long
# (busy_probe.py). A desktop's own programs stay below the first.
DISTURBED_RATIO, REFUSED_RATIO = 0.10, 0.15
# Of the canary's usual time; turbo clocks alone make a tenth.
DISTURBED_CANARY_RATIO, REFUSED_CANARY_RATIO = 1.3, 1.5
# A GPU at its limit of power lowers its clock by itself (an H100 of 700 W under matmuls to 1440 of
# 1980 MHz); a program beside it takes half of its time.
SHARED_GPU_RATIO = 1.6
# Of the budget, for waiting and measuring again: what has just been started or installed ends in
# some seconds, and what goes on after them seldom ends within the minute of a probe.
_PATIENCE_RATIO, _MOST_PATIENCE_S = 0.25, 60.0
# CPU times of Linux advance in ticks of 10 ms.
_LOOK_S = 0.25
_TENTH = 0.1


def default_patience_s(budget_s: float) -> float:
    """How long a probe of such a budget waits for others, and measures again, in all.

    >>> default_patience_s(60.0)
    15.0
    """
    return min(_MOST_PATIENCE_S, _PATIENCE_RATIO * budget_s)


def disturbed_canary_ratio(kind: DeviceKind) -> float:
    """From where on a canary that takes so many times as long as usual tells of other programs."""
    return SHARED_GPU_RATIO if kind == "cuda" else DISTURBED_CANARY_RATIO


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since boot of all programs, and of one process with all below it."""

    all_s: float
    own_s: float


def read_cpu_times(pid: int, threads: Sequence[int], root: Path = Path("/")) -> CpuTimes | None:
    """The times of hardware threads, and of `pid` and those below it; None where none are told.

    What a hypervisor gave to others (steal) counts as theirs; interrupts count for nobody.
    """
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    wanted, ticks = {f"cpu{thread}" for thread in threads}, 0
    for name, *columns in (line.split() for line in lines if line.startswith("cpu")):
        if name in wanted:
            # user, nice, system, idle, iowait, irq, softirq, steal, … (proc(5)).
            ticks += sum(map(int, columns[:3])) + sum(map(int, columns[7:8]))
    per_s = os.sysconf("SC_CLK_TCK")
    return CpuTimes(ticks / per_s, _tree_ticks(pid, root) / per_s)


def _tree_ticks(pid: int, root: Path) -> int:
    """CPU time of a process, its descendants, and those of them that have ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in os.scandir(root / "proc"):
        if not entry.name.isdecimal():
            continue
        try:
            text = Path(entry.path, "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        # The name in brackets may hold spaces; behind it: state, parent, …, four times (proc(5)).
        columns = text.rpartition(")")[2].split()
        ticks[int(entry.name)] = sum(map(int, columns[11:15]))
        children.setdefault(int(columns[1]), []).append(int(entry.name))
    total, left = 0, [pid]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children.get(process, [])
    return total


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen beside the measurements that were kept, and what waiting it took."""

    others_s: float = 0.0
    cores_s: float = 0.0
    canaries_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    repeats: int = 0

    @property
    def canary_s(self) -> float | None:
        """The median over all measurements: cores change their speed from one second to the next.

        On two cores of a shared server one canary was up to 28 % off the next, such medians of
        four probes 8 %.
        """
        return statistics.median(self.canaries_s) if self.canaries_s else None

    def interference(
        self, usual_canary_s: float | None = None, *, on_gpu: bool = False
    ) -> Interference:
        """What it comes to; `usual_canary_s` is that of an earlier probe of the same machine."""
        ratio = _canary_ratio(self.canary_s, usual_s(self.canaries_s, usual_canary_s))
        return Interference(
            others_ratio=self.others_s / self.cores_s if self.cores_s else 0.0,
            canary_ratio=1.0 if on_gpu and ratio < SHARED_GPU_RATIO else ratio,
            waited_s=self.waited_s,
            repeats=self.repeats,
        )


def usual_s(canaries_s: Sequence[float], known_s: float | None) -> float | None:
    """How long the canary takes undisturbed: the quickest tenth, since a first one may be odd."""
    usual = sorted(canaries_s)[int(_TENTH * len(canaries_s)) :][:1]
    return min((*usual, *((known_s,) if known_s else ())), default=None)


def _canary_ratio(canary_s: float | None, usual_s: float | None) -> float:
    return max(1.0, canary_s / usual_s) if canary_s and usual_s else 1.0


@dataclass(slots=True, kw_only=True)
class InterferenceWatch:
    """Measures beside a look at the load of others, and again once they have ended.

    Waiting and measuring again take `patience_s` in all. The measurements need `cores` cores, and
    others may use `spare_cores` besides without disturbing them. `read` tells the CPU times of all,
    `canary` how long the canary takes now, if it can, which matters from `disturbed_canary_ratio`
    on; `say` is told of what is waited for.
    """

    patience_s: float = 0.0
    cores: int = 1
    spare_cores: int = 0
    usual_canary_s: float | None = None
    disturbed_canary_ratio: float = DISTURBED_CANARY_RATIO
    read: Callable[[], CpuTimes | None] = lambda: None
    canary: Callable[[], float | None] = lambda: None
    say: Callable[[str], None] = lambda disturbance: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    seen: Seen = field(default_factory=Seen)

    @property
    def left_s(self) -> float:
        """Of the patience: what waiting and repeated measurements have not taken."""
        return max(0.0, self.patience_s - self.seen.waited_s)

    def run(self, measure: Callable[[], None]) -> None:
        """Call `measure`, and again where others disturbed it and have ended since.

        What it finds the second time must replace what it found the first.
        """
        while True:
            began, before = self.clock(), self.read()
            measure()
            took_s, after = self.clock() - began, self.read()
            others_s = self._others_s(before, after, took_s)
            canary_s, cores_s = self.canary(), took_s * self.cores
            interference = self._interference(others_s / (cores_s or 1.0), canary_s)
            can_repeat = self._disturbs(interference) and took_s < self.left_s
            if can_repeat and not self._disturbs(self.await_quiet()):
                self.seen.waited_s += took_s
                self.seen.repeats += 1
                continue
            self.seen.others_s += others_s
            self.seen.cores_s += cores_s
            self.seen.canaries_s += [] if canary_s is None else [canary_s]
            return

    def await_quiet(self) -> Interference:
        """Wait for others to end, as long as the patience lasts; what they do at the end of it."""
        look = self._look()
        if self._disturbs(look) and self.left_s:
            self.say(str(look))
        while self._disturbs(look) and self.left_s:
            began = self.clock()
            look = self._look()
            self.seen.waited_s += self.clock() - began
        return look

    def _look(self) -> Interference:
        """What others do right now."""
        before, began = self.read(), self.clock()
        self.sleep(_LOOK_S)
        after, took_s = self.read(), self.clock() - began
        others_s = self._others_s(before, after, took_s)
        return self._interference(others_s / (took_s * self.cores or 1.0), self.canary())

    def _others_s(self, before: CpuTimes | None, after: CpuTimes | None, took_s: float) -> float:
        """Seconds of the needed cores that others took."""
        if before is None or after is None:
            return 0.0
        others_s = after.all_s - before.all_s - (after.own_s - before.own_s)
        return min(max(0.0, others_s - self.spare_cores * took_s), self.cores * took_s)

    def _disturbs(self, interference: Interference) -> bool:
        is_slow = interference.canary_ratio > self.disturbed_canary_ratio
        return is_slow or interference.others_ratio > DISTURBED_RATIO

    def _interference(self, others_ratio: float, canary_s: float | None) -> Interference:
        ratio = _canary_ratio(canary_s, usual_s(self.seen.canaries_s, self.usual_canary_s))
        return Interference(others_ratio=others_ratio, canary_ratio=ratio)


def check_interference(interference: Interference) -> None:
    """Raise ProbeError where so much is disturbed that the numbers cannot be right."""
    if (
        interference.others_ratio > REFUSED_RATIO
        or interference.canary_ratio > REFUSED_CANARY_RATIO
    ):
        raise ProbeError(
            f"this machine is too busy to be probed ({interference}), and every estimate would be "
            "wrong; end other programs and probe again, or keep such a profile without --strict"
        )
