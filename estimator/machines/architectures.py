"""Know what a GPU's architecture is: `data/architectures.json`, one line for each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from estimator.errors import ProfileError
from estimator.machines.files import shipped_data
from estimator.machines.profile import Device

# Where tensor cores take their operands from: the first two generations from registers, later ones
# from shared memory copied ahead of time (NVIDIA A100 architecture whitepaper, 2020), which from
# Hopper on groups of warps leave to compute by themselves (NVIDIA H100 whitepaper, 2023).
TensorCores = Literal["none", "registers", "asynchronous", "warp groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the chips of one architecture have in common.

    `process_nm` is the lithography, with which energy per operation falls. `flops_per_clock` are
    dense operations of one multiprocessor by dtype, matrix units included. `short_tlb` says that
    the translation caches reach less far than those of later chips. Cards for gamers raise their
    clock to `above_boost_ratio` times the rated boost while power and heat allow.
    `nvlink_bytes_per_s` is one of `nvlinks` links, one way.
    """

    process_nm: float
    tensor_cores: TensorCores
    flops_per_clock: Mapping[str, float]
    source: str
    short_tlb: bool = False
    above_boost_ratio: float = 1.0
    nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        rates = {f"flops_per_clock[{dtype}]": rate for dtype, rate in self.flops_per_clock.items()}
        rates |= {"process_nm": self.process_nm, "above_boost_ratio": self.above_boost_ratio}
        for name, value in rates.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, found {value}")
        if self.tensor_cores not in get_args(TensorCores):
            raise ValueError(f"tensor_cores is {self.tensor_cores!r}")
        if (self.nvlinks > 0) != (self.nvlink_bytes_per_s > 0):
            raise ValueError("nvlinks and nvlink_bytes_per_s go together")
        if not self.source:
            raise ValueError("source is empty")


def architecture_of(device: Device) -> Architecture | None:
    """The architecture that a device names; None where it names none that is known."""
    return architectures().get(str(device.details.get("architecture")))


@lru_cache(maxsize=1)
def architectures() -> Mapping[str, Architecture]:
    """Every architecture that is known, by the name that devices give."""
    return read_architectures(shipped_data("architectures.json"))


def read_architectures(path: Path) -> Mapping[str, Architecture]:
    """The architectures of a file; raises ProfileError where one of them cannot be."""
    name = "the file"
    try:
        found = {}
        for name, row in json.loads(path.read_text(encoding="utf-8")).items():
            found[name] = Architecture(**row)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"{path} does not say what architectures are ({name}: {error}); install the package "
            "again or correct the file"
        ) from None
    return found
