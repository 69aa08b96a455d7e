"""NCCL's collectives cost a start, a hop per round, bytes over links, and a pipeline's filling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from estimator.placement.process_groups import ProcessGroup
from estimator.timeline.inner_links import START_S, InnerLinks
from estimator.timeline.lines import Line
from estimator.timeline.nccl import (
    _TREE,
    IN_SWITCH_RATIO,
    TREE_RATIO,
    USUAL_HOP_S,
    Shape,
    hop_latency_s,
    nccl_lines,
)
from estimator.timeline.rings import RING_ROUNDS, RING_SHARE

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
    ring, tree = nccl_lines("all_reduce", group(2, 8), LINKS)
    # The ring, twice: 14 hops in nodes, 1 between; 2 · 15/16 of the buffer over the network.
    assert ring.alpha_s == pytest.approx(START_S + 28e-6 + 2 * 7e-6)
    assert ring.beta_s_per_byte == pytest.approx(2 * 15 / 16 / 20e9)
    # Two trees over two nodes: each node sends half of the buffer up one and down the other.
    assert tree.alpha_s == pytest.approx(START_S + 14e-6 + 2 * 7e-6)
    assert tree.beta_s_per_byte == pytest.approx(1.0 / (20e9 * TREE_RATIO))


def test_across_many_nodes_the_tree_waits_for_a_logarithm_of_hops() -> None:
    # 64 nodes of 8: up and down 7 hops in a node and 6 between nodes; the ring takes 126 between.
    rounds = _TREE.rounds(Shape(512, 64, 8))
    assert rounds == (14, 12)
    ring, tree = nccl_lines("all_reduce", group(64, 8), LINKS)
    assert tree.alpha_s < 0.2 * ring.alpha_s


def test_a_switch_that_adds_spares_every_device_most_of_its_receiving() -> None:
    ring, in_switch = nccl_lines("all_reduce", group(1, 8), SWITCH)
    assert in_switch.beta_s_per_byte == pytest.approx(9 / 8 / (200e9 * IN_SWITCH_RATIO))
    assert in_switch.beta_s_per_byte < ring.beta_s_per_byte
    assert len(nccl_lines("all_gather", group(1, 8), SWITCH)) == 1
    # Two devices send each other everything: the switch has nothing to spare.
    assert len(nccl_lines("all_reduce", group(1, 2), SWITCH)) == 1


def test_other_collectives_go_around_the_ring() -> None:
    (line,) = nccl_lines("all_gather", group(2, 8), LINKS)
    assert line.alpha_s == pytest.approx(START_S + 14e-6 + 7e-6)
    assert line.beta_s_per_byte == pytest.approx(15 / 16 / 20e9)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
def test_rows_of_groups_cost_what_each_of_them_does(op: str) -> None:
    groups = [group(1, 8), group(1, 2), group(2, 8), group(64, 4), group(3, 1)]
    names = ("ranks", "nodes", "per_node", "bytes_per_s", "latency_s")
    rows = ProcessGroup(**{name: np.array([getattr(g, name) for g in groups]) for name in names})
    switch = SWITCH._replace(reduces=np.array([True, True, False, True, False]))
    found = nccl_lines(op, rows, switch)  # type: ignore[arg-type]
    for number, each in enumerate(groups):
        own = SWITCH._replace(reduces=bool(switch.reduces[number]))
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
    (line,) = nccl_lines("gather", group(2, 4), LINKS)  # type: ignore[arg-type]
    # Eight ranks on two nodes: six hops inside nodes and one between them.
    assert line.alpha_s == pytest.approx(START_S + 6 * 1e-6 + 7e-6)
    assert line.beta_s_per_byte == pytest.approx(7 / 8 / 20e9)
    start_s = START_S + 3 * USUAL_HOP_S
    assert hop_latency_s("gather", 4, start_s) == pytest.approx(USUAL_HOP_S)  # type: ignore[arg-type]
