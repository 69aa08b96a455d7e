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
# A GPU at its limit of power lowers its clock by itself (an H100 of 700 W under matmuls to 1440 of
# 1980 MHz); a program beside it takes half of its time.
SHARED_GPU_RATIO = 1.6
# Of the canary's usual time; turbo clocks alone make a tenth.
_DISTURBED_CANARY_RATIO = {"cpu": 1.3, "cuda": SHARED_GPU_RATIO}
REFUSED_CANARY_RATIO = 1.5
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


def others_cpu_s(pid: int, threads: Sequence[int], root: Path = Path("/")) -> float | None:
    """CPU seconds since boot that hardware threads gave to others; None where none are told.

    Others are all programs but `pid` and the processes below it. What a hypervisor gave to others
    (steal) counts as theirs; interrupts count for nobody.
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
    return (ticks - _tree_ticks(pid, root)) / os.sysconf("SC_CLK_TCK")


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
class InterferenceWatch:
    """Measures beside a look at the load of others, and again once they have ended.

    Waiting and measuring again take `patience_s` in all. The measurements need `cores` cores, and
    others may use `spare_cores` besides without disturbing them. `read_others_s` tells the CPU
    seconds that others have used so far, `canary` how long the canary takes now, if it can;
    `usual_canary_s` is that of an earlier probe of the same machine, and `say` is told of what is
    waited for. `others_s` of `cores_s` are what was seen beside the measurements that were kept.
    """

    patience_s: float = 0.0
    cores: int = 1
    spare_cores: int = 0
    kind: DeviceKind = "cpu"
    usual_canary_s: float | None = None
    read_others_s: Callable[[], float | None] = lambda: None
    canary: Callable[[], float | None] = lambda: None
    say: Callable[[str], None] = lambda disturbance: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
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

    def interference(self) -> Interference:
        """What was seen in all."""
        ratio = self._canary_ratio(self.canary_s)
        is_by_itself = self.kind == "cuda" and ratio < SHARED_GPU_RATIO
        return Interference(
            others_ratio=self.others_s / self.cores_s if self.cores_s else 0.0,
            canary_ratio=1.0 if is_by_itself else ratio,
            waited_s=self.waited_s,
            repeats=self.repeats,
        )

    @property
    def left_s(self) -> float:
        """Of the patience: what waiting and repeated measurements have not taken."""
        return max(0.0, self.patience_s - self.waited_s)

    def run(self, measure: Callable[[], None]) -> None:
        """Call `measure`, and again where others disturbed it and have ended since.

        What it finds the second time must replace what it found the first.
        """
        while True:
            began, before = self.clock(), self.read_others_s()
            measure()
            took_s, after = self.clock() - began, self.read_others_s()
            others_s = self._others_s(before, after, took_s)
            canary_s, cores_s = self.canary(), took_s * self.cores
            interference = self._interference(others_s / (cores_s or 1.0), canary_s)
            can_repeat = self._disturbs(interference) and took_s < self.left_s
            if can_repeat and not self._disturbs(self.await_quiet()):
                self.waited_s += took_s
                self.repeats += 1
                continue
            self.others_s += others_s
            self.cores_s += cores_s
            self.canaries_s += [] if canary_s is None else [canary_s]
            return

    def await_quiet(self) -> Interference:
        """Wait for others to end, as long as the patience lasts; what they do at the end of it."""
        look = self._look()
        if self._disturbs(look) and self.left_s:
            self.say(str(look))
        while self._disturbs(look) and self.left_s:
            began = self.clock()
            look = self._look()
            self.waited_s += self.clock() - began
        return look

    def _look(self) -> Interference:
        """What others do right now."""
        before, began = self.read_others_s(), self.clock()
        self.sleep(_LOOK_S)
        after, took_s = self.read_others_s(), self.clock() - began
        others_s = self._others_s(before, after, took_s)
        return self._interference(others_s / (took_s * self.cores or 1.0), self.canary())

    def _others_s(self, before: float | None, after: float | None, took_s: float) -> float:
        """Seconds of the needed cores that others took."""
        if before is None or after is None:
            return 0.0
        return min(max(0.0, after - before - self.spare_cores * took_s), self.cores * took_s)

    def _disturbs(self, interference: Interference) -> bool:
        is_slow = interference.canary_ratio > _DISTURBED_CANARY_RATIO[self.kind]
        return is_slow or interference.others_ratio > DISTURBED_RATIO

    def _interference(self, others_ratio: float, canary_s: float | None) -> Interference:
        return Interference(others_ratio=others_ratio, canary_ratio=self._canary_ratio(canary_s))

    def _canary_ratio(self, canary_s: float | None) -> float:
        """How many times as long as usual, that is the quickest tenth: a first one may be odd."""
        usual_s = sorted(self.canaries_s)[int(_TENTH * len(self.canaries_s)) :][:1]
        usual_s += [self.usual_canary_s] if self.usual_canary_s else []
        return max(1.0, canary_s / min(usual_s)) if canary_s and usual_s else 1.0


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
