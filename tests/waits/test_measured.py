"""What unchanged scripts wait for, on a clock of their own: a busy machine changes nothing.

Each script replaces `time.perf_counter` by a clock that only its injected costs move, so that every
stall is known to the last digit.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from estimator.cli.console import rendered
from estimator.errors import AllocationError, ModelError
from estimator.probe.devices.storage import evict, load, resident_ratio
from estimator.report.plans import measured_sections
from estimator.waits import measured as measured_module
from estimator.waits.measured import MeasuredStalls, RunName, TimedRun, measure_stalls
from estimator.waits.predicted import Stall
from estimator.waits.runs import RunRecord, Script, cores_of, place_of
from tests.conftest import Command

# One step computes 20 ms; a sample takes 1 ms of preparing, a cold file 30 ms, a byte 1 µs.
TRAIN = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from estimator.probe.devices.storage import resident_ratio

now = [0.0]
time.perf_counter = lambda: now[0]

def spend(seconds):
    now[0] += seconds

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FILES = sorted(Path(sys.argv[1]).glob("*.bin"))[rank::ranks]

class Files(Dataset):
    def __len__(self):
        return 4 * len(FILES)

    def __getitem__(self, index):
        path = FILES[index % len(FILES)]
        if resident_ratio([path]) < 0.5:
            spend(0.030)
        with open(path, "rb") as stream:
            stream.read()
        spend(0.001)
        return torch.ones(8)

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Files(), batch_size=4):
    spend(0.020)
    optimizer.zero_grad()
    model(batch).sum().backward()
    if dist.get_world_size() > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            spend(float(os.environ.get("WIRE", 1e-6)) * parameter.grad.nbytes)
    optimizer.step()
"""


def measured(
    path: Path, script: str, devices: int = 1, arguments: Sequence[str] = (), **more: Any
) -> MeasuredStalls:
    (path / "train.py").write_text(script)
    cores: tuple[tuple[int, ...], ...] = ((),) * devices
    asked = Script(
        path=path / "train.py",
        arguments=tuple(arguments),
        cores=cores,
        steps=8,
        warmup=2,
        timeout_s=120.0,
        **more,
    )
    return measure_stalls(asked, repeats=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """80 files on a disk, so that a cold cache exists."""
    folder = tmp_path / "data"
    folder.mkdir()
    files = [folder / f"{number}.bin" for number in range(80)]
    for path in files:
        path.write_bytes(bytes(20000))
    evict(files)
    if resident_ratio(files) > 0:
        pytest.skip("the temporary folder is a file system in memory")
    return folder


def test_injected_stalls_of_every_kind_are_found_exactly(tmp_path: Path, data: Path) -> None:
    # The network of the second node takes five times as long for a byte.
    nodes = ("env WIRE=5e-6", "env WIRE=5e-6")
    for _ in range(3):
        found = measured(tmp_path, TRAIN, devices=2, arguments=[str(data)], node_commands=nodes)
        # A kernel that reclaims memory may drop a page before its warm run: 30 ms among six steps.
        if found.stalls["prep"].stall_s < 0.006:
            break
    # 72 parameters of 4 bytes at 1 µs a byte; four samples of 1 ms; four cold files of 30 ms.
    assert found.runs["T0"].step_s == pytest.approx(0.020)
    assert found.stalls["interconnect"].stall_s == pytest.approx(288e-6)
    assert found.stalls["interconnect"].ratio == pytest.approx(288e-6 / 0.020288)
    assert found.stalls["prep"].stall_s == pytest.approx(0.004)
    assert found.stalls["fetch"].stall_s == pytest.approx(0.120)
    assert found.waited_s == pytest.approx(0.004)
    assert found.stalls["network"].stall_s == pytest.approx(4 * 288e-6)
    assert found.stalls["network"].ratio == pytest.approx(4 * 288e-6 / 0.020288)
    # The parts add up to the run that has them all.
    parts = sum(found.stalls[name].stall_s for name in ("interconnect", "prep", "fetch"))
    assert found.runs["T0"].step_s + parts == pytest.approx(found.runs["T2"].step_s)
    assert found.samples == 4
    assert set(found.missing) == {"host"}


# Like ssh: words are joined and read by a shell, in a home and an environment of its own. What was
# asked for is kept; n2 has a slow wire.
SSH = """#!/bin/sh
host=$1
shift
echo "$host $*" >> {log}
wire=1e-6
[ $host = n2 ] && wire=5e-6
cd {home} && exec env -i HOME={home} WIRE=$wire sh -c "$*"
"""


def test_ranks_of_nodes_behind_ssh_know_their_place_and_send_their_records_back(
    tmp_path: Path, data: Path
) -> None:
    log, ssh, home = tmp_path / "log", tmp_path / "ssh", tmp_path / "home"
    home.mkdir()
    ssh.write_text(SSH.format(log=log, home=home))
    ssh.chmod(0o755)
    nodes = (f"{ssh} n1", f"{ssh} n2")
    # No shell may read what a script is given.
    arguments = [os.path.relpath(data), "$HOME a;b {c,d}"]
    script = "import sys\nassert sys.argv[2] == '$HOME a;b {c,d}', sys.argv\n" + TRAIN
    found = measured(tmp_path, script, devices=2, arguments=arguments, node_commands=nodes)
    # 288 bytes at 5 µs a byte on the slower node, at 1 µs on one node.
    assert found.stalls["network"].stall_s == pytest.approx(4 * 288e-6)
    asked = {line.split()[0]: line.split()[1:] for line in log.read_text().splitlines()}
    assert sorted(asked) == ["n1", "n2"]
    for rank, host in enumerate(("n1", "n2")):
        # Each node has one rank, its first.
        place = {f"RANK={rank}", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"}
        assert place <= set(asked[host])


def test_three_ranks_on_two_nodes_are_two_and_one() -> None:
    # Of each rank: its node, its rank there, and how many ranks are there.
    assert [place_of(rank, 3, nodes=2) for rank in range(3)] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    assert [place_of(rank, 3, nodes=1) for rank in range(3)] == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]


def test_batches_of_any_iterable_are_replaced_where_it_is_watched(tmp_path: Path) -> None:
    script = """
import time
import torch
import estimator

now = [0.0]
time.perf_counter = lambda: now[0]

def batches():
    while True:
        now[0] += 0.007
        yield {"x": torch.ones(5, 3)}

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in estimator.watch_loader(batches()):
    now[0] += 0.010
    model(batch["x"]).sum().backward()
    optimizer.step()
"""
    found = measured(tmp_path, script)
    assert found.runs["T1"].step_s == pytest.approx(0.010)
    assert found.stalls["prep"].stall_s == pytest.approx(0.007)
    assert found.samples == 5
    assert "name them with --data" in found.missing["fetch"]


REFUSED = {
    "raise ValueError('no such thing')": "exit code 1: ValueError: no such thing",
    "step(range(20))": "took no batch of a DataLoader; wrap what gives its batches",
    "list(DataLoader(torch.ones(9, 2)))": "took 9 batches and made no step of an optimizer",
    "step(DataLoader(torch.ones(5, 2)))": "made 5 steps, and --warmup and --steps ask for 3",
}
BROKEN = """
import torch
from torch.utils.data import DataLoader

def step(batches):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in batches:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

"""


@pytest.mark.parametrize("line", REFUSED)
def test_a_script_that_cannot_be_measured_gets_one_sentence(tmp_path: Path, line: str) -> None:
    said = REFUSED[line].replace("ask for 3", "ask for 8")
    with pytest.raises(ModelError) as error:
        measured(tmp_path, BROKEN + line)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_script_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time\ntime.sleep(1000)")
    asked = Script(path=path, steps=3, warmup=1, timeout_s=2.0)
    with pytest.raises(ModelError, match=r"was stopped after 2 s: (wrote no times|took no batch)"):
        measure_stalls(asked, repeats=1)


def stalls_of(steps_s: dict[RunName, float], stalls: dict[str, Stall]) -> MeasuredStalls:
    """What steps of eight samples on two devices, timed in these runs, waited for."""
    return MeasuredStalls(
        script="train.py",
        devices=2,
        samples=8,
        workers=0,
        waited_s=0.0,
        runs={name: TimedRun(step_s, 0.0, ()) for name, step_s in steps_s.items()},
        stalls=stalls,
        missing={},
    )


def test_rates_are_samples_over_the_steps_that_hold_them_back() -> None:
    fetch = Stall(stall_s=0.4, low_s=0.3, high_s=0.5, ratio=0.67)
    found = stalls_of({"T1": 0.1, "T3": 0.2}, {"fetch": fetch})
    assert found.rates == pytest.approx({"G": 160.0, "P": 80.0, "F": 40.0})


def test_measured_stalls_are_shares_of_the_run_they_lengthen_and_beside_it_of_a_node() -> None:
    about = {"host": (0.04, 0.4), "prep": (0.2, 0.5), "fetch": (0.1, 0.2)}
    about |= {"interconnect": (0.1, 0.5), "network": (0.6, 3.0)}
    stalls = {
        name: Stall(stall_s=stall_s, low_s=stall_s, high_s=stall_s, ratio=ratio)
        for name, (stall_s, ratio) in about.items()
    }
    found = stalls_of({"T0": 0.1, "T1": 0.2, "T3": 0.4, "T2": 0.5, "T5": 0.8}, stalls)
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(rendered(measured_sections(found)))
    lines = console.export_text().splitlines()
    shares = {line.split()[0]: re.findall(r"[0-9.]+ %", line) for line in lines if " to " in line}
    # The network's 0.6 s are 75 % of T5 and 300 % of T1.
    assert shares == {
        "host": ["40 %"],
        "prep": ["50 %"],
        "fetch": ["20 %"],
        "interconnect": ["50 %", "50 %"],
        "network": ["75 %", "300 %"],
    }


def record(batches: int, samples: int, steps: int, *, busy_s: float | None = None) -> RunRecord:
    """A run whose steps took 20 ms each."""
    return RunRecord(
        step_s=0.020,
        waited_s=0.0,
        batches=batches,
        samples=samples,
        workers=0,
        steps_s=(0.020,) * steps,
        busy_s=busy_s,
    )


def test_the_host_stall_is_what_of_a_step_the_accelerator_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(script: Script, folder: Path, **how: Any) -> RunRecord:
        return record(8, 4, 6, busy_s=0.015 if how.get("is_profiled") else None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measured_module, "run", run)
    found = measure_stalls(Script(path=tmp_path / "train.py", cores=((), ())), repeats=1)
    host = found.stalls["host"]
    assert (host.stall_s, host.ratio) == (pytest.approx(0.005), pytest.approx(0.25))
    assert "host" not in found.missing
    # Cores are their own host.
    found = measure_stalls(Script(path=tmp_path / "train.py", cores=((0,), (1,))), repeats=1)
    assert "host" in found.missing


def test_pages_go_out_of_the_cache_and_come_back(data: Path) -> None:
    files = sorted(data.iterdir())
    load(files)
    assert resident_ratio(files) == 1.0
    evict(files)
    assert resident_ratio(files) == 0.0
    assert resident_ratio([data / "none"]) == 0.0


def test_files_of_a_file_system_in_memory_stay_and_fetch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(script: Script, folder: Path, **how: Any) -> RunRecord:
        return record(4, 1, 3)

    monkeypatch.setattr(measured_module, "run", run)
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("there is no /dev/shm")
    path = memory / f"{tmp_path.name}.bin"
    path.write_bytes(bytes(50000))
    try:
        asked = Script(path=tmp_path / "train.py", steps=4, warmup=1)
        found = measure_stalls(asked, repeats=1, data=[path])
    finally:
        path.unlink()
    assert "fetch" not in found.stalls
    assert "100% of the pages of 1 files stay in memory" in found.missing["fetch"]


def test_devices_of_this_machine_are_its_cores() -> None:
    assert len(cores_of("1x1:local")) == 1
    with pytest.raises(AllocationError, match="not on this machine"):
        cores_of("2x1:local")
    with pytest.raises(AllocationError, match="asks for 4096 devices of this machine"):
        cores_of("1x4096:local")


def test_the_command_runs_a_script_with_its_arguments(
    tmp_path: Path, data: Path, command: Command
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    asked = ["stalls", "run", str(tmp_path / "train.py"), "--on", "1x1:local", "--repeats", "1"]
    asked += ["--steps", "4", "--warmup", "2"]
    answer = command(*asked, "--", str(data))
    assert (answer.code, answer.err) == (0, "")
    for word in ("real batches, cold page cache", "prep", "4.00 ms", "120 ms", "no workers"):
        assert word in answer.out
    said = command("stalls", "--on", "1x1:local")
    assert said.code == 2
    assert "Missing argument 'MODEL'" in said.err
