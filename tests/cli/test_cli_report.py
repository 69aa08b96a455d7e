"""The command that writes a report: a page, figures, observed steps, one sentence for errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from estimator.api import estimate
from estimator.calibrate.calibrator import Calibrator
from estimator.graph.ir.op_graph import OpGraph
from estimator.units import format_seconds
from tests.conftest import Command
from tests.synthetic import perceptron

pytest.importorskip("matplotlib")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.graph"
    perceptron([256, 256, 256], target="cuda").save(path)
    return path


def test_a_report_has_all_sections_and_names_its_files(
    model: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "report.html"
    words = ("--on", "2x2:t4-g4dn", "-o", out, "--samples", "1e6", "--json")
    found = command("report", model, *words, "--figures", tmp_path / "figures")
    assert found.code == 0
    told = json.loads(found.out)
    assert told["report"] == str(out)
    assert all(Path(path).stat().st_size > 0 for path in told["figures"])
    text = out.read_text()
    named = ("answer", "time", "timeline", "scaling", "memory", "layouts", "cost", "assumptions")
    assert [f'<section id="{name}">' in text for name in named] == [True] * 8
    assert "calibration" not in text


def test_tokens_are_timed_and_paid_as_the_samples_that_hold_them(
    model: Path, tmp_path: Path, command: Command
) -> None:
    graph = replace(OpGraph.load(model), tokens_per_sample=128)
    graph.save(model)
    pages = []
    for amount in (("--samples", "1e9"), ("--tokens", "128e9")):
        out = tmp_path / f"{amount[0]}.html"
        found = command("report", model, "--on", "1x2:t4-g4dn", "-o", out, *amount)
        assert found.code == 0
        pages.append(out.read_text())
    took = format_seconds(1e9 / (estimate(graph, "1x2:t4-g4dn").samples_per_s or 0.0))
    for page in pages:
        assert took in page
        assert "1.00 Gsamples" in page.replace("1.00 G samples", "1.00 Gsamples")
    # Costs follow the section's heading; equal amounts cost the same.
    costs = [page.partition('<section id="cost">')[2].partition("</section>")[0] for page in pages]
    assert costs[0] == costs[1]


def test_observed_steps_stand_beside_predicted_ones(
    model: Path, tmp_path: Path, command: Command
) -> None:
    graph = OpGraph.load(model)
    store = Calibrator(tmp_path / "seen.db")
    step_s = 1.1 * estimate(graph, "1x2:t4-g4dn").step_time_s
    for _ in range(3):
        store.observe(graph, "1x2:t4-g4dn", step_time_s=step_s, batch_per_gpu=16)
    out = tmp_path / "report.html"
    found = command(
        "report", model, "--on", "1x2:t4-g4dn", "-o", out, "--observed", tmp_path / "seen.db"
    )
    assert found.code == 0
    text = out.read_text()
    assert '<section id="calibration">' in text
    assert f">{format_seconds(step_s)}<" in text
    assert "(-9 %)" in text, "of the engine, 1 / 1.1"
    assert re.search(r"\([+-]0 %\)", text), "of the calibrated answer"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--observed", "missing.db"), "there is no store 'missing.db'"),
        (("--on", "1x9:t4-g4dn"), "which has"),
        (("--samples", "1e6", "--tokens", "1e6"), "give --samples or --tokens, not both"),
        (("--tokens", "1e6"), "has no tokens to count"),
        (("--prices", "missing.csv"), "cannot read prices missing.csv"),
        (("-o", "/dev/null/report.html"), "/dev/null"),
    ],
)
def test_wrong_input_is_one_sentence(
    model: Path, tmp_path: Path, command: Command, words: tuple[str, ...], said: str
) -> None:
    out = ("--on", "1x1:t4-g4dn", "-o", tmp_path / "report.html")
    assert said in command("report", model, *out, *words).sentence
