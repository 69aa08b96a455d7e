"""Tables of estimates: every row equals the estimate of its allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from estimator.errors import AllocationError
from estimator.profile import (
    CollectiveCost,
    Link,
    MachineProfile,
    PairMatrix,
)
from estimator.tables import EstimateTable, estimate_many
from estimator.topology import Cluster, Node, Switch
from tests.synthetic import CHOSEN, Machine, perceptron

HOSTS = tuple(f"a{number}" for number in range(1, 8))


def collective(op: Any, ranks: int, nodes: int, rate: float, latency_s: float) -> CollectiveCost:
    """A measured group; times bend a little, so that corrections depend on the size."""
    return CollectiveCost(
        op=op,
        backend="gloo",
        group_size=ranks,
        nodes=nodes,
        points=tuple(
            (4.0**k, (latency_s + 4.0**k / rate) * (1 + 0.1 * (k % 3))) for k in range(5, 14)
        ),
        latency_s=latency_s,
        bandwidth_bytes_per_s=rate,
        provenance=replace(CHOSEN, relative_error=0.02 * ranks),
    )


def machine(name: str, shape: Machine, rate: float, *groups: tuple[int, int]) -> MachineProfile:
    """A machine on a network of a given rate, with collectives measured on some groups."""
    profile = replace(shape.profile(), name=name)
    measured = [
        collective(op, ranks, nodes, rate / (1 + nodes / 10), 1e-5 * nodes)
        for op in ("all_reduce", "broadcast")
        for ranks, nodes in groups
    ]
    return replace(
        profile,
        network=(
            Link(
                kind="tcp",
                reach="rack",
                latency_s=1e-4 + 1e4 / rate * 1e-6,
                bandwidth_bytes_per_s=rate,
                provenance=CHOSEN,
            ),
            Link(
                kind="tcp",
                reach="cluster",
                latency_s=3e-4,
                bandwidth_bytes_per_s=rate / 2,
                provenance=CHOSEN,
            ),
        ),
        collectives=profile.collectives + tuple(measured),
        host=replace(profile.host, provenance=replace(CHOSEN, relative_error=0.07)),
    )


def machines() -> dict[str, MachineProfile]:
    """Machines that differ in everything that a step depends on."""
    slow = machine("slow", Machine(devices=4, rank_spread_ratio=0.03), 1e8, (4, 2), (8, 4))
    fast = machine(
        "fast",
        Machine(
            devices=8,
            flops_per_s=3e11,
            memory_bytes_per_s=6e10,
            memory_contention=1.7,
            exposed_ratio=0.2,
            bandwidth_bytes_per_s=1e10,
        ),
        1.25e9,
        (16, 2),
    )
    # Collectives that compute cannot overlap with at all, measured over the network only.
    jammed = machine(
        "jammed", Machine(devices=2, exposed_ratio=3.0, slowdown_ratio=1.0), 1.25e9, (4, 4)
    )
    jammed = replace(
        jammed,
        overlaps=tuple(replace(item, nodes=2) for item in jammed.overlaps),
        pairs=PairMatrix(
            hosts=("a6", "a7", "a1"),
            latency_s=((None, 1e-4, 1e-4), (1e-4, None, 1e-4), (1e-4, 1e-4, None)),
            bandwidth_bytes_per_s=((None, 3e7, 9e8), (4e8, None, 2e7), (1e9, 5e7, None)),
            provenance=CHOSEN,
        ),
    )
    # Nothing measured of collectives over nodes, nor of overlap; small memory.
    bare = machine("bare", Machine(devices=3, flops_per_s=2e10), 5e8)
    tiny = tuple(replace(device, memory_bytes=3 << 20) for device in bare.devices)
    bare = replace(bare, overlaps=(), devices=tiny, rank_spread_ratio=None)
    return {each.name: each for each in (slow, fast, jammed, bare)}


CLUSTER = Cluster(
    nodes={
        "a1": Node(machine="fast", switch="r1", uplink_bytes_per_s=1e9),
        "a2": Node(machine="slow", switch="r1"),
        "a3": Node(machine="slow", switch="r2", slowdown_ratio=1.6),
        "a4": Node(machine="fast", switch="r2", slowdown_ratio=0.9),
        "a5": Node(machine="slow", switch="r3", uplink_bytes_per_s=5e7),
        "a6": Node(machine="jammed", switch="r3"),
        "a7": Node(machine="jammed"),
    },
    switches={
        "spine": Switch(),
        "half": Switch(parent="spine", uplink_bytes_per_s=8e7),
        "r1": Switch(parent="half", uplink_bytes_per_s=2e8),
        "r2": Switch(parent="half", uplink_bytes_per_s=1.5e8),
        "r3": Switch(parent="spine"),
    },
)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("home")
    for name, profile in machines().items():
        profile.save(home / "machines" / f"{name}.json")
    before = os.environ.get("ESTIMATOR_HOME")
    os.environ["ESTIMATOR_HOME"] = str(home)
    yield
    if before is None:
        del os.environ["ESTIMATOR_HOME"]
    else:
        os.environ["ESTIMATOR_HOME"] = before


def assert_equal(table: EstimateTable, **options: Any) -> None:
    """Each row of the table against the scalar estimate of its allocation."""
    for row in range(len(table)):
        scalar = table.row(row)
        step = scalar.step_time_s

        def close(name: str, value: float, row: int = row, step: float = step) -> None:
            found = float(getattr(table, name)[row])
            assert found == pytest.approx(value, rel=1e-9, abs=1e-9 * step), (name, row)

        for name in ("step_time_s", "low_s", "high_s"):
            assert getattr(table, name)[row] == pytest.approx(getattr(scalar, name), rel=1e-9)
        for part in (
            "forward_s",
            "backward_s",
            "host_exposed_s",
            "communication_exposed_s",
            "straggler_s",
            "update_s",
            "copies_exposed_s",
            "idle_s",
        ):
            close(part, getattr(scalar.breakdown, part))
        assert table.samples_per_s[row] == pytest.approx(scalar.samples_per_s, rel=1e-9)
        assert table.mfu_ratio[row] == pytest.approx(
            scalar.mfu_ratio or math.nan, rel=1e-9, nan_ok=True
        )
        assert table.peak_memory_bytes[row] == scalar.peak_memory_bytes
        assert table.fits[row] == scalar.fits
        assert (table.ranks[row], table.nodes[row]) == (scalar.ranks, scalar.plan.ring.nodes)
        assert table.batch_per_gpu[row] == scalar.batch_per_gpu
        assert table.global_batch[row] == scalar.global_batch
        assert scalar.bottleneck.startswith(BOTTLENECK_TEXTS[table.bottleneck[row]])


BOTTLENECK_TEXTS = {
    "compute": "computing",
    "host": "issuing",
    "communication": "merging",
    "update": "the optimizer",
    "stragglers": "waiting",
}
DEVICES = {"slow": 4, "fast": 8, "jammed": 2, "bare": 3}
widths = some.lists(some.sampled_from([32, 96, 256, 1000]), min_size=2, max_size=6)
graphs = some.builds(
    lambda widths, buffers: replace(perceptron(widths, batch=8), buffer_bytes=buffers),
    widths,
    some.sampled_from([0, 4096, 1 << 20]),
)
strategies = some.sampled_from(
    ["ddp", "ddp:unbucketed", "ddp:bucket=1MiB", "ddp:view", "ddp:bucket=64KiB,first=4KiB,view"]
)
counted = some.sampled_from(sorted(DEVICES)).flatmap(
    lambda name: some.builds(
        lambda nodes, devices: f"{nodes}x{devices}:{name}",
        some.integers(1, 40),
        some.integers(1, DEVICES[name]),
    )
)
rows = some.lists(counted, min_size=1, max_size=5).map("+".join)
cluster_groups = some.one_of(
    some.builds(
        lambda host, devices: f"{host}[{','.join(map(str, sorted(devices)))}]",
        some.sampled_from(HOSTS),
        some.sets(some.integers(0, 3), min_size=1, max_size=3),
    ),
    some.sampled_from(["1x1:slow", "1x4:slow", "2x3:slow", "1x2:fast", "2x8:fast", "2x1:jammed"]),
)
cluster_rows = some.lists(cluster_groups, min_size=1, max_size=6).map("+".join)


def placeable(text: str) -> bool:
    from estimator.placement import place

    try:
        place(text, cluster=CLUSTER)
    except AllocationError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    graphs,
    some.lists(rows, min_size=1, max_size=12),
    strategies,
    some.integers(1, 3),
    some.lists(some.sampled_from([1, 3, 8, 64]), min_size=12, max_size=12),
)
def test_every_row_equals_the_estimate_of_its_allocation(
    graph: Any, texts: list[str], strategy: str, accumulation_steps: int, batches: list[int]
) -> None:
    table = estimate_many(
        graph,
        texts,
        batch_per_gpu=np.array(batches[: len(texts)]),
        strategy=strategy,
        accumulation_steps=accumulation_steps,
    )
    assert_equal(table)


@settings(max_examples=60, deadline=None)
@given(graphs, some.lists(cluster_rows.filter(placeable), min_size=1, max_size=8), strategies)
def test_every_row_on_a_cluster_equals_the_estimate_of_its_allocation(
    graph: Any, texts: list[str], strategy: str
) -> None:
    assert_equal(estimate_many(graph, texts, strategy=strategy, cluster=CLUSTER))
