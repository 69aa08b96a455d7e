"""Answer kube-scheduler's extender, Volcano's, and the admission of Kubeflow's TrainJobs.

Formats: k8s.io/kube-scheduler/extender/v1 (ExtenderArgs, ExtenderFilterResult, HostPriorityList),
whose fields Go reads in any case.

Formats: volcano-sh/volcano, pkg/scheduler/plugins/extender/argument.go (PredicateRequest,
PrioritizeRequest and what answers them). A task holds its pod, a node the Kubernetes object, under
the names of Go's fields. What refuses a node is called `errorMessage` up to Volcano 1.8, `status`
with a `code` in later ones: both are given.

Formats: admission.k8s.io/v1 AdmissionReview, trainer.kubeflow.org/v1alpha1 TrainJob
(``spec.trainer.numNodes``), RFC 6902. Kueue then queues the job at that size.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from estimator.api import estimate
from estimator.errors import EstimatorError, WorkloadError, quoted
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.schedulers.launchers import WANTED_RATIO, sizes
from estimator.placement.topology import Cluster, Node, Switch
from estimator.units import parse_bandwidth_bytes_per_s, parse_whole

# Of a pod: the graph that it trains, with how many pods like it, a node each, and the nodes of
# those that are placed already. Of a node: its machine type, the switches above it from the root
# down, as in "spine/rack1", and what the uplink of the lowest carries.
GRAPH = "throughput-estimator/graph"
GANG = "throughput-estimator/gang"
PLACED = "throughput-estimator/placed"
MACHINE = "throughput-estimator/machine"
SWITCHES = "throughput-estimator/switches"
UPLINK = "throughput-estimator/uplink"
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


def prioritized(
    args: Content, graph_of: Callable[[str], OpGraph], cluster: Cluster | None = None
) -> list[dict[str, Any]]:
    """The answer to a prioritize call: 10 for the fastest node, the others in proportion.

    With a `cluster` (a cluster file's, or that of `cluster_of`) a gang is estimated on the hosts
    that it would have: those of members placed already, the node, and the nearest others.
    """
    pod = field(args, "pod") or {}
    scored = scores(pod, _items(args), graph_of, most=MOST_SCORE, cluster=cluster)
    return [{"host": name, "score": round(score)} for name, score in scored.items()]


def lack_of(pod: Content, node: Content, graph_of: Callable[[str], OpGraph]) -> str:
    """Why a pod's training cannot run on a node, in a sentence; empty where it can."""
    try:
        answer = _answer(pod, node, graph_of, _Gang())
    except EstimatorError as error:
        return str(error)
    if answer is not None and answer.fits == "no":
        return f"{answer.model} does not fit into the memory of {answer.allocation}"
    return ""


def scores(
    pod: Content,
    nodes: Sequence[Content],
    graph_of: Callable[[str], OpGraph],
    *,
    most: float,
    cluster: Cluster | None = None,
    placed: Sequence[str] = (),
) -> dict[str, float]:
    """By name of the node: `most` for the fastest, the others in proportion, 0 without answer.

    `placed` are nodes of members of the pod's gang beside those that it is annotated with.
    """
    annotations = _metadata(pod).get("annotations") or {}
    named = [name.strip() for name in str(annotations.get(PLACED, "")).split(",")]
    names = [name_of(node) for node in nodes]
    gang = _Gang(cluster, names, [name for name in (*named, *placed) if name])
    speeds: dict[str, float] = {}
    for node in nodes:
        try:
            answer = _answer(pod, node, graph_of, gang)
        except EstimatorError:
            answer = None
        speeds[name_of(node)] = 0.0 if answer is None else 1.0 / answer.step_time_s
    fastest = max(speeds.values(), default=0.0) or 1.0
    return {name: most * speed / fastest for name, speed in speeds.items()}


class _Gang(NamedTuple):
    """Where the members of a pod's gang may be: nodes that a scheduler offers, and those taken."""

    cluster: Cluster | None = None
    offered: Sequence[str] = ()
    placed: Sequence[str] = ()

    def allocation(self, host: str, members: int, devices: int) -> str | None:
        """The gang's hosts if a pod goes to one; None where the cluster does not know it.

        Members that are not placed yet come below the lowest switch that all have in common, on
        nodes that are offered before others.
        """
        if self.cluster is None or host not in self.cluster.nodes or members < 2:
            return None
        hosts = [*(name for name in self.placed if name in self.cluster.nodes), host][-members:]
        alike = self.cluster.hosts_of(self.cluster.nodes[host].machine)
        order = {name: number for number, name in enumerate(alike)}
        offered = set(self.offered)
        near = sorted(
            (name for name in alike if name not in hosts),
            key=lambda name: (-self._shared(name, hosts), name not in offered, order[name]),
        )
        hosts += near[: members - len(hosts)]
        # A ring that goes through the tree of switches depth first crosses each uplink once.
        hosts.sort(key=lambda name: (self.cluster_path(name), order.get(name, 0)))
        counts = Counter(hosts)
        return "+".join(f"{name}[0-{counts[name] * devices - 1}]" for name in counts)

    def cluster_path(self, host: str) -> tuple[str, ...]:
        """The switches above a host, from the root down."""
        return self.cluster.switches_above(host)[::-1] if self.cluster else ()

    def _shared(self, host: str, hosts: Sequence[str]) -> int:
        """Switches that a host has in common with all others."""
        paths = [self.cluster_path(name) for name in (host, *hosts)]
        levels = zip(*paths, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def cluster_of(nodes: Iterable[Content]) -> Cluster:
    """The cluster that labels of nodes describe, as ``kubectl get nodes -o json`` lists them.

    Nodes without a machine type are left out. Raises WorkloadError, TopologyError.
    """
    hosts: dict[str, Node] = {}
    switches: dict[str, Switch] = {}
    for node in nodes:
        labels = _metadata(node).get("labels") or {}
        if MACHINE not in labels:
            continue
        path = [name for name in str(labels.get(SWITCHES, "")).split("/") if name]
        for depth, name in enumerate(path):
            parent = path[depth - 1] if depth else None
            rate = _rate(labels[UPLINK]) if UPLINK in labels and depth == len(path) - 1 else None
            known = switches.get(name, Switch(parent=parent))
            switches[name] = replace(known, uplink_bytes_per_s=rate or known.uplink_bytes_per_s)
        switch = path[-1] if path else None
        hosts[name_of(node)] = Node(machine=labels[MACHINE], switch=switch)
    return Cluster(nodes=hosts, switches=switches)


def _rate(text: str) -> float:
    try:
        return parse_bandwidth_bytes_per_s(text)
    except ValueError as error:
        raise WorkloadError(f"{UPLINK}: {error}") from None


def _answer(
    pod: Content, node: Content, graph_of: Callable[[str], OpGraph], gang: _Gang
) -> Estimate | None:
    """The training of a pod, and of its gang, on such nodes; None where the pod names no graph."""
    annotations = _metadata(pod).get("annotations") or {}
    graph = annotations.get(GRAPH)
    if graph is None:
        return None
    members, devices = _number(annotations, GANG, 1, most=_MOST), _devices(pod)
    hosts = gang.allocation(name_of(node), members, devices)
    if hosts is not None:
        return estimate(graph_of(graph), hosts, cluster=gang.cluster)
    machine = (_metadata(node).get("labels") or {}).get(MACHINE)
    if machine is None:
        raise WorkloadError(f"the node has no label {MACHINE}; name its machine type there")
    return estimate(graph_of(graph), f"{members}x{devices}:{machine}")


def _devices(pod: Content) -> int:
    """GPUs that the containers of a pod are limited to."""
    containers = pod.get("spec", {}).get("containers", [])
    limits = [
        container.get("resources", {}).get("limits", {}).get(DEVICES, 0) for container in containers
    ]
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
    items: list[Content] = field(nodes, "items") or []
    return items


def name_of(node: Content) -> str:
    """The name in a node's metadata."""
    name: str = _metadata(node).get("name", "")
    return name


def _metadata(thing: Content) -> Content:
    metadata: Content = thing.get("metadata") or {}
    return metadata


def field(content: Content, name: str) -> Any:
    """A field in whatever case it is written, as Go reads it; None where it is missing."""
    for key, value in content.items():
        if key.lower() == name:
            return value
    return None


# Of pkg/scheduler/api/types.go: evicting other pods would not help.
UNSCHEDULABLE_AND_UNRESOLVABLE = 3
VOLCANO_MOST_SCORE = 100.0  # k8s.io/kubernetes/pkg/scheduler/framework, MaxNodeScore


def predicate(request: Content, graph_of: Callable[[str], OpGraph]) -> dict[str, Any]:
    """The answer to a predicate call: nothing, or why the task's pod cannot run on the node."""
    lack = lack_of(_pod(request), _node(field(request, "node")), graph_of)
    code = UNSCHEDULABLE_AND_UNRESOLVABLE if lack else 0
    return {"status": lack, "errorMessage": lack, "code": code}


def volcano_prioritized(
    request: Content, graph_of: Callable[[str], OpGraph], cluster: Cluster | None = None
) -> dict[str, Any]:
    """The answer to a prioritize call: 100 for the fastest node, the others in proportion.

    Nodes that hold tasks of the same job have members of its gang; for `cluster` see `prioritized`.
    """
    infos = field(request, "nodes") or []
    job = field(field(request, "task") or {}, "job")
    placed = [
        name_of(_node(info))
        for info in infos
        for task in (field(info, "tasks") or {}).values()
        if job and field(task, "job") == job
    ]
    how: Any = {"most": VOLCANO_MOST_SCORE, "cluster": cluster, "placed": placed}
    scored = scores(_pod(request), [_node(info) for info in infos], graph_of, **how)
    return {"nodeScore": scored, "errorMessage": ""}


def _pod(request: Content) -> Content:
    return field(field(request, "task") or {}, "pod") or {}


def _node(info: Content | None) -> Content:
    return field(info or {}, "node") or {}


MOST_NODES = "throughput-estimator/max-nodes"
WANTED = "throughput-estimator/efficiency"
ESTIMATE = "throughput-estimator/estimate"
_MOST = 4096


def admitted(review: Mapping[str, Any], graph_of: Callable[[str], OpGraph]) -> dict[str, Any]:
    """The answer to an AdmissionReview: a TrainJob with as many nodes as it uses well.

    Jobs without the graph's annotation pass as they are; one that fits nowhere is refused with its
    reason.
    """
    request = review.get("request") or {}
    response: dict[str, Any] = {"uid": request.get("uid", ""), "allowed": True}
    try:
        patch = _patch(request.get("object") or {}, graph_of)
    except EstimatorError as error:
        response |= {"allowed": False, "status": {"code": 422, "message": str(error)}}
        patch = []
    if patch:
        text = json.dumps(patch).encode()
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text).decode()}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": response,
    }


def _patch(job: Mapping[str, Any], graph_of: Callable[[str], OpGraph]) -> list[dict[str, Any]]:
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    if GRAPH not in annotations:
        return []
    machine = annotations.get(MACHINE)
    if machine is None:
        raise WorkloadError(f"the job has no annotation {MACHINE}; name its machine type there")
    trainer = (job.get("spec") or {}).get("trainer") or {}
    limits = (trainer.get("resourcesPerNode") or {}).get("limits") or {}
    nodes = sizes(
        graph_of(annotations[GRAPH]),
        machine,
        max_nodes=_number(annotations, MOST_NODES, trainer.get("numNodes", 1), most=_MOST),
        devices=_number(limits, DEVICES, 0, most=_MOST) or None,
        wanted_ratio=_ratio(annotations.get(WANTED, WANTED_RATIO)),
    )
    words = repr(nodes.most).removeprefix("Estimate(").removesuffix(")")
    patch: list[dict[str, Any]] = []
    if not (job.get("spec") or {}).get("trainer"):
        patch.append({"op": "add", "path": "/spec/trainer", "value": {}})
    # RFC 6901 writes a slash in a name as ~1.
    path = f"/metadata/annotations/{ESTIMATE.replace('/', '~1')}"
    return [
        *patch,
        {"op": "add", "path": "/spec/trainer/numNodes", "value": nodes.most_nodes},
        {"op": "add", "path": path, "value": words},
    ]


def _number(content: Mapping[str, Any], name: str, default: Any, *, most: int) -> int:
    try:
        return parse_whole(str(content.get(name, default)), most=most)
    except ValueError as error:
        raise WorkloadError(f"{name}: {error}") from None


def _ratio(value: Any) -> float:
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise WorkloadError(f"{WANTED} is a ratio above 0 and up to 1, found {quoted(value)}")
    return ratio
