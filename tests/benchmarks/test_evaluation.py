"""Methods are evaluated on the same draws, and scored as defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibration.evaluation import Regressor, cases, evaluate
from calibration.protocols import DRAWS, Split, all_splits
from calibration.tables import Job, StepTable, read_steps, read_workers
from calibration_accuracy import mean_errors, ordered
from summary import summarise

from estimator.calibrate.observation_files import MeasuredStep
from estimator.errors import ObservationError, WorkloadError

SIZES = [(1,), (2,), (1, 2), (4,), (4, 4)]
BATCHES = [8, 16, 32]


def true_step_s(sizes: tuple[int, ...], batch: float) -> float:
    return (0.1 + 0.01 * batch) * (1 + 0.1 * len(sizes))


def measured(sizes: tuple[int, ...], batch: float, gpu: str) -> MeasuredStep:
    return MeasuredStep(
        line=0,
        source="s",
        gpu=gpu,
        model="m",
        precision="fp32",
        strategy="ddp",
        variant=(),
        node_sizes=sizes,
        batch_per_gpu=batch,
        accumulation_steps=1,
        step_time_s=1.0,
    )


def make_job(model: str = "m", gpu: str = "T4") -> Job:
    steps = tuple(
        replace(measured(sizes, batch, gpu), model=model, step_time_s=true_step_s(sizes, batch))
        for sizes in SIZES
        for batch in BATCHES
    )
    return Job(label=f"{gpu}, {model}", gpu=gpu, model=model, steps=steps)


class Oracle:
    """Knows the model that made the rows; predicts `factor` times it, ± 20 %."""

    factor = 1.0

    def fit(self, X: Any, y: Any) -> Oracle:
        self.scale_ = float(np.max(y)) / 1e9
        return self

    def predict(self, X: Any) -> Any:
        X = np.asarray(X)
        return self.factor * (0.1 + 0.01 * X[:, 2]) * (1 + 0.1 * X[:, 1]) * (1 + self.scale_)

    def predict_interval(self, X: Any) -> Any:
        return 0.8 * self.predict(X), 1.2 * self.predict(X)


class TenPercentAbove(Oracle):
    factor = 1.1


class Unwilling(Oracle):
    def fit(self, X: Any, y: Any) -> Oracle:
        raise WorkloadError("it needs 99 rows; give more")


METHODS: dict[str, Callable[[], Regressor]] = {
    "calibrated": Oracle,
    "pollux": TenPercentAbove,
    "linear": Unwilling,
}


def test_errors_are_those_of_forms_whose_errors_are_known() -> None:
    jobs = [make_job()]
    runs = evaluate(jobs, "k-shot", ks=[3, 5], methods=METHODS)
    # 15 rows, of which 3 or 5 are learnt from, in each of 8 draws.
    assert {(run.method, run.split.k) for run in runs} == {(m, k) for m in METHODS for k in (3, 5)}
    assert len(runs) == 3 * 2 * 8
    errors = {
        method: mean_errors(jobs, [run for run in runs if run.method == method])
        for method in METHODS
    }
    assert errors["pollux"] == pytest.approx([0.1])
    assert errors["calibrated"] == pytest.approx([0], abs=1e-6)
    # One that cannot be fitted counts as an error of 100 %.
    assert errors["linear"] == [1]
    failed = [case for case in cases(jobs, runs, "k-shot", "now") if case["method"] == "linear"]
    assert len(failed) == 8 * (12 + 10)
    assert {(case["status"], case["reason"], case["predicted_s"]) for case in failed} == {
        ("no_prediction", "it needs 99 rows; give more", None)
    }


def test_cases_have_the_form_of_every_accuracy_benchmark() -> None:
    jobs = [make_job()]
    runs = evaluate(jobs, "few-shot", methods={"calibrated": TenPercentAbove})
    found = list(cases(jobs, runs, "few-shot", "2026-01-01"))
    # 3 single-device rows; of 2 and 4 devices in a node two rows each; there is no 1+1.
    assert len(found) == 15 - 3 - 4
    case = next(case for case in found if case["allocation"] == "1x1:t4+1x2:t4")
    assert (case["ranks"], case["nodes"], case["global_batch"]) == (3, 2, 3 * case["batch_per_gpu"])
    assert case["predicted_s"] == pytest.approx(1.1 * case["measured_s"])
    (row,) = summarise(found, by=("method",))
    assert row.median_ratio == pytest.approx(0.1)
    assert row.coverage_ratio == row.pairs_right_ratio == 1


def test_an_outlier_moves_the_predictions_of_a_mean_by_what_it_weighs() -> None:
    class Mean(Oracle):
        def fit(self, X: Any, y: Any) -> Oracle:
            self.mean_ = float(np.mean(y))
            return self

        def predict(self, X: Any) -> Any:
            return np.full(len(X), self.mean_)

    job = make_job()
    runs = evaluate([job], "online", ks=[3, 5], methods={"calibrated": Mean})
    assert {run.moved_ratio for run in runs if run.split.k == 3} == {None}
    run = next(run for run in runs if run.split.k == 5)
    learnt = job.y()[run.split.train]
    assert run.moved_ratio == pytest.approx(2 * learnt[-1] / learnt.sum())
    with_outlier = learnt.mean() + 2 * learnt[-1] / len(learnt)
    assert run.added_ratio == pytest.approx(abs(with_outlier / learnt[:-1].mean() - 1))


def test_pairs_ask_which_placement_is_faster() -> None:
    jobs = [make_job()]
    (run,) = evaluate(jobs, "pairs", methods={"calibrated": Oracle})
    # 2 on one node against 3 over two: one a batch. Close pairs add 4 on one node against those 3.
    assert ordered(jobs, run) == (3, 3, 6, 6)


def test_a_table_with_too_few_rows_is_refused() -> None:
    job = make_job()
    single = Job(label=job.label, gpu=job.gpu, model=job.model, steps=job.steps[:1])
    with pytest.raises(ObservationError, match="rows enough"):
        evaluate([single], "k-shot", methods=METHODS)


def test_the_regressor_takes_priors_from_the_machines_network_in_any_process() -> None:
    import pickle

    from calibration.evaluation import _with_machine_priors

    from estimator.calibrate.regressor import StepTimeRegressor

    job = make_job()
    named = [replace(step, interconnect="400Gb IB") for step in job.steps]
    known = _with_machine_priors(StepTimeRegressor, replace(job, steps=tuple(named)))
    regressor = pickle.loads(pickle.dumps(known))
    slow, fast = (
        made.fit([(1, 1, 8, 1, 1)], [1.0]).predict([(4, 4, 8, 1, 1)])[0]
        for made in (StepTimeRegressor(), regressor())
    )
    assert fast < slow


PROTOCOLS_SIZES = [(1,), (2,), (1, 1), (4,), (1, 2), (2, 2), (4, 4)]


def protocols_make_job(gpu: str = "T4") -> Job:
    steps = tuple(measured(sizes, batch, gpu) for sizes in PROTOCOLS_SIZES for batch in BATCHES)
    return Job(label=f"{gpu}, m", gpu=gpu, model="m", steps=steps)


JOB = protocols_make_job()
RANKS = JOB.X()[:, 0]


def of_job(protocol: str, ks: list[int] | None = None) -> list[Split]:
    return [split for _, split in all_splits([JOB], protocol, ks)]


def test_k_shot_starts_from_a_single_device_and_grows_by_more_of_the_same_draw() -> None:
    splits = of_job("k-shot", [3, 5])
    assert len(splits) == 2 * DRAWS
    for draw in range(DRAWS):
        three, five = (split for split in splits if split.draw == draw)
        assert RANKS[three.train[0]] == 1
        assert five.train[:3].tolist() == three.train.tolist()
        assert sorted([*five.train, *five.test]) == list(range(len(RANKS)))
    assert len({tuple(split.train) for split in splits}) == len(splits)


def test_a_k_without_a_test_row_is_left_out() -> None:
    # The job has 21 rows.
    assert {split.k for split in of_job("k-shot", [20, 21, 50])} == {20}


def test_online_trains_on_every_single_device_row_and_tests_on_others() -> None:
    splits = of_job("online", [0, 5])
    assert [split.k for split in splits].count(0) == 1
    for split in splits:
        assert (RANKS[split.train] == 1).sum() == len(BATCHES)
        assert len(split.train) == len(BATCHES) + (split.k or 0)
        assert (RANKS[split.test] > 1).all()


def test_few_shot_adds_six_rows_at_the_smallest_and_largest_batch() -> None:
    (split,) = of_job("few-shot")
    added = [JOB.steps[index] for index in split.train if RANKS[index] > 1]
    assert {(step.node_sizes, step.batch_per_gpu) for step in added} == {
        (sizes, batch) for sizes in ((2,), (1, 1), (4,)) for batch in (8, 32)
    }
    assert len(added) == 6
    (pairs,) = of_job("pairs")
    assert pairs.train.tolist() == split.train.tolist()
    assert len(pairs.test) == len(RANKS)


def test_every_row_is_tested_once_a_draw_and_not_trained_on() -> None:
    splits = of_job("cv")
    for draw in {split.draw for split in splits}:
        judged = np.concatenate([split.test for split in splits if split.draw == draw])
        assert sorted(judged) == list(range(len(RANKS)))
    assert all(not set(split.train) & set(split.test) for split in splits)


HEADER = "model,gpu,gpus,nodes,placement,local_batch,step_time_s"


def read(folder: Path, *rows: str, header: str = HEADER) -> StepTable:
    path = folder / "table.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return read_steps([path])


def only_step(table: StepTable) -> MeasuredStep:
    (job,) = table.jobs
    (step,) = job.steps
    return step


def test_without_nodes_they_follow_from_the_size_of_a_node_or_are_assumed(tmp_path: Path) -> None:
    known = read(tmp_path, "m,10,4,8,1", header="model,gpus,gpus_per_node,local_batch,step_time_s")
    # 10 devices need 3 nodes of 4: 4 + 3 + 3.
    assert only_step(known).node_sizes == (4, 3, 3)
    assert not known.assumed
    unknown = read(tmp_path, "m,10,8,1", header="model,gpus,local_batch,step_time_s")
    assert only_step(unknown).node_sizes == (5, 5)
    assert list(unknown.assumed.values()) == [1]


def test_a_row_that_cannot_be_used_is_left_out_with_its_reason(tmp_path: Path) -> None:
    bad, good = "m,T4,4,1,4,8,nan", "m,T4,1,1,1,8,0.1"
    table = read(tmp_path, bad, good, bad)
    assert only_step(table).ranks == 1
    ((told, count),) = table.refused.items()
    assert "step time is not a positive number" in told
    assert "table.csv line 2" in told
    assert count == 2


def test_jobs_are_told_apart_by_what_differs_between_them(tmp_path: Path) -> None:
    header = "model,gpu,precision,gpus,parallelism,local_batch,step_time_s,extra"
    rows = ["m,T4,fp32,1,single,8,1,x", "m,T4,fp32,2,ddp,8,1,y", "m,T4,fp16,1,single,8,1,x"]
    jobs = read(tmp_path, *rows, "n,T4,fp32,1,single,8,1,x", header=header).jobs
    assert [(job.label, len(job.steps)) for job in jobs] == [
        ("T4, m, fp32", 2), ("T4, m, fp16", 1), ("T4, n", 1)]  # fmt: skip


def test_repeated_measurements_stay_several_rows(tmp_path: Path) -> None:
    (job,) = read(tmp_path, "m,T4,1,1,1,8,0.10", "m,T4,1,1,1,8,0.12").jobs
    assert job.y().tolist() == [0.10, 0.12]


def test_semicolons_capital_letters_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("﻿Model;GPUs;Nodes;Local_Batch;Step_Time_s\nm;2;1;8;0.5\n", encoding="utf-8")
    assert only_step(read_steps([path])).features == (2, 1, 8, 1, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", HEADER.encode(), b"a,b\n1,2\n", b"\xff\xfe\x00", b"model,model\n1,2\n"],
)
def test_what_is_no_table_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ObservationError, match=str(path)):
        read_steps([path])


def test_a_table_of_workers_is_read_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    lines = ["gpu,parameter_servers,model,workers,steps_per_s", "K80,1,m,2,4.0", "K80,2,m,2,8.0"]
    path.write_text("\n".join(lines))
    found = read_workers(path)
    assert list(found) == ["K80, m, 1 servers", "K80, m, 2 servers"]
    rows, seconds = found["K80, m, 1 servers"]
    # 4 updates a second are 0.25 s between two of them.
    assert (rows.tolist(), seconds.tolist()) == ([[2, 1]], [0.25])
    for wrong in ("K80,1,m,3,-1", "K80,1,m,many,3"):
        path.write_text("\n".join([*lines, wrong]))
        with pytest.raises(ObservationError, match=r"w\.csv line 4 has no positive"):
            read_workers(path)


def test_notes_tell_jobs_of_one_model_apart_by_what_is_no_batch(tmp_path: Path) -> None:
    header = "model,gpus,local_batch,step_time_s,notes"
    rows = [
        "nnUNet,1,2,0.1,table=training;Dimension=2",
        "nnUNet,1,4,0.2,table=training;Dimension=2",
        "nnUNet,1,2,3.0,table=training;Dimension=3",
        "BERT,1,32,0.3,section=Batch size = 32 & with clip",
        "BERT,1,64,0.6,section=batch size=64(max) & with clip;median of several runs",
    ]
    jobs = read(tmp_path, *rows, header=header).jobs
    assert sorted(len(job.steps) for job in jobs) == [1, 2, 2]


def test_rows_of_two_networks_under_one_name_are_two_jobs(tmp_path: Path) -> None:
    # DLPerf's OneFlow rows: four times the samples cannot take half as long in one network.
    header = "model,gpu,gpus,local_batch,step_time_s,framework_version"
    rows = "InsightFace Y1,V100,1,64,0.261,OneFlow", "InsightFace Y1,V100,1,256,0.1304,OneFlow"
    jobs = read(tmp_path, *rows, "InsightFace Y1,V100,1,64,0.1,MxNet", header=header).jobs
    assert [(job.model, job.steps[0].batch_per_gpu) for job in jobs] == [
        ("InsightFace R100", 64), ("InsightFace Y1", 256), ("InsightFace Y1", 64),
    ]  # fmt: skip
