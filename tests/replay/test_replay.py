"""A replay keeps its accounts: devices, jobs, work, restarts and checkpoints."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.errors import AllocationError, WorkloadError
from estimator.placement.topology import Cluster, Node, Switch
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes, PlacementRule, ReplayNode
from estimator.replay.policies import BUILT_IN, load_policy
from estimator.replay.replay import Costs, Ran, Replay, Segment
from estimator.replay.speeds import EngineSpeeds, SharedLinks
from estimator.replay.view import Grant, PlanOf, View
from tests.budgets import examples
from tests.conftest import Command
from tests.replay.test_checked_schedules import violations
from tests.synthetic import perceptron

GRAPH = perceptron([8, 8])


class Linear:
    """One sample a second on each device, whatever the shape."""

    def __init__(self, efficiency: float = 1.0) -> None:
        self.efficiency = efficiency

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        batch = global_batch or job.global_batch
        return [batch / each.ranks**self.efficiency for each in shapes]


def job(name: str, arrival_s: float, samples: float, devices: int = 1) -> Job:
    about = {"graph": GRAPH, "global_batch": 64}
    return Job(name=name, arrival_s=arrival_s, samples=samples, devices=devices, **about)


def cluster(nodes: int = 2, devices: int = 4, rule: PlacementRule = "pack") -> Nodes:
    return Nodes((ReplayNode("synthetic", devices),) * nodes, rule)


def simulated(jobs: list[Job], policy: object, **options: object) -> dict[str, Ran]:
    speeds = Linear()
    replay = Replay(
        jobs,
        options.pop("nodes", None) or cluster(),  # type: ignore[arg-type]
        policy,  # type: ignore[arg-type]
        true=options.pop("true", speeds),  # type: ignore[arg-type]
        believed=options.pop("believed", speeds),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return {each.job.name: each for each in replay.run()}


def test_the_head_of_the_line_holds_back_who_comes_after() -> None:
    jobs = [job("wide", 0, 600, 6), job("wider", 1, 800, 8), job("small", 2, 10, 1)]
    ran = simulated(jobs, load_policy("fifo"))
    # 600 samples on 6 devices: 100 s; then 800 on 8; the small one fits only after both.
    assert ran["wide"].finish_s == pytest.approx(100)
    assert ran["wider"].finish_s == pytest.approx(200)
    assert ran["small"].finish_s == pytest.approx(210)
    assert ran["small"].waited_s == pytest.approx(198)


def test_max_min_halves_what_the_first_job_has_when_a_second_comes() -> None:
    jobs = [job("first", 0, 1600, 1), job("second", 100, 400, 1)]
    ran = simulated(jobs, load_policy("max-min"), costs=Costs(restart_s=30))
    # 100 s on 8 devices leave 800; both have 4 from then on, the first 30 s later: the second ends
    # at 200 with 70 · 4 = 280 of the first done; 520 are left, after 30 s more on 8 devices.
    assert ran["second"].finish_s == pytest.approx(200)
    assert ran["first"].finish_s == pytest.approx(200 + 30 + 520 / 8)
    assert [segment.shape.ranks for segment in ran["first"].segments] == [8, 4, 8]


def test_jobs_advance_at_true_speeds_and_policies_see_believed_ones() -> None:
    seen: list[float] = []

    def plan(view: View) -> Mapping[str, Grant]:
        seen.extend(view.samples_per_s(each.job, [4])[0] for each in view.jobs)
        return {each.job.name: Grant(4, "synthetic") for each in view.jobs}

    ran = simulated([job("a", 0, 800)], PlanOf(plan), true=Linear(0.5), believed=Linear(1.0))
    assert seen == [pytest.approx(4)]
    assert ran["a"].finish_s == pytest.approx(800 / 2)


class Halving:
    """Links on which jobs that run at once have half their speed."""

    def slowdowns(self, running: Mapping[str, object]) -> dict[str, float]:
        return dict.fromkeys(running, float(len(running)))


def test_jobs_that_share_links_slow_each_other_while_both_run() -> None:
    def plan(view: View) -> Mapping[str, Grant]:
        return {each.job.name: Grant(4, "synthetic") for each in view.jobs}

    ran = simulated([job("a", 0, 800), job("b", 100, 200)], PlanOf(plan), links=Halving())
    # a trains 400 in 100 s; then both have 2 samples/s: b ends at 200, when a has 200 left.
    assert ran["b"].finish_s == pytest.approx(200)
    assert ran["a"].finish_s == pytest.approx(250)
    assert [each.samples for each in ran["a"].segments] == [800]


def test_two_jobs_over_the_same_nodes_are_as_slow_as_the_estimate_beside_neighbours() -> None:
    nodes = Nodes.parse("2x8:v100-p3").described()
    graph = perceptron([4096, 4096, 4096], batch=64, target="cuda")
    both = [
        Job(name=name, arrival_s=0, graph=graph, samples=1, devices=4, global_batch=256)
        for name in "ab"
    ]
    links = SharedLinks(nodes, EngineSpeeds(nodes.cluster))
    slower = links.slowdowns({each.name: (each, {0: 2, 1: 2}, None) for each in both})
    where = "node0[0,1]+node1[0,1]"
    alone = est.estimate(graph, where, batch_per_gpu=64, cluster=nodes.cluster)
    beside = est.estimate(graph, where, batch_per_gpu=64, cluster=nodes.cluster, neighbours=[alone])
    assert slower["a"] == slower["b"] == pytest.approx(beside.step_time_s / alone.step_time_s)
    assert slower["a"] > 1.2
    # Within a node nothing is shared, nor by one job alone.
    assert links.slowdowns({"a": (both[0], {0: 4}, None), "b": (both[1], {1: 4}, None)}) == {
        "a": 1.0,
        "b": 1.0,
    }
    assert links.slowdowns({"a": (both[0], {0: 2, 1: 2}, None)}) == {"a": 1.0}


def test_moved_smaller_jobs_make_room_on_one_node() -> None:
    def plan(view: View) -> Mapping[str, Grant]:
        return {each.job.name: Grant(each.job.devices, "synthetic") for each in view.jobs}

    # Three single devices go on the first node; the fourth job's end leaves one there beside one
    # elsewhere.
    jobs = [job("a", 0, 50, 3), job("b", 0, 500, 1), job("c", 1, 500, 1), job("d", 60, 40, 4)]
    ran = simulated(jobs, PlanOf(plan))
    assert [segment.shape.per_node for segment in ran["d"].segments] == [(4,)]
    assert sum(len(each.segments) for each in ran.values()) == 5


def test_a_failed_node_costs_what_came_after_the_last_checkpoint() -> None:
    costs = Costs(restart_s=0, checkpoint_s=100, node_mtbf_s=1000, repair_s=10)
    ran = simulated([job("a", 0, 8000, 1)], load_policy("fifo"), nodes=cluster(1, 1), costs=costs)
    lost = [segment for segment in ran["a"].segments if segment.lost_samples]
    assert lost
    for segment in lost:
        trained = segment.end_s - segment.trains_from_s
        assert segment.samples == pytest.approx(trained // 100 * 100)
        assert segment.lost_samples == pytest.approx(trained % 100)


def test_nothing_is_lost_where_checkpoints_are_kept_at_all_times() -> None:
    costs = Costs(restart_s=0, checkpoint_s=0, node_mtbf_s=1000, repair_s=10)
    ran = simulated([job("a", 0, 8000, 1)], load_policy("fifo"), nodes=cluster(1, 1), costs=costs)
    segments = ran["a"].segments
    assert len(segments) > 1
    assert [segment.lost_samples for segment in segments] == [0.0] * len(segments)


@pytest.mark.parametrize(
    ("grants", "said"),
    [
        ({"nobody": Grant(1, "synthetic")}, "'nobody', which is not waiting"),
        ({"a": Grant(9, "synthetic")}, "grants 9 devices of synthetic and the cluster has 8"),
        ({"a": Grant(65, "synthetic")}, "can use 1 to 64"),
        ({"a": Grant(1, "t4")}, "devices of 't4', which the cluster does not have"),
        ({}, "leaves 1 jobs waiting on an empty cluster, such as 'a'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(grants: dict[str, Grant], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        simulated([job("a", 0, 800)], PlanOf(lambda view: grants))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (["a"], "answers a list; return the Grant of each job's name"),
        ({"a": 3}, "grants 3; give a Grant"),
        ({"a": Grant(1.5, "synthetic")}, "give a Grant of a whole number of devices"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_is_no_plan_is_refused(answer: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        simulated([job("a", 0, 800)], PlanOf(lambda view: answer))


def test_what_a_policy_raises_is_one_sentence() -> None:
    with pytest.raises(WorkloadError, match=r"the policy failed .ZeroDivisionError"):
        simulated([job("a", 0, 800)], PlanOf(lambda view: {"a": Grant(1 // 0, "synthetic")}))


def test_nodes_that_fail_faster_than_jobs_train_end_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("estimator.replay.replay._MOST_FAILURES", 50)
    costs = Costs(restart_s=0, checkpoint_s=1e6, node_mtbf_s=1, repair_s=1)
    with pytest.raises(WorkloadError, match="nodes that fail every 1 s let no job end"):
        simulated([job("a", 0, 8000, 1)], load_policy("fifo"), nodes=cluster(1, 1), costs=costs)


def test_a_job_of_a_thousand_years_is_not_resimulated() -> None:
    with pytest.raises(WorkloadError, match=r"'a' would train for .* s on 1x1:synthetic"):
        simulated([job("a", 0, 1e14, 1)], load_policy("tiresias"), nodes=cluster(1, 1))


class Narrow:
    """Devices that hold no job of more than two devices' worth of samples, on fewer than three."""

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        return [inf if each.ranks < 3 or job.name == "huge" else 1.0 for each in shapes]


def test_a_job_that_fits_nowhere_is_refused_by_name() -> None:
    with pytest.raises(WorkloadError, match="job 'huge' fits on no count of synthetic"):
        simulated([job("a", 0, 1), job("huge", 1, 1)], load_policy("fifo"), true=Narrow())


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_job_is_given_no_count_on_which_it_does_not_fit(policy: str) -> None:
    ran = simulated([job("a", 0, 640)], load_policy(policy), true=Narrow(), believed=Narrow())
    assert all(segment.shape.ranks >= 3 for segment in ran["a"].segments)


def test_a_grant_on_which_a_job_does_not_fit_is_refused() -> None:
    with pytest.raises(WorkloadError, match="grants 1x2:synthetic to 'a', which does not fit"):
        simulated(
            [job("a", 0, 64)], PlanOf(lambda view: {"a": Grant(2, "synthetic")}), true=Narrow()
        )


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(WorkloadError, match="job 'a' is listed twice"):
        simulated([job("a", 0, 1), job("a", 1, 1)], load_policy("fifo"))


drawn_jobs = st.lists(
    st.tuples(
        st.floats(0, 2000), st.floats(1, 20_000), st.sampled_from([1, 2, 3, 4, 8]), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("policy", BUILT_IN)
@given(
    drawn=drawn_jobs,
    mtbf_s=st.sampled_from([None, 5000.0]),
    seed=st.integers(0, 99),
    rule=st.sampled_from(["pack", "even", "spread"]),
)
@settings(max_examples=examples(4), deadline=None)
def test_every_policy_keeps_the_accounts(
    policy: str,
    drawn: list[tuple[float, float, int, bool]],
    mtbf_s: float | None,
    seed: int,
    rule: PlacementRule,
) -> None:
    jobs = [
        job(f"j{number}", arrival_s, samples, devices)
        for number, (arrival_s, samples, devices, _) in enumerate(drawn)
    ]
    costs = Costs(restart_s=30, checkpoint_s=120, node_mtbf_s=mtbf_s, repair_s=300)

    replay, again = (
        Replay(
            jobs,
            cluster(2, 4, rule),
            load_policy(policy),
            true=Linear(0.8),
            believed=Linear(0.9),
            costs=costs,
            seed=seed,
        )
        for _ in range(2)
    )
    ran = replay.run()
    assert [each.finish_s for each in ran] == [each.finish_s for each in again.run()]

    def taken(job: Job, segment: Segment) -> tuple[float, str]:
        return job.global_batch / segment.shape.ranks**0.8, "yes"

    assert violations(ran, jobs, "2x4:synthetic", replay.outages, costs, taken) == []


REPLAYS_GRAPH = perceptron([64, 64], target="cuda")
NODES = Nodes((ReplayNode("t4-g4dn", 4),) * 2, "pack")
JOBS = [replace(job(f"j{n}", 5.0 * n, 1e6, 1 + n), graph=REPLAYS_GRAPH) for n in range(4)]


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


MACHINE = "gtx-1080-roce"
# Hosts of two racks in turn, behind uplinks of a tenth of what their four nodes can send together.
RACKS = Cluster(
    nodes={
        f"{rack}{number}": Node(machine=MACHINE, switch=rack, uplink_bytes_per_s=1.25e9)
        for number in range(4)
        for rack in ("a", "b")
    },
    switches={
        "root": Switch(),
        "a": Switch(parent="root", uplink_bytes_per_s=0.5e9),
        "b": Switch(parent="root", uplink_bytes_per_s=0.5e9),
    },
)
WIDE = perceptron([2048, 2048, 2048], target="cuda")
JOB = Job(name="job", arrival_s=0, graph=WIDE, samples=1e6, devices=8, global_batch=512)


def racks(rule: PlacementRule = "pack") -> Nodes:
    return Nodes.parse(f"8x4:{MACHINE}", rule, RACKS)


def hosts(nodes: Nodes, name: str, count: int) -> tuple[str, ...]:
    return nodes.shape(nodes.take(name, count, MACHINE)).hosts


def test_a_job_of_several_nodes_stays_below_one_switch_where_it_fits() -> None:
    nodes = racks()
    # The file's first two nodes are of two racks.
    assert hosts(nodes, "two nodes", 8) == ("a0", "a1")
    # Two nodes are left in the first rack, which need no uplink; the third job takes the other.
    assert hosts(nodes, "again", 8) == ("a0", "a1")
    assert nodes.free_on == [0, 4] * 4
    assert hosts(nodes, "three nodes", 12) == ("b0", "b1", "b2")


def test_the_switch_with_least_room_is_filled_first() -> None:
    nodes = racks()
    nodes.take("job", 4, MACHINE, ((1, 4),))
    nodes.take("two nodes", 8, MACHINE)
    assert nodes.free_on == [4, 0, 4, 0, 4, 0, 4, 4]


def test_ranks_go_through_one_switch_before_the_next() -> None:
    nodes = racks()
    assert nodes.packed(MACHINE, 32).hosts == tuple(f"{r}{n}" for r in "ab" for n in range(4))
    assert str(nodes.packed(MACHINE, 6)) == "a0[0-3]+a1[0-1]"


def test_the_rank_order_of_the_placement_is_faster_than_that_of_the_file() -> None:
    in_order = racks().packed(MACHINE, 32)
    as_listed = AllocationShape(MACHINE, (4,) * 8, tuple(RACKS.nodes))
    ordered_s, listed_s = EngineSpeeds(RACKS).step_times_s(JOB, [in_order, as_listed])
    # In order one hop of the ring leaves each rack, as listed all four: the uplinks are the slowest
    # links of both, so that communication takes four times as long.
    assert listed_s > 2 * ordered_s


def test_spread_takes_of_each_switch_in_turn() -> None:
    nodes = racks("spread")
    given = nodes.take("job", 4, MACHINE)
    assert sorted(nodes.nodes[index].host or "" for index in given) == ["a0", "a1", "b0", "b1"]
    assert set(given.values()) == {1}


def test_nodes_alike_below_a_switch_share_an_estimate_and_unlike_ones_do_not() -> None:
    slow = replace(RACKS.nodes["a1"], slowdown_ratio=2.0)
    nodes = Nodes.parse(f"8x4:{MACHINE}", "pack", replace(RACKS, nodes={**RACKS.nodes, "a1": slow}))
    assert nodes.shape({4: 4}) == nodes.shape({0: 4}) != nodes.shape({2: 4})


def test_more_nodes_than_the_file_has_are_refused() -> None:
    with pytest.raises(AllocationError, match="of which the cluster file has 8 more"):
        Nodes.parse(f"9x4:{MACHINE}", "pack", RACKS)


def test_a_replay_reads_the_cluster_file(tmp_path: Path, command: Command) -> None:
    jobs, cluster, model = (tmp_path / name for name in ("jobs.json", "two.toml", "wide.graph"))
    WIDE.save(model)
    entry = {"arrival_s": 0, "model": str(model), "samples": 1e5, "devices": 8}
    jobs.write_text(json.dumps({"jobs": [entry]}))

    def completion_s(uplink: str) -> float:
        cluster.write_text(f'[nodes."n[1-2]"]\nmachine = "{MACHINE}"\nuplink = "{uplink}"\n')
        about = ("--on", f"2x4:{MACHINE}", "--cluster", cluster, "--policy", "fifo", "--json")
        found = command("replay", jobs, *about).content
        return float(found["policies"]["fifo"]["average_jct_s"])

    assert completion_s("1 Gbit/s") > 2 * completion_s("40 Gbit/s")
