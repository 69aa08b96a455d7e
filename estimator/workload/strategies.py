"""Name how ranks divide the work of training: data-parallel strategy, its knobs, batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from estimator.errors import StrategyError, WorkloadError, quoted
from estimator.units import (
    MIB,
    parse_bandwidth_bytes_per_s,
    parse_knobs,
    parse_size_bytes,
    parse_whole,
)
from estimator.workload.precision import PARAMETER_BYTES, parameter_dtype

# torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.hpp (torch 2.13):
# bucket_cap_mb defaults to 25 MiB with a first bucket of kDefaultFirstBucketBytes = 1 MiB.
DEFAULT_BUCKET_CAP_BYTES = 25 * MIB
DEFAULT_FIRST_BUCKET_BYTES = MIB
_MOST_BUCKET_BYTES, _MOST_RATE = 10**15, 1e15


# More samples than any training set has in a step, and more micro-batches than any step.
MOST_BATCH, MOST_GLOBAL_BATCH, MOST_ACCUMULATION = 10**9, 10**15, 10**8


def _whole(value: Any) -> int | None:
    """A whole number as Python's own, those of numpy too; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_count(value: object, what: str = "batch size", *, most: int = MOST_BATCH) -> int:
    """A number of samples or of micro-batches, or WorkloadError.

    >>> check_count(8)
    8
    """
    number = _whole(value)
    if number is None:
        found = "a whole number"
    elif number < 1:
        found = "at least 1"
    elif number > most:
        found = f"at most {most:g}"
    else:
        return number
    raise WorkloadError(f"{what} must be {found}, found {quoted(value)}; correct it")


class ShardDtypes(NamedTuple):
    """Bytes of an element in a shard, and in a reduction, over those of what is computed with."""

    stored_ratio: int = 1
    reduced_ratio: float = 1.0


class Keeps(NamedTuple):
    """What each rank holds between steps, of those that a strategy divides the work over."""

    parameters: Literal["whole", "shard"]
    gradients: Literal["whole", "shard"]
    state: Literal["whole", "shard", "servers"]


class _Facts(NamedTuple):
    """What is true of a strategy whatever its knobs."""

    keeps: Keeps
    # The axes of a layout that it goes with beside its own, under its default knobs.
    beside: frozenset[str] = frozenset()
    # Where it is tried unasked: on any devices, with layouts alone, or nowhere.
    searched: Literal["anywhere", "layouts", "nowhere"] = "anywhere"
    # Shards are cut through tensors, which makes them even; other ranks update whole tensors.
    cuts_tensors: bool = False
    # Gradients are held in the buffers that are reduced, in the dtype of the reduction.
    has_gradient_buffer: bool = False


StrategyKind = Literal["ddp", "zero1", "distributed-optimizer", "zero2", "fsdp", "ps"]
_FACTS: dict[StrategyKind, _Facts] = {
    "ddp": _Facts(Keeps("whole", "whole", "whole"), frozenset({"pp", "ep"})),
    "zero1": _Facts(Keeps("whole", "whole", "shard"), frozenset({"pp"})),
    "distributed-optimizer": _Facts(
        Keeps("whole", "whole", "shard"),
        frozenset({"pp"}),
        searched="layouts",
        cuts_tensors=True,
        has_gradient_buffer=True,
    ),
    "zero2": _Facts(Keeps("whole", "shard", "shard"), cuts_tensors=True),
    "fsdp": _Facts(Keeps("shard", "shard", "shard"), frozenset({"ep"}), cuts_tensors=True),
    "ps": _Facts(Keeps("whole", "whole", "servers"), searched="nowhere"),
}
_ALIASES: dict[str, StrategyKind] = {"zero3": "fsdp", "zero-redundancy-optimizer": "zero1"}
# Strategies whose ranks hold whole parameters merge gradients in buckets.
_BUCKETED = tuple(kind for kind, facts in _FACTS.items() if facts.keeps.parameters == "whole")
SEARCHED = tuple(kind for kind, facts in _FACTS.items() if facts.searched == "anywhere")
SEARCHED_WITH_LAYOUTS = tuple(kind for kind, facts in _FACTS.items() if facts.searched != "nowhere")
SAVING_MEMORY = tuple(kind for kind in SEARCHED if _FACTS[kind].keeps.state == "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How ranks divide the work and merge gradients; the defaults are PyTorch's own.

    ``ddp`` merges gradients by all-reduce and updates everywhere; ``zero1`` updates a share on each
    rank and broadcasts it tensor by tensor (PyTorch's ZeroRedundancyOptimizer);
    ``distributed-optimizer`` (Megatron-LM's, and DeepSpeed's ZeRO stage 1) holds gradients whole,
    reduce-scatters them, updates its share and gathers parameters; ``zero2`` does so and holds a
    share of gradients; ``fsdp`` (``zero3``) holds shares of parameters too and
    gathers each unit before it computes (`fully_shard` on every repeated block and on the rest),
    each share on `shard` ranks and the whole as often as those fit (HSDP), None: once over all;
    ``ps`` has `servers` parameter servers that update, each on a node of its own, synchronous
    unless `asynchronous`; their networks carry `server_bytes_per_s` each way, None: as much as the
    slowest worker's.

    `first_bucket_bytes` None means: 1 MiB under the default cap, the cap itself under an explicit
    one, as DDP does. `bucketed=False` is one collective per gradient tensor. `gradient_sync=False`
    adds up the whole gradients of FSDP's earlier micro-batches on every rank and scatters them with
    the last one (``set_requires_gradient_sync(False)``), where the default scatters those of each.
    Without `reshard_after_forward` a block is kept whole until its backward pass, which gathers
    nothing then. `param` and `reduce` are the dtypes of FSDP2's ``MixedPrecisionPolicy``: shards,
    gradients of shards and the optimizer's state are fp32, parameters are gathered and computed
    with in `param` and gradients reduced in `reduce`, None: as they are. In buckets `reduce` is
    DDP's ``bf16_compress_hook`` or ``fp16_compress_hook``, or the dtype of Megatron's and
    DeepSpeed's gradient buffer. With `master` the optimizer updates fp32 copies of a model in half,
    with `offload` FSDP keeps shards and updates them on the host (``CPUOffloadPolicy``).
    """

    kind: StrategyKind = "ddp"
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES
    first_bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    bucketed: bool = True
    servers: int = 0
    asynchronous: bool = False
    server_bytes_per_s: float | None = None
    shard: int | None = None
    gradient_sync: bool = True
    reshard_after_forward: bool = True
    param: str | None = None
    reduce: str | None = None
    master: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _FACTS:
            raise StrategyError(
                f"strategy {quoted(self.kind)} is unknown; write one of {', '.join(_FACTS)}"
            )
        for name, dtype in (("param", self.param), ("reduce", self.reduce)):
            if dtype is not None and dtype not in PARAMETER_BYTES:
                raise StrategyError(
                    f"{name}={dtype} is no dtype to shard with; choose one of "
                    f"{', '.join(PARAMETER_BYTES)}"
                )
        if self.shard is not None and self.shard < 1:
            raise StrategyError(
                f"a model is sharded over at least 1 rank, found {self.shard}; write fsdp:shard=8"
            )
        for value in (self.bucket_cap_bytes, self.first_bucket_bytes):
            if value is not None and not 1 <= value <= _MOST_BUCKET_BYTES:
                raise StrategyError(
                    f"a bucket holds 1 to {_MOST_BUCKET_BYTES:g} bytes; write a size such as 25MiB"
                )
        if self.kind == "ps" and self.servers < 1:
            raise StrategyError("a parameter-server job has at least 1 server; write ps:1")
        rate = self.server_bytes_per_s
        if rate is not None and not 1 / _MOST_RATE <= rate <= _MOST_RATE:
            raise StrategyError(
                f"a server's link has a positive rate, found {rate:g} B/s; write 1Gbit/s"
            )

    @property
    def first_cap_bytes(self) -> int:
        """The cap of the first bucket."""
        if self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        default = self.bucket_cap_bytes == DEFAULT_BUCKET_CAP_BYTES
        return DEFAULT_FIRST_BUCKET_BYTES if default else self.bucket_cap_bytes

    @property
    def keeps(self) -> Keeps:
        """What each rank holds between steps."""
        return _FACTS[self.kind].keeps

    @property
    def beside(self) -> frozenset[str]:
        """The axes of a layout that the strategy goes with, under its default knobs."""
        return _FACTS[self.kind].beside

    @property
    def cuts_tensors(self) -> bool:
        """Whether ranks update parts of tensors."""
        return _FACTS[self.kind].cuts_tensors

    @property
    def has_gradient_buffer(self) -> bool:
        """Whether gradients are held in the buffers that are reduced, as Megatron-LM's are."""
        return _FACTS[self.kind].has_gradient_buffer

    @property
    def holds_gradients_in_buckets(self) -> bool:
        """Whether no gradient is held beside the buckets."""
        return self.gradient_as_bucket_view or self.has_gradient_buffer

    @property
    def exchanges_every_micro_batch(self) -> bool:
        """Whether shards of gradients or parameters are exchanged in every micro-batch."""
        keeps = self.keeps
        gathered = keeps.parameters == "shard" and not self.reshard_after_forward
        return keeps.gradients == "shard" and not gathered

    def sharded_ranks(self, ranks: int) -> int:
        """Over how many of the ranks the parameters are sharded: 1 where each holds them whole.

        >>> Strategy.parse("fsdp:shard=4").sharded_ranks(8), Strategy.parse("ddp").sharded_ranks(8)
        (4, 1)
        """
        return 1 if self.keeps.parameters == "whole" else self.shard or ranks

    def shard_dtypes(self, precision: str) -> ShardDtypes:
        """What `param` and `reduce` mean for a graph of some precision.

        Raises StrategyError where the graph does not compute in `param`.

        >>> Strategy.parse("fsdp:param=bf16,reduce=fp32").shard_dtypes("bf16")
        ShardDtypes(stored_ratio=2, reduced_ratio=2.0)
        """
        found = parameter_dtype(precision)
        if self.param not in (None, found):
            raise StrategyError(
                f"fsdp:param={self.param} computes in {self.param}, found a model in {precision}; "
                f"write --precision {self.param}, or trace_model(..., precision='{self.param}')"
            )
        computed = PARAMETER_BYTES[found]
        return ShardDtypes(
            stored_ratio=1 if self.param is None else PARAMETER_BYTES["fp32"] // computed,
            reduced_ratio=PARAMETER_BYTES[self.reduce or found] / computed,
        )

    def master_ratio(self, precision: str) -> int:
        """How much wider master weights are than a model of some precision, 1 where it has none.

        Raises StrategyError for a model that is not in half.

        >>> Strategy.parse("ddp:master").master_ratio("bf16")
        2
        """
        if not self.master:
            return 1
        found = PARAMETER_BYTES[parameter_dtype(precision)]
        if found == PARAMETER_BYTES["fp32"]:
            raise StrategyError(
                f"master weights are fp32 copies of a model in half, found one in {precision}; "
                "leave out master or write --precision bf16"
            )
        return PARAMETER_BYTES["fp32"] // found

    def divides(self, ranks: Any) -> Any:
        """Whether the ranks can be divided as `shard` asks: of one number, or of each in an array.

        >>> Strategy.parse("fsdp:shard=4").divides(6)
        False
        """
        return ranks % (self.shard or 1) == 0

    def __str__(self) -> str:
        knobs = []
        if self.kind == "ps":
            knobs.append(str(self.servers))
        if self.asynchronous:
            knobs.append("async")
        if self.server_bytes_per_s is not None:
            knobs.append(f"link={self.server_bytes_per_s:f}B/s")
        if not self.bucketed:
            knobs.append("unbucketed")
        if self.bucket_cap_bytes != DEFAULT_BUCKET_CAP_BYTES:
            knobs.append(f"bucket={self.bucket_cap_bytes}")
        if self.first_bucket_bytes is not None:
            knobs.append(f"first={self.first_bucket_bytes}")
        if self.gradient_as_bucket_view:
            knobs.append("view")
        if self.shard is not None:
            knobs.append(f"shard={self.shard}")
        if not self.gradient_sync:
            knobs.append("no_sync")
        if not self.reshard_after_forward:
            knobs.append("no_reshard")
        if self.param is not None:
            knobs.append(f"param={self.param}")
        if self.reduce is not None:
            knobs.append(f"reduce={self.reduce}")
        if self.master:
            knobs.append("master")
        if self.offload:
            knobs.append("offload")
        return self.kind + (":" + ",".join(knobs) if knobs else "")

    @classmethod
    def parse(cls, text: str | Strategy) -> Strategy:
        """Read ``ddp``, ``ddp:bucket=5MiB,view``, ``zero1``, ``fsdp``, ``ps:2``, ``ps:2,async``.

        ``fsdp:shard=8`` shards over 8 ranks and replicates that, ``fsdp:param=bf16,reduce=fp32``
        gathers in one dtype and reduces in another; ``ps:2,link=10Gbit/s`` says what the network of
        each server carries.

        >>> Strategy.parse("ddp:bucket=5MiB").first_cap_bytes
        5242880
        """
        if isinstance(text, str):
            return _parsed(text)
        if not isinstance(text, Strategy):
            raise StrategyError(
                f"a strategy is text such as ddp or fsdp:shard=8, found {quoted(text)}; write one"
            )
        return _same(text)


@lru_cache(maxsize=4096)
def _same(strategy: Strategy) -> Strategy:
    """One object for all equal strategies, so that what is kept of one is found by identity."""
    return strategy


@lru_cache(maxsize=256)
def _parsed(text: str) -> Strategy:
    return _same(_read(text))


def _read(text: str) -> Strategy:
    name, _, knobs = text.strip().partition(":")
    kind = _ALIASES.get(name, name)
    if kind not in _FACTS:
        raise StrategyError(
            f"strategy {quoted(text)} is unknown; write one of {', '.join(_FACTS)}, or "
            f"with knobs as "
            "in ddp:bucket=5MiB,view"
        )
    options: dict[str, object] = {"kind": kind}
    try:
        for knob, value in parse_knobs(knobs).items():
            field, found = _read_knob(kind, knob, value)
            if field in options:
                raise ValueError(f"{quoted(knob)} says again what stands before it; leave one out")
            options[field] = found
        return Strategy(**options)  # type: ignore[arg-type]
    except ValueError as error:
        raise StrategyError(f"strategy {quoted(text)}: {error}") from None


_MOST_RANKS = 999_999
_NOT_PS = tuple(kind for kind, facts in _FACTS.items() if facts.keeps.state != "servers")
# The field that a knob sets, the strategies that have it, and how its value is read.
_VALUES: dict[str, tuple[str, Sequence[str], Callable[[str], object]]] = {
    "bucket": ("bucket_cap_bytes", _BUCKETED, parse_size_bytes),
    "first": ("first_bucket_bytes", _BUCKETED, parse_size_bytes),
    "shard": ("shard", ("fsdp",), partial(parse_whole, most=_MOST_RANKS)),
    "param": ("param", ("fsdp",), str),
    "reduce": ("reduce", _NOT_PS, str),
    "link": ("server_bytes_per_s", ("ps",), parse_bandwidth_bytes_per_s),
}
_FLAGS: dict[str, tuple[str, Sequence[str], bool]] = {
    "view": ("gradient_as_bucket_view", ("ddp", "zero1"), True),
    "unbucketed": ("bucketed", _BUCKETED, False),
    "no_sync": ("gradient_sync", ("fsdp",), False),
    "no_reshard": ("reshard_after_forward", ("fsdp",), False),
    "offload": ("offload", ("fsdp",), True),
    "master": ("master", tuple(kind for kind in _NOT_PS if kind in _BUCKETED), True),
    "async": ("asynchronous", ("ps",), True),
}


def _read_knob(kind: str, name: str, value: str) -> tuple[str, object]:
    """The field that a knob sets, and to what; raises ValueError."""
    if name in _FLAGS and not value and kind in _FLAGS[name][1]:
        field, _, flag = _FLAGS[name]
        return field, flag
    if name in _VALUES and kind in _VALUES[name][1]:
        field, _, read = _VALUES[name]
        return field, read(value)
    if kind == "ps" and name[:1].isdigit() and not value:
        return "servers", parse_whole(name, most=_MOST_RANKS)
    known = [f"{each}=" for each, (_, kinds, _) in _VALUES.items() if kind in kinds]
    known += [each for each, (_, kinds, _) in _FLAGS.items() if kind in kinds]
    known = ["a number of servers", *known] if kind == "ps" else known
    found = f"{name}={value}" if value else name
    raise ValueError(f"{quoted(found)} is no knob of {kind}; its knobs are {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Over how many ranks each axis of a mesh goes; torchtitan's names.

    `tp`, `cp` and `pp` divide the computing of one micro-batch, `ep` divides the experts over ranks
    that `dp_shard`, `cp` and `tp` count already. `schedule` is that of the pipeline. Exchanges are
    those of torch, or of `megatron`.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    megatron: bool = False

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "micro_batches"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name} is at least 1, found {getattr(self, name)}; leave it out for 1"
                )
        shared = self.dp_shard * self.cp * self.tp
        if shared % self.ep:
            raise StrategyError(
                f"ep={self.ep} does not divide the {shared} ranks of dp_shard, cp and tp; choose a "
                "divisor"
            )

    @property
    def dp(self) -> int:
        """Ranks with batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that FSDP divides weights over: those that share tokens hold the same ones."""
        return self.dp_shard * self.cp

    @property
    def replicas(self) -> int:
        """Ranks whose gradients of the same weights are averaged."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @classmethod
    def data_parallel(
        cls, ranks: int, *, shard: int | None = None, micro_batches: int = 1
    ) -> Parallelism:
        """All ranks along the data-parallel axes: replicas, each on `shard` ranks if it is sharded.

        Raises StrategyError where that does not divide the ranks.
        """
        if ranks % (shard or 1):
            raise StrategyError(
                f"'fsdp:shard={shard}' shards over {shard} ranks, which do not divide {ranks}; "
                f"choose a divisor of {ranks}"
            )
        shard = shard or 1
        return cls(dp_replicate=ranks // shard, dp_shard=shard, micro_batches=micro_batches)
