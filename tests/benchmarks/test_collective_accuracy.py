"""The benchmark of collectives learns from the groups that its split allows, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from collective_accuracy import cases_of, teaches
from collective_groups import Group, read_groups

GROUP = Group("s", "cluster", "all_reduce", "fp16", 2, 4, {1024: 1e-4, 2048: 2e-4, 4096: 4e-4})


def test_the_names_of_one_cluster_are_joined(tmp_path: Path) -> None:
    header = "source,system,collective,dtype,nodes,ranks,size_bytes,time_us"
    rows = [
        "e,1 node x 2 GPU Perlmutter,all_reduce,fp16,1,2,1024,10",
        "e,8 node x 1 GPU Perlmutter,all_reduce,fp16,8,8,1024,50",
        "e,2 node x 1 GPU Perlmutter,send_recv,fp16,2,2,1024,50",
    ]
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([header, *rows]))
    groups = read_groups(path)
    assert {group.system for group in groups} == {"Perlmutter"}
    assert [group.points for group in groups] == [
        {1024: pytest.approx(10e-6)},
        {1024: pytest.approx(50e-6)},
    ]


def test_sizes_are_predicted_from_every_other_size() -> None:
    (case,) = cases_of("sizes", [GROUP])
    assert case["size_bytes"] == 2048
    # A line through what was kept: 2 × 0.1 ms.
    assert case["predicted_s"] == pytest.approx(2e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("split", "nodes", "ranks", "allowed"),
    [
        ("devices", 2, 2, True),
        ("devices", 2, 4, False),
        ("devices", 1, 1, False),
        ("nodes", 2, 4, False),
        ("nodes", 1, 2, False),
    ],
)
def test_a_split_learns_from_smaller_groups_only(
    split: str, nodes: int, ranks: int, allowed: bool
) -> None:
    assert teaches(split, replace(GROUP, nodes=nodes, ranks=ranks), GROUP) is allowed


def test_more_nodes_are_predicted_from_fewer_that_crossed_the_network() -> None:
    assert teaches("nodes", GROUP, replace(GROUP, nodes=4, ranks=8))
    assert not teaches("nodes", replace(GROUP, dtype="fp32"), replace(GROUP, nodes=4, ranks=8))
