"""Hold the schemas of what the ranks of a probe tell each other: sizes bounded, nothing unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from estimator.errors import ProbeError
from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.units import GIB

# More ranks than any cluster starts, and more repeats than a measurement makes.
_MOST_RANKS, _MOST_ROWS = 1 << 20, 1 << 20
_MOST_CORES = 1 << 16

# Printable: some of it is shown on a terminal.
Word = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
# A part of the name of a file.
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}$")]
Rank = Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=GIB)]
Sizes = Annotated[list[Size], Field(min_length=1, max_length=64)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=_MOST_RANKS)]
Cores = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_CORES)]
Versions = Annotated[dict[Word, Word], Field(max_length=32)]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Flow = Annotated[list[Rank], Field(min_length=2, max_length=2)]
# (bytes, seconds), and (bytes, entered, left) by a clock that may start anywhere.
Points = Annotated[
    list[Annotated[list[Number], Field(min_length=2, max_length=2)]], Field(max_length=_MOST_ROWS)
]
Windows = Annotated[
    list[Annotated[list[Number], Field(min_length=3, max_length=3)]], Field(max_length=_MOST_ROWS)
]
_Checked = TypeVar("_Checked", bound=BaseModel)


class _Message(BaseModel):
    """JSON values of exactly these types under exactly these names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# Joining.


class Session(_Message):
    """Rank 0's random number: every later signature holds for this run alone."""

    nonce: Nonce


class Rendezvous(_Message):
    """A rank comes: where it runs, what it may use, and its own random number."""

    host: Host
    address: Word
    local_rank: Rank | None
    cores: Cores
    versions: Versions
    nonce: Nonce


class Assignment(_Message):
    """Rank 0's answer, with the number that the rank sent, so that it is no older one.

    `refused` says why the rank has no part; the rest is then left out.
    """

    nonce: Nonce
    refused: Word = ""
    local_rank: Rank = 0
    local_size: Rank = 1
    kind: DeviceKind | None = None
    cores: Cores = Field(default_factory=list)
    has_own_cores: bool = False
    peer: Word | None = None


class DeviceMessage(_Message):
    """The device of a rank, as `estimator.machines.profile.Device` has it."""

    kind: DeviceKind
    index: Rank
    name: Word
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Positive | None
    peak_flops_per_s: Annotated[dict[Word, Positive], Field(max_length=64)]
    cores: Cores
    numa_node: int | None
    details: Annotated[dict[Word, Word | int | float | bool | None], Field(max_length=256)]


class MemberMessage(_Message):
    """A rank is ready, with this device."""

    rank: Rank
    host: Host
    address: Word
    local_rank: Rank
    device: DeviceMessage
    machine: Word
    versions: Versions


class NotReady(_Message):
    """A rank has no device, or none that works."""

    failure: Word


# Measuring.


class TaskMessage(_Message):
    """Run this function of `estimator.probe.rank_functions` on these ranks."""

    ranks: Ranks
    function: Word
    arguments: dict[Word, Any]
    timeout_s: Positive


class Round(_Message):
    """Tasks to be run at the same time; none where the probe is over."""

    tasks: Annotated[list[TaskMessage], Field(max_length=_MOST_RANKS)]


class End(_Message):
    """A rank has ended a task: how many reports there are, and its result or why it failed."""

    reports: Annotated[int, Field(ge=0, le=_MOST_ROWS)]
    failure: Word | None
    result: dict[str, Any] | None


class CanaryArguments(_Message):
    """The fixed matmul needs no arguments."""


class PairsArguments(_Message):
    """For `estimator.probe.network.time_pairs`."""

    pairs: Annotated[
        list[Annotated[list[Flow], Field(max_length=_MOST_RANKS)]], Field(max_length=_MOST_RANKS)
    ]
    sizes_bytes: Sizes
    budget_s: Number


class FlowsArguments(_Message):
    """For `estimator.probe.network.time_flows`."""

    flows: Annotated[list[Flow], Field(min_length=1, max_length=_MOST_RANKS)]
    sizes_bytes: Sizes
    budget_s: Number


class ShapeArguments(_Message):
    """For `estimator.probe.shapes.time_shape`."""

    ops: Annotated[list[CollectiveName], Field(min_length=1, max_length=8)]
    sizes_bytes: Sizes
    budget_s: Number
    pairs: bool = False
    groups: Annotated[list[Ranks], Field(max_length=_MOST_RANKS)] | None = None


class OverlapArguments(_Message):
    """For `estimator.probe.overlap.time_rank`: cases are [bytes, all-reduces at once]."""

    budget_s: Number
    cases: Annotated[
        list[Annotated[list[Size], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=16),
    ]
    compute_ratio: Positive


class MachineArguments(_Message):
    """For `estimator.probe.machine.probe_machine`."""

    name: Word
    devices: Annotated[int, Field(gt=0, lt=_MOST_RANKS)] | None
    budget_s: Positive
    kind: DeviceKind | None


class PairReport(_Message):
    """What the sender of a pair measured."""

    source: Rank = Field(alias="from")
    target: Rank = Field(alias="to")
    latency_s: Number
    points: Points


class FlowReport(_Message):
    """What one sender of several measured."""

    latency_s: Number
    windows: Windows


class ShapeReport(_Message):
    """A collective at one size, or one of it and two at once, or why the backend has none."""

    op: CollectiveName
    windows: Windows | None = None
    one: Windows | None = None
    two: Windows | None = None
    unsupported: Word | None = None

    @model_validator(mode="after")
    def _is_one_of_three(self) -> ShapeReport:
        given = self.model_fields_set - {"op"}
        if given not in ({"windows"}, {"one", "two"}, {"unsupported"}):
            raise ValueError("windows, one and two, or unsupported must be given")
        return self


class OverlapRound(_Message):
    """Number of compute and of all-reduces, apart and together."""

    compute_s: Number
    collective_s: Number
    both_s: Number
    beside_s: Number


class OverlapReport(_Message):
    """The rounds of one case beside one kind of compute."""

    compute: Literal["compute_bound", "memory_bound"]
    size_bytes: Size
    in_flight: Size
    rounds: Annotated[list[OverlapRound], Field(min_length=1, max_length=_MOST_ROWS)]


def checked(schema: type[_Checked], value: Any, sender: str) -> _Checked:
    """`value` as a message of this schema; raises ProbeError saying what is wrong with it."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise ProbeError(_what_is_wrong(error, schema.__name__, sender)) from None


def checked_answers(schema: TypeAdapter[Any], values: Sequence[Any], sender: str) -> None:
    """Raise ProbeError where a report or a result is not of this schema."""
    for value in values:
        try:
            schema.validate_python(value)
        except ValidationError as error:
            raise ProbeError(_what_is_wrong(error, "report", sender)) from None


def _what_is_wrong(error: ValidationError, schema: str, sender: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])[:100]
    return (
        f"{sender} sent a {schema} that cannot be used ({where or 'all of it'}: {first['msg']}); "
        "install the same version on all nodes"
    )
