"""What all pictures share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from estimator.errors import StoreError
from estimator.report.pictures import empty_figure, save_figure, shades, title_of


def test_without_matplotlib_a_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StoreError, match=r"needs matplotlib; install throughput-estimator\[report"):
        empty_figure(width_inches=10.0, height_inches=4.0)


def test_another_kind_of_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(StoreError, match=r"cannot draw .*picture\.doc \(.*\); name a \.png"):
        save_figure(empty_figure(width_inches=1.0, height_inches=1.0), tmp_path / "picture.doc")


def test_long_names_are_wrapped_and_dollars_are_no_formula() -> None:
    name = "llama,hidden_size=4096,num_hidden_layers=32"
    lines = title_of(f"{name} on 4x8:h100-sxm: peak in update", characters=20).split("\n")
    assert max(map(len, lines)) <= 20
    assert "".join(lines).startswith(name)
    assert title_of("$x$", characters=20) == r"\$x\$"


def test_shades_begin_dark_and_end_at_the_brightest() -> None:
    colormaps = pytest.importorskip("matplotlib").colormaps
    first, second, last = shades(3, brightest=0.8)
    viridis = colormaps["viridis"]
    assert (first, second, last) == (viridis(0.0), viridis(0.4), viridis(0.8))
    assert shades(1, brightest=0.8) == [viridis(0.0)]
