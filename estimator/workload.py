"""Name how a model is trained: optimizer, precision, data-parallel strategy and its knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator.errors import StrategyError
from estimator.units import MIB, parse_size_bytes

Optimizer = Literal["sgd", "sgd-momentum", "adam", "adamw"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-amp", "fp16-amp"]
OPTIMIZERS: tuple[str, ...] = ("sgd", "sgd-momentum", "adam", "adamw")
PRECISIONS: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16", "bf16-amp", "fp16-amp")

# Tensors of optimizer state kept per parameter.
OPTIMIZER_STATE_TENSORS = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}

# torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.hpp (torch 2.13):
# bucket_cap_mb defaults to 25 MiB with a first bucket of kDefaultFirstBucketBytes = 1 MiB.
DEFAULT_BUCKET_CAP_BYTES = 25 * MIB
DEFAULT_FIRST_BUCKET_BYTES = MIB


def check_optimizer(text: str) -> str:
    """The optimizer's name, or StrategyError."""
    if text not in OPTIMIZERS:
        raise StrategyError(f"optimizer '{text}' is unknown; choose one of {', '.join(OPTIMIZERS)}")
    return text


def check_precision(text: str) -> str:
    """The precision's name, or StrategyError."""
    if text not in PRECISIONS:
        raise StrategyError(f"precision '{text}' is unknown; choose one of {', '.join(PRECISIONS)}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How ranks divide the work and merge gradients; the defaults are PyTorch DDP's own.

    `first_bucket_bytes` None means: 1 MiB under the default cap, the cap itself under an explicit
    one, as DDP does. `bucketed=False` is one all-reduce per gradient tensor.
    """

    kind: Literal["ddp"] = "ddp"
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES
    first_bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    bucketed: bool = True

    def __post_init__(self) -> None:
        for value in (self.bucket_cap_bytes, self.first_bucket_bytes):
            if value is not None and value < 1:
                raise StrategyError("a bucket holds at least 1 byte; write a size such as 25MiB")

    @property
    def first_cap_bytes(self) -> int:
        """The cap of the first bucket."""
        if self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        default = self.bucket_cap_bytes == DEFAULT_BUCKET_CAP_BYTES
        return DEFAULT_FIRST_BUCKET_BYTES if default else self.bucket_cap_bytes

    def __str__(self) -> str:
        knobs = []
        if not self.bucketed:
            knobs.append("unbucketed")
        if self.bucket_cap_bytes != DEFAULT_BUCKET_CAP_BYTES:
            knobs.append(f"bucket={self.bucket_cap_bytes}")
        if self.first_bucket_bytes is not None:
            knobs.append(f"first={self.first_bucket_bytes}")
        if self.gradient_as_bucket_view:
            knobs.append("view")
        return self.kind + (":" + ",".join(knobs) if knobs else "")

    @classmethod
    def parse(cls, text: str | Strategy) -> Strategy:
        """Read ``ddp``, ``ddp:bucket=5MiB,first=1MiB,view`` or ``ddp:unbucketed``.

        >>> Strategy.parse("ddp:bucket=5MiB").first_cap_bytes
        5242880
        """
        if isinstance(text, Strategy):
            return text
        kind, _, knobs = text.strip().partition(":")
        if kind != "ddp":
            raise StrategyError(f"strategy '{text}' is unknown; write ddp or ddp:bucket=5MiB,view")
        options: dict[str, int | bool] = {}
        for knob in filter(None, (part.strip() for part in knobs.split(","))):
            name, _, value = knob.partition("=")
            try:
                if name == "bucket":
                    options["bucket_cap_bytes"] = parse_size_bytes(value)
                elif name == "first":
                    options["first_bucket_bytes"] = parse_size_bytes(value)
                elif knob == "view":
                    options["gradient_as_bucket_view"] = True
                elif knob == "unbucketed":
                    options["bucketed"] = False
                else:
                    raise ValueError(
                        f"'{knob}' is no knob of ddp; use bucket=, first=, view, unbucketed"
                    )
            except ValueError as error:
                raise StrategyError(f"strategy '{text}': {error}") from None
        return cls(**options)  # type: ignore[arg-type]
