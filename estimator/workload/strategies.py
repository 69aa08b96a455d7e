"""Name how ranks divide the work of training: one class a data-parallel strategy, and batches.

What a strategy is called, its options and its text, and the facts about it that others go by stand
here; how it communicates, what it holds and when is its class in `timeline.strategies`.
"""

from __future__ import annotations

import operator
from abc import ABC
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

from estimator.errors import StrategyError, WorkloadError, quoted
from estimator.units import (
    MIB,
    parse_bandwidth_bytes_per_s,
    parse_size_bytes,
    parse_whole,
)
from estimator.workload.knobs import option, options_text, read_options
from estimator.workload.recipe import PARAMETER_BYTES, parameter_dtype

# torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.hpp (torch 2.13):
# bucket_cap_mb defaults to 25 MiB with a first bucket of kDefaultFirstBucketBytes = 1 MiB.
DEFAULT_BUCKET_CAP_BYTES = 25 * MIB
DEFAULT_FIRST_BUCKET_BYTES = MIB
_MOST_BUCKET_BYTES, _MOST_RATE = 10**15, 1e15
# Of which a large model has a million.
_LEAST_PART = 1 << 16


# More samples than any training set has in a step, and more micro-batches than any step.
MOST_BATCH, MOST_GLOBAL_BATCH, MOST_ACCUMULATION = 10**9, 10**15, 10**8


def check_count(value: Any, what: str = "batch size", *, most: int = MOST_BATCH) -> int:
    """A number of samples or of micro-batches, or WorkloadError.

    >>> check_count(8)
    8
    """
    try:
        # Those of numpy too.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        wanted = "a whole number"
    elif number < 1:
        wanted = "at least 1"
    elif number > most:
        wanted = f"at most {most:g}"
    else:
        return number
    raise WorkloadError(f"{what} must be {wanted}, found {quoted(value)}; correct it")


class ShardDtypes(NamedTuple):
    """Bytes of an element in a shard, and in a reduction, over those of what is computed with."""

    stored_ratio: int = 1
    reduced_ratio: float = 1.0


class Keeps(NamedTuple):
    """What each rank holds between steps, of those that a strategy divides the work over."""

    parameters: Literal["whole", "shard"]
    gradients: Literal["whole", "shard"]
    state: Literal["whole", "shard", "servers"]


_STRATEGIES: dict[str, type[Strategy]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(ABC):
    """How ranks divide the work and merge gradients; the defaults are PyTorch's own.

    Each strategy is a class with its own options. Its text is its name and the options that are not
    the default, such as ``ddp:bucket=5242880,view`` or ``fsdp:shard=8``. All else that other
    modules go by are the facts below, whichever strategy it is.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[Keeps]
    beside: ClassVar[frozenset[str]] = frozenset()
    """The axes of a layout that it goes with beside its own."""
    searched: ClassVar[Literal["anywhere", "layouts", "nowhere"]] = "anywhere"
    """Where it is tried unasked: on any devices, with layouts alone, or nowhere."""
    cuts_tensors: ClassVar[bool] = False
    """Whether ranks update parts of tensors, which makes shares even."""

    def __init_subclass__(cls, **options: Any) -> None:
        own = cls.__dict__
        for name in (own["name"], *own.get("aliases", ())) if "name" in own else ():
            _STRATEGIES[name] = cls

    def __post_init__(self) -> None:
        if not self.name:
            raise StrategyError("a strategy is one of its classes; write Strategy.parse('ddp')")

    def goes_with(self, axis: str) -> bool:
        """Whether an axis of a layout can be more than 1.

        >>> [Strategy.parse(text).goes_with("pp") for text in ("fsdp", "fsdp:no_reshard")]
        [False, True]
        """
        return axis in self.beside

    def beside_pipeline(self) -> Strategy:
        """The same, or what goes with a pipeline in its place if anything does."""
        return self

    def sharded_over(self, ranks: int | None) -> Strategy:
        """The same that shards over so many ranks at a time where it can; None: over all."""
        return self

    def differs_in_sync(self, other: Strategy) -> bool:
        """Whether another is the same but for when gradients are reduced."""
        return self == other

    @property
    def shard_ranks(self) -> int | None:
        """Over how many ranks it shards, None: over all, or it has parameters whole."""
        return None

    @property
    def communicators(self) -> int:
        """Process groups that a rank belongs to."""
        return 1

    @property
    def gathered_dtype(self) -> str | None:
        """The dtype that parameters are cast to as they are gathered, None: they are not."""
        return None

    @property
    def updates_on_host(self) -> bool:
        """Whether the optimizer runs on the host."""
        return False

    @property
    def merged_on(self) -> str:
        """Where gradients are added up: device, host or server."""
        return "device"

    @property
    def updated_on(self) -> str:
        """Where parameters are updated: device, host or server."""
        return "host" if self.updates_on_host else "device"

    def divides(self, ranks: Any) -> Any:
        """Whether the ranks can be divided as it asks: of one number, or of each in an array.

        >>> Strategy.parse("fsdp:shard=4").divides(6)
        False
        """
        return ranks % (self.shard_ranks or 1) == 0

    def shard_dtypes(self, precision: str) -> ShardDtypes:
        """What its dtypes mean for a graph of some precision; raises StrategyError."""
        return ShardDtypes()

    def master_ratio(self, precision: str) -> int:
        """How much wider master weights are than a model of some precision, 1 where it has none.

        Raises StrategyError for a model that is not in half.

        >>> Strategy.parse("ddp:master").master_ratio("bf16")
        2
        """
        return 1

    def __str__(self) -> str:
        options = options_text(self)
        return self.name + (f":{options}" if options else "")

    @staticmethod
    def parse(text: str | Strategy) -> Strategy:
        """Read ``ddp``, ``ddp:bucket=5MiB,view``, ``zero1``, ``fsdp``, ``ps:2``, ``ps:2,async``.

        ``fsdp:shard=8`` shards over 8 ranks and replicates that, ``fsdp:param=bf16,reduce=fp32``
        gathers in one dtype and reduces in another; ``ps:2,link=10Gbit/s`` says what the network of
        each server carries. Equal strategies are one object.

        >>> str(Strategy.parse("zero3:shard=8,offload"))
        'fsdp:shard=8,offload'
        """
        if isinstance(text, str):
            return _parsed(text)
        if not isinstance(text, Strategy):
            raise StrategyError(
                f"a strategy is text such as ddp or fsdp:shard=8, found {quoted(text)}; write one"
            )
        return _same(text)


_MOST_RANKS = 999_999
_ranks = partial(parse_whole, most=_MOST_RANKS)


def _check_dtype(name: str, dtype: str | None) -> None:
    if dtype is not None and dtype not in PARAMETER_BYTES:
        raise StrategyError(
            f"{name}={dtype} is no dtype to shard with; choose one of {', '.join(PARAMETER_BYTES)}"
        )


def _reduced_ratio(reduce: str | None, precision: str) -> float:
    computed = parameter_dtype(precision)
    return PARAMETER_BYTES[reduce or computed] / PARAMETER_BYTES[computed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed(Strategy):
    """Ranks hold whole parameters and merge gradients in buckets.

    `first_bucket_bytes` None means: 1 MiB under the default cap, the cap itself under an explicit
    one, as DDP does. `bucketed=False` is one collective per gradient tensor.
    """

    bucketed: bool = option("unbucketed", default=True)
    bucket_cap_bytes: int = option("bucket", parse_size_bytes, DEFAULT_BUCKET_CAP_BYTES)
    first_bucket_bytes: int | None = option("first", parse_size_bytes, None)

    def __post_init__(self) -> None:
        for value in (self.bucket_cap_bytes, self.first_bucket_bytes):
            if value is not None and not 1 <= value <= _MOST_BUCKET_BYTES:
                raise StrategyError(
                    f"a bucket holds 1 to {_MOST_BUCKET_BYTES:g} bytes; write a size such as 25MiB"
                )

    @property
    def first_cap_bytes(self) -> int:
        """The cap of the first bucket."""
        if self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        default = self.bucket_cap_bytes == DEFAULT_BUCKET_CAP_BYTES
        return DEFAULT_FIRST_BUCKET_BYTES if default else self.bucket_cap_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged(Bucketed):
    """Ranks merge gradients with each other.

    `reduce` is the dtype of DDP's ``bf16_compress_hook`` or ``fp16_compress_hook``, or of
    Megatron's and DeepSpeed's gradient buffer; None: as they are. With `master` the optimizer
    updates fp32 copies of a model in half.
    """

    reduce: str | None = option("reduce", str, None, place=2)
    master: bool = option("master", place=2)

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        _check_dtype("reduce", self.reduce)

    def shard_dtypes(self, precision: str) -> ShardDtypes:
        return ShardDtypes(reduced_ratio=_reduced_ratio(self.reduce, precision))

    def master_ratio(self, precision: str) -> int:
        if not self.master:
            return 1
        computed = PARAMETER_BYTES[parameter_dtype(precision)]
        if computed == PARAMETER_BYTES["fp32"]:
            raise StrategyError(
                f"master weights are fp32 copies of a model in half, found one in {precision}; "
                "leave out master or write --precision bf16"
            )
        return PARAMETER_BYTES["fp32"] // computed


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(_Merged):
    """``ddp``: gradients are all-reduced in buckets, every rank updates everything.

    With `gradient_as_bucket_view` gradients live in the buckets.
    """

    name = "ddp"
    keeps = Keeps("whole", "whole", "whole")
    beside = frozenset({"pp", "ep"})
    gradient_as_bucket_view: bool = option("view")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO1(DDP):
    """``zero1``: PyTorch's ZeroRedundancyOptimizer.

    A rank updates a share of the tensors and broadcasts each.
    """

    name = "zero1"
    aliases = ("zero-redundancy-optimizer",)
    keeps = Keeps("whole", "whole", "shard")
    beside = frozenset({"pp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedOptimizer(_Merged):
    """``distributed-optimizer``: Megatron-LM's, and DeepSpeed's ZeRO stage 1.

    Whole gradients, in the buffer that is reduced, are reduce-scattered; a rank updates its share
    and parameters are gathered.
    """

    name = "distributed-optimizer"
    keeps = Keeps("whole", "whole", "shard")
    beside = frozenset({"pp", "ep"})
    searched = "layouts"
    cuts_tensors = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO2(_Merged):
    """``zero2``: as the distributed optimizer, but a rank holds a share of gradients too."""

    name = "zero2"
    keeps = Keeps("whole", "shard", "shard")
    cuts_tensors = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(Strategy):
    """``fsdp`` (``zero3``): ranks hold shares of parameters too and gather each unit.

    That is `fully_shard` on every repeated block and on the rest, each share on `shard` ranks and
    the whole as often as those fit (HSDP), None: once over all. `gradient_sync=False` adds up the
    whole gradients of earlier micro-batches on every rank and scatters them with the last one
    (``set_requires_gradient_sync(False)``), where the default scatters those of each. Without
    `reshard_after_forward` a block is kept whole until its backward pass, which gathers nothing
    then. `param` and `reduce` are the dtypes of ``MixedPrecisionPolicy``: shards, gradients of
    shards and the optimizer's state are fp32, parameters are gathered and computed with in `param`
    and gradients reduced in `reduce`, None: as they are. With `offload` shards are kept and updated
    on the host (``CPUOffloadPolicy``).
    """

    name = "fsdp"
    aliases = ("zero3",)
    keeps = Keeps("shard", "shard", "shard")
    beside = frozenset({"ep"})
    cuts_tensors = True
    shard: int | None = option("shard", _ranks, None)
    gradient_sync: bool = option("no_sync", default=True)
    reshard_after_forward: bool = option("no_reshard", default=True)
    param: str | None = option("param", str, None)
    reduce: str | None = option("reduce", str, None)
    offload: bool = option("offload")

    def __post_init__(self) -> None:
        _check_dtype("param", self.param)
        _check_dtype("reduce", self.reduce)
        if self.shard is not None and self.shard < 1:
            raise StrategyError(
                f"a model is sharded over at least 1 rank, found {self.shard}; write fsdp:shard=8"
            )

    def goes_with(self, axis: str) -> bool:
        # Gradients of a pipeline's micro-batches add up where they are whole; parameters, which all
        # of them read, stay gathered, as torchtitan's do by default.
        if axis == "pp":
            return not self.reshard_after_forward
        return axis in self.beside and not self.offload

    def beside_pipeline(self) -> Strategy:
        return replace(self, reshard_after_forward=False)

    def sharded_over(self, ranks: int | None) -> Strategy:
        return replace(self, shard=ranks)

    def differs_in_sync(self, other: Strategy) -> bool:
        return isinstance(other, FSDP) and self == replace(other, gradient_sync=self.gradient_sync)

    @property
    def shard_ranks(self) -> int | None:
        return self.shard

    @property
    def communicators(self) -> int:
        """Under HSDP a rank shards in one group and replicates in another."""
        return 1 if self.shard is None else 2

    @property
    def gathered_dtype(self) -> str | None:
        return self.param

    @property
    def updates_on_host(self) -> bool:
        return self.offload

    def shard_dtypes(self, precision: str) -> ShardDtypes:
        """What `param` and `reduce` mean for a graph of some precision.

        Raises StrategyError where the graph does not compute in `param`.

        >>> Strategy.parse("fsdp:param=bf16,reduce=fp32").shard_dtypes("bf16")
        ShardDtypes(stored_ratio=2, reduced_ratio=2.0)
        """
        computed = parameter_dtype(precision)
        if self.param not in (None, computed):
            raise StrategyError(
                f"fsdp:param={self.param} computes in {self.param}, found a model in {precision}; "
                f"write --precision {self.param}, or trace_model(..., precision='{self.param}')"
            )
        wider = PARAMETER_BYTES["fp32"] // PARAMETER_BYTES[computed]
        return ShardDtypes(
            stored_ratio=1 if self.param is None else wider,
            reduced_ratio=_reduced_ratio(self.reduce, precision),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServers(Bucketed):
    """``ps``: `servers` parameter servers update, each on a node of its own.

    With `on_workers` there is one more on the processors of each node of workers. With `local` the
    devices of a node add up their gradients first, and each of them pushes its part. With
    `sums_only` servers add up gradients and workers update, as BytePS' summation service does.
    Tensors are cut in units of `part_bytes`, each of which one server has; None: every server has
    an equal part of each bucket.

    Synchronous unless `asynchronous`; the networks of servers on nodes of their own carry
    `server_bytes_per_s` each way, None: as much as the slowest worker's.
    """

    name = "ps"
    keeps = Keeps("whole", "whole", "servers")
    searched = "nowhere"
    servers: int = option("", _ranks, 0, place=0, values="a number of servers")
    on_workers: bool = option("beside", place=0)
    local: bool = option("local", place=0)
    sums_only: bool = option("sum", place=0)
    asynchronous: bool = option("async", place=0)
    part_bytes: int | None = option("part", parse_size_bytes, None, place=0)
    server_bytes_per_s: float | None = option(
        "link", parse_bandwidth_bytes_per_s, None, written=lambda rate: f"{rate:f}B/s", place=0
    )

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        if self.servers < 1 and not self.on_workers:
            raise StrategyError(
                "a parameter-server job has at least 1 server; write ps:1, or ps:beside"
            )
        if self.part_bytes is not None and not _LEAST_PART <= self.part_bytes <= _MOST_BUCKET_BYTES:
            raise StrategyError(
                f"servers have parts of {_LEAST_PART} to {_MOST_BUCKET_BYTES:g} bytes, found "
                f"{self.part_bytes}; write a size such as 4MB"
            )
        rate = self.server_bytes_per_s
        if rate is not None and not 1 / _MOST_RATE <= rate <= _MOST_RATE:
            raise StrategyError(
                f"a server's link has a positive rate, found {rate:g} B/s; write 1Gbit/s"
            )

    @property
    def merged_on(self) -> str:
        return "host" if not self.servers else "server and host" if self.on_workers else "server"

    @property
    def updated_on(self) -> str:
        return "device" if self.sums_only else self.merged_on


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD(Strategy):
    """``local-sgd``: each rank trains by itself; after every `every` steps parameters are averaged.

    PyTorch's ``PeriodicModelAverager``. It trains another model than synchronous steps do.
    """

    name = "local-sgd"
    keeps = Keeps("whole", "whole", "whole")
    searched = "nowhere"
    every: int = option("every", _ranks, 4)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise StrategyError(
                f"parameters are averaged after at least 1 step, found {self.every}; write "
                "local-sgd:every=4"
            )


def _named(*where: str) -> tuple[str, ...]:
    return tuple(
        kind.name for kind in dict.fromkeys(_STRATEGIES.values()) if kind.searched in where
    )


NAMES = _named("anywhere", "layouts", "nowhere")
SEARCHED = _named("anywhere")
SEARCHED_WITH_LAYOUTS = _named("anywhere", "layouts")
SAVING_MEMORY = tuple(name for name in SEARCHED if _STRATEGIES[name].keeps.state == "shard")


@lru_cache(maxsize=4096)
def _same(strategy: Strategy) -> Strategy:
    """One object for all equal strategies, so that what is kept of one is found by identity."""
    return strategy


@lru_cache(maxsize=256)
def _parsed(text: str) -> Strategy:
    name, _, options = text.strip().partition(":")
    kind = _STRATEGIES.get(name)
    if kind is None:
        known = dict.fromkeys(strategy.name for strategy in _STRATEGIES.values())
        raise StrategyError(
            f"strategy {quoted(text)} is unknown; write one of {', '.join(known)}, or with knobs "
            "as in ddp:bucket=5MiB,view"
        )
    try:
        return _same(kind(**read_options(kind, options, kind.name)))
    except ValueError as error:
        raise StrategyError(f"strategy {quoted(text)}: {error}") from None
