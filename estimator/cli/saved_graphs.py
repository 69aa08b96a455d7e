"""Let a saved graph stand for its model under the options of a command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from estimator.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from estimator.graph.op_graph import OpGraph

_FLAGS = {
    "compiled": "--compile",
    "compiled-blocks": "--compile-blocks",
    "cuda-graphs": "--cuda-graphs",
}


def as_asked(graph: OpGraph, asked: Mapping[str, Any]) -> OpGraph:
    """The saved graph with what of a request, by its fields, can be changed after tracing.

    Raises ModelError that names the command to trace again with for what cannot.
    """
    from estimator.api import with_recipe

    for option, wanted, traced in (
        ("precision", None if _is_same(graph, asked["precision"]) else asked["precision"], ""),
        ("measure", asked["measure"], bool(graph.timings)),
        ("channels-last", asked["channels_last"], graph.channels_last),
        ("checkpoint", asked["checkpoint"], graph.checkpoint),
        ("seq-len", asked["seq_len"], graph.tokens_per_sample),
    ):
        if wanted and wanted != traced:
            found = graph.precision if option == "precision" else traced
            words = f"with --{option} {found}" if found else f"without --{option}"
            raise ModelError(
                f"{asked['model']} was traced {words}, on which its operators depend; trace its "
                f"model again: {_command(graph, asked)}"
            )
    return with_recipe(
        graph,
        optimizer=asked["optimizer"],
        precision=asked["precision"],
        compiled=asked["execution"],
        grad_scaler=asked["grad_scaler"],
        clip_grad_norm=asked["clip_grad_norm"],
        float8=asked["float8"],
    )


def _is_same(graph: OpGraph, precision: str | None) -> bool:
    """Whether the operators of a graph are those of a precision, too."""
    if precision in (None, graph.precision):
        return True
    return {precision, graph.precision} == {"fp32", "tf32"} and not graph.timings


def _command(graph: OpGraph, asked: Mapping[str, Any]) -> str:
    """What traces the model as it was traced, but for what is asked."""
    valued = {
        "--target": graph.target,
        "--batch": asked["batch"] or graph.batch,
        "--precision": asked["precision"] or graph.precision,
        "--optimizer": asked["optimizer"] or graph.optimizer,
        "--checkpoint": asked["checkpoint"] or graph.checkpoint,
        "--float8": asked["float8"] or graph.float8,
        "--seq-len": asked["seq_len"],
    }
    flags = {
        "--channels-last": asked["channels_last"] or graph.channels_last,
        "--grad-scaler": asked["grad_scaler"] or graph.grad_scaler,
        "--clip-grad-norm": asked["clip_grad_norm"] or graph.clip_grad_norm,
        "--measure": asked["measure"] or bool(graph.timings),
        _FLAGS.get(asked["execution"] or graph.execution, ""): True,
    }
    words = [word for name, value in valued.items() if value for word in (name, str(value))]
    words += [name for name, is_on in flags.items() if name and is_on]
    return f"estimator trace MODEL {shlex.join([*words, '-o', asked['model']])}"
