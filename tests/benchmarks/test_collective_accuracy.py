"""The benchmark of collectives learns from the groups that its split allows, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from collective_accuracy import cases_of, teaches
from collective_systems import (
    TIMES_CALLS,
    Asked,
    Group,
    asked_of,
    cases_of_systems,
    read_groups,
)

from estimator.machines.profile import CollectiveName

GIB = 1 << 30
GROUP = Group("s", "cluster", "all_reduce", "fp16", 2, 4, {GIB: 0.1, 2 * GIB: 0.2, 4 * GIB: 0.4})


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
    assert case["size_bytes"] == 2 * GIB
    # A line through what was kept: 2 × 0.1 s; what NCCL takes to start is nothing beside that.
    assert case["predicted_s"] == pytest.approx(0.2, rel=1e-3)


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


def test_a_system_is_judged_by_a_fit_to_the_others() -> None:
    # Two systems whose times are what the formula says with k = 1 and with k = 2.
    shape = ("vTrain", "1x 8-GPU A100 node"), ("aiconfigurator", "a100_sxm")
    sizes = (1 << 20, 1 << 24, 1 << 26)
    groups = []
    for (source, system), pipelining in zip(shape, (1.0, 2.0), strict=True):
        blank = Group(source, system, "all_reduce", "fp16", 1, 8, dict.fromkeys(sizes, 1.0))
        (asked,) = asked_of([blank])
        times = asked.seconds(pipelining).tolist()
        groups.append(replace(blank, points=dict(zip(sizes, times, strict=True))))
    found = {case["system"]: case["pipelining"] for case in cases_of_systems(groups)}
    assert found == {"1x 8-GPU A100 node": pytest.approx(2.0), "a100_sxm": pytest.approx(1.0)}


def asked_a2(op: CollectiveName, *known: Group) -> Asked:
    """16 MiB over four A100 of the profiler that times calls, beside what else is known."""
    target = Group(TIMES_CALLS, "GCP a2 (A100-40GB)", op, "fp16", 1, 4, {16 << 20: 1e-3})
    (asked,) = asked_of([target, *known])
    return asked


def test_a_timed_call_has_the_hosts_work_as_another_system_shows_it() -> None:
    # Two other devices take 100 µs and 1 µs per MB. A start is 7.9 µs, a hop 1.05: two and one.
    points = {size: 100e-6 + size * 1e-12 for size in (1 << 20, 4 << 20, 16 << 20)}
    kernels_us: dict[CollectiveName, float] = {"all_reduce": 10.0, "all_gather": 8.95}
    for op, kernel_us in kernels_us.items():
        other = Group(TIMES_CALLS, "other", op, "fp16", 1, 2, points)
        assert asked_a2(op, other).call_s * 1e6 == pytest.approx(100 - kernel_us)
        assert asked_a2(op).call_s == 0.0


def test_a_timed_call_copies_its_lists() -> None:
    # Read and written at 0.8 of 1555 GB/s.
    gathered = asked_a2("all_gather")
    kernel_s = float(replace(gathered, copy_s_per_byte=0.0).seconds(1.0)[0])
    assert float(gathered.seconds(1.0)[0]) - kernel_s == pytest.approx(2 * (16 << 20) / 1244e9)
    assert asked_a2("all_reduce").copy_s_per_byte == 0.0
