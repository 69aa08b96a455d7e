"""The command that replays jobs: a table, JSON, a picture, and one sentence for wrong input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from estimator.calibrate.store import Observation, ObservationStore
from estimator.estimates.engine import DEFAULT
from estimator.graph.ir.op_graph import OpGraph
from tests.conftest import Command
from tests.synthetic import perceptron

CLUSTER = "2x4:gtx-1080-roce"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    perceptron([64, 64], target="cuda").save(tmp_path / "net.graph")
    entries = [
        {
            "name": f"j{number}",
            "arrival_s": 10.0 * number,
            "model": str(tmp_path / "net.graph"),
            "samples": 1e7,
            "devices": 1 + number % 4,
            "global_batch": 256,
        }
        for number in range(6)
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": entries}))
    return path


def test_replay_prints_each_policy_beside_the_first(jobs: Path, command: Command) -> None:
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "fifo", "--policy", "afs")
    assert found.code == 0
    assert "6 jobs on 2x4:gtx-1080-roce" in found.out
    assert re.search(r"fifo +[\d.]+ +1\.00", found.out)
    assert re.search(r"afs +[\d.]+ +\d\.\d\d", found.out)


def test_replay_prints_base_units_as_json_and_draws(
    jobs: Path, tmp_path: Path, command: Command
) -> None:
    picture = tmp_path / "replay.svg"
    found = command(
        *("replay", str(jobs), "--on", CLUSTER, "--policy", "max-min", "--json"),
        *("--believed", "calibrated", "--picture", str(picture)),
    )
    assert found.code == 0
    content = json.loads(found.out)
    assert content["policies"]["max-min"]["jobs"] == 6
    assert content["policies"]["max-min"]["average_jct_s"] > 0
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize("policy", ["pollux", "sia"])
def test_observed_gradient_noise_lets_policies_choose_batches(
    jobs: Path, tmp_path: Path, command: Command, policy: str
) -> None:
    entries = json.loads(jobs.read_text())["jobs"]
    jobs.write_text(json.dumps({"jobs": [each | {"most_global_batch": 4096} for each in entries]}))
    graph = OpGraph.load(tmp_path / "net.graph")
    words = ("replay", str(jobs), "--on", CLUSTER, "--policy", policy, "--json")
    chosen = {}
    # Without noise more samples a step are worth nothing; with much of it, all of them.
    for noise in (None, 1.0, 1e6):
        path = tmp_path / f"{noise}.db"
        seen = Observation(
            workload=graph.workload,
            fingerprint=DEFAULT.content(graph).fingerprint,
            allocation="1x2:gtx-1080-roce",
            batch_per_gpu=8,
            step_time_s=0.1,
            gradient_noise_samples=noise,
        )
        ObservationStore(path).add(seen)
        found = command(*words, "--observed", path)
        assert ("no job of this file has a gradient noise" in found.err) == (noise is None)
        lives = json.loads(found.out)["policies"][policy]["lives"]
        chosen[noise] = {grant["global_batch"] for life in lives for grant in life["grants"]}
    assert chosen[None] == chosen[1.0] == {256}
    assert max(chosen[1e6]) > 256


def test_jobs_that_share_links_take_longer(jobs: Path, command: Command) -> None:
    words = ("replay", str(jobs), "--on", CLUSTER, "--policy", "fifo", "--json")
    spread = (*words, "--placement", "spread")
    alone, beside = (
        command(*spread, *more).content["policies"]["fifo"]["average_jct_s"]
        for more in ((), ("--contention",))
    )
    assert beside > alone


def test_the_schedule_has_each_jobs_life(jobs: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "schedule.json"
    words = ("--policy", "max-min", "--schedule", str(path), "--json", "--restart", "10")
    found = command("replay", str(jobs), "--on", CLUSTER, *words)
    printed = json.loads(found.out)["policies"]["max-min"]
    written = json.loads(path.read_text())["policies"]["max-min"]
    assert written["lives"] == printed["lives"]
    assert printed["jobs"] == len(written["lives"]) == 6
    for life in written["lives"]:
        grants = life["grants"]
        assert life["arrival_s"] <= grants[0]["start_s"]
        assert grants[-1]["end_s"] == life["finish_s"]
        assert sum(grant["samples"] for grant in grants) == pytest.approx(1e7)
        assert life["moves"] == len(grants) - 1
        for moved in grants[1:]:
            owed_s = min(10.0, moved["end_s"] - moved["start_s"])
            assert moved["trains_from_s"] - moved["start_s"] == pytest.approx(owed_s)
    held = written["devices_held"]
    assert max(held["devices"]) <= 8
    assert held["devices"][-1] == 0
    assert held["time_s"] == sorted(held["time_s"])


def test_jobs_are_replayed_as_their_file_describes_them(jobs: Path, command: Command) -> None:
    entry = json.loads(jobs.read_text())["jobs"][0] | {"devices": 2}
    entries = [
        entry | {"name": "fixed", "least_devices": 2, "most_devices": 2},
        entry | {"name": "sharded", "strategy": "fsdp", "restart_s": 5, "checkpoint_s": 60},
        entry | {"name": "stalled", "loader": "prep=1ms,workers=1"},
    ]
    jobs.write_text(json.dumps({"jobs": entries}))
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "max-min", "--json")
    lives = {each["name"]: each for each in json.loads(found.out)["policies"]["max-min"]["lives"]}
    assert {grant["allocation"] for grant in lives["fixed"]["grants"]} == {"1x2:gtx-1080-roce"}
    for moved in lives["sharded"]["grants"][1:]:
        assert moved["trains_from_s"] - moved["start_s"] <= 5
    # A thousand samples a second and worker: 10 s for each ten thousand samples of a rank.
    last = lives["stalled"]["grants"][-1]
    ranks = int(last["allocation"].split("x")[1].split(":")[0])
    rate = last["samples"] / (last["end_s"] - last["trains_from_s"])
    assert rate <= 1.01 * 1000 * ranks * float(last["allocation"].split("x")[0])


def test_what_a_policy_prints_is_no_part_of_the_answer(jobs: Path, command: Command) -> None:
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "builtins:print")
    assert (found.code, found.out) == (2, "")
    assert "the policy answers a NoneType" in found.err


def test_a_wrong_job_file_is_one_sentence_also_beside_models(jobs: Path, command: Command) -> None:
    jobs.write_text(json.dumps({"jobs": [{"name": "j", "devices": [[2]]}]}))
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "fifo", "--model", "none")
    assert (found.code, found.out) == (2, "")
    assert len(found.err.splitlines()) == 1


EVIL = """
from pathlib import Path
import torch

Path(__file__).with_name("ran").touch()

def f(batch=8):
    return torch.nn.Linear(64, 64), torch.randn(batch, 64)
"""


@pytest.mark.parametrize("model", ["evil.py:f", "evil:f", "./evil.py:f"])
def test_a_file_of_jobs_runs_no_code_unless_it_is_let(
    model: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    entry = {"name": "j", "arrival_s": 0, "model": model, "samples": 1e5, "devices": 1}
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": [entry]}))
    words = ("replay", "jobs.json", "--on", CLUSTER, "--policy", "fifo")
    refused = command(*words).sentence
    assert f"'{model}' is no saved graph, summary or hf: type" in refused
    assert "--allow-code" in refused
    assert not (tmp_path / "ran").exists()
    assert command(*words, "--allow-code").code == 0
    assert (tmp_path / "ran").exists()
    monkeypatch.delitem(sys.modules, "evil", raising=False)


def test_a_job_that_ends_within_the_digits_of_its_arrival_is_replayed(
    jobs: Path, command: Command
) -> None:
    entry = json.loads(jobs.read_text())["jobs"][0] | {"arrival_s": 1e15, "samples": 1}
    jobs.write_text(json.dumps({"jobs": [entry]}))
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "fifo", "--json")
    assert found.code == 0
    assert json.loads(found.out)["policies"]["fifo"]["worst_unfairness"] < 1.5


@pytest.mark.parametrize("words", [("--model", "hf:gpt2"), ("--loader", "sample=1MB,prep=1ms")])
def test_what_only_a_trace_takes_is_refused_beside_jobs(
    jobs: Path, command: Command, words: tuple[str, ...]
) -> None:
    found = command("replay", str(jobs), "--on", CLUSTER, "--policy", "fifo", *words)
    assert "are for traces, and each job of this file names its own" in found.sentence


def test_a_trace_takes_the_models_given(jobs: Path, tmp_path: Path, command: Command) -> None:
    trace = tmp_path / "workload.csv"
    trace.write_text("name,time,application,num_replicas,batch_size\na,7,cnn,2,64\nb,9,cnn,4,64\n")
    arguments = ["replay", str(trace), "--on", CLUSTER, "--policy", "srtf"]
    found = command(*arguments, "--model", str(tmp_path / "net.graph"))
    assert found.code == 0
    assert "2 jobs on" in found.out
    refused = command(*arguments)
    assert refused.code == 2
    assert "a trace names no models; give --model" in refused.sentence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--policy", "lottery"], "'lottery' is no policy"),
        (["--restart", "x"], "'x' is not a duration; write a number and one of"),
        (
            ["--checkpoint-every", "nan"],
            "'nan' is not from 1.00 s to 278000 h; write a time",
        ),
        # A node is repaired for an hour.
        (["--node-mtbf", "3"], "'3' is not from 60.0 min to 278000000 h; write a time that is"),
        (["--seed", "-1"], "'-1' is not from 0 to 1e+15; write one that is"),
        (["--on", "a1[0]"], "describe a cluster by machine types"),
        (["--on", "1x9:gtx-1080-roce"], "gtx-1080-roce has 4"),
        (["--on", "1x2:gtx-1080-roce", "--policy", "fifo"], "jobs waiting on an empty cluster"),
    ],
)
def test_wrong_input_is_one_sentence(
    jobs: Path, command: Command, change: list[str], said: str
) -> None:
    given = ["--on", CLUSTER, "--policy", "max-min", *change]
    found = command("replay", str(jobs), *given)
    assert said in found.sentence
