"""Answer Volcano's plugin "extender": may a task run on a node, and which node is the fastest.

Formats: volcano-sh/volcano, pkg/scheduler/plugins/extender/argument.go (PredicateRequest,
PrioritizeRequest and what answers them). A task holds its pod, a node the Kubernetes object, under
the names of Go's fields. What refuses a node is called `errorMessage` up to Volcano 1.8, `status`
with a `code` in later ones: both are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estimator.graph.op_graph import OpGraph
from estimator.schedulers.kubernetes import Content, field, lack_of, scores

# Of pkg/scheduler/api/types.go: evicting other pods would not help.
UNSCHEDULABLE_AND_UNRESOLVABLE = 3
MOST_SCORE = 100.0  # k8s.io/kubernetes/pkg/scheduler/framework, MaxNodeScore


def predicate(request: Content, graph_of: Callable[[str], OpGraph]) -> dict[str, Any]:
    """The answer to a predicate call: nothing, or why the task's pod cannot run on the node."""
    lack = lack_of(_pod(request), _node(field(request, "node")), graph_of)
    code = UNSCHEDULABLE_AND_UNRESOLVABLE if lack else 0
    return {"status": lack, "errorMessage": lack, "code": code}


def prioritized(request: Content, graph_of: Callable[[str], OpGraph]) -> dict[str, Any]:
    """The answer to a prioritize call: 100 for the fastest node, the others in proportion."""
    nodes = [_node(each) for each in field(request, "nodes") or []]
    found = scores(_pod(request), nodes, graph_of, most=MOST_SCORE)
    return {"nodeScore": found, "errorMessage": ""}


def _pod(request: Content) -> Content:
    return field(field(request, "task") or {}, "pod") or {}


def _node(info: Content | None) -> Content:
    return field(info or {}, "node") or {}
