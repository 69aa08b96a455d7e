"""What people print in a terminal is one line, however large the value."""

from __future__ import annotations

import pickle

import estimator as est
from estimator.units import format_interval
from tests.synthetic import Machine, perceptron

PROFILE = Machine(devices=2).profile()
GRAPH = perceptron([256, 1000, 256], batch=64)


def test_values_print_as_one_line_that_says_what_they_are() -> None:
    answer = est.estimate(GRAPH, "1x2:m", profile=PROFILE)
    table = est.estimate_many(GRAPH, ["1x1:m", "1x2:m"], profile=PROFILE)
    # Two products of 256 · 1000 weights each.
    graph_text = f"OpGraph({GRAPH.name} for cpu: {len(GRAPH.ops)} ops, 512,000 parameters)"
    assert repr(GRAPH) == graph_text
    assert repr(GRAPH.at(128)) == f"BoundGraph({graph_text} at batch 128)"
    assert repr(PROFILE) == f"MachineProfile({PROFILE.name}: 2 x {PROFILE.devices[0].name})"
    assert repr(answer).startswith(f"Estimate({GRAPH.name} on 1x2:m: ")
    assert repr(answer).endswith(" samples/s)")
    assert f" {format_interval(answer.step_time_s, answer.low_s, answer.high_s)}, " in repr(answer)
    assert "2 rows, columns step_time_s, " in repr(table)
    assert " fits, bottleneck, " in repr(table)


def test_values_that_print_alike_still_differ() -> None:
    other = perceptron([1000, 256, 1000], batch=64)
    assert pickle.loads(pickle.dumps(GRAPH)) == GRAPH
    assert other != GRAPH
