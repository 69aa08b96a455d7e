"""Messages between nodes become links, pairs of nodes a matrix."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device
from estimator.placement.topology import Cluster, Node, Switch
from estimator.probe.cluster import steps
from estimator.probe.cluster.findings import (
    ClusterFindings,
    Member,
    World,
    shapes,
    slow_links,
    slow_nodes,
)
from estimator.probe.links.collectives import SharedClock, shape_costs
from estimator.probe.links.copies import Pace, typical_link
from estimator.probe.links.network import (
    grouped,
    network_kind,
    pair_link,
    pair_matrix,
)

MB = 1_000_000


def member(rank: int, host: str, local_rank: int = 0) -> Member:
    device = Device(kind="cpu", index=local_rank, name="core", memory_bytes=1 << 30)
    return Member(rank=rank, host=host, device=device, machine="m")


def world_of(*counts: int, cluster: Cluster | None = None) -> World:
    """Nodes a, b, c, … with so many devices each."""
    members: list[Member] = []
    for host, count in zip("abcdefgh", counts, strict=False):
        members += [member(len(members) + i, host, i) for i in range(count)]
    return World.of(members, cluster)


def two_racks() -> Cluster:
    """a and b in one rack, c and d in another, both below a spine."""
    return Cluster(
        nodes={
            host: Node(machine="m", switch=rack)
            for host, rack in {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}.items()
        },
        switches={"spine": Switch(), "r1": Switch(parent="spine"), "r2": Switch(parent="spine")},
    )


def test_a_busy_machine_bends_the_latency_of_a_link_and_not_its_rate() -> None:
    # 25 MB/s and 100 µs; messages below 64 KiB wait 3 ms for a core besides.
    points = [
        (size, 1e-4 + size / 25e6 + (3e-3 if size < 65536 else 0.0))
        for size in (1024 * 4**power for power in range(8))
    ]
    link = pair_link("tcp", "rack", {"latency_s": 1e-4, "points": points})
    assert link.bandwidth_bytes_per_s == pytest.approx(25e6, rel=1e-3)
    # Of the four smaller sizes three waited: 3.1 ms is what such a message takes here.
    assert link.latency_s == pytest.approx(3.1e-3, rel=0.01)


def test_one_size_of_three_that_was_held_up_does_not_change_the_rate() -> None:
    points = [(size, size / 25e6) for size in (MB // 4, MB, 4 * MB)]
    held_up = [points[0], (MB, 1.5 * MB / 25e6), points[2]]
    link = pair_link("tcp", "rack", {"latency_s": 1e-4, "points": held_up})
    assert link.bandwidth_bytes_per_s == pytest.approx(25e6)


def test_small_messages_that_a_shaper_lets_pass_take_no_less_than_next_to_nothing() -> None:
    # 25 MB/s once a bucket of 100 kB is drained; a byte takes 50 µs.
    points = [
        (size, 5e-5 + max(0, size - 100_000) / 25e6)
        for size in (1024 * 4**power for power in range(8))
    ]
    link = pair_link("tcp", "rack", {"latency_s": 5e-5, "points": points})
    assert link.bandwidth_bytes_per_s == pytest.approx(25e6, rel=1e-3)
    assert link.latency_s == 5e-5


def test_the_link_of_middling_rate_stands_for_its_class() -> None:
    links = [
        pair_link(
            "tcp",
            "rack",
            {"latency_s": 1e-6, "points": [(MB, MB / rate), (4 * MB, 4 * MB / rate)]},
        )
        for rate in (10e6, 100e6, 80e6)
    ]
    typical = typical_link(links)
    assert typical.bandwidth_bytes_per_s == pytest.approx(80e6)
    # Deviations 0.875, 0.25 and 0: the middle one.
    assert typical.provenance.relative_error == pytest.approx(0.25)


def test_a_matrix_has_gaps_where_pairs_were_not_measured() -> None:
    message = {"latency_s": 2e-4, "points": [(MB, 0.1), (2 * MB, 0.2)]}
    matrix = pair_matrix(("a", "b"), {("a", "b"): message}, at="now")
    assert matrix.latency_s == ((None, 2e-4), (None, None))
    assert matrix.bandwidth_bytes_per_s[0][1] == pytest.approx(10e6)


def test_pairs_run_at_once_only_where_no_cable_is_shared() -> None:
    world = world_of(1, 1, 1, 1, cluster=two_racks())
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3), (2, 0)]
    links = {(x, y): world.links_between("abcd"[x], "abcd"[y]) for x, y in pairs}
    # a–b and c–d stay in their racks; all others share the uplinks of both.
    assert grouped(pairs, links) == [[(0, 1), (2, 3)], [(0, 2)], [(1, 3)], [(2, 0)]]


def test_without_a_cluster_file_pairs_run_one_after_the_other() -> None:
    world = world_of(1, 1, 1, 1)
    links = {(0, 1): world.links_between("a", "b"), (2, 3): world.links_between("c", "d")}
    assert grouped(links, links) == [[(0, 1)], [(2, 3)]]


def test_racks_come_from_the_cluster_file_by_host_name_with_or_without_domain() -> None:
    names = ("a.example.org", "b", "c", "x")
    world = World.of(list(map(member, range(4), names)), two_racks())
    assert world.locality("a.example.org", "b") == "rack"
    assert world.locality("b", "c") == "cluster"
    assert "x" not in world.switches


def test_nccl_goes_over_verbs_where_there_are_any(tmp_path: Path) -> None:
    assert network_kind("cpu", tmp_path) == "tcp"
    assert network_kind("cuda", tmp_path) == "tcp"
    layer = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/link_layer"
    layer.parent.mkdir(parents=True)
    layer.write_text("Ethernet\n")
    assert network_kind("cuda", tmp_path) == "roce"
    layer.write_text("InfiniBand\n")
    assert network_kind("cuda", tmp_path) == "infiniband"
    assert network_kind("cpu", tmp_path) == "tcp"


@pytest.mark.parametrize("name", ["efa_0", "rdmap16s27"])
def test_efa_is_told_from_the_verbs_that_it_is_listed_among(tmp_path: Path, name: str) -> None:
    # What a p4d.24xlarge and a p5.48xlarge list; neither port says InfiniBand.
    layer = tmp_path / f"sys/class/infiniband/{name}/ports/1/link_layer"
    layer.parent.mkdir(parents=True)
    layer.write_text("Unspecified\n")
    assert network_kind("cuda", tmp_path) == "efa"


class _Asked:
    """A group of two nodes of two GPUs each, whose ranks find what is given, in that order."""

    kind, rank = "cuda", 0

    def __init__(self, *reports: list[list[Any]]) -> None:
        gpus = [
            replace(one, device=replace(one.device, kind="cuda")) for one in world_of(2, 2).members
        ]
        self.world, self.reports = World(members=tuple(gpus)), list(reports)

    def handle(self, _ranks: Sequence[int]) -> None:
        pass

    def measured(self, ranks: Sequence[int], _measure: Any) -> list[list[Any]]:
        reports = self.reports.pop(0)
        assert len(reports) == len(ranks)
        return reports


def test_a_cluster_over_efa_keeps_what_the_switch_of_its_boxes_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/class/infiniband/rdmap16s27").mkdir(parents=True)
    monkeypatch.setattr(steps, "network_kind", partial(network_kind, root=tmp_path))
    points = [(size, 2e-5 + size / 1e10) for size in (1e4, 1e6, 1e8)]
    sent = [[{"from": one, "to": 1 - one, "latency_s": 2e-5, "points": points}] for one in range(2)]
    windows = [(size, 0.0, 1e-4 + size / 5e9, 1) for size in (1 << 20, 1 << 24)]
    reduced = [[{"op": "all_reduce", "windows": windows}] for _ in range(4)]
    group: Any = _Asked(sent, reduced)
    plan = steps.ProbePlan(findings=ClusterFindings(at="now"))
    steps.links_between_nodes(group, plan, 1.0)
    steps.all_reduce_everywhere(group, plan, 1.0)
    box = load_profile("h100-sxm")
    profile = plan.findings.merged(box, name="pair", world=group.world, used_s=1.0)
    (link,) = profile.network
    assert (link.kind, link.locality, link.provenance.source) == ("efa", "rack", "measured")
    assert link.bandwidth_bytes_per_s == pytest.approx(1e10, rel=1e-2)
    (cost,) = profile.collectives
    assert (cost.backend, cost.group_size, cost.nodes) == ("nccl", 4, 2)
    assert cost.hosts == ("a", "a", "b", "b")
    assert cost.bandwidth_bytes_per_s == pytest.approx(5e9, rel=1e-2)
    # NVLink SHARP and the classes inside a node are the box's own.
    assert profile.links == box.links
    assert any(inside.reduces for inside in profile.links)


def test_shapes_start_with_everything_and_never_repeat() -> None:
    # Ranks 0–1 on a, 2–3 on b, 4–5 on c, 6–7 on d.
    found = list(shapes(world_of(2, 2, 2, 2)))
    assert found[:5] == [
        (0, 1, 2, 3, 4, 5, 6, 7),
        (0, 2),
        (0, 2, 4, 6),
        (0, 1, 2, 3),
        (0, 2, 4),
    ]
    assert len(found) == len(set(found))


def test_groups_visit_the_racks_one_after_the_other_whatever_the_rank_order() -> None:
    # a and b share a rack, c and d another; ranks 0 … 3 are on a, c, b, d.
    world = World.of(list(map(member, range(4), "acbd")), two_racks())
    everything, *_ = shapes(world)
    assert world.hosts(everything) == ("a", "b", "c", "d")
    assert [world.members[rank].rank for rank in everything] == [0, 2, 1, 3]


def test_uneven_nodes_and_racks_make_shapes_of_their_own() -> None:
    found = list(shapes(world_of(2, 1, 1, 1, cluster=two_racks())))
    assert found[0] == (0, 1, 2, 3, 4)
    assert (0, 3) in found, "one device in each of two racks: a and c"


def test_collectives_of_a_shape_keep_the_sizes_that_every_rank_finished() -> None:
    # Rank 1 was lost during the third size; two at once take twice as long as one.
    def timed(size: int, seconds: float) -> dict[str, object]:
        return {"op": "all_reduce", "windows": [(size, 0.0, seconds)] * 3}

    one = [(100, 0.0, 1.0)]
    two = [(100, 5.0, 7.0)]
    whole = [timed(100, 1.0), timed(200, 2.0)]
    reports = [
        [*whole, {"op": "all_reduce", "one": one, "two": two}, timed(400, 4.0)],
        [*whole, {"op": "all_reduce", "one": one, "two": two}],
    ]
    (cost,), notes = shape_costs(reports, "gloo", ("a", "b"))
    assert notes == []
    assert cost.points == ((100, 1.0), (200, 2.0))
    assert (cost.nodes, cost.hosts, cost.group_size) == (2, ("a", "b"), 2)
    assert cost.pair_ratio == ((100, 2.0),)


def test_what_a_backend_lacks_is_said() -> None:
    reports = [[{"op": "reduce_scatter", "unsupported": "no such thing"}]] * 2
    costs, notes = shape_costs(reports, "gloo", ("a", "b"))
    assert costs == []
    assert notes == ["gloo has no reduce_scatter: no such thing"]


def test_sizes_stop_growing_where_links_are_slow() -> None:
    pace = Pace((1 * MB, 4 * MB, 16 * MB, 64 * MB))
    # 4 MB in 0.4 s: 16 MB would take 1.6 s, three times.
    assert pace.goes_on(2, 4 * MB, 0.4, left_s=5.0)
    assert not pace.goes_on(2, 4 * MB, 0.4, left_s=4.0)
    # One call took longer than 1.5 s: enough, whatever time is left.
    assert not pace.goes_on(3, 16 * MB, 1.6, left_s=100.0)
    # Two sizes are always tried.
    assert pace.goes_on(1, 1 * MB, 9.0, left_s=0.0)


def test_a_slow_size_leaves_time_for_the_larger_ones() -> None:
    pace = Pace((1 * MB, 4 * MB))
    # 0.1 s each: 4 MB thrice takes 1.2 s; of 10 s, 8.8 are left for two sizes: 44 times.
    assert pace.repeats(0, 0.1, left_s=10.0) == 44
    assert pace.repeats(0, 0.1, left_s=1.0) == 3


class _Wire:
    """Rank 1's view of pings to rank 0, whose clock is ahead: each way takes its own time."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ahead_s: float, ways_s: list[float]
    ) -> None:
        self.now, self.ahead_s, self.ways_s = 100.0, ahead_s, iter(ways_s)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def get_rank(self, _group: object) -> int:
        return 1

    def get_world_size(self, _group: object) -> int:
        return 2

    def tensor(self, values: list[float], **_: object) -> list[float]:
        return _Number(values)

    float64 = "float64"

    def send(self, _number: object, *, group: object, group_dst: int) -> None:
        self.now += next(self.ways_s)

    def recv(self, number: list[float], *, group: object, group_src: int) -> None:
        number[0] = self.now + self.ahead_s
        self.now += next(self.ways_s)


class _Number(list):  # type: ignore[type-arg]
    def __float__(self) -> float:
        return float(self[0])


def test_the_quickest_exchange_tells_how_far_a_clock_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seven exchanges are held up on one way by 1 s; one takes 1 ms each way.
    ways = [1e-3, 1.0] * 7 + [1e-3, 1e-3]
    wire = _Wire(monkeypatch, ahead_s=50.0, ways_s=ways * 2)
    clock = SharedClock(wire, wire, None)
    clock.mark()
    wire.ahead_s = 50.5
    began = wire.now
    wire.now += 10.0
    clock.mark()
    # Halfway between the marks the clock is ahead by halfway between 50.0 and 50.5.
    middle = statistics.fmean((began, wire.now))
    ((_, entered, left),) = clock.shifted([(1, middle, middle)])
    assert entered == left
    assert entered - middle == pytest.approx(50.25, abs=0.01)


def test_a_node_that_computes_longer_or_has_slow_links_is_named() -> None:
    (sentence,) = slow_nodes({"a": 1.0, "b": 1.0, "c": 1.8})
    assert sentence.startswith("node c computes 1.8 times as long")
    rates = {"a": 100, "b": 100, "c": 20}
    message = {
        (x, y): {
            "latency_s": 1e-4,
            "points": [(MB, 1 / min(rates[x], rates[y])), (2 * MB, 2 / min(rates[x], rates[y]))],
        }
        for x in rates
        for y in rates
        if x != y
    }
    (sentence,) = slow_links(pair_matrix(tuple(rates), message, at=""))
    assert sentence.startswith("the links of node c carry 20 MB/s")
