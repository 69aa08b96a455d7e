"""Split a traced graph as a layout asks, by the plan that is given, traced with it, or found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from estimator.errors import EstimatorError, StrategyError, printable
from estimator.graph.compile.megatron import compiled_like
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.context import split_context
from estimator.graph.partition.experts import slice_expert_tokens, split_experts, sum_experts
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan, found_plan, plan_of_config
from estimator.graph.partition.repeats import Repeats
from estimator.workload.layouts import Layout


def split_by_layout(
    graph: OpGraph,
    layout: Layout,
    plan: Plan | None = None,
    repeats: Callable[[], Repeats | None] = lambda: None,
) -> OpGraph:
    """The graph of one rank of a layout.

    `repeats` gives the equal blocks of the graph, most of which then need not be divided. Raises
    StrategyError, also where rules cannot read the operators of a graph that was saved.
    """
    try:
        return _split(graph, layout, plan, repeats)
    except EstimatorError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise StrategyError(
            f"the operators of {graph.name} are none that can be divided by '{layout}' ({reason}); "
            "trace the model again"
        ) from error


def _split(
    graph: OpGraph,
    layout: Layout,
    plan: Plan | None,
    repeats: Callable[[], Repeats | None] = lambda: None,
) -> OpGraph:
    if graph.layout is not None:
        # Its module was divided before it was traced.
        return graph
    axis = next(name for name in ("tp", "cp", "ep") if getattr(layout, name) > 1)
    if graph.is_summary:
        raise StrategyError(
            f"{graph.name} is known by a summary, whose layers cannot be divided by {axis}; trace "
            "it"
        )
    if graph.execution != "eager":
        return _compiled(graph, axis, layout, plan)
    # A plan that is given may name any block.
    few = repeats() if plan is None else None
    if few is not None:
        with suppress(StrategyError):
            part = few.repeated(_divided(few.short, layout, None))
            if part is not None:
                return part
    return _divided(graph, layout, plan)


def _divided(graph: OpGraph, layout: Layout, plan: Plan | None) -> OpGraph:
    if plan is None and layout.tp > 1:
        plan = _plan(graph, layout)
    of_experts = sum_experts if layout.sums_experts else split_experts
    graph = of_experts(graph, ep=layout.ep, imbalance=layout.imbalance)
    graph = split_context(graph, cp=layout.cp, ring=layout.ring)
    if layout.ep > 1 and not layout.sums_experts:
        graph = slice_expert_tokens(graph, tp=layout.tp)
    return graph if plan is None else split(graph, plan, tp=layout.tp, megatron=layout.megatron)


def _plan(graph: OpGraph, layout: Layout) -> Plan:
    """What the model's config says, but where tokens or vocabulary are divided too: found."""
    sequence, vocabulary = layout.sequence, layout.vocabulary
    modules = dict.fromkeys(op.module for op in graph.ops)
    own = None if sequence or vocabulary else plan_of_config(graph.tp_plan, modules)
    return own or found_plan(graph, sequence=sequence, vocabulary=vocabulary)


def _compiled(graph: OpGraph, axis: str, layout: Layout, plan: Plan | None) -> OpGraph:
    """What the compiler makes of a rank's part, as of a module that was parallelised before."""
    eager = graph.eager
    if eager is None:
        raise StrategyError(
            f"{graph.name} was compiled and saved without its eager operators, which {axis} "
            "divides; trace it again"
        )
    eager = replace(eager, name=graph.name, optimizer=graph.optimizer)
    return compiled_like(_split(eager, layout, plan), graph)
