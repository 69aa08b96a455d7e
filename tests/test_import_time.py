"""Starting is fast because nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import estimator

HEAVY = ("torch", "numpy", "scipy", "sklearn", "pydantic", "rich", "transformers", "pynvml")


@pytest.mark.parametrize(
    "code",
    [
        "import estimator",
        "import estimator; estimator.Allocation.parse('1x2:local'); estimator.load_profile",
        "from estimator.cli import commands; commands(['--help'], standalone_mode=False)",
        "from estimator.cli import commands; "
        "commands(['estimate', '--help'], standalone_mode=False)",
        "from estimator.cli import commands; "
        "commands(['calibrate', 'evaluate', '--help'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_imported_by(code: str) -> None:
    program = f"import sys; {code}; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_every_public_name_can_be_used() -> None:
    assert all(getattr(estimator, name) is not None for name in estimator.__all__)
    assert set(estimator.__all__) <= set(dir(estimator))
