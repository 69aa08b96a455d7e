"""A user's script that names public types passes mypy --strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import estimator as est

graph: est.OpGraph = est.OpGraph.load("step.graph")
answer: est.Estimate = est.estimate(graph, "2x8:h100-sxm", strategy=est.Strategy.parse("fsdp"))
exposed_s: float = answer.breakdown.communication_exposed_s
reveal_type(answer.breakdown.total_s)
seconds: est.Breakdown[float] = answer.breakdown
recipe: est.Recipe = est.Recipe.parse("megatron:fp8=current")
layout: est.Layout = est.Layout.parse("tp=2,dp=*")
ranking = est.best_layouts([graph], "2x8:h100-sxm", global_batch=64)
times: list[float] = [row.answer.step_time_s for row in ranking.rows]
for row in est.sweep(graph, "1..2x8:h100-sxm", layout=layout):
    if row.answer is not None:
        print(row.allocation, row.answer.low_s, row.answer.fits)
"""


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
