"""Serve kube-scheduler (or Volcano) and Kubeflow: filter, prioritize and admit by estimates.

    python examples/kubernetes_extender.py FOLDER [PORT [CLUSTER.toml]]

FOLDER holds graphs as 'estimator trace MODEL -o FOLDER/NAME.graph' writes them. A pod or TrainJob
names one with the annotation throughput-estimator/graph: NAME; nodes have the label
throughput-estimator/machine. With a cluster file gangs are kept where their links are fastest. The
scheduler's configuration:

    extenders:
      - urlPrefix: http://127.0.0.1:8322
        filterVerb: filter
        prioritizeVerb: prioritize
        weight: 1

that of Volcano, among its plugins:

    - name: extender
      arguments:
        extender.urlPrefix: http://127.0.0.1:8322
        extender.predicateVerb: volcano/predicate
        extender.prioritizeVerb: volcano/prioritize

Kubernetes asks admission webhooks over TLS only: put a proxy that has the certificate before it.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import estimator as est
from estimator.errors import GraphFileError
from estimator.files import parse_json
from estimator.integrations.schedulers import kubernetes
from estimator.integrations.schedulers.kubernetes import admitted, filtered, prioritized

VERBS = {
    "/filter": filtered,
    "/prioritize": prioritized,
    "/volcano/predicate": kubernetes.predicate,
    "/volcano/prioritize": kubernetes.volcano_prioritized,
    "/admit": admitted,
}
MOST_BYTES = 64 << 20
# What a message of another form than Kubernetes' raises.
UNLIKE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def server(folder: Path, port: int, cluster: est.Cluster | None = None) -> ThreadingHTTPServer:
    """A server on loopback; port 0 is any that is free."""
    graphs: dict[str, est.OpGraph] = {}
    verbs: dict[str, Any] = dict(VERBS)
    for path in ("/prioritize", "/volcano/prioritize"):
        verbs[path] = partial(verbs[path], cluster=cluster)

    def graph_of(name: str) -> est.OpGraph:
        if not re.fullmatch(r"[A-Za-z0-9][\w\-]{0,99}", name):
            raise GraphFileError("a graph's name has letters, digits, - and _ only")
        if name not in graphs:
            graphs[name] = est.OpGraph.load(folder / f"{name}.graph")
        return graphs[name]

    class Handler(BaseHTTPRequestHandler):
        # Of each read: who announces more than is sent does not hold a thread for ever.
        timeout = 30.0

        def do_POST(self) -> None:
            announced = self.headers.get("Content-Length", "")
            if self.path not in verbs:
                self.send_error(404)
                return
            if not re.fullmatch("[0-9]{1,9}", announced) or not 0 < int(announced) <= MOST_BYTES:
                self.send_error(413 if re.fullmatch("[1-9][0-9]*", announced) else 411)
                return
            try:
                asked = parse_json(self.rfile.read(int(announced)))
                answer: Any = verbs[self.path](asked, graph_of)
                status = 200
            except (est.EstimatorError, *UNLIKE) as error:
                # The extender protocol has a place for it.
                answer, status = {"error": str(error)}, 200 if self.path == "/filter" else 400
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing of single requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    known = est.Cluster.load(sys.argv[3]) if len(sys.argv) > 3 else None
    running = server(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8322, known)
    print(f"listening on {running.server_address}", flush=True)
    running.serve_forever()
