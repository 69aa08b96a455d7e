"""What a request may ask: plain values and texts, never a path, an import or a model's name."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from estimator.errors import AllocationError
from estimator.machines.catalogue import known_machines, split_limit
from estimator.placement.allocation import Allocation

MOST_ROWS = 200_000
_MOST_MACHINES = 32
_FRESH_S = 2.0

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

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"graph": "0" * 64, "on": "2x8:h100-sxm"}]}
    )

    on: Text
    layout: Text | None = None
    loader: Text | None = None
    reasons: Annotated[
        bool, Field(description="Also assumptions, provenance and memory, at twice the time.")
    ] = True


class ManyQuestion(Question):
    """Many allocations, answered as columns; a row without an answer is null."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"graph": "0" * 64, "on": ["1x8:h100-sxm", "2x8:h100-sxm"]}]
        }
    )

    on: Annotated[list[Text], Field(min_length=1, max_length=MOST_ROWS)]
    columns: Annotated[list[Column], Field(min_length=1, max_length=16)] = [
        "step_time_s",
        "low_s",
        "high_s",
        "samples_per_s",
    ]


class PlanQuestion(BaseModel):
    """What to rent to train so much."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"graph": "0" * 64, "machines": ["a100-p4d"], "samples": 1e7}]
        },
    )

    graph: Hash
    machines: Annotated[list[Text], Field(min_length=1, max_length=_MOST_MACHINES)]
    samples: Amount | None = None
    tokens: Amount | None = None
    max_nodes: Annotated[int, Field(ge=1, le=64)] = 4
    deadline_s: Amount | None = None
    budget_usd: Amount | None = None
    spot: bool = False
    batch_per_gpu: Count | None = None
    global_batch: Count | None = None


class Observed(BaseModel):
    """The time of steps that ran."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "graph": "0" * 64,
                    "on": "2x8:h100-sxm",
                    "step_time_s": 0.41,
                    "batch_per_gpu": 8,
                }
            ]
        },
    )

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
