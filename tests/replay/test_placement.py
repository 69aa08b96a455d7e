"""Jobs are placed by the switches of a described cluster, and ranked so that rings cross few."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import AllocationError
from estimator.placement.topology import Cluster, Node, Switch
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes, PlacementRule
from estimator.replay.speeds import EngineSpeeds
from tests.synthetic import perceptron

Run = Callable[..., Any]
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
WIDE = replace(perceptron([2048, 2048, 2048]), target="cuda")
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


def test_a_replay_reads_the_cluster_file(tmp_path: Path, command: Run) -> None:
    jobs, cluster, model = (tmp_path / name for name in ("jobs.json", "two.toml", "wide.graph"))
    WIDE.save(model)
    entry = {"arrival_s": 0, "model": str(model), "samples": 1e5, "devices": 8}
    jobs.write_text(json.dumps({"jobs": [entry]}))

    def completion_s(uplink: str) -> float:
        cluster.write_text(f'[nodes."n[1-2]"]\nmachine = "{MACHINE}"\nuplink = "{uplink}"\n')
        about = ("--on", f"2x4:{MACHINE}", "--cluster", cluster, "--policy", "fifo", "--json")
        found = json.loads(command("replay", jobs, *about).out)
        return float(found["policies"]["fifo"]["average_jct_s"])

    assert completion_s("1 Gbit/s") > 2 * completion_s("40 Gbit/s")
