"""Tables of estimates: every row equals the estimate of its allocation."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

import estimator as est
from estimator.api import estimate
from estimator.coefficients import Calibration, Coefficients, StepPredictor, StepQuestion
from estimator.errors import (
    AllocationError,
    ProfileError,
    RowError,
    StrategyError,
    UnknownMachineError,
    WorkloadError,
)
from estimator.estimates import engine
from estimator.estimates.estimate import Breakdown
from estimator.estimates.table import COLUMNS, EstimateTable, estimate_chunks, estimate_many
from estimator.estimates.table.answers import RowAnswers
from estimator.estimates.table.request import TableRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import CollectiveCost, MachineProfile, PairMatrix
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch
from estimator.timeline.rank import program
from tests.budgets import examples
from tests.synthetic import CHOSEN, Machine, in_blocks, on_gpus, perceptron

HOSTS = tuple(f"a{number}" for number in range(1, 10))


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
        for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
        for ranks, nodes in groups
    ]
    measured += [
        collective(op, 2, 1, 2 * shape.bandwidth_bytes_per_s, shape.latency_s)
        for op in ("all_gather", "reduce_scatter")
    ]
    (rack,) = profile.network
    rack = replace(rack, latency_s=1e-4 + 1e4 / rate * 1e-6, bandwidth_bytes_per_s=rate)
    cluster = replace(rack, locality="cluster", latency_s=3e-4, bandwidth_bytes_per_s=rate / 2)
    return replace(
        profile,
        network=(rack, cluster),
        collectives=profile.collectives + tuple(measured),
        host=replace(profile.host, provenance=replace(CHOSEN, relative_error=0.07)),
    )


def machines() -> dict[str, MachineProfile]:
    """Machines that differ in everything that a step depends on."""
    slow = machine("slow", Machine(devices=4, rank_jitter_ratio=0.03), 1e8, (4, 2), (8, 4))
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
    bare = replace(bare, overlaps=(), devices=tiny, rank_jitter_ratio=None)
    # Neither a network nor collectives but those of a ring within the node.
    lone = replace(Machine(devices=2).profile(), name="lone", network=())
    # Known by its datasheet to have several network cards, each near one or two devices.
    railed = machine("railed", Machine(devices=6), 1e9, (6, 2))
    datasheet = tuple(
        replace(link, provenance=replace(CHOSEN, source="datasheet")) for link in railed.network
    )
    cards = {"nic_count": 4, "nic_bit_per_s": 2_000_000_000}
    railed = replace(railed, network=datasheet, hardware=cards)
    cpus = (slow, fast, jammed, bare, lone, railed)
    gpus = (replace(on_gpus(each), name=f"{each.name}-gpu") for each in cpus)
    return {each.name: each for each in (*cpus, *gpus)}


CLUSTER = Cluster(
    nodes={
        "a1": Node(machine="fast", switch="r1", uplink_bytes_per_s=1e9),
        "a2": Node(machine="slow", switch="r1"),
        "a3": Node(machine="slow", switch="r2", slowdown_ratio=1.6),
        "a4": Node(machine="fast", switch="r2", slowdown_ratio=0.9),
        "a5": Node(machine="slow", switch="r3", uplink_bytes_per_s=5e7),
        "a6": Node(machine="jammed", switch="r3"),
        "a7": Node(machine="jammed"),
        "a8": Node(machine="railed", switch="r3", uplink_bytes_per_s=7e8),
        "a9": Node(machine="railed"),
    },
    switches={
        "spine": Switch(),
        "half": Switch(parent="spine", uplink_bytes_per_s=8e7),
        "r1": Switch(parent="half", uplink_bytes_per_s=2e8),
        "r2": Switch(parent="half", uplink_bytes_per_s=1.5e8),
        "r3": Switch(parent="spine"),
    },
)
GPU_CLUSTER = replace(
    CLUSTER,
    nodes={
        name: replace(node, machine=f"{node.machine}-gpu") for name, node in CLUSTER.nodes.items()
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


def assert_equal(table: EstimateTable) -> None:
    """Each row of the table against the scalar estimate of its allocation."""
    for row in range(len(table)):
        scalar = table.row(row)
        for name in ("step_time_s", "low_s", "high_s", "samples_per_s"):
            expected = pytest.approx(getattr(scalar, name), rel=1e-9)
            assert getattr(table, name)[row] == expected, (name, row)
        for name in ("mfu_ratio", "hfu_ratio"):
            expected = pytest.approx(getattr(scalar, name) or math.nan, rel=1e-9, nan_ok=True)
            assert getattr(table, name)[row] == expected, (name, row)
        for part in PARTS:
            value, least = getattr(scalar.breakdown, part), 1e-9 * scalar.step_time_s
            expected = pytest.approx(value, rel=1e-9, abs=least)
            assert getattr(table, part)[row] == expected, (part, row)
        assert table.peak_memory_bytes[row] == scalar.peak_memory_bytes
        assert table.fits[row] == scalar.fits
        assert (table.ranks[row], table.nodes[row]) == (scalar.ranks, scalar.plan.group.nodes)
        assert table.batch_per_gpu[row] == (scalar.batch_per_gpu or 0)
        assert table.global_batch[row] == scalar.global_batch
        assert scalar.bottleneck.startswith(BOTTLENECK_TEXTS[table.bottleneck[row]])


PARTS = [name for name in COLUMNS if name in Breakdown.__slots__]
BOTTLENECK_TEXTS = {
    "compute": "computing",
    "host": "issuing",
    "communication": ("reducing", "gathering", "sending"),
    "update": "the optimizer",
    "stragglers": "waiting",
}
DEVICES = {"slow": 4, "fast": 8, "jammed": 2, "bare": 3, "railed": 6}


widths = some.lists(some.sampled_from([32, 96, 256, 1000]), min_size=2, max_size=6)
graphs = some.builds(
    lambda widths, buffers, target, optimizer, clips: replace(
        in_blocks(perceptron(widths, batch=8)),
        buffer_bytes=buffers,
        target=target,
        optimizer=optimizer,
        clip_grad_norm=clips,
    ),
    widths,
    some.sampled_from([0, 4096, 1 << 20]),
    some.sampled_from(["cpu", "cuda"]),
    some.sampled_from(["adamw", "adamw-fused", "adamw-8bit", "lamb"]),
    some.booleans(),
)
STRATEGIES = """
ddp ddp:unbucketed ddp:view ddp:bucket=64KiB,first=4KiB,view zero1:bucket=1MiB zero2:bucket=256KiB
ddp:bucket=64KiB,reduce=bf16 distributed-optimizer:bucket=1MiB
distributed-optimizer:reduce=bf16,unbucketed fsdp fsdp:no_sync ps:2,bucket=64KiB
ps:3,async,link=2Gbit/s ps:beside,local,sum ps:2,beside,part=64KiB local-sgd:every=3
"""
strategies = some.sampled_from(STRATEGIES.split())
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
    some.sampled_from(
        ["1x1:slow", "1x4:slow", "2x3:slow", "1x2:fast", "2x8:fast", "2x1:jammed", "1x5:railed"]
    ),
)
cluster_rows = some.lists(cluster_groups, min_size=1, max_size=6).map("+".join)


def of_kind(text: str, graph: OpGraph) -> str:
    """The same allocation of machines that the graph was traced for."""
    return re.sub(r":([a-z]+)", r":\1-gpu", text) if graph.target == "cuda" else text


def placeable(text: str) -> bool:
    try:
        place(text, cluster=CLUSTER)
    except AllocationError:
        return False
    return True


class CoefficientsByRanks:
    """A calibration whose factors depend on what is asked."""

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: StepPredictor,
    ) -> list[Coefficients]:
        return [self.of(*each) for each in zip(questions, allocations, strict=True)]

    def of(self, question: StepQuestion, allocation: Allocation) -> Coefficients:
        ranks = question.ranks
        assert ranks == allocation.ranks
        return Coefficients(
            compute_ratio=1 + question.batch / 64,
            update_ratio=1 + 1 / question.most_on_node,
            communication_ratio=0.5 + ranks % 3,
            relative_error=0.2 if ranks % 2 else None,
        )


allocations = some.one_of(
    some.tuples(some.lists(rows, min_size=1, max_size=8), some.just(False)),
    some.tuples(
        some.lists(cluster_rows.filter(placeable), min_size=1, max_size=8), some.just(True)
    ),
)


def asked_of(graph: OpGraph, texts: Sequence[str], in_cluster: bool) -> tuple[list[str], Any]:
    """The allocations on machines of the graph's kind, and the cluster that they are of."""
    cluster = GPU_CLUSTER if graph.target == "cuda" else CLUSTER
    return [of_kind(text, graph) for text in texts], cluster if in_cluster else None


@settings(max_examples=examples(50), deadline=None)
@given(
    graphs,
    allocations,
    strategies,
    some.integers(1, 3),
    some.lists(some.sampled_from([1, 3, 8, 64]), min_size=8, max_size=8),
    some.sampled_from([None, CoefficientsByRanks()]),
)
def test_every_row_equals_the_estimate_of_its_allocation(
    graph: OpGraph,
    where: tuple[list[str], bool],
    strategy: str,
    accumulation_steps: int,
    batches: list[int],
    calibration: Calibration | None,
) -> None:
    texts, cluster = asked_of(graph, *where)
    table = estimate_many(
        graph,
        texts,
        batch_per_gpu=np.array(batches[: len(texts)]),
        strategy=strategy,
        accumulation_steps=accumulation_steps,
        cluster=cluster,
        calibration=calibration,
    )
    assert_equal(table)


class CoefficientsOfWorkloads:
    """A calibration that has learnt the compute of some workloads by name."""

    def __init__(self, **compute_ratios: float) -> None:
        self.compute_ratios = compute_ratios

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: StepPredictor,
    ) -> list[Coefficients]:
        ratios = [self.compute_ratios[question.workload] for question in questions]
        return [Coefficients(compute_ratio=ratio) for ratio in ratios]


def test_a_job_in_another_precision_has_its_own_corrections_in_a_table_too() -> None:
    learnt = CoefficientsOfWorkloads(**{"perceptron": 3.0, "perceptron, bf16": 5.0})
    for precision, ratio in (("fp32", 3.0), ("bf16", 5.0)):
        graph = replace(PLAIN, precision=precision)
        cold, table = (
            estimate_many(graph, ["1x1:slow", "2x4:slow"], calibration=calibration)
            for calibration in (None, learnt)
        )
        assert table.forward_s == pytest.approx(ratio * cold.forward_s, rel=1e-9), precision
        assert_equal(table)


def divided_by(shard: int, text: str) -> bool:
    return Allocation.parse(text).ranks % shard == 0


hybrid = some.sampled_from([("fsdp:shard=2", 2), ("fsdp:shard=4", 4), ("fsdp:shard=2,no_sync", 2)])


@settings(max_examples=examples(40), deadline=None)
@given(graphs, allocations, hybrid, some.integers(1, 3))
def test_every_row_of_nested_groups_equals_its_estimate(
    graph: OpGraph,
    where: tuple[list[str], bool],
    hybrid: tuple[str, int],
    accumulation_steps: int,
) -> None:
    strategy, shard = hybrid
    texts, cluster = asked_of(graph, [t for t in where[0] if divided_by(shard, t)], where[1])
    options: Any = {"accumulation_steps": accumulation_steps, "cluster": cluster}
    assert_equal(estimate_many(graph, texts, strategy=strategy, **options))


def test_shards_in_unlike_nodes_wait_for_the_slower_links_whichever_come_first() -> None:
    # What is gathered within a node takes ten times as long in the one as in the other.
    graph = in_blocks(perceptron([1000] * 4, batch=8))
    texts = ["1x2:slow+1x2:fast", "1x2:fast+1x2:slow"]
    table = estimate_many(graph, texts, strategy="fsdp:shard=2")
    assert table.communication_exposed_s[0] == pytest.approx(table.communication_exposed_s[1])
    assert_equal(table)


@settings(max_examples=examples(80), deadline=None)
@given(
    graphs,
    allocations,
    some.one_of(strategies, hybrid.map(lambda each: each[0])),
    some.sampled_from([1, 2, 3, 11]),
    some.sampled_from([None, CoefficientsByRanks()]),
)
def test_a_timeline_plays_what_was_computed(
    graph: OpGraph,
    where: tuple[list[str], bool],
    strategy: str,
    accumulation_steps: int,
    calibration: Calibration | None,
) -> None:
    text = where[0][0]
    assume("shard=" not in strategy or divided_by(4, text))
    (asked,), cluster = asked_of(graph, [text], where[1])
    answer = est.estimate(
        graph,
        asked,
        strategy=strategy,
        accumulation_steps=accumulation_steps,
        cluster=cluster,
        calibration=calibration,
    )
    assert answer.timeline.step_time_s == pytest.approx(answer.step_time_s, rel=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "ps:2"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_model_without_parameters_synchronises_nothing(strategy: str, target: Any) -> None:
    graph = replace(perceptron([32, 64], batch=8), parameters=(), target=target)
    texts = [of_kind(text, graph) for text in ("1x1:slow", "2x2:slow+1x3:fast")]
    assert_equal(estimate_many(graph, texts, strategy=strategy))


def test_kinds_of_ranks_too_many_to_compare_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, texts = perceptron([256] * 5, batch=8), ["3x4:slow+2x8:fast+1x2:jammed", "9x2:slow"]
    compared = estimate_many(graph, texts, strategy="ddp:unbucketed").to_dict()
    monkeypatch.setattr(program, "_MOST_COMPARED", 1)
    found = estimate_many(graph, texts, strategy="ddp:unbucketed").to_dict()
    for name in ("step_time_s", "low_s", "high_s", "communication_exposed_s"):
        assert found[name] == pytest.approx(compared[name], rel=1e-12), name


PLAIN = perceptron([64, 96, 32], batch=8)


def test_columns_and_texts_and_allocations_give_the_same_table() -> None:
    texts = ["1x1:slow", "2x4:slow+1x8:fast", "3x2:fast"]
    columns = AllocationColumns(
        machines=("fast", "slow"),
        machine=np.array([[1, -1], [1, 0], [0, -1]]),
        nodes=np.array([[1, 0], [2, 1], [3, 0]]),
        devices=np.array([[1, 0], [4, 8], [2, 0]]),
    )
    asked = [texts, [Allocation.parse(text) for text in texts], columns]
    one, *others = [estimate_many(PLAIN, each).to_dict() for each in asked]
    assert one["allocation"] == texts
    assert all(other == one for other in others)
    # A generator and the keys of a mapping are iterables, without a place for each.
    drawn = [iter(texts), dict.fromkeys(texts).keys()]
    assert all(estimate_many(PLAIN, each).to_dict() == one for each in drawn)


def test_ranks_and_nodes_and_the_global_batch_add_up() -> None:
    table = estimate_many(
        PLAIN, ["2x4:slow+1x8:fast"], batch_per_gpu=np.array([6]), accumulation_steps=3
    )
    assert (table.ranks[0], table.nodes[0]) == (2 * 4 + 8, 3)
    assert table.global_batch[0] == 6 * 16 * 3
    assert table.samples_per_s[0] == pytest.approx(6 * 16 * 3 / table.step_time_s[0])


def test_a_global_batch_is_one_number_or_one_for_each_row() -> None:
    table = estimate_many(PLAIN, ["1x1:slow", "1x2:slow"], global_batch=24)
    assert table.batch_per_gpu.tolist() == [24, 12]
    table = estimate_many(PLAIN, ["1x1:slow", "1x2:slow"], global_batch=np.array([24, 8]))
    assert table.batch_per_gpu.tolist() == [24, 4]


def test_rows_that_do_not_fit_come_last_however_fast() -> None:
    # Devices of 'bare' have 3 MiB; 16 bytes of state for each of 256·1000 parameters take more.
    graph = perceptron([256, 1000], batch=8)
    table = estimate_many(graph, ["3x3:bare", "1x1:slow", "1x2:slow"])
    assert table.fits.tolist() == ["no", "yes", "yes"]
    rates = table.samples_per_s
    assert table.order().tolist() == [2, 1, 0] if rates[2] > rates[1] else [1, 2, 0]
    assert table.order("step_time_s").tolist()[-1] == 0
    assert str(table.best("ranks").allocation) == "1x1:slow"


def test_a_table_without_rows_has_no_best_one() -> None:
    with pytest.raises(WorkloadError, match="no rows"):
        estimate_many(PLAIN, []).best()


def test_the_csv_holds_every_column_of_every_row() -> None:
    table = estimate_many(PLAIN, ["1x1:slow", "2x4:slow+1x8:fast"])
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["allocation"] for row in rows] == ["1x1:slow", "2x4:slow+1x8:fast"]
    assert float(rows[1]["step_time_s"]) == table.step_time_s[1]
    assert rows[1]["bottleneck"] == table.bottleneck[1]
    parts = [name for name in rows[1] if name.endswith("_s") and name in Breakdown.__slots__]
    assert sum(float(rows[1][name]) for name in parts) == pytest.approx(table.step_time_s[1])


def test_chunks_of_an_iterator_are_pieces_of_the_whole_table() -> None:
    texts = [f"{nodes}x{devices}:slow" for nodes in range(1, 8) for devices in (1, 4)]
    pieces = list(estimate_chunks(PLAIN, iter(texts), rows=5))
    assert [len(piece) for piece in pieces] == [5, 5, 4]
    whole = estimate_many(PLAIN, texts)
    joined = np.concatenate([piece.step_time_s for piece in pieces])
    assert joined.tolist() == whole.step_time_s.tolist()


def test_a_machine_written_anew_between_chunks_stays_the_one_that_was_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    file = tmp_path / "machines" / "slow.json"
    machines()["slow"].save(file)
    # Shards over two nodes follow from no counts: such rows are placed one by one.
    chunks = estimate_chunks(PLAIN, ["2x1:slow"] * 2, rows=1, strategy="fsdp:shard=2")
    first = next(chunks)
    os.utime(file, ns=(0, 0))
    assert next(chunks).step_time_s == first.step_time_s


def test_the_cluster_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[switches.r]\n[nodes.h1]\nmachine = "slow"\nswitch = "r"\nuplink = "1 Gbit/s"\n'
        '[nodes.h2]\nmachine = "slow"\nswitch = "r"\nuplink = "10 Gbit/s"\n'
    )
    table = estimate_many(PLAIN, ["h1[0]+h2[0,1]", "h2[0]"], cluster=path)
    assert table.ranks.tolist() == [3, 1]
    assert_equal(table)


GOOD = "1x2:slow"
HYBRID = {"strategy": "fsdp:shard=2"}


WRONG_ROWS = [
    ("1x9:slow", {}, AllocationError, "row 2: '1x9:slow' asks for 9 devices of 'slow'"),
    ("1x2", {}, AllocationError, "row 2: '1x2' is not an allocation"),
    ("1x2:nowhere", {}, UnknownMachineError, "row 2: no machine profile is called 'nowhere'"),
    ("h1[0]", {}, AllocationError, "row 2: 'h1\\[0\\]' names a host"),
    ("1x2:slow-gpu", {}, WorkloadError, "row 2: perceptron was traced for cpu"),
    (GOOD, {"batch_per_gpu": np.array([1, 1, 0])}, WorkloadError, "row 2: batch size"),
    ("2x1:lone", {"strategy": "zero2"}, AllocationError, "row 2: .*no network of 'lone'"),
    ("1x2:lone", {"strategy": "zero2"}, ProfileError, "row 2: .*no all-gather costs"),
    ("1x2:lone", {"strategy": "ps:1"}, ProfileError, "row 2: .*has no network"),
    ("1x3:slow", HYBRID, StrategyError, "row 2: 'fsdp:shard=2' shards over 2 ranks"),
    ("1x1:slow", HYBRID, StrategyError, "row 2: 'fsdp:shard=2' .* do not divide 1"),
]


@pytest.mark.parametrize(("wrong", "options", "error", "said"), WRONG_ROWS)
def test_the_first_invalid_row_is_named(
    wrong: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}"):
        estimate_many(PLAIN, [GOOD, GOOD, wrong], strict=True, **options)
    if "batch_per_gpu" not in options:
        with pytest.raises(error, match=f"^{said}"):
            list(estimate_chunks(PLAIN, [GOOD, GOOD, wrong], rows=2, strict=True, **options))


@pytest.mark.parametrize(("wrong", "options", "error", "said"), WRONG_ROWS)
def test_a_row_that_cannot_be_answered_is_empty_and_says_why(
    wrong: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    table = estimate_many(PLAIN, [GOOD, GOOD, wrong, "1x4:slow"], **_padded(options))
    assert list(table.errors) == [2]
    assert re.match(said.removeprefix("row 2: "), table.errors[2])
    assert math.isnan(table.samples_per_s[2])
    assert (table.ranks[2], table.fits[2], table.bottleneck[2]) == (0, "", "")
    assert table.order()[-1] == 2
    with pytest.raises(error):
        table.row(2)
    assert_equal(table[table.answered])


def _padded(options: dict[str, Any]) -> dict[str, Any]:
    """Options for one row more."""
    batches = options.get("batch_per_gpu")
    return options if batches is None else {"batch_per_gpu": np.append(batches, 5)}


def test_rows_without_an_answer_among_texts_and_columns_are_found_alike() -> None:
    texts = ["1x1:slow", "1x9:slow", "nonsense", "", "1x2:", "a1[0]", "1x1:slow+1x8:fast"]
    table = estimate_many(PLAIN, texts)
    assert list(table.errors) == [1, 2, 3, 4, 5]
    assert "error" in table.to_csv().splitlines()[0]
    assert table.to_dict()["error"][0] is None
    columns = AllocationColumns(
        machines=("slow",),
        machine=np.zeros((3, 1), dtype=int),
        nodes=np.array([[1], [0], [1]]),
        devices=np.array([[2], [1], [7]]),
    )
    assert list(estimate_many(PLAIN, columns).errors) == [1, 2]
    assert estimate_many(PLAIN, columns).to_dict()["allocation"] == ["1x2:slow", "", "1x7:slow"]


def test_a_host_whose_device_is_named_twice_is_one_row_without_an_answer() -> None:
    table = estimate_many(PLAIN, ["a2[0]+a2[0]", "a2[0]+a2[1]"], cluster=CLUSTER)
    assert list(table.errors) == [0]
    assert "device" in table.errors[0]


def test_no_row_with_an_answer_raises_why_the_first_has_none() -> None:
    with pytest.raises(AllocationError, match="9 devices"):
        estimate_many(PLAIN, ["1x9:slow", "1x8:slow"]).best()


@settings(max_examples=examples(20), deadline=None)
@given(some.lists(rows, min_size=1, max_size=6), some.integers(1, 300), some.integers(1, 2))
def test_a_global_batch_is_split_as_the_estimate_of_the_row_splits_it(
    texts: list[str], samples: int, accumulation_steps: int
) -> None:
    asked: Any = {"global_batch": samples, "accumulation_steps": accumulation_steps}
    table = estimate_many(PLAIN, texts, **asked)
    for row, text in enumerate(texts):
        if row in table.errors:
            with pytest.raises(WorkloadError, match=re.escape(table.errors[row])):
                estimate(PLAIN, text, **asked)
            continue
        answer = estimate(PLAIN, text, **asked)
        assert table.step_time_s[row] == pytest.approx(answer.step_time_s, rel=1e-9)
        assert table.samples_per_s[row] == pytest.approx(answer.samples_per_s, rel=1e-9)
        assert table.global_batch[row] == answer.global_batch == samples
        assert table.batch_per_gpu[row] == (answer.batch_per_gpu or 0)
        assert table.row(row).batches == answer.batches


def test_a_table_asked_again_is_kept_until_its_machine_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    machine_file, asked = tmp_path / "machines" / "slow.json", engine.Engine()
    slow = machines()["slow"]
    slow.save(machine_file)
    texts = ["1x1:slow", "1x2:slow"]
    before = estimate_many(PLAIN, texts, engine=asked)
    filled: list[int] = []
    fill = RowAnswers.fill

    def counted(answers: RowAnswers, request: TableRequest, columns: Any) -> None:
        filled.append(len(request.allocations))
        fill(answers, request, columns)

    monkeypatch.setattr(RowAnswers, "fill", counted)
    again = estimate_many(PLAIN, map(Allocation.parse, texts), engine=asked)
    assert again.to_dict() == before.to_dict()
    # Columns are the caller's own.
    again.step_time_s[:] = 0.0
    assert estimate_many(PLAIN, texts, engine=asked).step_time_s.all()
    assert not filled
    estimate_many(PLAIN, texts, engine=asked, batch_per_gpu=16)
    estimate_many(PLAIN, ["1x4:slow", *texts], engine=asked)
    assert filled == [2, 3]
    replace(machines()["fast"], name="slow").save(machine_file)
    changed = estimate_many(PLAIN, texts, engine=asked)
    assert changed.step_time_s[0] < before.step_time_s[0]


def test_a_row_without_an_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    asked = engine.Engine()
    machines()["slow"].save(tmp_path / "machines" / "slow.json")
    texts = ["1x1:slow", "1x1:fast"]
    assert list(estimate_many(PLAIN, texts, engine=asked).errors) == [1]
    machines()["fast"].save(tmp_path / "machines" / "fast.json")
    assert not estimate_many(PLAIN, texts, engine=asked).errors


def test_kept_tables_count_towards_the_bytes_of_the_cache() -> None:
    asked = engine.Engine()
    texts = [f"{nodes}x2:slow" for nodes in range(1, 900)]
    estimate_many(PLAIN, texts[:1], engine=asked)
    before = asked.cache.size_bytes
    table = estimate_many(PLAIN, texts, engine=asked)
    grown = asked.cache.size_bytes - before
    assert grown > sum(getattr(table, name).nbytes for name in COLUMNS)


def test_a_table_iterates_and_is_indexed_by_rows() -> None:
    texts = ["1x1:slow", "1x2:slow", "1x4:slow"]
    table = estimate_many(PLAIN, texts, batch_per_gpu=np.array([2, 4, 8]))
    assert [str(answer.allocation) for answer in table] == texts
    assert table[-1].batch_per_gpu == 8
    for some_rows in (slice(1, None), [1, 2], np.array([False, True, True])):
        part = table[some_rows]
        assert part.step_time_s.tolist() == table.step_time_s[1:].tolist()
        assert part.row(0).batch_per_gpu == 4
    missing: list[Any] = [3, -4, [0, 3], "x", 1.5, [True, False], np.array([0.5])]
    missing += [[[0, 1]], [[0], [1, 2]], True, np.bool_(True), None, slice(0, 1.5)]
    for rows in missing:
        with pytest.raises(
            RowError, match=r"the table has 3 rows, found row .*; give numbers below 3"
        ):
            table[rows]
    for row in (3, -4, "x", 1.5, True, [0]):
        for asked in (table.row, table.allocation):
            with pytest.raises(RowError, match="the table has 3 rows"):
                asked(row)  # type: ignore[arg-type]
    # As sequences do.
    assert issubclass(RowError, IndexError)
    assert str(table[np.array(2)].allocation) == texts[2]
    assert [str(answer.allocation) for answer in table[::-1]] == texts[::-1]
    for none in ([], (), np.array([]), np.zeros(3, dtype=bool), slice(3, None)):
        assert len(table[none]) == 0


def test_errors_of_a_table_are_looked_up_by_any_key() -> None:
    table = estimate_many(PLAIN, ["1x1:slow", "1x1:no-such-machine"])
    assert "no-such-machine" in table.errors[1]
    keys: list[Any] = [0, 2, -1, "x", 1.5, None, (0,)]
    for key in keys:
        assert key not in table.errors
        assert table.errors.get(key) is None


def test_an_allocation_is_looked_up_without_counting_the_rows() -> None:
    table = estimate_many(PLAIN, ["1x1:slow"] * 100_000)
    table.allocation(7)
    tracemalloc.start()
    table.allocation(7)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One number a row is 800 kB.
    assert most_bytes < 100_000


def test_a_table_becomes_a_data_frame_or_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = estimate_many(PLAIN, ["1x1:slow", "1x9:slow"])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame = table.to_pandas()
    assert frame["step_time_s"] is table.step_time_s
    assert frame["error"] == [None, table.errors[1]]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(WorkloadError, match="install pyarrow, or use to_dict"):
        table.to_arrow()


def test_batches_of_another_length_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"shape \(2,\) for 1 allocations"):
        estimate_many(PLAIN, [GOOD], batch_per_gpu=np.array([1, 2]))


@pytest.mark.parametrize("strategy", ["ddp:bucket=64KiB", "zero1:bucket=64KiB", "fsdp"])
def test_one_allocation_and_many_agree_to_the_last_bit(strategy: str) -> None:
    graph = in_blocks(perceptron([512] * 24, batch=8, target="cuda"))
    texts = [
        f"{nodes}x{devices}:{machine}"
        for machine in ("h100-sxm", "dgx-a100")
        for nodes in (1, 3, 4, 7)
        for devices in (2, 4, 8)
    ]
    alone = [estimate(graph, text, strategy=strategy).step_time_s for text in texts]
    assert estimate_many(graph, texts, strategy=strategy).step_time_s.tolist() == alone
