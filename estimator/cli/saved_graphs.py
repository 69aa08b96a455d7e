"""Let a saved graph stand for its model under the options of a command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from estimator.errors import ModelError

if TYPE_CHECKING:
    from estimator.cli.request import Request
    from estimator.graph.op_graph import OpGraph

_FLAGS = {
    "compiled": "--compile",
    "compiled-blocks": "--compile-blocks",
    "cuda-graphs": "--cuda-graphs",
}


def as_asked(graph: OpGraph, request: Request) -> OpGraph:
    """The saved graph with what of a request can be changed after tracing.

    Raises ModelError that names the command to trace again with for what cannot.
    """
    from estimator.api import with_recipe

    for option, asked, traced in (
        ("precision", None if _is_same(graph, request.precision) else request.precision, ""),
        ("measure", request.measure, bool(graph.timings)),
        ("channels-last", request.channels_last, graph.channels_last),
        ("checkpoint", request.checkpoint, graph.checkpoint),
        ("seq-len", request.seq_len, graph.tokens_per_sample),
    ):
        if asked and asked != traced:
            found = graph.precision if option == "precision" else traced
            words = f"with --{option} {found}" if found else f"without --{option}"
            raise ModelError(
                f"{request.model} was traced {words}, on which its operators depend; trace its "
                f"model again: {_command(graph, request)}"
            )
    return with_recipe(
        graph,
        optimizer=request.optimizer,
        precision=request.precision,
        compiled=request.execution,
        grad_scaler=request.grad_scaler,
        clip_grad_norm=request.clip_grad_norm,
        float8=request.float8,
    )


def _is_same(graph: OpGraph, precision: str | None) -> bool:
    """Whether the operators of a graph are those of a precision, too."""
    if precision in (None, graph.precision):
        return True
    return {precision, graph.precision} == {"fp32", "tf32"} and not graph.timings


def _command(graph: OpGraph, request: Request) -> str:
    """What traces the model as it was traced, but for what is asked."""
    valued = {
        "--target": graph.target,
        "--batch": request.batch or graph.batch,
        "--precision": request.precision or graph.precision,
        "--optimizer": request.optimizer or graph.optimizer,
        "--checkpoint": request.checkpoint or graph.checkpoint,
        "--float8": request.float8 or graph.float8,
        "--seq-len": request.seq_len,
    }
    flags = {
        "--channels-last": request.channels_last or graph.channels_last,
        "--grad-scaler": request.grad_scaler or graph.grad_scaler,
        "--clip-grad-norm": request.clip_grad_norm or graph.clip_grad_norm,
        "--measure": request.measure or bool(graph.timings),
        _FLAGS.get(request.execution or graph.execution, ""): True,
    }
    words = [word for name, value in valued.items() if value for word in (name, str(value))]
    words += [name for name, is_on in flags.items() if name and is_on]
    return f"estimator trace MODEL {shlex.join([*words, '-o', request.model])}"
