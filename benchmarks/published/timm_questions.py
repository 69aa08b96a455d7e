"""Ask the engine about timm's published training steps, in the form of all other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import estimator as est
from estimator.calibrate.observation_files import MeasuredStep
from estimator.machines.catalogue import load_profile
from estimator.tensors import OpCall, TensorSpec
from published.graphs import ModelSpec
from published.mapping import Question, Verdict
from published.rows import PublishedRow
from published.sources import Workload
from published.timm_rows import Layout, TimmRow, read_timm_rows

TABLE = "timm_train"
_SOURCE = "timm"


def timm_verdicts(folder: Path, bank: Path) -> Iterator[Verdict]:
    """What becomes of the rows of ``timm_train.csv`` in `folder`, by the graphs in `bank`."""
    path = folder / f"{TABLE}.csv"
    if not path.is_file():
        return
    table = read_timm_rows(path, bank)
    for row in table.rows:
        yield Verdict(
            table=TABLE, source=_SOURCE, line=row.line, outcome="mapped", question=_question(row)
        )
    for reason, count in table.refused.items():
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
        graph=_graph(row.graph_path, row.layout),
        profile=_profile(row.machine),
    )


# Kept, as answers are kept by the identity of what they are about.
@cache
def _graph(path: Path, layout: Layout) -> est.OpGraph:
    graph = est.OpGraph.load(path)
    return graph if layout == "nchw" else in_channels_last(graph)


def in_channels_last(graph: est.OpGraph) -> est.OpGraph:
    """A graph traced with channels outermost, its convolutions with channels innermost.

    The bank holds one layout. Of the other only the convolutions' kernels differ: all else walks
    its tensors in the order in which they lie.
    """
    ops = tuple(
        replace(op, call=_last(op.call), other_call=_last(op.other_call))
        if "convolution" in op.call.target
        else op
        for op in graph.ops
    )
    return replace(graph, ops=ops, channels_last=True)


def _last(call: OpCall) -> OpCall:
    arguments = tuple(
        _channels_innermost(item) if isinstance(item, TensorSpec) else item
        for item in call.arguments
    )
    return replace(call, arguments=arguments)


def _channels_innermost(spec: TensorSpec) -> TensorSpec:
    if len(spec.shape) != 4:
        return spec
    _, channels, rows, columns = spec.shape
    strides = (channels * rows * columns, 1, columns * channels, channels)
    return TensorSpec(spec.shape, spec.dtype, strides)


@cache
def _profile(name: str) -> est.MachineProfile:
    return load_profile(name)
