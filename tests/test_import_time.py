"""Starting is fast because nothing heavy is imported before it is needed."""

from __future__ import annotations

import doctest
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import estimator
import estimator as est
from estimator.units import format_interval
from tests.synthetic import Machine, perceptron

HEAVY = ("torch", "numpy", "scipy", "sklearn", "pydantic", "rich", "transformers", "pynvml")


def printed_by(program: str) -> list[str]:
    """The lines that a process of its own prints."""
    words = [sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    "code",
    [
        "import estimator",
        "import estimator; estimator.Allocation.parse('1x2:local'); estimator.load_profile",
        "from estimator.cli.main import commands; commands(['--help'], standalone_mode=False)",
        "from estimator.cli.main import commands; "
        "commands(['estimate', '--help'], standalone_mode=False)",
        "from estimator.cli.main import commands; "
        "commands(['calibrate', 'fit', '--help'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_imported_by(code: str) -> None:
    program = f"import sys; {code}; print([name for name in {HEAVY} if name in sys.modules])"
    found = printed_by(program)
    assert found[-1] == "[]"


def test_estimating_a_saved_graph_imports_neither_torch_nor_sklearn(tmp_path: Path) -> None:
    perceptron([64, 64], target="cuda").save(tmp_path / "step.json")
    arguments = ["estimate", str(tmp_path / "step.json"), "--on", "2x8:h100-sxm"]
    program = (
        f"import sys; from estimator.cli.main import commands; "
        f"commands({arguments}, standalone_mode=False); "
        "print([name for name in ('torch', 'sklearn', 'transformers') if name in sys.modules])"
    )
    found = printed_by(program)
    assert any("step time" in line for line in found)
    assert found[-1] == "[]"


def test_the_first_question_about_a_probed_gpu_imports_no_solver(tmp_path: Path) -> None:
    perceptron([64, 64], target="cuda").save(tmp_path / "step.json")
    machine = Path(__file__).resolve().parents[1] / "data" / "measured" / "h100-80gb.json"
    program = (
        "import sys; from estimator import OpGraph, estimate, load_profile; "
        f"graph, machine = OpGraph.load({str(tmp_path / 'step.json')!r}), "
        f"load_profile({str(machine)!r}); "
        "estimate(graph, '1x1:h100-80gb', profile=machine); "
        "print('scipy.optimize' in sys.modules)"
    )
    found = printed_by(program)
    assert found[-1] == "False"


def test_every_public_name_can_be_used() -> None:
    assert all(getattr(estimator, name) is not None for name in estimator.__all__)
    assert set(estimator.__all__) <= set(dir(estimator))
    # Importing a room sets its name in the package: a function of that name would be gone.
    rooms = {path.stem for path in Path(estimator.__file__).parent.iterdir()}
    assert not rooms & set(estimator.__all__)


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
