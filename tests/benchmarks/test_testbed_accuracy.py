"""The accuracy run on testbeds: what is predicted, launched and kept of a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import testbed_runs
import torch
from layout_paces import MODELS
from records import Records
from testbed import layouts
from testbed.network import Testbed
from testbed_accuracy import SUBJECTS
from testbed_cases import beds, cases
from testbed_runs import Bench, RunPlan, Trial
from testbed_subjects import orders, splits, steps, strategies

from estimator.errors import StrategyError, TrainingError
from estimator.graph.partition.plan import Plan
from estimator.placement.allocation import Allocation

BED = "shard200"


def plan_of(tmp_path: Path, **changed: Any) -> RunPlan:
    first = [case for case in cases() if case.bed == BED]
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
    bench = steps.StepBench(BED, plan, records)
    bench.network_path.touch()
    monkeypatch.setattr(steps.StepBench, "estimate", refuse)
    monkeypatch.setattr(testbed_runs, "measure", never)
    bench.prepare(bed_of(BED))
    bench.measure(bed_of(BED))
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
        yield bed_of(BED)

    monkeypatch.setattr(testbed_runs, "testbed", testbed)
    plan = plan_of(tmp_path, repeats=2)
    plan = replace(plan, cases=plan.cases[:3])
    path = tmp_path / "records.jsonl"
    Counting(BED, plan, Records(path)).run()
    failed, first, second = plan.cases
    measured = [record["key"] for record in Records(path).of("measurement")]
    assert measured == [first.key, second.key] * 2
    assert [record["reason"] for record in Records(path).of("failure", failed.key)] == [
        "rank 1 died"
    ]
    plan = replace(plan, repeats=3)
    Counting(BED, plan, Records(path)).run()
    assert len(Records(path).of("measurement")) == 6
    assert len(Records(path).of("prediction")) == 3
    assert len(built) == 2
    # All is there: nothing is built.
    Counting(BED, plan, Records(path)).run()
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
}
# Seconds that the one case is then found to have taken.
FOUND = {
    "steps": {"measured_s": 2.5},
    "splits": {"measured_s": 2.5},
    "strategies": {"measured_s": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
    "orders": {"measured_all_reduce_s": 0.25, "measured_step_s": 2.5},
    "overlap": {"measured_s": 1.0, "step_s": 2.5},
}
# What the last figure says of that.
TOLD = {
    "steps": None,
    "splits": ("6 + 2 instead of 4", 0.6),
    "strategies": ("right or within 5 % of the best, of 1 cells", 0.0),
    "orders": None,
    "overlap": ("overlap: beyond, of 1", 1),
}


class Run:
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_launches_what_it_predicted_and_assembles_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []

    def measure(_bed: Testbed, model: str, allocation: str, **asked: Any) -> Run:
        launched.append({"model": model, "allocation": allocation, **asked})
        return Run(2.5 if asked.get("merges_gradients", True) else 1.5)

    for module in (testbed_runs, orders):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(orders, "all_reduce_s", lambda *_, **__: 0.25)
    monkeypatch.setattr(strategies, "step_seconds", lambda *_, **__: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(strategies, "set_uplink", lambda *_: None)
    subject = SUBJECTS[name]
    case = subject.cases[0]
    plan = plan_of(tmp_path, cases=[case])
    records = Records(tmp_path / "records.jsonl")
    records.add({"kind": "prediction", "key": case.key, **WRITTEN[name]})
    bench = subject.bench(case.bed, plan, records)
    bench.measure(bed_of(case.bed))
    found = subject.assemble([case], records)
    for row in found[: 2 if name == "splits" else 1]:
        assert {field: row[field] for field in FOUND[name]} == FOUND[name]
    told = list(subject.figures(found))
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
        testbed_runs, "measure", lambda *_, **given: asked.append(given["batch"]) or Run(1.0)
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


def test_layouts_without_stages_are_judged_by_themselves() -> None:
    found = [case for case in cases() if case.method == "paced layouts"]
    assert found
    assert not any("pp=" in (case.layout or "") for case in found)


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
