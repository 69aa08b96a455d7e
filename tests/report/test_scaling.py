"""Pictures of sweeps."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from estimator.advise.sweeps import SweepRow, sweep
from estimator.engine import estimate_graph
from estimator.estimates import Estimate
from estimator.report.scaling import draw_scaling, lines_of
from tests.synthetic import Machine, perceptron

PROFILE = Machine(devices=4).profile()
GRAPH = perceptron([256, 1000, 256], batch=64)


def answer_of(text: str) -> Estimate:
    return estimate_graph(GRAPH, text, profile=PROFILE)


def rows_of(*patterns: str) -> list[SweepRow]:
    return sweep(patterns, answer_of)


def devices_of(*patterns: str) -> dict[str, list[int]]:
    lines = lines_of(rows_of(*patterns))
    return {label: [point.devices for point in line] for label, line in lines.items()}


def test_whole_nodes_make_one_line_over_devices() -> None:
    assert devices_of("1..4x2:m") == {"2 devices a node": [2, 4, 6, 8]}


def test_lines_are_by_the_count_that_has_fewer_values() -> None:
    assert devices_of("1..2x1..4:m") == {"1 node": [1, 2, 3, 4], "2 nodes": [2, 4, 6, 8]}
    assert devices_of("1..3x1..2:m") == {
        "1 device a node": [1, 2, 3],
        "2 devices a node": [2, 4, 6],
    }


def test_machine_types_have_lines_of_their_own() -> None:
    assert list(devices_of("1..2x1:a", "1..2x1:b")) == ["a, 1 device a node", "b, 1 device a node"]


def test_a_picture_of_many_lines_is_drawn_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = rows_of(*(f"1..2x1:m{number}" for number in range(30)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_scaling(rows, tmp_path / "many.svg")
    drawn = (tmp_path / "many.svg").read_text()
    # matplotlib keeps the words of an SVG in comments; ten of the thirty lines are named.
    assert drawn.count("1 device a node -->") == 10
