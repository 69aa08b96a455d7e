"""The command that says what to rent: a table, JSON, a picture, one sentence for wrong input."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import estimator as est
from estimator.advise.layouts.search import LayoutRanking, LayoutRow, best_layouts
from estimator.api import estimate
from estimator.cli.console import print_sections
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.schedulers.launchers import time_text
from estimator.report.plans import layouts_sections
from tests.conftest import Command, free_port
from tests.synthetic import perceptron


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.graph"
    perceptron([2048, 2048, 2048], target="cuda").save(path)
    return path


def test_rent_prints_the_cheapest_and_the_fastest(model: Path, command: Command) -> None:
    found = command("rent", model, "--machines", "t4-g4dn,a100-p4d", "--samples", "1e9")
    assert found.code == 0
    assert "cheapest" in found.out
    assert "on-demand prices" in found.out


def test_rent_prints_base_units_as_json_and_draws(
    model: Path, tmp_path: Path, command: Command
) -> None:
    picture = tmp_path / "rent.svg"
    found = command(
        *("rent", model, "--machines", "t4-g4dn,a100-p4d", "--samples", "1e12", "--json"),
        *("--max-nodes", 2, "--spot", "--revoked-every", "t4-g4dn=20min,a100-p4d=30min"),
        *("--picture", picture),
    )
    chosen = json.loads(found.out)
    assert chosen["cheapest"] in chosen["front"]
    assert chosen["cheapest"]["interval_s"] > 0
    assert len(chosen["offers"]) == 4 + 5
    assert picture.read_text().startswith("<?xml")


def test_instances_go_by_the_hour_of_the_day(model: Path, tmp_path: Path, command: Command) -> None:
    rates = tmp_path / "rates.csv"
    lines = [f"{hour},{2.0 if 8 <= hour < 18 else 0.0}" for hour in range(24)]
    rates.write_text("\n".join(["hour,per_hour", *lines]))
    about = ("--machines", "t4-g4dn", "--samples", "1e9", "--json", "--spot", "--max-nodes", 1)
    by_hour = (*about, "--revocations", rates, "--lifetime", "24h", "--start-hour")
    usd = {}
    for hour in (9, 18):
        found = command("rent", model, *by_hour, hour).content
        usd[hour] = found["cheapest"]["duration_s"]
    never = command("rent", model, *about).content["cheapest"]["duration_s"]
    assert never < usd[18] < usd[9]
    assert found["assumptions"] == [
        "training starts at 18:00",
        "a restart begins on new instances, all at once",
    ]


def test_own_prices_decide(model: Path, tmp_path: Path, command: Command) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("Machine,AcceleratorCount,Price\nt4-g4dn,4,1000\na100-p4d,8,0.01\n")
    about = ("--machines", "t4-g4dn,a100-p4d", "--samples", "1e9", "--json", "--prices", prices)
    found = command("rent", model, *about).content
    assert found["cheapest"]["allocation"].endswith("a100-p4d")


def test_nothing_in_time_is_told_by_the_exit_code(model: Path, command: Command) -> None:
    about = ("--machines", "t4-g4dn", "--samples", "1e12", "--deadline", "1min")
    found = command("rent", model, *about)
    assert found.code == 1
    assert "nothing keeps the deadline and the budget" in found.out
    assert "nothing keeps the deadline and the budget" in found.err


@pytest.mark.parametrize("deadline", ["14d", "2w", "336h", "20160min"])
def test_a_deadline_is_typed_in_days_or_weeks(model: Path, command: Command, deadline: str) -> None:
    about = ("rent", model, "--machines", "t4-g4dn", "--max-nodes", 1, "--json", "--samples")
    rates = [each["samples_per_s"] for each in command(*about, 1).content["offers"]]
    # 14 days of 86,400 s.
    for days, code in ((13.99, 0), (14.01, 1)):
        samples = days * 86400 * max(rates)
        assert command(*about, samples, "--deadline", deadline).code == code


def test_machines_on_which_nothing_fits_are_named_and_told_by_the_exit_code(
    tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "large.graph"
    # 8 GiB of weights, 32 with gradients and AdamW's state: of 40 GB, eight devices can divide it.
    perceptron([1 << 16, 1 << 15], batch=64, target="cuda").save(path)
    about = ("rent", path, "--samples", "1e9", "--max-nodes", 1, "--machines")
    both = command(*about, "t4-g4dn,a100-p4d")
    assert both.code == 0
    (line,) = [line for line in both.out.splitlines() if "t4-g4dn: not even 1x4:t4-g4dn" in line]
    assert "needs" in line
    assert "1x1:a100-p4d: needs" in both.out
    none = command(*about, "t4-g4dn")
    assert none.code == 1
    assert none.err.endswith("exit code 1: the model fits on none of these machines\n")
    assert "no allocation can train perceptron" in none.out
    assert "t4-g4dn: not even 1x4:t4-g4dn" in none.out
    as_json = command(*about, "t4-g4dn", "--json", "--picture", tmp_path / "rent.svg")
    assert as_json.code == 1
    assert "rent.svg is not drawn" in as_json.err
    found = json.loads(as_json.out)
    assert (found["cheapest"], found["offers"]) == (None, [])
    assert set(found["left_out"]) == {"1x1:t4-g4dn", "1x2:t4-g4dn", "1x4:t4-g4dn"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machines", "dgx-a100"), "no price of 'dgx-a100' is known"),
        (("--machines", "k80-p2", "--spot"), "no spot price of 'k80-p2' is known"),
        (("--machines", "t4-g4dn", "--revoked-every", "1h"), "give --spot"),
        (
            ("--machines", "t4-g4dn", "--lifetime", "1d"),
            "--lifetime is of spot instances; give --sp",
        ),
        (("--machines", "t4-g4dn", "--spot", "--revocations", "1,2"), "one for each of 24 hours"),
        (
            ("--machines", "t4-g4dn", "--spot", "--revocations", "0", "--revoked-every", "1h"),
            "--revoked-every and --revocations say the same; give one of them",
        ),
        (("--machines", "t4-g4dn", "--spot", "--start-hour", "8"), "--start-hour is of machines"),
        (
            ("--machines", "t4-g4dn", "--spot", "--revoked-every", "t4-g4dm=1h"),
            "do not both name t4-g4dm, t4-g4dn",
        ),
        (
            ("--machines", "t4-g4dn", "--spot", "--revoked-every", "t4-g4dn=1h,t4-g4dn=2h"),
            "'t4-g4dn' stands twice; write it once",
        ),
        (("--machines", "t4-g4dn", "--network", "10Gbit/s"), "No such option '--network'"),
        (("--machines", "t4-g4dn", "--restart", "5min"), "--restart is of machines that are rev"),
        (
            ("--machines", "t4-g4dn", "--global-batch", "8", "--batch", "7"),
            "--batch is what ranks take where no --global-batch is given; leave it out",
        ),
        (("--machines", "t4-g4dn", "--strategy", "fsdp"), "No such option '--strategy'"),
        (("--machines", "t4-g4dn", "--deadline", "soon"), "is not a duration"),
        (("--machines", ","), "--machines names none"),
        (("--machines", "t4-g4dn", "--layout", "tp=2"), "No such option '--layout'"),
        (("--machines", "t4-g4dn", "--on", "1x4:t4-g4dn"), "No such option '--on'"),
        ((), "Missing option '--machines'"),
        (("--machines", "t4-g4dn", "--tokens", "1e9"), "give samples or tokens"),
    ],
)
def test_wrong_input_is_one_sentence(
    model: Path, command: Command, words: tuple[str, ...], said: str
) -> None:
    found = command("rent", model, "--samples", "1e9", *words)
    assert said in found.sentence


def test_layouts_of_an_allocation_are_ranked(model: Path, command: Command) -> None:
    found = command("layouts", model, "--on", "1x4:t4-g4dn", "--global-batch", 64)
    assert found.code == 0
    assert "Training" in found.out
    assert "with a global batch of 64" in found.out
    assert "dp=4" in found.out
    assert "were worked out" in found.out
    layouts = command("layouts", model, "--on", "1x4:t4-g4dn", "--global-batch", 64, "--json").out
    names = [row["layout"] for row in json.loads(layouts)["layouts"]]
    lines = found.out.splitlines()
    # Each whole, on one line; the best is named first.
    assert lines[0].split() == ["best", names[0]]
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names)


def test_layouts_checkpoints_and_strategies_are_never_cut_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = perceptron([64, 64, 64], target="cuda")
    answer = est.estimate(graph, "1x1:t4-g4dn", batch_per_gpu=4)
    row = LayoutRow(
        layout="tp=8,pp=16,schedule=interleaved:4,sp,vocab,dp=128",
        strategy="distributed-optimizer",
        checkpoint="selective:op",
        batch_per_gpu=1,
        micro_batches=128,
        answer=answer,
        why="communication +12 %",
    )
    ranking = LayoutRanking(rows=(row,), candidates=1, worked_out=1, too_large=0, refusals=())
    about = {"model": "net", "allocation": "128x8:m"}
    print_sections(layouts_sections(ranking, **about, global_batch=2048))
    printed = capsys.readouterr().out
    for text in (row.layout, "distributed-optimizer, selective:op"):
        assert any(text in line for line in printed.splitlines())


def test_layouts_as_json_are_those_of_python(model: Path, command: Command) -> None:
    about = ("--on", "1x4:t4-g4dn", "--global-batch", 64, "--strategies", "ddp fsdp", "--json")
    found = command("layouts", model, *about).content
    ranking = best_layouts(
        OpGraph.load(model), "1x4:t4-g4dn", global_batch=64, strategies=("ddp", "fsdp")
    )
    assert found["layouts"] == [row.to_dict() for row in ranking.rows]
    assert found["allocation"] == "1x4:t4-g4dn"
    assert found["layouts"][0]["why"] is None


def test_offers_that_share_a_global_batch_say_their_layout(model: Path, command: Command) -> None:
    about = ("--machines", "t4-g4dn", "--samples", "1e9", "--global-batch", 256)
    found = command("rent", model, *about, "--json").content
    assert {each["global_batch"] for each in found["offers"]} == {256}
    (four,) = (each for each in found["offers"] if each["allocation"] == "1x4:t4-g4dn")
    best = best_layouts(OpGraph.load(model), "1x4:t4-g4dn", global_batch=256, most=1).rows[0]
    assert four["step_time_s"] <= best.answer.step_time_s * (1 + 1e-9)


def test_mixed_machines_are_offered_and_cost_both(model: Path, command: Command) -> None:
    about = ("--machines", "t4-g4dn,a100-p4d", "--samples", "1e9", "--max-nodes", 2, "--mixed")
    found = command("rent", model, *about, "--json").content
    offered = {each["allocation"]: each for each in found["offers"]}
    both = offered["1x4:t4-g4dn+1x8:a100-p4d"]
    per_hour = [offered[name]["usd_per_hour"] for name in ("1x4:t4-g4dn", "1x8:a100-p4d")]
    assert both["usd_per_hour"] == pytest.approx(sum(per_hour))


def test_the_script_follows_from_the_estimate(
    model: Path, tmp_path: Path, command: Command
) -> None:
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
    told = command("slurm", model, *words, "--json").content
    assert told["script"] == found.out
    assert told["time_s"] == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slurm",), "give --samples or --tokens"),
        (("slurm", "--samples", "1", "--sinfo", "/missing"), "cannot read /missing"),
        (("slurm", "--samples", "1", "--run", "'"), "cannot be split into words"),
        (("slurm", "--tokens", "1"), "no tokens to count"),
        (("slurm", "--samples", "1", "--on", "1x1:t4-g4dn+1x1:v100-p3"), "has unlike nodes"),
        (("layouts",), "give --global-batch"),
        (("layouts", "--global-batch", "64", "--batch", "7"), "No such option '--batch'"),
        (("memory", "--plans"), "for one rank"),
    ],
)
def test_wrong_input_beside_an_allocation_is_one_sentence(
    model: Path, command: Command, words: tuple[str, ...], said: str
) -> None:
    name, *options = words
    assert said in command(name, model, "--on", "1x4:t4-g4dn", *options).sentence


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm controller of two nodes with four GPUs each, without daemons on them."""
    if shutil.which("slurmctld") is None or shutil.which("sbatch") is None:
        pytest.skip("Slurm is not installed")
    if os.getuid() != 0:
        pytest.skip("a Slurm controller without munge needs root")
    port = free_port()
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
    model: Path, tmp_path: Path, command: Command, controller: dict[str, str]
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


WIDE = """
import torch

def deep(batch=4096):
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.randn(batch, 256)

def large(batch=4):
    return torch.nn.Linear(60000, 60000, device="meta"), torch.randn(batch, 60000)
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(WIDE)
    return str(tmp_path / "models.py")


def test_memory_prints_the_peak_by_kind_module_and_tensor(tiny: str, command: Command) -> None:
    answer = command("memory", tiny, "--on", "1x1:rtx-2080-ti")
    assert (answer.code, answer.err) == (0, "")
    for word in ("peak memory", "of 9.59 GiB (fits)", "optimizer state", "by module", "held until"):
        assert word in answer.out


def test_memory_as_json_adds_up_to_the_peak(tiny: str, command: Command) -> None:
    answer = command("memory", tiny, "--on", "1x1:rtx-2080-ti", "--json")
    content = json.loads(answer.out)
    assert sum(content["at_peak_bytes"].values()) == content["peak_bytes"]
    # Weights of 32 x 64 and 64 x 8 and their biases, in blocks of 512 bytes; two states of each.
    parameters = 8192 + 512 + 2048 + 512
    assert content["at_peak_bytes"]["parameters"] == parameters
    assert content["at_peak_bytes"]["optimizer state"] == 2 * parameters
    assert len(content["end_s"]) == len(content["levels_bytes"]["activations"])


def test_a_picture_that_cannot_be_drawn_is_one_sentence(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "memory.doc"
    answer = command("memory", tiny, "--on", "1x1:rtx-2080-ti", "--picture", str(path))
    assert f"cannot draw {path} (Format 'doc' is not supported" in answer.sentence


def test_memory_draws_a_picture(tiny: str, command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    answer = command("memory", tiny, "--on", "1x1:rtx-2080-ti", "--picture", str(path))
    assert answer.code == 0
    # The legend names every kind that is held.
    assert "optimizer state" in path.read_text()


def test_plans_fall_from_the_peak_without_one_and_are_drawn(
    models: str, command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plans.svg"
    words = ["memory", f"{models}:deep", "--on", "1x1:rtx-2080-ti", "--plans"]
    answer = command(*words, "--picture", str(path), "--json")
    plans = json.loads(answer.out)["plans"]
    # Some memory comes for nothing: copies beside the operators.
    assert plans[0]["overhead_ratio"] == pytest.approx(0.0, abs=1e-9)
    assert plans[0]["saved_ratio"] > 0
    assert len(plans) > 1
    for less, more in itertools.pairwise(plans):
        assert less["peak_bytes"] > more["peak_bytes"]
        assert less["step_time_s"] < more["step_time_s"]
    assert "Peak against time" in path.read_text()
    assert "plans that lower the peak" in command(*words).out


def test_what_does_not_fit_ends_with_code_1(models: str, command: Command) -> None:
    answer = command("memory", f"{models}:large", "--on", "1x1:rtx-2080-ti")
    # 3.6e9 parameters of 4 bytes alone are more than the device has.
    assert answer.code == 1
    assert "does not fit" in answer.out
    assert "does not fit on 1x1:rtx-2080-ti" in answer.err


@pytest.mark.parametrize("on", ["1x1:rtx-2080-ti", "1x4:rtx-2080-ti --strategy fsdp"])
def test_a_snapshot_replays_to_the_predicted_peak(
    tiny: str, command: Command, tmp_path: Path, on: str
) -> None:
    path = tmp_path / "memory.pickle"
    words = ["memory", tiny, "--on", *on.split(), "--snapshot", str(path), "--json"]
    content = command(*words).content
    snapshot = pickle.loads(path.read_bytes())
    held = peak = 0
    alive: set[int] = set()
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            alive.add(entry["addr"])
            held += entry["size"]
        elif entry["action"] == "free_completed":
            alive.remove(entry["addr"])
            held -= entry["size"]
        peak = max(peak, held)
    assert peak == content["peak_bytes"]
    # torch's own reader of snapshots takes it.
    from torch.cuda._memory_viz import trace, trace_plot

    assert "MEM[" in trace(snapshot)
    assert "html" in trace_plot(snapshot)
