"""Speeds can be sent to other processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

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
