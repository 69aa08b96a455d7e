"""The spans of a step, held as columns."""

from __future__ import annotations

from itertools import pairwise

import estimator as est
from estimator.estimates.estimate import Estimate
from estimator.timeline.simulator.tasks import Span
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([32, 64, 32], batch=4)
OPS = 2 * (2 + 5)  # two layers: two ops forward, five backward each


def answer(allocation: str, **options: int) -> Estimate:
    return est.estimate(GRAPH, allocation, profile=Machine().profile(), **options)


def test_a_span_looked_up_equals_the_one_met_on_the_way() -> None:
    spans = answer("1x2:m").timeline.spans
    listed = list(spans)
    assert len(spans) == len(listed) == OPS + 1 + 3  # one bucket; wait, copy back, update
    assert spans[3] == listed[3]
    assert spans[-1] == listed[-1]
    assert list(spans[2:5]) == listed[2:5]
    assert (listed[0].name, listed[0].phase) == ("aten.mm.default", "forward")
    assert (listed[-1].name, listed[-1].phase) == ("update", "update")


def test_every_micro_batch_runs_the_ops_one_after_the_other() -> None:
    spans = [span for span in answer("1x1:m", accumulation_steps=3).timeline.spans if span.phase]
    ops = [span for span in spans if span.phase != "update"]
    assert [span.name for span in ops] == [op.call.target for op in GRAPH.ops] * 3
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(ops))


def test_ranks_under_unlike_load_have_tracks_of_their_own() -> None:
    # Four ranks on a node and one alone: the first of either stands for its equals.
    timeline = answer("1x4:m+2x1:m").timeline
    assert timeline.ranks_like == (0, 0, 0, 0, 4, 4)
    by_rank = {rank: [s for s in timeline.spans if s.rank == rank] for rank in (0, 4)}
    assert len(by_rank[0]) == len(by_rank[4])
    assert {span.rank for span in timeline.spans} == {0, 4}
    ends = {rank: max(map(end_s, spans)) for rank, spans in by_rank.items()}
    assert ends[0] == ends[4] == timeline.step_time_s


def end_s(span: Span) -> float:
    return span.end_s
