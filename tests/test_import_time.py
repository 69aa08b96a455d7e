"""Starting is fast because nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import estimator
from tests.synthetic import perceptron

HEAVY = ("torch", "numpy", "scipy", "sklearn", "pydantic", "rich", "transformers", "pynvml")


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
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_estimating_a_saved_graph_imports_neither_torch_nor_sklearn(tmp_path: Path) -> None:
    graph = replace(perceptron([64, 64]), target="cuda")
    graph.save(tmp_path / "step.json")
    arguments = ["estimate", str(tmp_path / "step.json"), "--on", "2x8:h100-sxm"]
    program = (
        f"import sys; from estimator.cli.main import commands; "
        f"commands({arguments}, standalone_mode=False); "
        "print([name for name in ('torch', 'sklearn', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "step time" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_first_question_about_a_probed_gpu_imports_no_solver(tmp_path: Path) -> None:
    replace(perceptron([64, 64]), target="cuda").save(tmp_path / "step.json")
    machine = Path(__file__).resolve().parents[1] / "data" / "measured" / "h100-80gb.json"
    program = (
        "import sys; from estimator import OpGraph, estimate, load_profile; "
        f"graph, machine = OpGraph.load({str(tmp_path / 'step.json')!r}), "
        f"load_profile({str(machine)!r}); "
        "estimate(graph, '1x1:h100-80gb', profile=machine); "
        "print('scipy.optimize' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "False"


def test_every_public_name_can_be_used() -> None:
    assert all(getattr(estimator, name) is not None for name in estimator.__all__)
    assert set(estimator.__all__) <= set(dir(estimator))
    # Importing a room sets its name in the package: a function of that name would be gone.
    rooms = {path.stem for path in Path(estimator.__file__).parent.iterdir()}
    assert not rooms & set(estimator.__all__)
