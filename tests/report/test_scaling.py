"""Pictures of sweeps."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import estimator as est
from estimator.advise.scaling import SweepRow, sweep
from estimator.estimates.estimate import Estimate
from estimator.report.pictures import lines_of, save_figure, scaling_figure
from tests.synthetic import Machine, perceptron

PROFILE = Machine(devices=4).profile()
GRAPH = perceptron([256, 1000, 256], batch=64)


def answer_of(text: str) -> Estimate:
    return est.estimate(GRAPH, text, profile=PROFILE)


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


def texts_of(rows: list[SweepRow], path: Path) -> list[str]:
    """What a picture says: matplotlib keeps the words of an SVG in comments."""
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(scaling_figure(rows), path)
    return re.findall("<!-- (.*?) -->", path.read_text())


def test_a_picture_names_every_line_it_draws(tmp_path: Path) -> None:
    texts = texts_of(rows_of(*(f"1..2x1:m{number}" for number in range(30))), tmp_path / "many.svg")
    named = [text for text in texts if text.endswith("1 device a node")]
    assert len(named) == len(set(named)) == 30
    assert "linear" in texts


def test_a_picture_says_what_it_is_of(tmp_path: Path) -> None:
    texts = texts_of(rows_of("1..2x1..4:m"), tmp_path / "one.svg")
    assert f"{GRAPH.name} on m: fp32, batch 64 per device, ddp" in texts
    assert {"1 node", "2 nodes", "linear"} <= set(texts)
    by_step = sweep(
        ["1x1..2:m"],
        lambda text: est.estimate(GRAPH, text, profile=PROFILE, global_batch=128),
    )
    texts = texts_of(by_step, tmp_path / "step.svg")
    assert f"{GRAPH.name} on m: fp32, batch 128 a step, ddp" in texts


def test_a_line_of_one_point_shows_its_interval() -> None:
    pytest.importorskip("matplotlib")
    (row,) = rows_of("1x2:m")
    speed = scaling_figure([row]).axes[0]
    ((begin, end),) = speed.collections[0].get_segments()
    samples = row.answer.samples_per_s * row.answer.step_time_s
    assert [begin[1], end[1]] == pytest.approx(
        [samples / row.answer.high_s, samples / row.answer.low_s]
    )
