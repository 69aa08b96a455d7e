"""Steps of pipelines, worked out by hand and against the simulation by events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.timeline.collectives.overlap import NO_OVERLAP
from estimator.timeline.pipelines.simulation import (
    RepeatedTasks,
    RunTask,
    StageCosts,
    last_ends_s,
    most_held_bytes,
    pipeline_tasks,
    play_run,
)
from estimator.timeline.simulator.simulation import simulate
from estimator.timeline.simulator.tasks import play
from estimator.workload.schedules import Schedule
from tests.budgets import examples

EQUAL = StageCosts(forward_s=1.0, input_s=1.0, weight_s=1.0)


def step_s(text: str, ranks: int, micro_batches: int, stages: list[StageCosts]) -> float:
    tasks, _ = pipeline_tasks(Schedule.parse(text), ranks, micro_batches, stages)
    return float(play(tasks.tasks, NO_OVERLAP))


@pytest.mark.parametrize("text", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(
    text: str, ranks: int, micro_batches: int
) -> None:
    total_s = step_s(text, ranks, micro_batches, [EQUAL] * ranks)
    assert total_s == pytest.approx(3 * (micro_batches + ranks - 1))


def test_interleaving_divides_the_bubble_by_the_virtual_stages() -> None:
    # (p − 1) / (v·m + p − 1) of the step (Narayanan et al. 2021, section 2.2): each of v stages
    # takes a v-th of the passes.
    ranks, micro_batches, virtual = 4, 8, 2
    third = StageCosts(*(seconds / virtual for seconds in EQUAL[:3]))
    total_s = step_s("interleaved:2", ranks, micro_batches, [third] * ranks * virtual)
    assert total_s == pytest.approx(3 * micro_batches + 3 * (ranks - 1) / virtual)


def test_zb_h1_has_a_third_of_the_bubble() -> None:
    # Qi et al. 2023, table 1: (p − 1)(T_F + T_B − T_W) instead of (p − 1)(T_F + T_B + T_W).
    assert step_s("zb", 4, 12, [EQUAL] * 4) == pytest.approx(3 * 12 + 3 * 1.0)


def test_zb_v_has_no_bubble_beyond_its_ramp() -> None:
    # Equal passes fill each other: a rank idles only until its first and after its last pass.
    half = StageCosts(0.5, 0.5, 0.5)
    tasks, _ = pipeline_tasks(Schedule.parse("zbv"), 4, 16, [half] * 8)
    played = simulate(tasks.tasks, NO_OVERLAP)
    for rank in range(4):
        numbers = [n for n, task in enumerate(tasks.tasks) if task.lane == f"rank {rank}"]
        begun, ended = played.start_s[numbers].min(), played.end_s[numbers].max()
        assert ended - begun == pytest.approx(16 * 3.0)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 12), (8, 20)])
def test_dualpipe_has_the_bubble_of_its_authors(ranks: int, micro_batches: int) -> None:
    # DeepSeek-V3's report, table 2: (PP/2 − 1)(F&B + B − 3W), where F&B, a forward beside a
    # backward pass, takes as long as both one after the other: F = W = 1, B = 2.
    total_s = step_s("dualpipe", ranks, micro_batches, [EQUAL] * 2 * ranks)
    assert total_s == pytest.approx(3 * micro_batches + (ranks / 2 - 1) * (3 + 2 - 3))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 6), (4, 10), (6, 14)])
def test_both_ways_of_dualpipe_mirror_each_other(ranks: int, micro_batches: int) -> None:
    # Where the second copy is the first one mirrored and nothing is sent, a rank of each half does
    # what one of DualPipeV does, which holds the same stages and passes to itself what goes to the
    # other half.
    costs = [StageCosts(1.0 + n / 7, 1.3 + n / 5, 0.7 + n / 11) for n in range(ranks)]
    v = step_s("dualpipev", ranks // 2, micro_batches, costs)
    assert step_s("dualpipe", ranks, 2 * micro_batches, costs * 2) == pytest.approx(v)


def test_dualpipe_on_two_ranks_by_hand() -> None:
    # Rank 0 holds stages 0 and 1' (the copy's last), rank 1 stages 1 and 0'; F = 1, I = W = 1,
    # sending takes 0.1. Two micro-batches from each end, a on rank 0, b on rank 1, by symmetry rank
    # 1 does what rank 0 does: F(0, a0) 0–1, sent until 1.1; F(1', b0), sent by rank 1 from 1 on,
    # 1.1–2.1; F(0, a1) –3.1; B(1', b0) –5.1; F(1', b1), there since 3.2, –6.1, and beside it
    # B(0, a0), whose gradient of rank 1's B(1, a0) is there at 5.2, –8.1. Then B(1', b1) –10.1 and
    # B(0, a1), of which the gradients of inputs alone come from 10.2 on, –11.2, then of weights
    # –12.2.
    stage = StageCosts(1.0, 1.0, 1.0, sent_s=0.1, returned_s=0.1)
    assert step_s("dualpipe", 2, 4, [stage] * 4) == pytest.approx(12.2)


def test_two_stages_that_send_for_a_tenth_of_a_second() -> None:
    # 1F1B, p = 2, m = 2; F = 1, B = 2, a transfer 0.1. Rank 1: F0 1.1–2.1, B0 –4.1; F1 is there
    # since 2.2, but rank 1 waits for what it sends: F1 4.2–5.2, B1 –7.2, sent until 7.3. Rank 0:
    # B0 4.2–6.2, B1 7.3–9.3.
    stage = StageCosts(1.0, 1.0, 1.0, sent_s=0.1, returned_s=0.1)
    assert step_s("1f1b", 2, 2, [stage] * 2) == pytest.approx(9.3)


def test_the_first_micro_batch_adds_no_gradients() -> None:
    # 1F1B, p = 2, m = 2; F = 1, B = 1 and 0.25 more for the second one. Rank 1: F0 1–2, B0 –3, F1
    # –4, B1 –5.25; rank 0: F0, F1 –2, B0 3–4, B1 5.25–6.5.
    stage = StageCosts(1.0, 0.5, 0.5, added_s=0.25)
    assert step_s("1f1b", 2, 2, [stage] * 2) == pytest.approx(6.5)


def test_gpipe_receives_once_it_has_nothing_else_to_do() -> None:
    # F0 0–1, F1 1–2 on rank 0; rank 1 F0 1.1–2.1, receives F1 until 2.2, F1 –3.2, B0 –5.2, B1 –7.2;
    # rank 0 B0 5.3–7.3, receives until 7.4, B1 –9.4.
    stage = StageCosts(1.0, 1.0, 1.0, sent_s=0.1, returned_s=0.1)
    assert step_s("gpipe", 2, 2, [stage] * 2) == pytest.approx(9.4)


def test_rows_are_steps_of_their_own() -> None:
    rows = [
        StageCosts(np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([1.0, 2.0]))
        for _ in range(4)
    ]
    tasks, _ = pipeline_tasks(Schedule.parse("1f1b"), 4, 8, rows)
    assert play(tasks.tasks, NO_OVERLAP).tolist() == pytest.approx([33.0, 66.0])


SECONDS = st.floats(0.01, 3.0)
SCHEDULES = st.sampled_from(
    ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb", "zbv", "dualpipev", "dualpipe"]
).map(Schedule.parse)


def ranks_of(schedule: Schedule, most: int) -> st.SearchStrategy[int]:
    """Ranks that a schedule runs on: an even number where micro-batches come from both ends."""
    return st.integers(1, most).filter(lambda ranks: not schedule.is_two_way or ranks % 2 == 0)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_the_evaluator_equals_the_simulation_for_every_schedule(data: st.DataObject) -> None:
    schedule = data.draw(SCHEDULES)
    ranks = data.draw(ranks_of(schedule, 5))
    micro_batches = ranks * data.draw(st.integers(2, 4))
    stages = [
        StageCosts(*(data.draw(SECONDS) for _ in range(6))) for _ in range(ranks * schedule.virtual)
    ]
    tasks, last = pipeline_tasks(schedule, ranks, micro_batches, stages)
    played = simulate(tasks.tasks, NO_OVERLAP)
    assert play(tasks.tasks, NO_OVERLAP) == pytest.approx(played.step_s, rel=1e-9)
    # No rank computes more than the step, and the last pass of some rank ends it.
    busy = [
        sum(task.cost_s for task in tasks.tasks if task.lane == f"rank {rank}")
        for rank in range(ranks)
    ]
    assert max(busy) <= played.step_s * (1 + 1e-9)
    assert max(played.end_s[last, 0]) <= played.step_s


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_micro_batches_in_the_middle_advance_by_the_period_of_all(data: st.DataObject) -> None:
    schedule = data.draw(SCHEDULES)
    ranks = data.draw(ranks_of(schedule, 4))
    micro_batches = ranks * data.draw(st.integers(2, 14))
    # Stages that are nearly alike fall behind each other slowly: what is waited for changes late.
    least = data.draw(st.sampled_from([0.01, 0.97, 1.0]))
    seconds = st.floats(least, 3.0 if least < 0.1 else 1.0)
    stages = [
        StageCosts(*(data.draw(seconds) for _ in range(3)), *(data.draw(SECONDS) / 9,) * 3)
        for _ in range(ranks * schedule.virtual)
    ]
    tasks, last = pipeline_tasks(schedule, ranks, micro_batches, stages)
    played = simulate(tasks.tasks, NO_OVERLAP)
    found = last_ends_s(schedule, ranks, micro_batches, stages)
    assert found == pytest.approx(played.end_s[last, 0].tolist(), rel=1e-9)


def test_a_wait_that_catches_up_late_is_not_missed() -> None:
    # A ends every 1.1 s. B takes 1 s and is 50 s behind at first: it ends every second until A has
    # caught up (1.1 k > 50 + k − 1 from k = 491 on), then 1 s after A.
    run = RepeatedTasks((RunTask(0, -2, -2, -2), RunTask(1, -2, -1, -1)), times=1000, more=0)
    ends = [0.0, 50.0]
    play_run(run, 490, 2, [1.1, 1.0], ends)
    assert ends[-2:] == pytest.approx([490 * 1.1, 50 + 490])
    play_run(run, 510, 2, [1.1, 1.0], ends)
    assert ends[-2:] == pytest.approx([1100.0, 1101.0])
    at_once = [0.0, 50.0]
    play_run(run, 1000, 2, [1.1, 1.0], at_once)
    assert at_once[-2:] == pytest.approx(ends[-2:])
    # What lies between is not played.
    assert len(at_once) < 100


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_p_minus_s_micro_batches(rank: int, held: int) -> None:
    assert most_held_bytes(Schedule.parse("1f1b"), 4, rank, 16, {rank: 10}) == 10 * held


def test_gpipe_holds_all_and_interleaving_more_than_1f1b() -> None:
    assert most_held_bytes(Schedule.parse("gpipe"), 4, 2, 16, {2: 1}) == 16
    # (v − 1)·p + 2(p − 1) forward passes come before the first backward one, and one with it.
    held = most_held_bytes(Schedule.parse("interleaved:2"), 4, 0, 16, {0: 1, 4: 1})
    assert held == 4 + 2 * 3 + 1


def test_zb_h1_holds_no_more_than_1f1b_s_first_rank() -> None:
    # Qi et al. 2023, section 3.1.
    for rank in range(4):
        assert most_held_bytes(Schedule.parse("zb"), 4, rank, 16, {rank: 1}) <= 4
