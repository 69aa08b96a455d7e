"""Cluster files: nodes, switches, rates, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import TopologyError
from estimator.placement.topology import Cluster, Node, Switch, expand_hosts

GOOD = """
[switches.spine]
[switches.rack1]
parent = "spine"
uplink = "2 Gbit/s"
[nodes."a[1-3]"]
machine = "local"
switch = "rack1"
uplink = "500 Mbit/s"
[nodes.b1]
machine = "h100"
slowdown = 1.2
"""


def test_a_cluster_file_gives_nodes_switches_and_line_rates(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    cluster = Cluster.load(path)
    assert list(cluster.nodes) == ["a1", "a2", "a3", "b1"]
    assert cluster.nodes["a2"].uplink_bytes_per_s == 500e6 / 8
    assert cluster.nodes["b1"].slowdown_ratio == 1.2
    assert cluster.switches_above("a1") == ("rack1", "spine")
    assert cluster.switches_above("b1") == ()
    assert cluster.hosts_of("local") == ("a1", "a2", "a3")


def test_a_loop_of_switches_is_refused() -> None:
    switches = {"s": Switch(parent="t"), "t": Switch(parent="s")}
    with pytest.raises(TopologyError, match="loop"):
        Cluster(nodes={"a": Node(machine="m")}, switches=switches)


def test_host_lists_keep_leading_zeros() -> None:
    assert list(expand_hosts("n[08-10]x")) == ["n08x", "n09x", "n10x"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 3", "nodes: must be a table"),
        ("[nodes.a]\nswitch='r'", "machine: is missing"),
        ("[nodes.a]\nmachine='m'\nswitch='r'", "not in the file"),
        ("[nodes.a]\nmachine='m'\nuplink='fast'", "not a rate"),
        ("[nodes.a]\nmachine='m'\nuplink='0 Gbit/s'", "positive rate"),
        ("[nodes.a]\nmachine='m'\nslowdown=-1", "slowdown"),
        ("[nodes.a]\nmachine='m'\nslowdown=nan", "slowdown"),
        ("[nodes.a]\nmachine='m'\nslowdown=1e200", "slowdown"),
        ("[nodes.a]\nmachine='m'\nslowdown=1e-200", "slowdown"),
        ("[nodes.a]\nmachine='m'\nslowdown=1" + "0" * 400, "slowdown"),
        ("[nodes.a]\nmachine='m'\nslowdown='fast'", "slowdown"),
        ("[nodes.a]\nmachine='m'\ncolour='red'", "colour: is unknown"),
        ("[nodes.a]\nmachine='m'\n[nodes.'a[1-2]']\nmachine='m'\n[nodes.a1]\nmachine='m'", "twice"),
        ("[nodes.'a[3-1]']\nmachine='m'", "counts from"),
        ("transport='pigeon'\n[nodes.a]\nmachine='m'", "transport: must be"),
        ("", "no nodes"),
        ("[nodes", "not TOML"),
    ],
)
def test_a_wrong_cluster_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=words) as caught:
        Cluster.load(path)
    assert "\n" not in str(caught.value)
