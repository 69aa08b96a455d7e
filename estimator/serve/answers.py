"""Check what requests ask, keep uploaded graphs by the hash of their content, and answer.

A question has plain values and texts, never a path, an import or a model's name.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import time
from collections.abc import Hashable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from estimator.advise.rent.transient import Spot
from estimator.api import estimate
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.errors import (
    AllocationError,
    EstimatorError,
    GraphFileError,
    StrategyError,
    WorkloadError,
)
from estimator.files import parse_json, write_bytes_atomically
from estimator.graph.files import saved_name
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.summary import summary_from, summary_graph
from estimator.machines.catalogue import known_machines, load_profile, split_limit
from estimator.placement.allocation import Allocation
from estimator.workload.strategies import SEARCHED

if TYPE_CHECKING:
    from estimator.estimates.estimate import Estimate

logger = logging.getLogger(__name__)

MOST_ROWS = 200_000
_MOST_MACHINES = 32
_FRESH_S = 2.0
_MOST_IN_MEMORY = 64
_MOST_ON_DISK = 10_000
_MOST_WARM = 100_000
# How often a worker looks whether any other has observed something.
_REFIT_S = 2.0

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="Of an uploaded graph.")]
Text = Annotated[str, Field(min_length=1, max_length=400)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Amount = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
Column = Literal[
    "step_time_s",
    "low_s",
    "high_s",
    "samples_per_s",
    "mfu_ratio",
    "hfu_ratio",
    "peak_memory_bytes",
    "fits_code",
    "bottleneck_code",
    "ranks",
    "nodes",
    "global_batch",
]


def _shown(**example: Any) -> ConfigDict:
    """A strict model that is shown with an example about some graph."""
    examples: list[Any] = [{"graph": "0" * 64, **example}]
    return ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": examples})


class Question(BaseModel):
    """A graph and how it is trained; what is left out is as traced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    graph: Hash
    batch_per_gpu: Count | None = None
    global_batch: Count | None = None
    accumulation_steps: Annotated[int, Field(ge=1, le=10**6)] = 1
    strategy: Text = "ddp"
    calibrated: Annotated[bool, Field(description="Correct by observed steps.")] = True

    @property
    def options(self) -> dict[str, Any]:
        """How it is trained, as `estimator.estimate` takes it."""
        return self.model_dump(exclude={"graph", "on", "calibrated", "reasons", "columns"})


class EstimateQuestion(Question):
    """One allocation."""

    model_config = _shown(on="2x8:h100-sxm")

    on: Text
    layout: Text | None = None
    loader: Text | None = None
    reasons: Annotated[
        bool, Field(description="Also assumptions, provenance and memory, at twice the time.")
    ] = True


class ManyQuestion(Question):
    """Many allocations, answered as columns; a row without an answer is null."""

    model_config = _shown(on=["1x8:h100-sxm", "2x8:h100-sxm"])

    on: Annotated[list[Text], Field(min_length=1, max_length=MOST_ROWS)]
    columns: Annotated[list[Column], Field(min_length=1, max_length=16)] = [
        "step_time_s",
        "low_s",
        "high_s",
        "samples_per_s",
    ]


class PlanQuestion(BaseModel):
    """What to rent to train so much."""

    # Not strict: JSON has objects and arrays for a Spot's dataclasses and tuples.
    model_config = _shown(machines=["a100-p4d"], samples=1e7) | ConfigDict(strict=False)

    graph: Hash
    machines: Annotated[list[Text], Field(min_length=1, max_length=_MOST_MACHINES)]
    samples: Amount | None = None
    tokens: Amount | None = None
    max_nodes: Annotated[int, Field(ge=1, le=64)] = 4
    mixed: Annotated[bool, Field(description="Nodes of two machines together, too.")] = False
    strategies: Annotated[list[Text], Field(min_length=1, max_length=16)] = list(SEARCHED)
    deadline_s: Amount | None = None
    budget_usd: Amount | None = None
    spot: bool = False
    taken: Annotated[Spot | None, Field(description="How spot instances are taken away.")] = None
    batch_per_gpu: Count | None = None
    global_batch: Count | None = None
    layouts: Annotated[
        bool, Field(description="Also those that share a global batch; seconds an allocation.")
    ] = False
    loader: Text | None = None


class Observed(BaseModel):
    """The time of steps that ran."""

    model_config = _shown(on="2x8:h100-sxm", step_time_s=0.41, batch_per_gpu=8)

    graph: Hash
    on: Text
    step_time_s: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
    batch_per_gpu: Count
    accumulation_steps: Annotated[int, Field(ge=1, le=10**6)] = 1
    strategy: Text = "ddp"
    steps: Annotated[int, Field(ge=1, le=10**12)] = 1
    gradient_noise_samples: Annotated[float, Field(gt=0, le=1e15)] | None = None
    identity: Annotated[str, Field(min_length=8, max_length=100)] | None = None


class Problem(BaseModel):
    """What was wrong (RFC 9457): `detail` is one sentence, `code` the kind of error."""

    model_config = ConfigDict(extra="forbid")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str


def known(text: str) -> str:
    """An allocation text whose machines all have profiles; raises AllocationError.

    Where a machine is named, by an allocation or alone, a path stands for no profile.
    """
    for group in Allocation.parse(text).groups:
        check_machine(group.machine)
    return text


def check_machine(name: str | None) -> None:
    """Raise AllocationError for what is not the name of a machine."""
    if name is None:
        raise AllocationError("hosts need a cluster file; name machine types, as in 2x8:h100-sxm")
    if split_limit(name)[0] not in _names(round(time.monotonic() / _FRESH_S)):
        raise AllocationError(f"there is no machine {name[:80]!r}; GET /machines lists those known")


@lru_cache(maxsize=2)
def _names(_moment: int) -> frozenset[str]:
    """Machines that have profiles, looked up again every moment: folders are read for it."""
    return frozenset(known_machines())


class UnknownGraphError(GraphFileError):
    """No graph of that hash was uploaded."""


class Graphs:
    """Saved graphs of a folder, named by the SHA-256 of their bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.get = lru_cache(_MOST_IN_MEMORY)(self._get)

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
        return name, graph

    def _get(self, name: str) -> OpGraph:
        """The graph of a hash; raises UnknownGraphError."""
        path = self._path(name)
        if not path.is_file():
            raise UnknownGraphError(f"no graph {name[:12]}… was uploaded; POST it to /graphs")
        return OpGraph.load(path)

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


class Answers:
    """The graphs, the store and what is warm of one worker; any thread may ask."""

    def __init__(self, folder: Path, store: Path | None) -> None:
        self.graphs = Graphs(folder)
        self.calibrator = Calibrator(store)
        self._warm: set[Hashable] = set()
        self._revision = self.calibrator.store.revision
        self._looked_s = time.monotonic()
        self._fitting = threading.Lock()

    def is_warm(self, question: EstimateQuestion) -> bool:
        """Whether such a question was answered before, so that it takes microseconds."""
        return _key(question) in self._warm

    def estimate(self, question: EstimateQuestion) -> Estimate:
        """The answer to one question; raises EstimatorError."""
        self._refit_soon()
        answer = estimate(
            self.graphs.get(question.graph),
            known(question.on),
            calibration=self.calibrator if question.calibrated else None,
            **question.options,
        )
        if len(self._warm) >= _MOST_WARM:
            self._warm.clear()
        self._warm.add(_key(question))
        return answer

    def estimate_many(self, question: ManyQuestion) -> dict[str, Any]:
        """Columns as numpy arrays, and the reasons of rows without an answer."""
        from estimator.estimates.table import estimate_many

        self._refit_soon()
        groups = set("+".join(question.on).split("+"))
        for machine in {_machine(group) for group in groups}:
            check_machine(machine)
        table = estimate_many(
            self.graphs.get(question.graph),
            question.on,
            calibration=self.calibrator if question.calibrated else None,
            **question.options,
        )
        return {name: getattr(table, name) for name in question.columns}

    def plan(self, question: PlanQuestion) -> dict[str, Any]:
        """What to rent."""
        from estimator.advise.rent.offers import rent as what_to_rent

        for machine in question.machines:
            check_machine(machine)
        graph = self.graphs.get(question.graph)
        choice = what_to_rent(
            graph,
            question.machines,
            calibration=self.calibrator,
            spot=question.taken or question.spot,
            layouts_of=[graph] if question.layouts else (),
            **question.model_dump(exclude={"graph", "machines", "spot", "taken", "layouts"}),
        )
        return choice.to_dict()

    def observe(self, seen: Observed) -> int:
        """Keep an observed step; how many were new. It is on disk when this returns."""
        graph = self.graphs.get(seen.graph)
        summary = ObservedWorkload.of(graph)
        observation = Observation(
            workload=summary.name,
            fingerprint=summary.fingerprint,
            allocation=known(seen.on),
            source="service",
            identity=seen.identity or uuid4().hex,
            **seen.model_dump(exclude={"graph", "on", "identity"}),
        )
        return self.calibrator.store.add_many([observation], summaries=[summary])

    def machines(self) -> list[dict[str, Any]]:
        """Every machine that can be named, with its devices."""
        listed = []
        for name in known_machines():
            try:
                profile = load_profile(name)
            except EstimatorError:
                continue
            device = profile.devices[0]
            listed.append(
                {
                    "name": name,
                    "devices": len(profile.devices),
                    "device": device.name,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                }
            )
        return listed

    def _refit_soon(self) -> None:
        """Learn in a thread of its own what any worker has observed since."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _REFIT_S or not self._fitting.acquire(blocking=False):
            return
        self._looked_s = now_s
        threading.Thread(target=self._refit, name="refit", daemon=True).start()

    def _refit(self) -> None:
        try:
            revision = self.calibrator.store.revision
            if revision != self._revision:
                self.calibrator.fit()
                self._revision = revision
        except EstimatorError as error:
            logger.warning("cannot refit now: %s", error)
        finally:
            self._fitting.release()


def said(answer: Estimate, *, reasons: bool) -> dict[str, Any]:
    """An answer as plain values, with or without what it rests on."""
    if reasons:
        return answer.to_dict()
    names = ("step_time_s", "low_s", "high_s", "samples_per_s", "tokens_per_s", "mfu_ratio")
    more = ("peak_memory_bytes", "fits", "ranks", "batch_per_gpu", "global_batch", "strategy")
    return {
        "model": answer.model,
        "allocation": str(answer.allocation),
        **{name: getattr(answer, name) for name in (*names, *more)},
        "breakdown": {
            item.name: getattr(answer.breakdown, item.name) for item in fields(answer.breakdown)
        },
        "bottleneck": answer.breakdown.largest_share[0],
    }


def _machine(group: str) -> str:
    """The name in a group of an allocation text, as far as one can tell before it is parsed."""
    if "[" in group or ":" not in group:
        raise StrategyError("hosts need a cluster file; name machine types, as in 2x8:h100-sxm")
    return group.rpartition(":")[2].strip()


def _key(question: EstimateQuestion) -> Hashable:
    return question.graph, question.on, *question.options.values()
