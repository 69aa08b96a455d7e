"""A killed `estimator probe`, and two of one name at once, leave a whole file.

Whole is what loads and is, to the last byte, what one probe meant to write.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from estimator.machines.catalogue import load_profile

COMMAND = [sys.executable, "-m", "estimator"]
# The same command, whose parts find one number at once: what it writes is a probe's.
QUICK_COMMAND = [
    sys.executable,
    "-c",
    """
from estimator.cli.main import main
from estimator.probe import machine
from estimator.probe.devices.calls import grid_call
from estimator.tensors import TensorSpec

def run_job(processes, function, on_finding, **more):
    if "kernels" in function:
        call = grid_call("relu.default", TensorSpec((8,))).call.encode()
        on_finding({"call": call, "warm_s": 1e-6})

machine.run_job = run_job
main()
""",
]
PROBE = ["probe", "--name", "shared", "--budget", "1"]


def start(home: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, "ESTIMATOR_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until_written(file: Path, process: subprocess.Popen[str]) -> None:
    """Until the first sign of writing: a draft beside the file, or another file in its place."""
    before = file.stat().st_ino
    while process.poll() is None and file.stat().st_ino == before:
        if len(list(file.parent.iterdir())) > 1:
            return
        # A draft is there for some milliseconds; asking without end takes the core that is probed.
        time.sleep(5e-4)


def wait_until_measuring(process: subprocess.Popen[str]) -> None:
    """Until the process has started another one to measure in."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_a_killed_probe_leaves_the_profile_of_before_or_its_own_whole(tmp_path: Path) -> None:
    from tests.conftest import make_small_profile

    folder = tmp_path / "machines"
    folder.mkdir()
    file = folder / "shared.json"
    for moment, command in (("measuring", COMMAND), ("writing", QUICK_COMMAND)):
        # A short probe replaces only a profile that was cut short too.
        replace(make_small_profile("shared"), kernels_timed_ratio=1e-9).save(file)
        before = file.read_bytes()
        with start(tmp_path, *command, *PROBE, "--devices", "1") as process:
            if moment == "measuring":
                wait_until_measuring(process)
            else:
                wait_until_written(file, process)
            assert process.poll() is None, process.communicate()
            os.killpg(process.pid, signal.SIGKILL)
        assert load_profile(file).name == "shared"
        assert process.returncode == -signal.SIGKILL
        if moment == "measuring":
            assert file.read_bytes() == before
        # A draft may stay; nothing else does, and nothing takes it for a profile.
        assert {path.suffix for path in folder.iterdir() if not path.name.startswith(".")} == {
            ".json"
        }


def test_two_probes_of_one_name_leave_the_file_of_one_of_them(tmp_path: Path) -> None:
    command = [*COMMAND, *PROBE, "--devices", "2", "--json"]
    with start(tmp_path, *command) as first, start(tmp_path, *command) as second:
        outputs = [process.communicate(timeout=180) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    written = json.loads((tmp_path / "machines" / "shared.json").read_text())
    assert written in [json.loads(output) for output, _ in outputs]
    assert load_profile(tmp_path / "machines" / "shared.json").name == "shared"
    assert [path.name for path in (tmp_path / "machines").iterdir()] == ["shared.json"]
