"""Begin a picture and write it, as matplotlib does both."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import IO, Any

from estimator.errors import StoreError, cause


def empty_figure(*, width_inches: float, height_inches: float) -> Any:
    """A figure without axes; raises StoreError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StoreError(
            "a picture needs matplotlib; install throughput-estimator[report]"
        ) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def shades(count: int, *, brightest: float) -> list[Any]:
    """So many colours from dark up to the `brightest`; 1 is hard to see on white."""
    from matplotlib import colormaps

    return [colormaps["viridis"](brightest * n / max(count - 1, 1)) for n in range(count)]


def title_of(text: str, *, characters: int) -> str:
    """A title in lines of so many characters at most, as matplotlib shows it.

    Names of models may be longer than a picture is wide; between two dollars it would read a
    formula.
    """
    return "\n".join(textwrap.wrap(text, characters)).replace("$", r"\$")


def inline_svg(figure: Any, name: str) -> str:
    """A figure as an SVG element for a page; `name` keeps its ids apart from other figures'."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def save_figure(figure: Any, path: Path, *, to: IO[bytes] | None = None) -> None:
    """Write a figure to `path`, or what would stand there `to` a stream; raises StoreError."""
    try:
        if to is None:
            figure.savefig(path)
        else:
            figure.savefig(to, format=path.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot draw {path} ({cause(error)}); name a .png or .svg file") from None
