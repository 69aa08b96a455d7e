"""Slow the computing ranks of a testbed's slow nodes down, by rationing their CPU time.

A rank that gets 1/r of its core in every 10 ms computes r times as long, whatever it computes, and
its part of the communication with it. The kernel's CFS bandwidth control does it (control groups
of version 1); paced ranks need none of this, they wait r times as long.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from estimator.errors import ProbeError

_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000


@contextlib.contextmanager
def rationed(prefix: str, slowdown_ratios: Sequence[float]) -> Iterator[list[str | None]]:
    """A control group for every rank whose ratio is above 1, to be joined by it; gone afterwards.

    Raises ProbeError where control groups cannot be made.
    """
    groups: list[str | None] = []
    try:
        for rank, ratio in enumerate(slowdown_ratios):
            groups.append(None if ratio == 1.0 else _make(f"{prefix}{rank}", ratio))
        yield groups
    finally:
        for group in filter(None, groups):
            _remove(Path(group))


def _make(name: str, ratio: float) -> str:
    folder = _CONTROLLER / name
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(round(_PERIOD_US / ratio)))
    except OSError as error:
        raise ProbeError(
            f"cannot ration CPU time in {folder} ({error}); slow nodes that compute need control "
            "groups of version 1, paced models do not"
        ) from None
    return str(folder)


def join(group: str | None) -> None:
    """Put this process into its control group, if it has one."""
    if group is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


def remove_stale(prefixes: str = "tb*") -> None:
    """Remove the groups of testbeds whose owner has died."""
    for folder in _CONTROLLER.glob(prefixes):
        owner = folder.name.removeprefix("tb").partition("x")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """A group can be removed once its processes have ended, which takes the kernel a moment."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
