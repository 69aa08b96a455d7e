"""The command that writes a Slurm job script, which Slurm itself takes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimator.api import estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.schedulers.launchers import time_text
from tests.synthetic import perceptron

Run = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.graph"
    replace(perceptron([2048, 2048, 2048]), target="cuda").save(path)
    return path


def test_the_script_follows_from_the_estimate(model: Path, tmp_path: Path, command: Run) -> None:
    answer = estimate(OpGraph.load(model), "2x4:t4-g4dn")
    limit_s = answer.duration_s(samples=1e8) * answer.high_s / answer.step_time_s * 1.25
    sinfo = tmp_path / "sinfo.txt"
    sinfo.write_text("short|1:00|9|gpu:t4:4\nlong|infinite|9|gpu:t4:4\n")
    words = ("--on", "2x4:t4-g4dn", "--samples", "1e8", "--sinfo", sinfo, "--run", "train.py -v")
    found = command("slurm", model, *words)
    assert found.code == 0
    lines = found.out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {
        "#SBATCH --partition=long",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --time={time_text(limit_s)}",
        "#SBATCH --gres=gpu:t4:4",
    } <= set(lines)
    assert lines[-1].startswith("srun torchrun --nnodes=2 --nproc-per-node=4 ")
    assert lines[-1].endswith(" train.py -v")
    told = json.loads(command("slurm", model, *words, "--json").out)
    assert told["script"] == found.out
    assert told["time_s"] == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --samples or --tokens"),
        (("--samples", "1", "--sinfo", "/missing"), "cannot read /missing"),
        (("--samples", "1", "--run", "'"), "cannot be split into words"),
        (("--tokens", "1"), "no tokens to count"),
        (("--samples", "1", "--on", "1x1:t4-g4dn+1x1:v100-p3"), "has unlike nodes"),
    ],
)
def test_wrong_input_is_one_sentence(
    model: Path, command: Run, words: tuple[str, ...], said: str
) -> None:
    assert said in command("slurm", model, "--on", "1x4:t4-g4dn", *words).sentence


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm controller of two nodes with four GPUs each, without daemons on them."""
    if shutil.which("slurmctld") is None or shutil.which("sbatch") is None:
        pytest.skip("Slurm is not installed")
    if os.getuid() != 0:
        pytest.skip("a Slurm controller without munge needs root")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = socket.gethostname()
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={port}\n"
        "AuthType=auth/none\nCredType=cred/none\nSlurmUser=root\nGresTypes=gpu\n"
        f"StateSaveLocation={tmp_path}\nSlurmctldPidFile={tmp_path}/pid\n"
        f"SlurmctldLogFile={tmp_path}/log\nProctrackType=proctrack/pgid\n"
        "SelectType=select/cons_tres\nReturnToService=2\nSlurmdTimeout=0\n"
        "NodeName=n[1-2] NodeAddr=127.0.0.1 CPUs=16 RealMemory=1000 Gres=gpu:t4:4 State=CLOUD\n"
        # Nodes of a cloud count as they are described until they are resumed.
        "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=600\nPrivateData=cloud\n"
        "PartitionName=train Nodes=n[1-2] Default=YES MaxTime=7-0 State=UP\n"
    )
    (tmp_path / "gres.conf").write_text("NodeName=n[1-2] Name=gpu Type=t4 Count=4\n")
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    process = subprocess.Popen(
        ["slurmctld", "-D", "-c"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while (
            subprocess.run(["scontrol", "ping"], env=environment, capture_output=True).returncode
            or b"UP"
            not in subprocess.run(["scontrol", "ping"], env=environment, capture_output=True).stdout
        ):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip("a Slurm controller does not start here")
            time.sleep(0.2)
        yield environment
    finally:
        process.kill()
        process.wait()


def test_slurm_itself_takes_the_script(
    model: Path, tmp_path: Path, command: Run, controller: dict[str, str]
) -> None:
    words = ["sinfo", "-h", "-o", "%R|%l|%D|%G"]
    sinfo = subprocess.run(words, env=controller, capture_output=True, text=True, check=True)
    (tmp_path / "sinfo.txt").write_text(sinfo.stdout)
    asked = ("--on", "2x4:t4-g4dn", "--samples", "1e8", "--sinfo", tmp_path / "sinfo.txt")
    script = tmp_path / "job.sh"
    found = command("slurm", model, *asked)
    assert found.code == 0, (found.err, sinfo.stdout)
    script.write_text(found.out)
    test = subprocess.run(
        ["sbatch", "--test-only", str(script)], env=controller, capture_output=True, text=True
    )
    assert test.returncode == 0, test.stderr
    assert "to start at" in test.stderr
    assert "on nodes n[1-2] in partition train" in test.stderr
    # The same script for more GPUs than a node has is refused: the test can fail.
    script.write_text(script.read_text().replace("gpu:t4:4", "gpu:t4:5"))
    test = subprocess.run(["sbatch", "--test-only", str(script)], env=controller)
    assert test.returncode != 0
