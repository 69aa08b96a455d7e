"""Split a traced graph as a layout asks, by the plan that is given, traced with it, or found."""

from __future__ import annotations

from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.graph.split import split
from estimator.graph.split_found import found_plan
from estimator.graph.split_plan import Plan
from estimator.workload.layout import Layout


def split_by_layout(graph: OpGraph, layout: Layout, plan: Plan | None = None) -> OpGraph:
    """The graph of one rank of a layout; raises StrategyError."""
    if graph.is_summary:
        raise StrategyError(
            f"{graph.name} is known by a summary, whose layers cannot be divided by tp; trace it"
        )
    if graph.execution != "eager":
        raise StrategyError(
            f"{graph.name} is compiled: its fused operators cannot be divided by tp; trace it eager"
        )
    if plan is None:
        plan = found_plan(graph, sequence=layout.sequence, vocabulary=layout.vocabulary)
    return split(graph, plan, tp=layout.tp)
