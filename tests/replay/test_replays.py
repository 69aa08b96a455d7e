"""What the page on schedulers shows runs; speeds can be sent to other processes."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimator.replay.jobs import Job
from estimator.replay.nodes import Nodes, ReplayNode
from estimator.replay.speeds import EngineSpeeds
from tests.synthetic import perceptron

GRAPH = replace(perceptron([64, 64]), target="cuda")
NODES = Nodes((ReplayNode("t4-g4dn", 4),) * 2, "pack")
JOBS = [
    Job(name=f"j{n}", arrival_s=5.0 * n, graph=GRAPH, samples=1e6, devices=1 + n, global_batch=64)
    for n in range(4)
]


def test_speeds_sent_elsewhere_forget_what_goes_by_a_place_in_memory() -> None:
    speeds = EngineSpeeds()
    shape = NODES.packed("t4-g4dn", 2)
    (known_s,) = speeds.step_times_s(JOBS[0], [shape])
    speeds._known = dict.fromkeys(speeds._known, 2 * known_s)
    assert pickle.loads(pickle.dumps(speeds)).step_times_s(JOBS[0], [shape]) == [known_s]


def test_the_policy_and_the_table_of_the_page_replay_jobs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedulers.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if "estimator.replay" in block:
            exec(block, names)
    # 1e6 samples in steps of 64, each of a second on any one or two devices.
    step_s = {(job.name, "t4-g4dn", count): 1.0 for job in JOBS for count in (1, 2, 4)}
    found = names["replayed"](JOBS[:2], step_s, cluster="2x4:t4-g4dn")
    assert found.average_jct_s == pytest.approx(1e6 / 64, rel=0.1)
    assert found.jobs == 2
