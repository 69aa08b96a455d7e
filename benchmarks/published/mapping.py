"""Map rows of published tables to questions for the engine, or say why a row cannot be asked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import estimator as est
from estimator.calibrate.observation_files import Row
from estimator.machines.profile import MachineProfile
from estimator.workload.layouts import Layout
from estimator.workload.strategies import DDP
from published import benchmark_sources, language_sources, scheduler_sources
from published.graphs import GraphStore
from published.machines import machine_of
from published.rows import NotMapped, NotQualified, PublishedRow, parsed, standard_tables
from published.sources import Source, Workload

Outcome = Literal["mapped", "unmapped", "not_qualified"]
# In the order in which a row's source is looked for.
SOURCES = (
    *language_sources.SOURCES,
    *benchmark_sources.SOURCES,
    *scheduler_sources.SOURCES,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One row as the engine is asked about it."""

    row: PublishedRow
    workload: Workload
    graph: est.OpGraph
    profile: MachineProfile

    @property
    def allocation(self) -> str:
        """Devices of each node, on the row's machine."""
        setting, sizes = self.workload.setting, groupby(self.row.step.node_sizes)
        if setting is not None and setting.in_containers:
            sizes = groupby([1] * self.row.step.ranks)
        name = self.profile.name
        return "+".join(f"{len(list(same))}x{size}:{name}" for size, same in sizes)

    @property
    def global_batch(self) -> float:
        """Samples of one step: ranks that share a model share its samples."""
        step, ranks = self.row.step, self.row.step.ranks
        layout = Layout.parse(self.workload.layout or "dp=*")
        return step.global_batch * math.prod(layout.data_axes(ranks, DDP())) / ranks

    @property
    def batch_per_gpu(self) -> int:
        """Samples per device and micro-batch."""
        return round(self.row.step.batch_per_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a row: a question, or the reason why not."""

    table: str
    source: str
    line: int
    outcome: Outcome
    reason: str = ""
    question: Question | None = None


def verdicts(folder: Path, graphs: GraphStore, only: Sequence[str] = ()) -> Iterator[Verdict]:
    """What becomes of every row of every table of a directory in the standard columns.

    `only` are parts of names of tables or sources.
    """
    for table, lines in standard_tables(folder):
        for line, cells in lines:
            source = cells.get("source", table)
            named = f"{table} {source}".lower()
            if only and not any(word.lower() in named for word in only):
                continue
            yield _verdict(table, source, line, cells, graphs)


def source_of(cells: Row) -> Source:
    """The source that a row belongs to; raises NotMapped for one that nobody has described."""
    name = cells.get("source", "")
    for source in SOURCES:
        if re.search(source.pattern, name, re.IGNORECASE):
            return source
    raise NotMapped(f"its source '{name}' is not described")


def _verdict(table: str, source: str, line: int, cells: Row, graphs: GraphStore) -> Verdict:
    outcome: Outcome = "mapped"
    reason, question = "", None
    try:
        described = source_of(cells)
        question = _question(parsed(table, line, described.complete(cells)), described, graphs)
    except NotQualified as error:
        outcome, reason = "not_qualified", str(error)
    except NotMapped as error:
        outcome, reason = "unmapped", str(error)
    return Verdict(
        table=table, source=source, line=line, outcome=outcome, reason=reason, question=question
    )


def _question(row: PublishedRow, described: Source, graphs: GraphStore) -> Question:
    if row.step.batch_per_gpu < 0.5:
        raise NotMapped("it has less than one sample on a device")
    workload = described.workload(row)
    profile = machine_of(row, workload.setting)
    graph = graphs.graph(workload.spec, workload.precision, workload.optimizer)
    return Question(row=row, workload=workload, graph=graph, profile=profile)
