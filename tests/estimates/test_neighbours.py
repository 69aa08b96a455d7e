"""Jobs on links in common: max-min shares while they send, and the steps that follow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator.errors import AllocationError, EstimatorError, WorkloadError
from estimator.estimates.neighbours import Sender, fair_rates, link_ratios
from estimator.placement.topology import Cluster, Node, Switch
from tests.synthetic import Machine, in_blocks, perceptron

GRAPH = in_blocks(perceptron([512, 512, 512, 512], batch=16))
MACHINE = Machine(
    devices=4, latency_s=1e-12, network_latency_s=1e-12, rank_jitter_ratio=0.0
).profile()
LATE = "ddp:unbucketed"


def test_flows_on_one_link_share_what_a_slower_one_leaves() -> None:
    # 10 B/s for three: 3⅓ each, of which one takes 2; the others share the 8 that it leaves.
    rates = fair_rates(
        np.array([[True, True, True], [True, False, True]]),
        np.array([10.0]),
        np.ones((1, 3)),
        np.array([2.0, 10.0, 10.0]),
    )
    np.testing.assert_allclose(rates, [[2, 4, 4], [2, 0, 8]])


def test_a_flow_over_two_hops_takes_the_share_of_the_narrower_one() -> None:
    # Hop 0 carries 10 and flows a, b; hop 1 carries 4 and a, c: a and c 2 each, so b has 8.
    uses = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    alone = np.array([4.0, 10.0, 4.0])
    rates = fair_rates(np.ones((1, 3), dtype=bool), np.array([10.0, 4.0]), uses, alone)
    np.testing.assert_allclose(rates, [[2, 8, 2]])


def test_a_flow_that_leaves_twice_takes_twice_its_rate_of_a_link() -> None:
    # x + 2x = 9.
    uses = np.array([[1.0, 2.0]])
    rates = fair_rates(np.ones((1, 2), dtype=bool), np.array([9.0]), uses, np.array([9.0, 4.5]))
    np.testing.assert_allclose(rates, [[3, 3]])


def test_jobs_without_a_link_in_common_have_their_own_rates() -> None:
    always = lambda ratio: (1.0, 1.0)  # noqa: E731
    one, other = {("node", "a"): (1e9, 1)}, {("node", "b"): (1e9, 1)}
    assert link_ratios([Sender(one, 1e9, always), Sender(other, 1e9, always)]) == [1.0, 1.0]


def test_many_jobs_that_always_send_have_equal_parts_of_a_link() -> None:
    link = {("switch", "r"): (1e9, 1)}
    ratios = link_ratios([Sender(link, 1e9, lambda ratio: (1.0, 1.0))] * 20)
    assert ratios == pytest.approx([1 / 20] * 20)


def _estimate(allocation: str, **options: Any) -> est.Estimate:
    return est.estimate(GRAPH, allocation, strategy=LATE, profile=MACHINE, **options)


def test_two_jobs_on_one_network_card_wait_for_each_other_while_both_send() -> None:
    # Each computes C and then sends for S. With d the share of time that the other sends, a job
    # has 1 - d/2 of the link, sends for x = S / (1 - d/2), and d = x / (C + x):
    # x² + 2(C - S)x - 2SC = 0, so x = S - C + √(S² + C²).
    alone = _estimate("2x2:synthetic")
    send_s = alone.plan.alone_s(alone.answer.slowest)
    compute_s = alone.step_time_s - send_s
    beside = _estimate("2x2:synthetic", neighbours=[alone])
    longer_s = send_s - compute_s + math.hypot(send_s, compute_s)
    assert longer_s > 1.1 * send_s
    assert beside.step_time_s == pytest.approx(compute_s + longer_s, rel=1e-3)
    assert any("1 other job on the same links leaves" in text for text in beside.assumptions)
    assert beside.breakdown.forward_s == alone.breakdown.forward_s


def test_traffic_that_fills_a_link_leaves_half_of_it() -> None:
    alone = _estimate("2x2:synthetic")
    beside = _estimate("2x2:synthetic", neighbours=[("2x1:synthetic", 1e8)])
    send_s = 6 / 4 * GRAPH.parameter_bytes / 1e8  # a ring of four passes 2 · 3/4 of all bytes on
    assert beside.step_time_s - alone.step_time_s == pytest.approx(send_s, rel=1e-3)


def _two_racks() -> Cluster:
    racks = {name: Switch(parent="core", uplink_bytes_per_s=1e8) for name in ("r", "s")}
    nodes = {
        f"{rack}{number}": Node(machine="synthetic", switch=rack)
        for rack in ("r", "s")
        for number in range(3)
    }
    return Cluster(nodes=nodes, switches={"core": Switch(), **racks})


@pytest.mark.parametrize(
    ("other", "slowed"),
    [
        ("r1[0]+s1[0]", True),  # other nodes, the same uplinks of both racks
        ("r0[2]+r1[0]", True),  # one node in common
        ("r1[0]+r2[0]", False),  # other nodes below one switch
        ("r0[2]+r0[3]", False),  # inside a node nothing leaves it
    ],
)
def test_only_what_crosses_the_same_nodes_or_uplinks_slows(other: str, slowed: bool) -> None:
    cluster = _two_racks()
    alone = _estimate("r0[0,1]+s0[0,1]", cluster=cluster)
    neighbour = _estimate(other, cluster=cluster)
    beside = _estimate("r0[0,1]+s0[0,1]", cluster=cluster, neighbours=[neighbour])
    assert (beside.step_time_s > 1.01 * alone.step_time_s) == slowed


def test_a_pipeline_and_sharded_ranks_are_slowed_too() -> None:
    for options in ({"strategy": "fsdp"}, {"strategy": "ps:2"}, {"layout": "pp=2,dp=*"}):
        asked: Any = {"profile": MACHINE, **options}
        alone = est.estimate(GRAPH, "2x2:synthetic", **asked)
        asked["neighbours"] = [("2x1:synthetic", 1e8)]
        beside = est.estimate(GRAPH, "2x2:synthetic", **asked)
        assert beside.step_time_s > alone.step_time_s


def test_a_cluster_that_was_read_twice_is_one(tmp_path: Path) -> None:
    file = tmp_path / "rack.toml"
    file.write_text("".join(f'[nodes.{node}]\nmachine = "{MACHINE.name}"\n' for node in "ab"))
    asked = {"profile": MACHINE, "cluster": file, "strategy": LATE}
    other = est.estimate(GRAPH, "a[1]+b[1]", **asked)
    answer = est.estimate(GRAPH, "a[0]+b[0]", neighbours=[other], **asked)
    assert answer.step_time_s > est.estimate(GRAPH, "a[0]+b[0]", **asked).step_time_s
    file.write_text(file.read_text() + f'[nodes.c]\nmachine = "{MACHINE.name}"\n')
    with pytest.raises(WorkloadError, match="of one cluster"):
        est.estimate(GRAPH, "a[0]+b[0]", neighbours=[other], **asked)


def test_jobs_that_want_more_devices_than_a_node_has_are_refused() -> None:
    neighbour = _estimate("2x3:synthetic")
    with pytest.raises(AllocationError, match=r"the jobs want 5 devices of node 1, which has 4"):
        _estimate("2x2:synthetic", neighbours=[neighbour])


@pytest.mark.parametrize("neighbour", [3, "2x1:synthetic", ("2x1:synthetic", -1), (1, 2, 3), None])
def test_what_is_no_neighbour_is_refused_in_a_sentence(neighbour: Any) -> None:
    with pytest.raises(EstimatorError, match="neighbour"):
        _estimate("2x2:synthetic", neighbours=[neighbour])


def test_a_table_has_no_neighbours() -> None:
    options: Any = {"neighbours": [("2x1:t4-g4dn", 1.0)]}
    with pytest.raises(WorkloadError, match="a table has no neighbours"):
        est.estimate_many(GRAPH, ["2x1:t4-g4dn"], **options)
