"""Schedules of all policies pass a checker that shares no code with the replay.

Capacity, memory, conserved work, every job's end, moves that are paid for, nodes that are down:
for each policy on five traces, clusters of like and of unlike machines, with and without failures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from replay_speeds import drawn_jobs

import estimator as est
from estimator.graph.ir.op_graph import OpGraph
from estimator.replay.job_files import jobs_of_trace, read_trace
from estimator.replay.jobs import Job
from estimator.replay.nodes import Nodes
from estimator.replay.policies import BUILT_IN, load_policy
from estimator.replay.replay import Costs, Ran, Replay, Segment
from estimator.replay.speeds import EngineSpeeds
from tests.synthetic import perceptron

# The second model needs 7.3 GiB: more than a GTX 1080 can surely give.
SMALL = replace(perceptron([2048, 2048, 2048], target="cuda"), name="small")
LARGE = replace(perceptron([14000, 14000, 14000], target="cuda"), name="large")
CLUSTERS = {
    "like": "4x4:v100-p3",
    "unlike": "2x4:gtx-1080-roce+2x4:v100-p3+1x8:dgx-a100",
}
RUNS_S = (100, 750, 240, 60, 1200, 400, 180, 600)
REQUESTS = (1, 4, 2, 1, 4, 1, 2, 4)


def _clock(seconds: float) -> str:
    return f"2020-04-01 {int(seconds // 3600):02}:{int(seconds // 60 % 60):02}:00"


def trace_text(form: str) -> str:
    """Eight jobs, two minutes apart, in the form of a published trace."""
    rows = [(f"j{n}", 120 * n, *pair) for n, pair in enumerate(zip(REQUESTS, RUNS_S, strict=True))]
    if form == "helios":
        lines = ["job_id,gpu_num,submit_time,duration"]
        lines += [f"{name},{gpus},{_clock(at)},{run}" for name, at, gpus, run in rows]
    elif form == "pai":
        lines = ["job_name,inst_num,start_time,end_time,plan_gpu"]
        lines += [f"{name},{gpus},{at},{at + run},100" for name, at, gpus, run in rows]
    elif form == "pollux":
        lines = ["name,time,application,num_replicas,batch_size"]
        lines += [f"{name},{at},cifar10,{gpus},64" for name, at, gpus, _ in rows]
    else:
        return json.dumps(
            [
                {
                    "jobid": name,
                    "submitted_time": _clock(at),
                    "attempts": [
                        {
                            "start_time": _clock(at),
                            "end_time": _clock(at + 60 * (1 + run // 60)),
                            "detail": [{"ip": "m", "gpus": ["g"] * gpus}],
                        }
                    ],
                }
                for name, at, gpus, run in rows
            ]
        )
    return "\n".join(lines) + "\n"


def jobs_of(form: str, nodes: Nodes, folder: Path) -> list[Job]:
    if form == "drawn":
        graphs = {"small": [SMALL], "large": [LARGE]}
        jobs = drawn_jobs(graphs, nodes, jobs=8, arrivals_every_s=120, seed=3)
    else:
        path = folder / f"trace.{'json' if form == 'philly' else 'csv'}"
        path.write_text(trace_text(form))
        jobs = jobs_of_trace(read_trace(path), [SMALL, LARGE], nodes, seed=1)
    if form in ("drawn", "pollux"):
        # Run times of hours are drawn.
        jobs = [replace(each, samples=each.samples / 10) for each in jobs]
    # Every other job may change its batch, for policies that choose it.
    return [
        replace(each, most_global_batch=4 * each.global_batch, gradient_noise_samples=500.0)
        if number % 2
        else each
        for number, each in enumerate(jobs)
    ]


@cache
def step_of(graph: OpGraph, where: str, batch: int, micro_batches: int) -> tuple[float, str]:
    """Step time and whether it fits, asked of `estimate` itself."""
    answer = est.estimate(graph, where, batch_per_gpu=batch, accumulation_steps=micro_batches)
    return answer.step_time_s, answer.fits


@cache
def split_step_of(graph: OpGraph, where: str, batch: int, micro_batches: int) -> tuple[float, str]:
    """The same where unlike devices share a global batch by speed."""
    answer = est.estimate(graph, where, global_batch=batch, accumulation_steps=micro_batches)
    return answer.step_time_s, answer.fits


def estimated(job: Job, segment: Segment) -> tuple[float, str]:
    """Step time of a segment and whether it fits, as `estimate` says."""
    batch = segment.global_batch or job.global_batch
    per_rank = -(-batch // segment.shape.ranks)
    micro_batches = -(-per_rank // (job.graph.batch or 1))
    if not segment.shape.also:
        own = -(-per_rank // micro_batches)
        return step_of(job.graph, str(segment.shape), own, micro_batches)
    parts = [sum(each.per_node) for each in (segment.shape, *segment.shape.also)]
    unit = gcd(*parts) * micro_batches
    return split_step_of(job.graph, str(segment.shape), -(-batch // unit) * unit, micro_batches)


def violations(
    ran: Sequence[Ran],
    jobs: Sequence[Job],
    cluster: str,
    outages: Sequence[tuple[int, float, float]],
    costs: Costs,
    taken: Callable[[Job, Segment], tuple[float, str]] = estimated,
) -> list[str]:
    """What is wrong with a schedule whose steps took what is said, a sentence each."""
    wrong = [] if {each.job.name for each in ran} == {job.name for job in jobs} else ["jobs lost"]
    wrong += capacity_violations(ran, cluster, outages)
    for each in ran:
        name, segments = each.job.name, each.segments
        if not segments or segments[-1].end_s != each.finish_s:
            wrong.append(f"{name} has no end")
        if abs(sum(s.samples for s in segments) / each.job.samples - 1) > 1e-6:
            wrong.append(f"{name} trained {sum(s.samples for s in segments)} samples")
        free_s = each.job.arrival_s
        for number, segment in enumerate(segments):
            where = f"{name} from {segment.start_s:.0f} s on {segment.shape}"
            if segment.start_s < free_s - 1e-6 or segment.end_s < segment.start_s:
                wrong.append(f"{where} overlaps")
            free_s = segment.end_s
            owed_s = min(costs.restart_s if number else 0.0, segment.end_s - segment.start_s)
            if abs(segment.trains_from_s - segment.start_s - owed_s) > 1e-6:
                wrong.append(f"{where} restarts in {segment.trains_from_s - segment.start_s} s")
            said = speed_violations(each.job, segment, costs, *taken(each.job, segment))
            wrong += [f"{where} {what}" for what in said]
    return wrong


def capacity_violations(
    ran: Sequence[Ran], cluster: str, outages: Sequence[tuple[int, float, float]]
) -> list[str]:
    """No node gives more devices than it has, nor any while it is down."""
    sizes = []
    for group in cluster.split("+"):
        shape, machine = group.split(":")
        nodes, devices = map(int, shape.split("x"))
        sizes += [(machine, devices)] * nodes
    wrong = []
    segments = [segment for each in ran for segment in each.segments]
    for node, (machine, devices) in enumerate(sizes):
        here = [s for s in segments if node in s.given and s.end_s > s.start_s]
        wrong += [f"{s.job} is not of {machine}" for s in here if machine not in str(s.shape)]
        for at in {s.start_s for s in here}:
            held = sum(s.given[node] for s in here if s.start_s <= at < s.end_s)
            if held > devices:
                wrong.append(f"node {node} gives {held} of {devices} devices at {at}")
        for down, start, end in outages:
            late = [s for s in here if down == node and s.start_s < end and s.end_s > start]
            wrong += [f"{s.job} runs on node {node} while it is down" for s in late]
    for s in segments:
        if sum(s.given.values()) != s.shape.ranks:
            wrong.append(f"{s.job} holds {sum(s.given.values())} devices as {s.shape}")
    return wrong


def speed_violations(
    job: Job, segment: Segment, costs: Costs, step_s: float, fits: str
) -> list[str]:
    """Samples are those of its steps, where it fits; lost since the last checkpoint alone."""
    if fits == "no":
        return ["does not fit"]
    batch = segment.global_batch or job.global_batch
    noise, own = job.gradient_noise_samples, job.global_batch
    # A batch of its own choosing is worth what Pollux says of it.
    useful = batch * (noise + own) / (noise + batch) if segment.global_batch and noise else batch
    due = (segment.end_s - segment.trains_from_s) * useful / step_s
    trained = segment.samples + segment.lost_samples
    wrong = [] if abs(trained - due) <= 1e-6 * max(due, batch) else [f"trains {trained} of {due}"]
    if segment.lost_samples > (1 + 1e-9) * costs.checkpoint_s * useful / step_s:
        wrong.append(f"loses {segment.lost_samples}")
    return wrong


@pytest.mark.parametrize("failing", [False, True], ids=["sound", "failing"])
@pytest.mark.parametrize("cluster", list(CLUSTERS))
@pytest.mark.parametrize("policy", BUILT_IN)
def test_no_policy_breaks_a_rule_on_any_trace(
    policy: str, cluster: str, failing: bool, tmp_path: Path
) -> None:
    costs = Costs(restart_s=30, checkpoint_s=120, node_mtbf_s=4000 if failing else None)
    speeds = EngineSpeeds()
    for form in ("philly", "helios", "pai", "pollux", "drawn"):
        nodes = Nodes.parse(CLUSTERS[cluster])
        jobs = jobs_of(form, nodes, tmp_path)
        replay = Replay(
            jobs, nodes, load_policy(policy), true=speeds, believed=speeds, costs=costs, seed=7
        )
        ran = replay.run()
        assert violations(ran, jobs, CLUSTERS[cluster], replay.outages, costs) == [], form


def test_the_checker_finds_what_is_planted() -> None:
    """Each kind of violation, in a sound schedule of two jobs that is then spoilt."""
    cluster, costs, speeds = CLUSTERS["unlike"], Costs(restart_s=30), EngineSpeeds()
    about = {"arrival_s": 0.0, "samples": 1e5, "devices": 2, "global_batch": 32}
    jobs = [Job(name=name, graph=SMALL, **about) for name in "ab"]
    nodes = Nodes.parse(cluster)
    ran = Replay(jobs, nodes, load_policy("fifo"), true=speeds, believed=speeds).run()
    assert violations(ran, jobs, cluster, [], costs) == []
    first, second = (each.segments[0] for each in ran)
    assert first.given == second.given == {0: 2}

    def spoilt(**changes: Any) -> list[str]:
        bad = Ran(job=jobs[0], finish_s=ran[0].finish_s, segments=[replace(first, **changes)])
        return violations([bad, ran[1]], jobs, cluster, [], costs)

    assert any("gives 6 of 4" in each for each in spoilt(given={0: 4}))
    assert any("restarts" in each for each in spoilt(trains_from_s=first.start_s + 9))
    assert any("trained" in each for each in spoilt(samples=first.samples / 2))
    assert any("loses" in each for each in spoilt(lost_samples=1e12))
    assert any("is not of" in each for each in spoilt(given={2: 2}))
    assert any("has no end" in each for each in spoilt(end_s=first.end_s - 1))
    large = replace(jobs[0], graph=LARGE)
    ran[0] = Ran(job=large, finish_s=ran[0].finish_s, segments=[first])
    assert "a from 0 s on 1x2:gtx-1080-roce does not fit" in violations(
        ran, jobs, cluster, [(0, 1.0, 2.0)], costs
    )
    assert any("while it is down" in e for e in violations(ran, jobs, cluster, [(0, 1, 2)], costs))
