"""The testbed: what it is described by, which commands build it, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from testbed import description, launch, measure, network, paced

from estimator.errors import AllocationError, TrainingError
from estimator.placement.topology import Cluster

BED = description.TestbedDescription(
    nodes=(
        description.TestbedNode(
            name="n0", devices=2, uplink_bytes_per_s=62.5e6, rack="r1", slowdown_ratio=1.5
        ),
        description.TestbedNode(name="n1", devices=1, uplink_bytes_per_s=12.5e6),
    ),
    racks=(description.TestbedRack(name="r1", uplink_bytes_per_s=125e6),),
)
needs_root = pytest.mark.skipif(
    network.unavailable_reason() is not None, reason=str(network.unavailable_reason())
)


def test_the_cluster_file_says_the_same_to_the_engine(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(BED.cluster_toml("paced"))
    cluster = Cluster.load(path)
    assert cluster.switches_above("n0") == ("r1", "spine")
    assert cluster.switches_above("n1") == ("spine",)
    assert cluster.switches["r1"].uplink_bytes_per_s == 125e6
    assert cluster.nodes["n0"].slowdown_ratio == 1.5
    assert cluster.nodes["n1"].uplink_bytes_per_s == 12.5e6


def test_ranks_are_placed_in_the_order_of_the_allocation() -> None:
    bed = network.Testbed(description=BED, prefix="tb1x0-")
    ranks = launch.place(bed, "n1[0]+n0[1,0]")
    assert [rank.node for rank in ranks] == ["n1", "n0", "n0"]
    assert [rank.environment["LOCAL_RANK"] for rank in ranks] == ["0", "0", "1"]
    assert {rank.environment["MASTER_ADDR"] for rank in ranks} == {bed.address("n1")}
    with pytest.raises(AllocationError, match=r"n1\[1\]"):
        launch.place(bed, "n1[1]")


def test_each_link_is_limited_at_both_ends() -> None:
    commands = network.build_commands(BED, "tb1x0-")
    limits = {(c[2], c[6]): c[9:] for c in commands if c[0] == "tc"}
    assert set(limits) == {
        ("tb1x0-n0", "eth0"),
        ("tb1x0-r1", "n0"),
        ("tb1x0-n1", "eth0"),
        ("tb1x0-spine", "n1"),
        ("tb1x0-r1", "uplink"),
        ("tb1x0-spine", "r1"),
    }
    # 2 ms of 500 Mbit/s are 125 kB.
    assert limits["tb1x0-n0", "eth0"][:4] == ("rate", "500000000bit", "burst", "125000")
    assert limits["tb1x0-r1", "n0"] == limits["tb1x0-n0", "eth0"]
    # 2 ms of 1 Gbit/s would be 250 kB: more than 128 kB at once are no line any more.
    assert limits["tb1x0-r1", "uplink"][:4] == ("rate", "1000000000bit", "burst", "128000")


def test_a_paced_graph_takes_its_declared_times() -> None:
    graph = paced.paced_graph("few_big", batch=4)
    waits = [graph.timings[op.call].seconds for op in graph.ops if op.call in graph.timings]
    # Four layers of 3.75 ms a sample forward, and as much for the gradients of the weights and of
    # the input, which the first layer's input does not need.
    assert sum(waits) == pytest.approx((4 + 4 + 3) * 4 * 3.75e-3)
    assert graph.parameter_bytes == 24_000_000
    assert [p.name for p in graph.parameters] == [f"{k}.weights.0" for k in (3, 2, 1, 0)]


@needs_root
def test_what_a_dead_owner_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, living = f"tb{dead.pid}x0-n0", f"tb{os.getpid()}x99-n0"
    for name in (stale, living):
        network.run_command(("ip", "netns", "add", name))
    sleeper = subprocess.Popen(["ip", "netns", "exec", stale, "sleep", "60"])
    try:
        while not network.run_command(("ip", "netns", "pids", stale)):
            assert sleeper.poll() is None
        assert f"tb{dead.pid}x0-" in network.remove_stale()
        assert stale not in network.namespaces()
        assert living in network.namespaces()
        assert sleeper.wait() != 0
    finally:
        network.remove(f"tb{os.getpid()}x99-")


ALL_REDUCE = """
import os, socket, torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1_000_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(socket.gethostname(), x.sum().item())
dist.destroy_process_group()
"""


@needs_root
def test_two_ranks_on_two_nodes_reduce_and_leave_nothing_behind() -> None:
    two = description.TestbedDescription.uniform(nodes=2, devices=1, uplink="200 Mbit/s")
    with network.testbed(two) as bed:
        outputs = launch.launch(bed, "n1[0]+n0[0]", [sys.executable, "-c", ALL_REDUCE])
        assert outputs == ["n1 3000000.0\n", "n0 3000000.0\n"]
        run = measure.measure(
            bed, "paced:many_small", "n0[0]+n1[0]", batch=1, steps=2, warmup_steps=1
        )
        assert [len(times) for times in run.step_times_s] == [2, 2]
        whole = measure.measure(
            bed, "paced:eight_even", "n0[0]+n1[0]", strategy="fsdp", steps=2, warmup_steps=1
        )
        # 8 MB are gathered twice, half of them over the link, and all-reduced once: gloo scatters
        # so. Eight layers take 0.83 ms for a sample of eight three times, the first one twice.
        blocked_s = (2 * 4e6 + 8e6) / 25e6
        assert whole.step_s > blocked_s + 8 * 0.83e-3 * (3 * 8 - 1)
        failing = ["sh", "-c", "test $RANK = 0 && sleep 60 || { echo no disk >&2; exit 3; }"]
        with pytest.raises(TrainingError, match=r"rank 1 on node 'n1' ended with 3.*no disk"):
            launch.launch(bed, "n0[0]+n1[0]", failing)
    assert not [name for name in network.namespaces() if name.startswith(bed.prefix)]
