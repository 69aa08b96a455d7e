"""What a replay was worth: completion times, makespan, utilisation, queue, fairness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.cluster.nodes import Nodes
from estimator.cluster.replay import Ran
from estimator.cluster.speeds import Speeds
from estimator.cluster.view import counts_up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay in numbers; JCT is a job's completion time, from arrival to end.

    `utilization_ratio` is the share of device time held by jobs until the makespan,
    `worst_unfairness` the highest finish-time fairness ρ (Themis, NSDI 2020): a job's completion
    time over what it would have had alone on an equal share of the cluster; `unfair_ratio` the
    share of jobs with ρ above 1.
    """

    jobs: int
    average_jct_s: float
    median_jct_s: float
    p90_jct_s: float
    p99_jct_s: float
    makespan_s: float
    utilization_ratio: float
    average_queue_s: float
    average_fairness: float
    worst_unfairness: float
    unfair_ratio: float
    restarts_per_job: float
    lost_samples_ratio: float


def outcome(ran: Sequence[Ran], nodes: Nodes, true: Speeds) -> Outcome:
    """Sum a replay up; all jobs have ended."""
    jct = np.array([each.completion_s for each in ran])
    makespan_s = max(each.finish_s for each in ran) - min(each.job.arrival_s for each in ran)
    held_s = sum(s.shape.ranks * (s.end_s - s.start_s) for each in ran for s in each.segments)
    offered_s = sum(node.devices for node in nodes.nodes) * makespan_s
    fairness = finish_time_fairness(ran, nodes, true)
    trained = sum(each.job.samples for each in ran)
    lost = sum(segment.lost_samples for each in ran for segment in each.segments)
    return Outcome(
        jobs=len(ran),
        average_jct_s=float(jct.mean()),
        median_jct_s=float(np.median(jct)),
        p90_jct_s=float(np.quantile(jct, 0.9)),
        p99_jct_s=float(np.quantile(jct, 0.99)),
        makespan_s=makespan_s,
        utilization_ratio=held_s / offered_s if offered_s else 0.0,
        average_queue_s=float(np.mean([each.waited_s for each in ran])),
        average_fairness=float(fairness.mean()),
        worst_unfairness=float(fairness.max()),
        unfair_ratio=float((fairness > 1).mean()),
        restarts_per_job=float(np.mean([len(each.segments) - 1 for each in ran])),
        lost_samples_ratio=lost / trained,
    )


def finish_time_fairness(ran: Sequence[Ran], nodes: Nodes, true: Speeds) -> np.ndarray:
    """ρ of each job: completion time over that alone on 1/N of the cluster.

    N is the mean number of unfinished jobs over the job's life; its share counts down to the next
    count that a job uses, and is at most what the job asked for.
    """
    starts = np.array([each.job.arrival_s for each in ran])
    ends = np.array([each.finish_s for each in ran])
    total = sum(node.devices for node in nodes.nodes)
    found = []
    for each, start, end in zip(ran, starts, ends, strict=True):
        overlap = np.minimum(ends, end) - np.maximum(starts, start)
        # A job may be too short for the digits that a late arrival leaves of a second.
        unfinished = np.maximum(overlap, 0.0).sum() / (end - start) if end > start else 1.0
        share = max(min(int(total / unfinished), each.job.devices), 1)
        count = [c for c in counts_up_to(share, each.job.devices) if c <= share][-1]
        fastest_s = min(
            true.step_times_s(each.job, [nodes.packed(machine, min(count, nodes.total(machine)))])[
                0
            ]
            for machine in nodes.machines
        )
        found.append((end - start) / (each.job.samples * fastest_s / each.job.global_batch))
    return np.array(found)
