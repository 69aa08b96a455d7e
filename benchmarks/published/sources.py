"""Say for each source of published tables what its rows were measured with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from estimator.calibrate.observation_files import Row
from estimator.errors import StrategyError
from estimator.workload.layouts import Layout
from published.graphs import ModelSpec
from published.machines import Setting
from published.rows import NotMapped, NotQualified, PublishedRow, other_framework


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was trained: model, precision, optimizer, strategy, and the machine beside its GPU.

    `layout` is how ranks share the model, as the engine reads it. With `has_update` False the
    optimizer's step was not measured. `remarks` are what had to be assumed.
    """

    spec: ModelSpec
    precision: str
    optimizer: str = "adamw"
    strategy: str = "ddp"
    layout: str | None = None
    has_update: bool = True
    setting: Setting | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How rows of one source are read: completed before parsing, then mapped to a workload.

    `pattern` is looked for in the column `source`. `complete` gives the cells with what the source
    says elsewhere filled in, or raises NotQualified.
    """

    pattern: str
    workload: Callable[[PublishedRow], Workload]
    complete: Callable[[Row], Row] = dict


Mapper = Callable[[PublishedRow], Workload]


def by_model(*known: tuple[str, Mapper]) -> Mapper:
    """What maps a row by the first pattern that its model has; it raises NotMapped for others."""

    def workload(row: PublishedRow) -> Workload:
        for pattern, mapped in known:
            if re.search(pattern, row.step.model, re.IGNORECASE):
                return mapped(row)
        raise NotMapped(f"no builder for the model {row.step.model}")

    return workload


def needs_pytorch(cells: Row) -> Row:
    """The cells as they are; raises NotQualified where another framework was measured."""
    framework = other_framework(cells)
    if framework is not None:
        raise NotQualified(f"it was measured with {framework}, whose kernels are its own")
    return cells


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
