"""Read how published rows share a model among ranks: their degrees, in the engine's words."""

from __future__ import annotations

import re
from collections.abc import Mapping

from estimator.calibrate.observation_files import Row
from estimator.errors import StrategyError
from estimator.workload.layouts import Layout
from published.rows import NotMapped

_DEGREES = re.compile(r"\b(tp|pp|dp|cp|ep|vp|fsdp|hsdp)\s*=?\s*(\d+)", re.IGNORECASE)
# Cells of a row whose ranks share a model; the table's own reader knows data parallelism alone.
COLUMN = "layout"


def degrees_of(parallelism: str) -> dict[str, int]:
    """Ranks along each axis, such as those of ``tp4/dp1/pp2`` or ``TP=4, PP=4, VP=5``."""
    return {name.lower(): int(degree) for name, degree in _DEGREES.findall(parallelism)}


def layout_text(degrees: Mapping[str, int], *, flags: str = "vocab") -> str:
    """A layout as the engine reads it, 1F1B or interleaved; empty where every rank has the model.

    `flags` are what tp divides beside layers.

    >>> layout_text({"tp": 4, "pp": 2, "vp": 5})
    'tp=4,vocab,pp=2,schedule=interleaved:5,dp=*'
    """
    tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
    parts = [f"tp={tp}", *flags.split(",")] if tp > 1 else []
    if pp > 1:
        virtual = degrees.get("vp", 1)
        parts += [f"pp={pp}", f"schedule=interleaved:{virtual}" if virtual > 1 else "schedule=1f1b"]
    parts += [f"{name}={degrees[name]}" for name in ("cp", "ep") if degrees.get(name, 1) > 1]
    return ",".join([*parts, "dp=*"]) if parts else ""


def with_layout(cells: Row, *, flags: str = "vocab", data_parallel: str = "dp") -> Row:
    """The cells with a layout of their own, the rest of the ranks being `data_parallel`.

    Raises NotMapped for a layout that the engine has not.
    """
    text = layout_text(degrees_of(cells.get("parallelism", "")), flags=flags)
    try:
        Layout.parse(text or "dp=*")
    except StrategyError as error:
        raise NotMapped(str(error)) from None
    return {**cells, "parallelism": data_parallel, **({COLUMN: text} if text else {})}
