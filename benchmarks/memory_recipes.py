"""Predict the peak memory of Llama-3 8B under FSDP beside what was published.

Published figures are those of torchtitan's log, the most that the allocator had reserved. Predicted
is what live tensors take, what the stream of reductions keeps of gradient shards between steps, and
the allocator's usual fragmentation on both (`estimator/machines/typical.py`). The bound is
10 % on each published row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from options import Options
from published.graphs import KNOWN
from published.language_sources import LLAMA_3_VOCABULARY
from records import say
from summary import percent
from zoo.language import decoder

import estimator as est
from estimator.machines.typical import FRAGMENTATION_RATIO
from estimator.units import GIB

BOUND_RATIO = 0.10
MODEL, STRATEGY = "llama-3-8b", "fsdp:param=bf16,reduce=fp32"
FP32_BYTES = 4


class Case(NamedTuple):
    """Where the model is trained, how, and the peak that was published."""

    allocation: str
    batch: int
    compiled: bool
    published_gib: float
    source: str


# pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3; pytorch/ao,
# torchao/float8/README.md, "Training benchmarks", which reads the same log. Blocks are compiled one
# by one there, and selective checkpointing is by operator (train_configs/llama3_8b.toml).
_TITAN, _AO = "torchtitan 2024-12, table", "torchao 0.10, bfloat16"
PUBLISHED = (
    Case("1x8:h100-sxm", 2, False, 82.4, f"{_TITAN} 1"),
    Case("1x8:h100-sxm", 2, True, 77.0, f"{_TITAN} 1"),
    Case("16x8:h100-sxm", 2, False, 67.0, f"{_TITAN} 3"),
    Case("16x8:h100-sxm", 2, True, 62.0, f"{_TITAN} 3"),
    Case("1x8:h100-sxm", 1, True, 47.65, _AO),
)


@lru_cache
def graph_of(*, compiled: bool) -> est.OpGraph:
    """The traced step at a microbatch of 2, which serves every other one."""
    say(f"tracing {MODEL}" + ", compiled" * compiled)
    sizes = dict(zip(KNOWN["llama"]["columns"], KNOWN["llama"][MODEL], strict=True))
    settings = {"vocabulary": LLAMA_3_VOCABULARY, "length": 8192, "tied": False}
    return est.trace_model(
        *decoder(2, **sizes, **settings, wide_loss=True, shifted=True, separate=True),
        precision="bf16",
        target="cuda",
        checkpoint="selective:op",
        compiled="blocks" if compiled else None,
        name=MODEL,
    )


def reserved_bytes(answer: est.Estimate, graph: est.OpGraph) -> float:
    """What the allocator holds of a rank's memory at the peak, gradient shards in fp32 included."""
    kept = graph.parameter_count * FP32_BYTES / answer.ranks
    return (answer.peak_memory_bytes + kept) * (1 + FRAGMENTATION_RATIO)


def run(options: Options) -> Iterator[dict[str, Any]]:
    """The published peaks, each off by at most the bound."""
    for case in PUBLISHED:
        graph = graph_of(compiled=case.compiled)
        answer = est.estimate(graph, case.allocation, batch_per_gpu=case.batch, strategy=STRATEGY)
        reserved = reserved_bytes(answer, graph)
        off = reserved / (case.published_gib * GIB) - 1
        name = f"{MODEL} on {case.allocation}, batch {case.batch}, {STRATEGY}"
        name += ", compiled" * case.compiled
        say(f"{name}: {percent(off, '+')}")
        more = {"live_bytes": answer.peak_memory_bytes, "reserved_bytes": reserved}
        about = {**case._asdict(), **more, "fits": answer.fits, "error_ratio": off}
        yield {**about, "id": name, "value": abs(off), "bound": BOUND_RATIO}
