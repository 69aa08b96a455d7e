"""Keep uploaded graphs by the hash of their content: on disk for all workers, some in memory."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from estimator.errors import GraphFileError, WorkloadError
from estimator.files import parse_json, write_bytes_atomically
from estimator.graph.files import saved_name
from estimator.graph.ir.op_graph import OpGraph, summary_graph
from estimator.graph.summary import summary_from
from estimator.serve.questions import check_machine

_MOST_IN_MEMORY = 64
_MOST_ON_DISK = 10_000


class UnknownGraphError(GraphFileError):
    """No graph of that hash was uploaded."""


class Graphs:
    """Saved graphs of a folder, named by the SHA-256 of their bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: OrderedDict[str, OpGraph] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, content: bytes) -> tuple[str, OpGraph]:
        """Keep a saved graph, or the graph of a summary as JSON; its hash, and the graph.

        Raises GraphFileError, WorkloadError, StrategyError.
        """
        if content[:2] != b"\x1f\x8b":
            content = _of_summary(content)
        name = hashlib.sha256(content).hexdigest()
        path = self._path(name)
        if not path.exists() and len(self.names()) >= _MOST_ON_DISK:
            raise GraphFileError(
                f"{_MOST_ON_DISK} graphs are kept already; delete some of {self.folder.name}"
            )
        graph = _read(content)
        write_bytes_atomically(path, content)
        self._keep(name, graph)
        return name, graph

    def get(self, name: str) -> OpGraph:
        """The graph of a hash; raises UnknownGraphError."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded
        path = self._path(name)
        if not path.is_file():
            raise UnknownGraphError(f"no graph {name[:12]}… was uploaded; POST it to /graphs")
        graph = OpGraph.load(path)
        self._keep(name, graph)
        return graph

    def titles(self, most: int) -> list[tuple[str, str]]:
        """(hash, name) of the latest graphs; of each file the head is read alone."""
        return [(name, saved_name(self._path(name))) for name in self.names()[:most]]

    def names(self) -> list[str]:
        """The hashes of all graphs, the latest first."""
        if not self.folder.is_dir():
            return []
        paths = sorted(self.folder.glob("*.graph"), key=lambda path: -path.stat().st_mtime)
        return [path.stem for path in paths]

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.graph"

    def _keep(self, name: str, graph: OpGraph) -> None:
        with self._lock:
            self._loaded[name] = graph
            while len(self._loaded) > _MOST_IN_MEMORY:
                self._loaded.popitem(last=False)


def _read(content: bytes) -> OpGraph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload"
        path.write_bytes(content)
        try:
            return OpGraph.load(path)
        except GraphFileError as error:
            raise GraphFileError(str(error).replace(str(path), "the upload")) from None


def _of_summary(content: bytes) -> bytes:
    try:
        known = parse_json(content)
    except ValueError as error:
        raise GraphFileError(
            f"the upload is neither a saved graph nor JSON ({error}); send what 'estimator trace "
            "-o FILE' wrote, or a job's summary"
        ) from None
    target = known.pop("target", None) if isinstance(known, dict) else None
    if target not in (None, "cpu", "cuda"):
        raise WorkloadError("the target of a summary is cpu or cuda; leave it out or correct it")
    summary = summary_from(known, "the upload")
    if summary.machine is not None:
        check_machine(summary.machine)
    graph = summary_graph(summary, target=target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary"
        graph.save(path)
        return path.read_bytes()
