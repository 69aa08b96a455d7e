"""Ask the engine about timm's published training steps, in the form of all other rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import estimator as est
from estimator.calibrate.tables import MeasuredStep
from estimator.profile import load_profile
from published.graphs import ModelSpec
from published.mapping import Question, Verdict
from published.rows import PublishedRow
from published.sources import Workload
from published.timm_rows import TimmRow, read_timm_rows

TABLE = "timm_train"
_SOURCE = "timm"


def timm_verdicts(folder: Path, bank: Path) -> Iterator[Verdict]:
    """What becomes of the rows of ``timm_train.csv`` in `folder`, by the graphs in `bank`.

    Rows in channels-last layout are not mapped: the bank's graphs are traced in the other one.
    """
    path = folder / f"{TABLE}.csv"
    if not path.is_file():
        return
    table = read_timm_rows(path, bank)
    for row in table.rows:
        if row.layout == "nchw":
            yield Verdict(
                table=TABLE,
                source=_SOURCE,
                line=row.line,
                outcome="mapped",
                question=_question(row),
            )
    refused = dict(table.refused)
    last = sum(row.layout != "nchw" for row in table.rows)
    refused["the bank's graphs are not in channels-last layout"] = last
    for reason, count in refused.items():
        for _ in range(count):
            yield Verdict(table=TABLE, source=_SOURCE, line=0, outcome="unmapped", reason=reason)


def _question(row: TimmRow) -> Question:
    step = MeasuredStep(
        line=row.line,
        source=_SOURCE,
        gpu=row.machine,
        model=row.model,
        precision=row.precision,
        strategy="ddp",
        variant=(row.family, row.layout, row.torch),
        node_sizes=(1,),
        batch_per_gpu=row.batch_per_gpu,
        accumulation_steps=1,
        step_time_s=row.step_time_s,
    )
    spec = ModelSpec(name=f"{row.model} {row.image_size}", builder="timm")
    return Question(
        row=PublishedRow(table=TABLE, line=row.line, cells={}, step=step),
        workload=Workload(spec=spec, precision=row.precision, optimizer="sgd-momentum"),
        graph=_graph(row.graph_path),
        profile=_profile(row.machine),
    )


# Kept, as answers are kept by the identity of what they are about.
@cache
def _graph(path: Path) -> est.OpGraph:
    return est.OpGraph.load(path)


@cache
def _profile(name: str) -> est.MachineProfile:
    return load_profile(name)
