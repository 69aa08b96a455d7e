"""Tables with a column of layouts: every row is the estimate of its allocation and layout."""

from __future__ import annotations

import numpy as np
import pytest

import estimator as est
from estimator.errors import StrategyError
from tests.graph.partition.test_stages import traced
from tests.synthetic import Machine, with_every_collective

PROFILE = with_every_collective(Machine(rank_jitter_ratio=0.0).profile())
GRAPH = traced(4)
ALLOCATIONS = ["1x4:m", "1x2:m", "2x2:m", "1x3:m", "1x1:m"]
LAYOUTS = ["pp=2,dp=*", None, "pp=4,schedule=gpipe,dp=1", "pp=2,dp=*", "dp=*"]


def test_each_row_has_its_layout() -> None:
    table = est.estimate_many(
        GRAPH, ALLOCATIONS, layout=LAYOUTS, accumulation_steps=4, profile=PROFILE
    )
    assert table.answered.tolist() == [True, True, True, False, True]
    assert "takes a multiple of 2 ranks, found 3" in table.errors[3]
    for row in (0, 1, 2, 4):
        answer = est.estimate(
            GRAPH, ALLOCATIONS[row], layout=LAYOUTS[row], accumulation_steps=4, profile=PROFILE
        )
        assert table.step_time_s[row] == pytest.approx(answer.step_time_s, rel=1e-9)
        assert table.idle_s[row] == pytest.approx(answer.breakdown.idle_s, rel=1e-9)
        assert table.peak_memory_bytes[row] == answer.peak_memory_bytes
        assert table.global_batch[row] == answer.global_batch
        assert table.nodes[row] == (2 if row == 2 else 1)
        assert table[row].layout == answer.layout
    assert (table[2:].idle_s == table.idle_s[2:])[[0, 2]].all()
    assert table[2:][0].layout == "pp=4,schedule=gpipe,dp=1"


def test_one_layout_is_that_of_all_rows_and_batches_go_with_it() -> None:
    batches = np.array([16, 32])
    table = est.estimate_many(
        GRAPH,
        ["1x4:m", "1x8:m"],
        layout="pp=2,dp=*",
        global_batch=batches,
        accumulation_steps=2,
        profile=PROFILE,
    )
    assert table.global_batch.tolist() == [16, 32]
    assert table.batch_per_gpu.tolist() == [4, 4]
    assert (table.idle_s > 0).all()


def test_a_column_of_another_length_is_refused_in_one_sentence() -> None:
    with pytest.raises(StrategyError, match="one for each of 2 allocations, found"):
        est.estimate_many(GRAPH, ["1x2:m", "1x4:m"], layout=["pp=2"], profile=PROFILE)
    with pytest.raises(StrategyError, match=r"row 1: layout 'pp=2.*' takes a multiple of 2 ranks"):
        est.estimate_many(
            GRAPH,
            ["1x2:m", "1x3:m"],
            layout="pp=2",
            accumulation_steps=2,
            profile=PROFILE,
            strict=True,
        )
