"""Say for each source of published tables what its rows were measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from estimator.calibrate.observation_files import Row
from published.graphs import ModelSpec
from published.machines import Setting
from published.rows import NotQualified, PublishedRow, other_framework


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


def needs_pytorch(cells: Row) -> Row:
    """The cells as they are; raises NotQualified where another framework was measured."""
    framework = other_framework(cells)
    if framework is not None:
        raise NotQualified(f"it was measured with {framework}, whose kernels are its own")
    return cells
