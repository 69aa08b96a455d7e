"""NCCL's collectives cost a start, a hop per round, bytes over links, and a pipeline's filling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import CollectiveName
from estimator.placement.mesh import ProcessGroup, whole_group
from estimator.placement.placement import place
from estimator.timeline.collectives.algorithms import (
    _TREE,
    IN_SWITCH_RATIO,
    RING_ROUNDS,
    RING_SHARE,
    START_S,
    TREE_RATIO,
    USUAL_HOP_S,
    InnerLinks,
    Line,
    algorithms_of,
    expert_dispatch,
    hop_latency_s,
    keeps_order,
    links_over,
    nccl_lines,
    network_traits,
    widest_link,
)
from estimator.timeline.collectives.costs import GroupCollective

# A hop of 1 µs at 200 GB/s in a node, of 7 µs at 20 GB/s between nodes.
LINKS = InnerLinks(latency_s=1e-6, bytes_per_s=200e9, pipelining=1.5)
SWITCH = LINKS._replace(reduces=True)


def group(nodes: int, per_node: int) -> ProcessGroup:
    network = {"bytes_per_s": 20e9, "latency_s": 7e-6} if nodes > 1 else {}
    return ProcessGroup(ranks=nodes * per_node, nodes=nodes, per_node=per_node, **network)


def seconds(line: Line, size: float) -> float:
    return float(line.alpha_s + line.beta_s_per_byte * size + line.root_s * math.sqrt(size))


def test_small_messages_on_one_node_grow_as_published() -> None:
    # aiconfigurator, a100_sxm, fp16, 512 bytes, µs over 2, 4 and 8 GPUs.
    links = LINKS._replace(latency_s=1.05e-6)
    for op, times in (("all_reduce", (10.0, 14.5, 22.6)), ("all_gather", (9.0, 10.8, 15.6))):
        for ranks, time_us in zip((2, 4, 8), times, strict=True):
            (line,) = nccl_lines(op, group(1, ranks), links)  # type: ignore[arg-type]
            assert line.alpha_s * 1e6 == pytest.approx(time_us, rel=0.1)


def test_one_node_goes_around_the_ring_and_its_pipeline_fills() -> None:
    (line,) = nccl_lines("all_reduce", group(1, 4), LINKS)
    assert line.alpha_s == pytest.approx(START_S + 6e-6)  # 3 neighbours, twice
    assert line.beta_s_per_byte == pytest.approx(1.5 / 200e9)
    assert line.root_s == pytest.approx(1.5 * math.sqrt((START_S + 6e-6) * 1.5 / 200e9))


def test_a_tree_sends_less_between_two_nodes_and_waits_for_fewer_hops() -> None:
    _, ring, _, tree = nccl_lines("all_reduce", group(2, 8), LINKS)
    # The ring by LL, twice: 14 hops in nodes, 1 between; 2 · 15/16 of the buffer and as many flags.
    assert ring.alpha_s == pytest.approx(START_S + 28e-6 + 2 * 7e-6)
    assert ring.beta_s_per_byte == pytest.approx(2 * 2 * 15 / 16 / 20e9)
    # Two trees over two nodes: each node sends half of the buffer up one and down the other.
    assert tree.alpha_s == pytest.approx(START_S + 14e-6 + 2 * 7e-6)
    assert tree.beta_s_per_byte == pytest.approx(1.0 / (20e9 * TREE_RATIO))


def test_across_many_nodes_the_tree_waits_for_a_logarithm_of_hops() -> None:
    # 64 nodes of 8: up and down 7 hops in a node and 6 between nodes; the ring takes 126 between.
    rounds = _TREE.rounds(group(64, 8))
    assert rounds == (14, 12)
    _, ring, _, tree = nccl_lines("all_reduce", group(64, 8), LINKS)
    assert tree.alpha_s < 0.2 * ring.alpha_s


def test_nodes_of_one_gpu_gather_by_aggregated_trees() -> None:
    *rings, pat = nccl_lines("all_gather", group(16, 1), LINKS)
    # Four rounds of 7 µs and Simple's 11.3 µs, each overlapped 3.5 times; 16 ranks of 2.8 µs.
    assert pat.alpha_s == pytest.approx(START_S + 1.8e-6 + 4 / 3.5 * 18.3e-6 + 16 * 2.8e-6)
    assert pat.beta_s_per_byte == pytest.approx(15 / 16 / (0.75 * 20e9))
    # It beats LL, which waits for 15 hops, where messages are small alone.
    assert pat.alpha_s < min(ring.alpha_s for ring in rings)
    assert seconds(pat, 1e9) > min(seconds(ring, 1e9) for ring in rings)
    # NCCL has it for one GPU a node alone, and not for an all-reduce.
    assert len(nccl_lines("all_gather", group(16, 2), LINKS)) == len(rings)
    assert len(nccl_lines("all_reduce", group(16, 1), LINKS)) == len(rings) + 1


def test_a_switch_that_adds_spares_every_device_most_of_its_receiving() -> None:
    ring, in_switch = nccl_lines("all_reduce", group(1, 8), SWITCH)
    assert in_switch.beta_s_per_byte == pytest.approx(1 / (200e9 * IN_SWITCH_RATIO))
    assert in_switch.beta_s_per_byte < ring.beta_s_per_byte
    # Its pipeline fills more slowly where it has more slices to add: k is 1 for 8 ranks, 3 for 72.
    for ranks, pipelining in ((8, 1.0), (72, 3.0)):
        _, line = nccl_lines("all_reduce", group(1, ranks), SWITCH)
        filling = math.sqrt(line.alpha_s * line.beta_s_per_byte)
        assert line.root_s == pytest.approx(pipelining * filling)
    assert len(nccl_lines("all_gather", group(1, 8), SWITCH)) == 1
    # Two devices send each other everything: the switch has nothing to spare.
    assert len(nccl_lines("all_reduce", group(1, 2), SWITCH)) == 1


def test_other_collectives_go_around_the_ring() -> None:
    _, line, _ = nccl_lines("all_gather", group(2, 8), LINKS)
    assert line.alpha_s == pytest.approx(START_S + 14e-6 + 7e-6)
    assert line.beta_s_per_byte == pytest.approx(2 * 15 / 16 / 20e9)


def test_between_nodes_a_ring_has_three_protocols() -> None:
    simple, low_latency, low_latency_128 = nccl_lines("all_gather", group(2, 8), LINKS)
    # 14 hops in nodes and 1 between. NCCL's table, µs: starts 8.4, 6.6 and 14; hops 3.4, 0.6 and
    # 1.9 over NVLink, 14, 2.7 and 4 over the network; LL is as the links say.
    least_s = START_S + 14e-6 + 7e-6
    assert low_latency.alpha_s == pytest.approx(least_s)
    assert low_latency_128.alpha_s == pytest.approx(least_s + (7.4 + 14 * 1.3 + 1.3) * 1e-6)
    assert simple.alpha_s == pytest.approx(least_s + (1.8 + 14 * 2.8 + 11.3) * 1e-6)
    assert low_latency.beta_s_per_byte == pytest.approx(15 / 16 * 2 / 20e9)
    fast = replace(group(2, 8), bytes_per_s=200e9)
    assert nccl_lines("all_gather", fast, LINKS)[1].beta_s_per_byte == pytest.approx(
        15 / 16 / 22.5e9
    )
    # Of 128 bytes 8 are flags, of 8 bytes 4; only whole chunks wait at each hop.
    assert low_latency_128.beta_s_per_byte == pytest.approx(15 / 16 * 128 / 120 / 20e9)
    assert low_latency_128.root_s == low_latency.root_s == 0
    assert simple.beta_s_per_byte == pytest.approx(15 / 16 / 20e9)
    assert simple.root_s == pytest.approx(2 * math.sqrt(simple.alpha_s * simple.beta_s_per_byte))


def test_a_network_that_reorders_bytes_leaves_a_ring_only_whole_chunks() -> None:
    simple, *_ = nccl_lines("all_gather", group(2, 8), LINKS)
    reordering = LINKS._replace(keeps_order=False)
    assert nccl_lines("all_gather", group(2, 8), reordering) == (simple,)
    # Inside one node there is no network.
    one = group(1, 8)
    assert nccl_lines("all_gather", one, reordering) == nccl_lines("all_gather", one, LINKS)


def test_without_nvlink_in_its_nodes_a_ring_has_no_ll128() -> None:
    simple, low_latency, _ = nccl_lines("all_gather", group(2, 8), LINKS)
    over_pcie = LINKS._replace(over_nvlink=False)
    assert nccl_lines("all_gather", group(2, 8), over_pcie) == (simple, low_latency)


def test_rings_over_sockets_lose_nothing_to_their_hops() -> None:
    # Perlmutter over sockets, estimate-train-time, all-reduce: µs of 2 to 8 nodes of one GPU.
    over_sockets = LINKS._replace(over_sockets=True)
    ring = algorithms_of("all_reduce")[:1]
    for nodes, log in {
        2: {41943040: 33770, 2074435456: 1766173},
        4: {268435456: 332610, 2399635456: 3025499},
        8: {268435456: 408320, 2399635456: 3598228},
    }.items():
        along = replace(group(nodes, 1), bytes_per_s=1.19e9, latency_s=25e-6)
        lines = nccl_lines("all_reduce", along, over_sockets, algorithms=ring)
        for size, time_us in log.items():
            found_s = min(seconds(line, size) for line in lines)
            assert found_s * 1e6 == pytest.approx(time_us, rel=0.05)
    assert network_traits(load_profile("t4-g4dn"))["over_sockets"]
    assert not network_traits(load_profile("dgx-a100"))["over_sockets"]


def test_a_rack_of_blackwell_all_reduces_at_what_was_measured() -> None:
    # coreweave/nccl-tests, pull request 43: 72 GB200 in one NVLink domain, bus bandwidth in GB/s.
    group = whole_group(place("1x72:gb200-nvl72"))
    model = GroupCollective.of(load_profile("gb200-nvl72"), "all_reduce", group)
    for power, bus in ((29, 582e9), (30, 703e9), (31, 766e9), (32, 841e9), (33, 841e9)):
        size = 1 << power
        assert 2 * 71 / 72 * size / model.time_s(size) == pytest.approx(bus, rel=0.1)


@pytest.mark.parametrize(
    ("name", "op", "log"),
    [
        ("h100-sxm", "all_gather", {10: 10.2, 20: 17.0, 22: 33.4, 24: 69, 26: 208, 29: 1402}),
        ("h100-sxm", "reduce_scatter", {10: 10.2, 22: 29.8, 23: 44, 24: 70, 26: 201, 29: 1399}),
        ("h100-sxm", "all_reduce", {10: 15.6, 20: 25, 21: 38, 22: 50, 23: 79, 26: 325, 29: 2111}),
        ("b200", "all_reduce", {10: 25, 18: 28, 20: 30, 22: 53, 23: 72, 26: 278, 29: 1335}),
    ],
)
def test_eight_gpus_on_a_switch_take_what_was_published(
    name: str, op: CollectiveName, log: dict[int, float]
) -> None:
    # aiconfigurator, NCCL 2.29.2, fp16, 8 GPUs: µs by the logarithm of bytes.
    model = GroupCollective.of(load_profile(name), op, whole_group(place(f"1x8:{name}")))
    for power, time_us in log.items():
        assert model.time_s(1 << power) * 1e6 == pytest.approx(time_us, rel=0.3)


def test_efa_keeps_the_order_of_bytes_since_p5() -> None:
    for name, keeps in (("a100-p4d", False), ("h100-p5", True), ("dgx-a100", True)):
        assert keeps_order(load_profile(name)) is keeps


def test_published_logs_of_two_nodes_are_met_without_a_fit() -> None:
    # nccl-tests, float all-reduce, µs. 2 DGX A100: NVIDIA/deepops, nvidia-network-operator.md.
    # 2 p4d.24xlarge: aws-samples/aws-efa-eks, README.md. NCCL of 2020 goes around the ring.
    logs = {
        "dgx-a100": {20: 120.1, 22: 165.8, 24: 301.9, 26: 918.0},
        "a100-p4d": {20: 485.3, 22: 803.5, 24: 1875.1, 26: 5305.9},
    }
    for name, log in logs.items():
        profile = load_profile(name)
        ring = whole_group(place(f"2x8:{name}", profile=profile))
        link = widest_link(profile, 8)
        links = links_over(profile, link)
        lines = nccl_lines("all_reduce", ring, links, algorithms=algorithms_of("all_reduce")[:1])
        for power, time_us in log.items():
            found_s = min(seconds(line, 1 << power) for line in lines)
            assert found_s * 1e6 == pytest.approx(time_us, rel=0.25)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
def test_rows_of_groups_cost_what_each_of_them_does(op: str) -> None:
    groups = [group(1, 8), group(1, 2), group(2, 8), group(64, 4), group(3, 1)]
    names = ("ranks", "nodes", "per_node", "bytes_per_s", "latency_s")
    rows = ProcessGroup(**{name: np.array([getattr(g, name) for g in groups]) for name in names})
    reduces = np.array([True, True, False, True, False])
    keeps = np.array([True, False, True, False, True])
    switch = SWITCH._replace(reduces=reduces, keeps_order=keeps)
    found = nccl_lines(op, rows, switch)  # type: ignore[arg-type]
    for number, each in enumerate(groups):
        flags = {"reduces": bool(reduces[number]), "keeps_order": bool(keeps[number])}
        own = SWITCH._replace(**flags)
        alone = nccl_lines(op, each, own)  # type: ignore[arg-type]
        for size in (1e3, 1e6, 1e9):
            together = min(
                seconds(Line(*(np.broadcast_to(term, 5)[number] for term in line)), size)
                for line in found
            )
            assert together == pytest.approx(min(seconds(line, size) for line in alone))


def test_a_collective_without_an_algorithm_of_its_own_goes_around_its_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # To one rank of n: n - 1 hops, and n - 1 of n parts enter it.
    monkeypatch.setitem(RING_ROUNDS, "gather", lambda n: n - 1)
    monkeypatch.setitem(RING_SHARE, "gather", lambda n: (n - 1) / n)
    reordering = LINKS._replace(keeps_order=False)
    (line,) = nccl_lines("gather", group(2, 4), reordering)  # type: ignore[arg-type]
    # Eight ranks on two nodes: six hops inside nodes and one between them.
    assert line.alpha_s == pytest.approx(START_S + (1.8 + 6 * 3.8 + 18.3) * 1e-6)
    assert line.beta_s_per_byte == pytest.approx(7 / 8 / 20e9)
    start_s = START_S + 3 * USUAL_HOP_S
    assert hop_latency_s("gather", 4, start_s) == pytest.approx(USUAL_HOP_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "gigabytes_per_s"), [(8, 546), (16, 523), (32, 484)])
def test_tokens_go_to_ranks_of_a_rack_at_published_rates(ranks: int, gigabytes_per_s: int) -> None:
    # HybridEP on GB200: 4096 tokens of 7168 in bf16, 8 experts each, of all ranks' experts at
    # random; its rates count what a rank gets, its own tokens too (docs/README_Hybrid-EP.md).
    profile = load_profile("gb200-nvl72")
    links = links_over(profile, widest_link(profile, ranks))
    (line,) = nccl_lines("all_to_all", group(1, ranks), links, algorithms=(expert_dispatch(8),))
    copied = 4096 * 8 * 7168 * 2
    got = copied / 8 * ranks * (1 - (1 - 1 / ranks) ** 8)
    assert got / seconds(line, copied) == pytest.approx(gigabytes_per_s * 1e9, rel=0.1)


def test_a_token_crosses_the_network_once_for_each_node() -> None:
    algorithm = expert_dispatch(8)
    inside, across = algorithm.share(group(2, 8))
    # Of 2 nodes a token's 8 experts are on 2 (1 - 2^-8), half of which are its own.
    assert across == pytest.approx(8 * (1 - 2**-8) / 8)
    assert inside == pytest.approx(16 * (1 - (15 / 16) ** 8) * 7 / 8 / 8)


def test_megatron_s_recipes_keep_sums_out_of_the_switch() -> None:
    # 8 H100 at about 330 GB/s without NVLS, 475 with it (NVIDIA/nccl, issue 1221).
    profile, size = load_profile("dgx-h100"), 8 << 30
    links = links_over(profile, widest_link(profile, 8))
    for in_switch, gigabytes_per_s in ((False, 330), (True, 475)):
        algorithms = algorithms_of("all_reduce", in_switch=in_switch)
        lines = nccl_lines("all_reduce", group(1, 8), links, algorithms=algorithms)
        fastest_s = min(seconds(line, size) for line in lines)
        assert 1.75 * size / fastest_s == pytest.approx(gigabytes_per_s * 1e9, rel=0.05)
