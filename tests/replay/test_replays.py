"""Replays on an executor's workers are those that are played here."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from estimator.replay.jobs import Job
from estimator.replay.nodes import Node, Nodes
from estimator.replay.policies import load_policy
from estimator.replay.replay import Case, Costs, Segment, replay_many
from estimator.replay.speeds import EngineSpeeds, TrueSpeeds
from tests.synthetic import perceptron

GRAPH = replace(perceptron([64, 64]), target="cuda")
NODES = Nodes((Node("t4-g4dn", 4),) * 2, "pack")
JOBS = [
    Job(name=f"j{n}", arrival_s=5.0 * n, graph=GRAPH, samples=1e6, devices=1 + n, global_batch=64)
    for n in range(4)
]


def cases() -> list[Case]:
    """Two policies, two seeds; nodes fail, so that a seed matters."""
    return [
        Case(
            policy=load_policy(policy),
            true=TrueSpeeds(JOBS, seed),
            believed=EngineSpeeds(),
            costs=Costs(node_mtbf_s=3600.0, repair_s=60.0),
            seed=seed,
        )
        for policy in ("fifo", "max-min")
        for seed in (0, 1)
    ]


def test_a_pool_of_processes_plays_the_same_replays() -> None:
    def ends(executor: ProcessPoolExecutor | None) -> list[list[tuple[float, list[Segment]]]]:
        found = replay_many(JOBS, NODES, cases(), executor=executor)
        return [[(ran.finish_s, ran.segments) for ran in each] for each in found]

    here = ends(None)
    assert len({tuple(end for end, _ in each) for each in here}) == 4, "every case is another"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert ends(pool) == here


def test_speeds_sent_elsewhere_forget_what_goes_by_a_place_in_memory() -> None:
    speeds = EngineSpeeds()
    shape = NODES.packed("t4-g4dn", 2)
    (known_s,) = speeds.step_times_s(JOBS[0], [shape])
    speeds._known = dict.fromkeys(speeds._known, 2 * known_s)
    assert pickle.loads(pickle.dumps(speeds)).step_times_s(JOBS[0], [shape]) == [known_s]
