"""Write the sections of a report as one HTML file, and show an estimate in a notebook."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from estimator.errors import StoreError
from estimator.estimates.estimate import Estimate
from estimator.files import read_text
from estimator.report.pictures import inline_svg, save_figure
from estimator.report.sections import Section, estimate_sections
from estimator.units import format_seconds

_TEMPLATES = Path(__file__).with_name("templates")


def page(title: str, sections: Sequence[Section]) -> str:
    """The page as text; raises StoreError where matplotlib is missing."""
    shown = [section for section in sections if not section.is_empty]
    return str(template("report.html").render(title=title, sections=shown))


def write_figures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Each figure of the sections as .png and .svg; raises StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {folder} ({error.strerror}); name a folder") from None
    drawn = [section for section in sections if section.figure is not None]
    paths = [folder / f"{picture.name}.{kind}" for picture in drawn for kind in ("png", "svg")]
    for path in paths:
        save_figure(next(picture.figure for picture in drawn if picture.name == path.stem), path)
    return paths


@cache
def template(name: str) -> Any:
    """A template of the package, which escapes every name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": format_seconds,
        "figure": _figure,
        "sentence": lambda words: words[:1].upper() + words[1:],
    }
    environment.globals["style"] = _raw("style.css")
    environment.globals["zoom"] = _raw("zoom.js")
    environment.globals["zoom_hash"] = zoom_hash()
    return environment.get_template(name)


@cache
def zoom_hash() -> str:
    """The hash by which a page allows its one script and no other."""
    content = read_text(_TEMPLATES / "zoom.js").encode()
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


def _raw(name: str) -> Any:
    from markupsafe import Markup

    return Markup(read_text(_TEMPLATES / name))


def _figure(section: Section) -> Any:
    from markupsafe import Markup

    # matplotlib escapes the texts of its SVG.
    return Markup(inline_svg(section.figure, section.name))


def estimate_html(answer: Estimate) -> str:
    """An HTML element with its own style, every name escaped."""
    return str(template("notebook.html").render(sections=estimate_sections(answer)))
