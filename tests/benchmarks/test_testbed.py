"""Testbeds: what builds them, what waits in them, and what is predicted and kept of a case."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import testbed_runs
import torch
import torch.distributed as dist
from layout_paces import MODELS, divided
from records import Records
from testbed import description, launch, layouts, measure, network, paced
from testbed.network import Testbed
from testbed.paced_products import flops, flops_of
from testbed_accuracy import SUBJECTS
from testbed_cases import beds, cases
from testbed_runs import Bench, RunPlan, Trial
from testbed_subjects import neighbours, orders, splits, steps, strategies

from estimator.errors import AllocationError, StrategyError, TrainingError
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.plan import Plan
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster
from estimator.workload.layouts import Layout

BED = description.TestbedDescription(
    nodes=(
        description.TestbedNode(
            name="n0", devices=2, uplink_bytes_per_s=62.5e6, rack="r1", slowdown_ratio=1.5
        ),
        description.TestbedNode(name="n1", devices=1, uplink_bytes_per_s=12.5e6),
    ),
    racks={"r1": 125e6},
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
        step_s = measure.measure(
            bed, "paced:many_small", "n0[0]+n1[0]", batch=1, steps=2, warmup_steps=1
        )
        # 10 MB go over the link in either direction; forty layers take 0.25 ms twice or thrice.
        assert step_s > 10e6 / 25e6 + 40 * 0.25e-3
        whole = measure.measure(
            bed, "paced:eight_even", "n0[0]+n1[0]", strategy="fsdp", steps=2, warmup_steps=1
        )
        # 8 MB are gathered twice, half of them over the link, and all-reduced once: gloo scatters
        # so. Eight layers take 0.83 ms for a sample of eight three times, the first one twice.
        blocked_s = (2 * 4e6 + 8e6) / 25e6
        assert whole > blocked_s + 8 * 0.83e-3 * (3 * 8 - 1)
        failing = ["sh", "-c", "test $RANK = 0 && sleep 60 || { echo no disk >&2; exit 3; }"]
        with pytest.raises(TrainingError, match=r"rank 1 on node 'n1' ended with 3.*no disk"):
            launch.launch(bed, "n0[0]+n1[0]", failing)
    assert not [name for name in network.namespaces() if name.startswith(bed.prefix)]


SHARDED = "shard200"


def plan_of(tmp_path: Path, **changed: Any) -> RunPlan:
    first = [case for case in cases() if case.bed == SHARDED]
    known = {"cases": first, "work": tmp_path, "profile": tmp_path / "testbed.json"}
    return RunPlan(**{**known, "repeats": 1, "steps": 4, **changed})


def bed_of(name: str) -> Testbed:
    return Testbed(description=beds()[name], prefix="tb1x0-")


def refuse(*_: object, **__: object) -> None:
    raise StrategyError("no such strategy")


def never(*_: object, **__: object) -> None:
    pytest.fail("what is not predicted is not measured")


def test_a_case_that_is_refused_keeps_its_reason_and_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path)
    records = Records(tmp_path / "records.jsonl")
    bench = steps.StepBench(SHARDED, plan, records)
    bench.network_path.touch()
    monkeypatch.setattr(steps.StepBench, "estimate", refuse)
    monkeypatch.setattr(testbed_runs, "measure", never)
    bench.prepare(bed_of(SHARDED))
    bench.measure(bed_of(SHARDED))
    found = steps.assemble(plan.cases, records)
    assert found
    assert {case["status"] for case in found} == {"no_prediction"}
    assert {case["reason"] for case in found} == {"no such strategy"}
    assert "no such strategy" in capsys.readouterr().err


class Counting(Bench):
    """Predicts nothing new; a case takes as many seconds as it was launched times."""

    def probe(self, bed: Testbed) -> None:
        self.network_path.touch()

    def predict(self, case: Any) -> dict[str, Any]:
        return {"predicted_s": 1.0}

    def trials(self, case: Any, prediction: dict[str, Any]) -> Iterator[Trial]:
        def launched(_bed: Testbed) -> dict[str, Any]:
            if case is self.cases[0]:
                raise TrainingError("rank 1 died")
            return {"step_s": 1.0 + len(self.records.of("measurement", case.key))}

        yield Trial(key=case.key, run=launched)


def test_cases_take_turns_and_a_second_run_measures_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    @contextmanager
    def testbed(description: Any) -> Iterator[Testbed]:
        built.append(description)
        yield bed_of(SHARDED)

    monkeypatch.setattr(testbed_runs, "testbed", testbed)
    plan = plan_of(tmp_path, repeats=2)
    plan = replace(plan, cases=plan.cases[:3])
    path = tmp_path / "records.jsonl"
    Counting(SHARDED, plan, Records(path)).run()
    failed, first, second = plan.cases
    measured = [record["key"] for record in Records(path).of("measurement")]
    assert measured == [first.key, second.key] * 2
    assert [record["reason"] for record in Records(path).of("failure", failed.key)] == [
        "rank 1 died"
    ]
    plan = replace(plan, repeats=3)
    Counting(SHARDED, plan, Records(path)).run()
    assert len(Records(path).of("measurement")) == 6
    assert len(Records(path).of("prediction")) == 3
    assert len(built) == 2
    # All is there: nothing is built.
    Counting(SHARDED, plan, Records(path)).run()
    assert len(built) == 2


# What is written down of a case before it is launched, in each subject.
WRITTEN = {
    "steps": {
        **{"predicted_s": 2.0, "low_s": 1.0, "high_s": 3.0, "alone_s": 1.0},
        **{"batch_per_gpu": 8, "global_batch": 16},
    },
    "splits": {
        "best": [6, 2],
        "even": [4, 4],
        "global_batch": 8,
        "splits": [
            {"batches": [4, 4], "predicted_s": 1.5, "low_s": 1.0, "high_s": 2.0},
            {"batches": [6, 2], "predicted_s": 1.0, "low_s": 0.5, "high_s": 2.0},
        ],
    },
    "strategies": {"step_s": [3.0, 2.0, 1.0, 4.0, 5.0, 6.0]},
    "orders": {
        "order": "ours",
        "hosts": ["n1", "n0"],
        "allocation": "n1[0]+n0[0]",
        "link": "network",
        "all_reduce_s": 0.5,
        "pairs_alone_s": 0.4,
        "step_s": 2.0,
    },
    "overlap": {"predicted_s": 2.0, "breakdown": {"communication_exposed_s": 0.5}},
    "neighbours": {"predicted_s": 2.0, "low_s": 1.5, "alone_s": 1.5, "other_s": 1.0},
}
# Seconds that the one case is then found to have taken.
FOUND = {
    "steps": {"measured_s": 2.5},
    "splits": {"measured_s": 2.5},
    "strategies": {"measured_s": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
    "orders": {"measured_all_reduce_s": 0.25, "measured_step_s": 2.5},
    "overlap": {"measured_s": 1.0, "step_s": 2.5},
    "neighbours": {"measured_s": 2.5},
}
# What the last figure says of that.
TOLD = {
    "steps": None,
    "splits": ("6 + 2 instead of 4", 0.6),
    "strategies": ("right or within 5 % of the best, of 1 cells", 0.0),
    "orders": None,
    "overlap": ("overlap: beyond, of 1", 1),
    "neighbours": ("beside few_big n0[1]+n1[1], were it alone", 0.4),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_launches_what_it_predicted_and_assembles_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []
    job_trained = threading.Event()

    def measure(_bed: Testbed, model: str, allocation: str, **asked: Any) -> float:
        launched.append({"model": model, "allocation": allocation, **asked})
        if "port" in asked:  # what trains beside the job ends after it
            job_trained.wait(10)
            time.sleep(0.5)
        job_trained.set()
        return 2.5 if asked.get("merges_gradients", True) else 1.5

    for module in (testbed_runs, orders):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(orders, "all_reduce_s", lambda *_, **__: 0.25)
    monkeypatch.setattr(strategies, "step_seconds", lambda *_, **__: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(strategies, "set_uplink", lambda *_: None)
    monkeypatch.setattr(neighbours, "AHEAD_S", 0.0)
    subject = SUBJECTS[name]
    case = subject.cases[0]
    plan = plan_of(tmp_path, cases=[case])
    records = Records(tmp_path / "records.jsonl")
    records.add({"kind": "prediction", "key": case.key, **WRITTEN[name]})
    bench = subject.bench(case.bed, plan, records)
    bench.measure(bed_of(case.bed))
    found = subject.module.assemble([case], records)
    for row in found[: 2 if name == "splits" else 1]:
        assert {field: row[field] for field in FOUND[name]} == FOUND[name]
    told = list(subject.module.figures(found))
    if TOLD[name] is not None:
        assert told[-1]["id"].endswith(TOLD[name][0])
        assert told[-1]["value"] == pytest.approx(TOLD[name][1])
    if name == "splits":
        # n0[0]+n2[0]: one rank a group.
        assert [each["batch"] for each in launched] == [[4, 4], [6, 2]]
        assert [row["is_best"] for row in found] == [False, True]
    if name == "strategies":
        # The third was predicted fastest, and is three times the first.
        assert found[0]["regret_ratio"] == 2.0
    if name == "neighbours":
        # The other trains on a port of its own, for twice what the job takes with all its start.
        assert [each.get("port") for each in launched] == [launch.MASTER_PORT + 1, None]
        assert launched[0]["steps"] == 2 * 2 * plan.steps * 2.0
    if name == "overlap":
        # 1 s was exposed: more than 15 % away from the 0.5 s predicted.
        assert found[0]["value"] > 1


def test_splits_of_a_case_on_two_ranks_a_node_give_each_rank_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in SUBJECTS["splits"].cases if case.allocation == "n0[0,1]+n3[0,1]")
    asked: list[Any] = []
    bench = splits.SplitBench(
        case.bed, plan_of(tmp_path, cases=[case]), Records(tmp_path / "records.jsonl")
    )
    monkeypatch.setattr(
        testbed_runs, "measure", lambda *_, **given: asked.append(given["batch"]) or 1.0
    )
    (trial,) = bench.trials(case, {"splits": [{"batches": [15, 5]}]})
    assert trial.run(bed_of(case.bed)) == {"step_s": 1.0}
    assert asked == [[15, 15, 5, 5]]


def test_forty_paced_pipelines_are_measured_and_some_divide_and_repeat_their_stages() -> None:
    found = [case for case in cases() if case.method == "paced pipelines"]
    assert len({case.key for case in found}) == len(found) >= 40
    # Eight ranks, of which two hold a part of each layer of one of two stages.
    both = [case for case in found if (case.layout or "").startswith("tp=2,pp=2,")]
    assert {case.bed for case in both} == {"even", "eight200"}
    assert all(Allocation.parse(case.allocation).ranks == 8 for case in both)


def test_stages_after_one_another_are_the_model() -> None:
    model, batch = MODELS["deep"]()
    parts = layouts.staged(model, [1, 3])
    assert [len(part) for part in parts] == [1 + 1, 2, 1 + 2]
    found = batch
    with torch.no_grad():
        for part in parts:
            found = part(found)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), batch.flatten())
        assert torch.equal(loss, model(batch))


def test_stages_begin_where_the_prediction_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in cases() if case.model == "deep")
    monkeypatch.setattr(
        steps.StepBench, "divided", lambda *_: SimpleNamespace(plan=Plan(()), flops_per_s=1.0)
    )
    staged = SimpleNamespace(pipeline=SimpleNamespace(points=("blocks.3",)))
    monkeypatch.setattr(steps.StepBench, "estimate", lambda *_: staged)
    given: dict[str, Any] = {}
    monkeypatch.setattr(layouts, "step_seconds", lambda *_, **options: given.update(options) or 2.0)
    bench = steps.StepBench(case.bed, plan_of(tmp_path), Records(tmp_path / "records.jsonl"))
    assert bench.train(bed_of(case.bed), case) == {"step_s": 2.0}
    assert (given["points"], given["micro_batches"]) == (("blocks.3",), case.accumulation_steps)


def test_splits_around_the_best_one_keep_the_global_batch_and_include_the_even_one() -> None:
    ranks = (3, 1)
    found = splits.splits_around((8, 4), (7, 7), ranks)
    assert found[:2] == [(7, 7), (8, 4)]
    # What leaves the single slow rank goes to three fast ones: 3 samples at a time, of 28.
    assert set(found[2:]) == {(9, 1), (6, 10), (5, 13)}
    found = splits.splits_around((12, 8, 4), (8, 8, 8), (2, 2, 2))
    assert {12 - split[0] for split in found} >= {-3, -2, -1, 0, 1, 2, 3, 4}
    assert all(sum(split) == 24 and min(split) >= 1 for split in found)


def record(batches: tuple[int, int], predicted_s: float, measured_s: float | None) -> Any:
    return {
        "id": str(batches),
        "case": "c",
        "batches": batches,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "noise_ratio": 0.01,
        "is_best": batches == (6, 2),
        "is_even": batches == (4, 4),
        "reason": None,
    }


def test_gain_and_loss_are_counted_at_the_predicted_best_split() -> None:
    rows = [record((4, 4), 1.5, 1.4), record((6, 2), 1.0, 1.0), record((5, 3), 1.1, 0.98)]
    (row,) = splits.balances(rows)
    assert row["predicted_gain_ratio"] == pytest.approx(0.5)
    assert row["gain_ratio"] == pytest.approx(0.4)
    # 50 % instead of 40 % is a quarter too much, though the step itself is exact.
    assert row["gain_error_ratio"] == pytest.approx(0.25)
    assert not row["is_within"]
    assert row["measured_best"] == (5, 3)
    assert row["lost_ratio"] == pytest.approx(1.0 / 0.98 - 1)
    (figure,) = splits.figures(rows)
    assert figure["value"] == pytest.approx(0.25)
    # A case with a split that failed is not judged.
    assert not [*splits.balances([record((4, 4), 1.5, None), rows[1]])]


class Clock:
    """Time that passes only in sleeping; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(paced, "time", found)
    monkeypatch.setattr(paced, "pace", paced.Pace())
    return found


@pytest.mark.parametrize(
    ("slowdown", "busy_s", "blocks", "expected_s"),
    [
        # Work after a collective that blocks begins when that is over.
        (1.0, 0.0, True, 2.0 + 5.0 + 3.0),
        # What a thread does before it is blocked is hidden behind its work.
        (1.0, 1.0, True, 2.0 + 5.0 + 3.0),
        # So is starting one that does not block.
        (1.0, 0.0, False, 2.0 + 3.0),
        # A slow node waits longer for its work and not for collectives.
        (1.5, 0.0, True, 1.5 * 2.0 + 5.0 + 1.5 * 3.0),
    ],
)
def test_work_goes_on_beside_collectives_that_do_not_block(
    slowdown: float, busy_s: float, blocks: bool, expected_s: float, clock, monkeypatch
) -> None:
    def all_reduce(tensor, async_op=False):
        clock.sleep(5.0 if blocks else 1.0)
        return None if blocks else object()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    paced.pace.slowdown_ratio = slowdown
    before = dist.all_reduce, dist.broadcast, dist.reduce_scatter_tensor
    with paced.pausing_at_collectives():
        assert dist.all_reduce is not before[0]
        paced.pace.restart()
        paced.pace.wait(2.0)
        clock.sleep(busy_s)
        dist.all_reduce(torch.ones(1), not blocks)
        paced.pace.wait(3.0)
    assert clock.now_s == pytest.approx(expected_s)
    assert (dist.all_reduce, dist.broadcast, dist.reduce_scatter_tensor) == before


def two_layers() -> tuple[paced.PacedModel, torch.Tensor]:
    """Layers of 2 s forward and 6 s backward each, at one sample."""
    layers = [paced.PacedLayer([(3, 2), (3,)], 2.0, 3.0) for _ in range(2)]
    return paced.PacedModel(*layers), torch.zeros(1, 4)


def test_gradients_of_the_input_come_before_those_of_the_weights(clock) -> None:
    model, batch = two_layers()
    ready: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ready.append((name, clock.now_s))
        )
    paced.pace.restart()
    loss = model(batch).mean()
    assert clock.now_s == pytest.approx(2 * 2.0)
    loss.backward()
    # 3 s for the gradient of layer 1's input, 3 s for its weights, then 3 s for layer 0's weights:
    # nothing asks for the gradient of the batch.
    assert dict(ready) == {
        "1.weights.0": 10.0,
        "1.weights.1": 10.0,
        "0.weights.0": 13.0,
        "0.weights.1": 13.0,
    }
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_either_gradient_of_a_layer_can_be_had_without_the_other(clock) -> None:
    model, batch = two_layers()
    paced.pace.restart()
    hidden = model[0](batch)
    output = model[1](hidden).mean()
    assert clock.now_s == pytest.approx(4.0)
    (gradient,) = torch.autograd.grad(output, hidden, retain_graph=True)
    assert gradient.shape == hidden.shape
    assert clock.now_s == pytest.approx(4.0 + 3.0)
    torch.autograd.grad(output, list(model[1].parameters()))
    assert clock.now_s == pytest.approx(4.0 + 3.0 + 3.0)


def test_layers_share_the_memory_of_their_gradients_and_weights_of_one_layer_do_not(clock) -> None:
    layers = [paced.PacedLayer([(5,), (5,)], 1.0, 2.0) for _ in range(2)]
    model = paced.PacedModel(*layers)
    model(torch.zeros(1, 4)).mean().backward()
    pointers = [parameter.grad.data_ptr() for parameter in model.parameters()]
    assert pointers[:2] == pointers[2:]
    assert pointers[0] != pointers[1]


def test_products_count_two_flops_for_each_pair_that_they_multiply() -> None:
    assert flops("mm", [(8, 4), (4, 2)]) == 2 * 8 * 4 * 2
    assert flops("bmm", [(3, 8, 4), (3, 4, 2)]) == 3 * 2 * 8 * 4 * 2
    assert flops("_grouped_mm", [(10, 4), (5, 4, 6), (5,)]) == 2 * 10 * 4 * 6
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    query, key = (2, 3, 8, 4), (2, 3, 16, 4)
    pairs = 2 * 3 * 8 * 16 * 4
    assert flops(attention, [query, key, key]) == 2 * 2 * pairs
    assert flops(f"{attention}_backward", [query, query, key, key]) == 5 * 2 * pairs


@pytest.mark.parametrize("layout", ["tp=2", "tp=4,sp", "cp=2,ring"])
def test_what_a_rank_of_a_layout_multiplies_is_timed_to_the_seconds_asked_for(layout: str) -> None:
    known = divided("decoder", layout, rank_s=0.5)
    local = split_by_layout(known.graph, Layout.parse(layout).of_layers, known.plan)
    waits = [known.graph.timings[op.call].seconds for op in local.ops if flops_of(op.call)]
    assert sum(waits) == pytest.approx(0.5)
    free = [known.graph.timings[op.call].seconds for op in local.ops if not flops_of(op.call)]
    assert max(free) < 1e-6
