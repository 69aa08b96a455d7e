"""Every protocol trains on the rows that it promises, and tests on the others."""

from __future__ import annotations

import numpy as np
from calibration.protocols import DRAWS, Split, all_splits
from calibration.tables import Job
from calibration.worker_tables import WorkerStep

from estimator.calibrate.observation_files import MeasuredStep

SIZES = [(1,), (2,), (1, 1), (4,), (1, 2), (2, 2), (4, 4)]
BATCHES = [8, 16, 32]


def measured(sizes: tuple[int, ...], batch: float, gpu: str) -> MeasuredStep:
    return MeasuredStep(
        line=0,
        source="s",
        gpu=gpu,
        model="m",
        precision="",
        strategy="ddp",
        variant=(),
        node_sizes=sizes,
        batch_per_gpu=batch,
        accumulation_steps=1,
        step_time_s=1.0,
    )


def make_job(gpu: str = "T4") -> Job[MeasuredStep]:
    steps = tuple(measured(sizes, batch, gpu) for sizes in SIZES for batch in BATCHES)
    return Job(label=f"{gpu}, m", gpu=gpu, model="m", steps=steps)


JOB = make_job()
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


def test_asynchronous_workers_train_on_powers_of_two() -> None:
    steps = tuple(
        WorkerStep(source="s", gpu="K80", model="m", workers=n, parameter_servers=1, step_time_s=1)
        for n in range(1, 9)
    )
    job = Job(label="K80, m", gpu="K80", model="m", steps=steps)
    ((_, split),) = all_splits([job], "workers")
    assert (split.train + 1).tolist() == [1, 2, 4, 8]
    assert (split.test + 1).tolist() == [3, 5, 6, 7]
