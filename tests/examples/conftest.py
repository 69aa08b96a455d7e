"""The folder of examples can be imported from."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder; processes that an example starts import from it too."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return EXAMPLES
