"""A user's script that names public types passes mypy --strict."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import estimator as est

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import estimator as est

graph: est.OpGraph = est.OpGraph.load("step.graph")
answer: est.Estimate = est.estimate(graph, "2x8:h100-sxm", strategy=est.Strategy.parse("fsdp"))
exposed_s: float = answer.breakdown.communication_exposed_s
reveal_type(answer.breakdown.total_s)
seconds: est.Breakdown = answer.breakdown
recipe: est.Recipe = est.Recipe.parse("megatron:fp8=current")
plain = est.Recipe(precision="bf16-amp", optimizer="adamw", clip=1.0, compile="blocks")
layout: est.Layout = est.Layout.parse("tp=2,dp=*")
ranking = est.best_layouts([graph], "2x8:h100-sxm", global_batch=64)
times: list[float] = [row.answer.step_time_s for row in ranking.rows]
for row in est.sweep(graph, "1..2x8:h100-sxm", layout=layout):
    if row.answer is not None:
        print(row.allocation, row.answer.low_s, row.answer.fits)
"""


def test_every_public_name_has_an_example_that_runs() -> None:
    finder = doctest.DocTestFinder()
    without = [
        name
        for name in est.__all__
        if not any(found.examples for found in finder.find(getattr(est, name), name))
    ]
    assert not without


SUBJECTS = ("model_or_graph", "graph", "graphs", "model", "batch", "loss", "plan", "loader")
SUBJECTS += (
    "allocation",
    "allocations",
    "machines",
    "patterns",
    "name_or_path",
    "store",
    "batches",
)


def test_public_functions_take_keywords_after_their_subject() -> None:
    for name in est.__all__:
        function = getattr(est, name)
        if inspect.isfunction(function):
            for parameter in inspect.signature(function).parameters.values():
                is_subject = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                assert not is_subject or parameter.name in SUBJECTS, (name, parameter.name)
                assert parameter.annotation is not parameter.empty, (name, parameter.name)


def test_a_script_of_a_user_passes_mypy_strict(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "float"' in found.stdout, found.stdout
    assert found.returncode == 0, found.stdout
