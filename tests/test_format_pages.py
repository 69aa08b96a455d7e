"""Every example of docs/formats.md is read by what reads such files."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from estimator.calibrate.observation_files import measured_step, read_rows
from estimator.graph.summary import load_summary, summary_graph
from estimator.machines.catalogue import load_profile
from estimator.machines.prices import PriceList
from estimator.placement.topology import Cluster
from estimator.replay.job_files import read_jobs

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
_FILE = re.compile(r"^<!-- file=([\w.]+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = dict(_FILE.findall(PAGE))


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in EXAMPLES.items():
        Path(name).write_text(text, encoding="utf-8")


def test_the_profile_is_one() -> None:
    profile = load_profile("profile.json")
    assert (profile.name, profile.devices[0].memory_bandwidth_bytes_per_s) == ("my-card", 320e9)


def test_the_cluster_has_five_nodes_one_of_them_slow() -> None:
    cluster = Cluster.load(Path("cluster.toml"))
    assert list(cluster.nodes) == ["a1", "a2", "a3", "a4", "a5"]
    assert cluster.nodes["a5"].slowdown_ratio == 1.2


def test_the_jobs_are_two_of_one_summary() -> None:
    jobs = read_jobs(Path("jobs.json"), lambda model: summary_graph(load_summary(model)))
    assert [(job.name, job.arrival_s, job.most_devices) for job in jobs] == [
        ("first", 0, None),
        ("second", 60, 16),
    ]


def test_the_prices_are_of_two_machines() -> None:
    prices = PriceList.load(Path("prices.csv"))
    assert prices.price("t4-g4dn", 4).rate(spot=True) == 1.60


def test_the_observations_are_three_steps() -> None:
    rows = read_rows(Path("observations.csv"))
    steps = [measured_step(line, row, Counter()) for line, row in rows]
    assert [step.step_time_s for step in steps] == [0.21, 0.24, 0.31]


def test_question_and_answer_have_the_fields_of_the_service() -> None:
    questions = pytest.importorskip("estimator.serve.answers")
    asked = json.loads(EXAMPLES["question.json"]) | {"graph": "0" * 64}
    questions.EstimateQuestion.model_validate(asked)
    assert {"step_time_s", "low_s", "high_s", "fits"} <= set(json.loads(EXAMPLES["answer.json"]))
