"""Filter and rank nodes for pods as an extender of kube-scheduler, over HTTP and JSON.

Formats: k8s.io/kube-scheduler/extender/v1 (ExtenderArgs, ExtenderFilterResult, HostPriorityList),
whose fields Go reads in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from estimator.api import estimate
from estimator.errors import EstimatorError, WorkloadError
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph

# Of a pod: the graph that it trains. Of a node: its machine type.
GRAPH = "throughput-estimator/graph"
MACHINE = "throughput-estimator/machine"
DEVICES = "nvidia.com/gpu"
MOST_SCORE = 10  # MaxExtenderPriority

Content = Mapping[str, Any]


def filtered(args: Content, graph_of: Callable[[str], OpGraph]) -> dict[str, Any]:
    """The answer to a filter call: nodes on which the pod's training fits, the reasons of others.

    Pods without a graph keep all nodes. `graph_of` gives the graph that a pod names.
    """
    pod, kept, failed = field(args, "pod") or {}, [], {}
    for node in _items(args):
        if lack := lack_of(pod, node, graph_of):
            failed[name_of(node)] = lack
        else:
            kept.append(node)
    return {"nodes": {"items": kept}, "failedNodes": failed, "error": ""}


def prioritized(args: Content, graph_of: Callable[[str], OpGraph]) -> list[dict[str, Any]]:
    """The answer to a prioritize call: 10 for the fastest node, the others in proportion."""
    pod = field(args, "pod") or {}
    found = scores(pod, _items(args), graph_of, most=MOST_SCORE)
    return [{"host": name, "score": round(score)} for name, score in found.items()]


def lack_of(pod: Content, node: Content, graph_of: Callable[[str], OpGraph]) -> str:
    """Why a pod's training cannot run on a node, in a sentence; empty where it can."""
    try:
        answer = _answer(pod, node, graph_of)
    except EstimatorError as error:
        return str(error)
    if answer is not None and answer.fits == "no":
        return f"{answer.model} does not fit into the memory of {answer.allocation}"
    return ""


def scores(
    pod: Content, nodes: Iterable[Content], graph_of: Callable[[str], OpGraph], *, most: float
) -> dict[str, float]:
    """By name of the node: `most` for the fastest, the others in proportion, 0 without answer."""
    speeds: dict[str, float] = {}
    for node in nodes:
        try:
            answer = _answer(pod, node, graph_of)
        except EstimatorError:
            answer = None
        speeds[name_of(node)] = 0.0 if answer is None else 1.0 / answer.step_time_s
    fastest = max(speeds.values(), default=0.0) or 1.0
    return {name: most * speed / fastest for name, speed in speeds.items()}


def _answer(pod: Content, node: Content, graph_of: Callable[[str], OpGraph]) -> Estimate | None:
    """The pod's training on one node; None where the pod names no graph."""
    graph = (_metadata(pod).get("annotations") or {}).get(GRAPH)
    if graph is None:
        return None
    machine = (_metadata(node).get("labels") or {}).get(MACHINE)
    if machine is None:
        raise WorkloadError(f"the node has no label {MACHINE}; name its machine type there")
    return estimate(graph_of(graph), f"1x{_devices(pod)}:{machine}")


def _devices(pod: Content) -> int:
    """GPUs that the containers of a pod are limited to."""
    containers = pod.get("spec", {}).get("containers", [])
    limits = [each.get("resources", {}).get("limits", {}).get(DEVICES, 0) for each in containers]
    try:
        devices = sum(map(int, limits))
    except (TypeError, ValueError):
        raise WorkloadError(f"the pod's limits of {DEVICES} are no whole numbers") from None
    if devices < 1:
        raise WorkloadError(f"the pod asks for no {DEVICES}; give it a limit of 1 or more")
    return devices


def _items(args: Content) -> list[Content]:
    nodes = field(args, "nodes")
    if nodes is None:
        raise WorkloadError(
            "the scheduler sent names of nodes only; set nodeCacheCapable: false for this extender"
        )
    found: list[Content] = field(nodes, "items") or []
    return found


def name_of(node: Content) -> str:
    """The name in a node's metadata."""
    found: str = _metadata(node).get("name", "")
    return found


def _metadata(thing: Content) -> Content:
    found: Content = thing.get("metadata") or {}
    return found


def field(content: Content, name: str) -> Any:
    """A field in whatever case it is written, as Go reads it; None where it is missing."""
    for key, value in content.items():
        if key.lower() == name:
            return value
    return None
