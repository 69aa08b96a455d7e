"""Ration what processes may use, by control groups of version 1."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from estimator.errors import ProbeError


@contextlib.contextmanager
def control_group(controller: str, name: str, settings: dict[str, str]) -> Iterator[Path]:
    """The folder of a new group with the files `settings`, gone once its processes have ended.

    Raises ProbeError where none can be made.
    """
    folder = Path("/sys/fs/cgroup", controller, name)
    try:
        folder.mkdir()
        for file, value in settings.items():
            (folder / file).write_text(value)
    except OSError as error:
        raise ProbeError(
            f"cannot make the control group {folder} ({error}); run as root where control groups "
            "have version 1"
        ) from None
    try:
        yield folder
    finally:
        # The kernel takes a moment after the last process.
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def join(group: str | Path) -> None:
    """Put this process into a group."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
