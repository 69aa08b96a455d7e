"""Set the size of a Kubeflow TrainJob when it is admitted: AdmissionReview in, JSONPatch out.

Formats: admission.k8s.io/v1 AdmissionReview, trainer.kubeflow.org/v1alpha1 TrainJob
(``spec.trainer.numNodes``), RFC 6902. Kueue then queues the job at that size.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from estimator.errors import EstimatorError, WorkloadError, quoted
from estimator.graph.op_graph import OpGraph
from estimator.schedulers.kubernetes import DEVICES, GRAPH, MACHINE
from estimator.schedulers.sizes import WANTED_RATIO, sizes
from estimator.units import parse_whole

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
    found = sizes(
        graph_of(annotations[GRAPH]),
        machine,
        max_nodes=_number(annotations, MOST_NODES, trainer.get("numNodes", 1), most=_MOST),
        devices=_number(limits, DEVICES, 0, most=_MOST) or None,
        wanted_ratio=_ratio(annotations.get(WANTED, WANTED_RATIO)),
    )
    words = repr(found.most).removeprefix("Estimate(").removesuffix(")")
    patch: list[dict[str, Any]] = []
    if not (job.get("spec") or {}).get("trainer"):
        patch.append({"op": "add", "path": "/spec/trainer", "value": {}})
    # RFC 6901 writes a slash in a name as ~1.
    path = f"/metadata/annotations/{ESTIMATE.replace('/', '~1')}"
    return [
        *patch,
        {"op": "add", "path": "/spec/trainer/numNodes", "value": found.most_nodes},
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
