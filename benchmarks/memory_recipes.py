"""Predict the peak memory of language models beside what was published.

Published figures are those of torchtitan's log, the most that the allocator had reserved. Predicted
is what live tensors take, what the stream of reductions keeps of gradient shards between steps, and
the allocator's usual fragmentation on both (`estimator/machines/typical.py`). The bound is
10 % on each published row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from options import Options
from published.language_sources import LLAMA, LLAMA_3_VOCABULARY
from records import say
from summary import percent
from zoo.language import decoder

import estimator as est
from estimator.graph.models import load_model
from estimator.machines.typical import FRAGMENTATION_RATIO
from estimator.workload import Strategy

BOUND_RATIO = 0.10
SHARDED = "fsdp:param=bf16,reduce=fp32"
FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how it is trained and on what; `published_gib` where that was published."""

    model: str
    allocation: str
    batch: int
    strategy: str = SHARDED
    checkpoint: str | None = None
    compiled: str = ""
    published_gib: float | None = None
    source: str = ""


# pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3; pytorch/ao,
# torchao/float8/README.md, "Training benchmarks", which reads the same log. Blocks are compiled one
# by one there, and selective checkpointing is by operator (train_configs/llama3_8b.toml).
_TITAN, _AO = "torchtitan 2024-12, table", "torchao 0.10, bfloat16"
PUBLISHED = tuple(
    Case(
        model="llama-3-8b",
        allocation=allocation,
        batch=batch,
        checkpoint="selective:op",
        compiled=compiled,
        published_gib=gib,
        source=source,
    )
    for allocation, batch, compiled, gib, source in (
        ("1x8:h100-sxm", 2, "", 82.4, f"{_TITAN} 1"),
        ("1x8:h100-sxm", 2, "blocks", 77.0, f"{_TITAN} 1"),
        ("16x8:h100-sxm", 2, "", 67.0, f"{_TITAN} 3"),
        ("16x8:h100-sxm", 2, "blocks", 62.0, f"{_TITAN} 3"),
        ("1x8:h100-sxm", 1, "blocks", 47.65, _AO),
    )
)


@lru_cache(maxsize=4)
def graph_of(model: str, checkpoint: str | None, compiled: str) -> est.OpGraph:
    """The traced step at a microbatch of 2, which serves every other one."""
    say(f"tracing {model}, checkpoint {checkpoint or 'none'}")
    built: tuple[Any, ...]
    if model == "gpt2":
        built = load_model("hf:gpt2", batch=2, seq_len=1024, weights=False)[:3]
    else:
        settings = dict(LLAMA[model])
        settings |= {"vocabulary": LLAMA_3_VOCABULARY, "length": 8192, "tied": False}
        built = decoder(2, **settings, wide_loss=True, shifted=True, separate=True)
    return est.trace_model(
        *built,
        precision="bf16",
        target="cuda",
        checkpoint=checkpoint,
        compiled="blocks" if compiled else None,
        name=model,
    )


def reserved_bytes(answer: est.Estimate, graph: est.OpGraph) -> float:
    """What the allocator holds of a rank's memory at the peak."""
    strategy = Strategy.parse(answer.strategy)
    kept = 0.0
    if strategy.keeps.parameters == "shard":
        kept = graph.parameter_count * FP32_BYTES / (strategy.shard_ranks or answer.ranks)
    return (answer.peak_memory_bytes + kept) * (1 + FRAGMENTATION_RATIO)


def predicted(case: Case) -> dict[str, Any]:
    """One case as plain values."""
    graph = graph_of(case.model, case.checkpoint, case.compiled)
    # DDP trains a bf16 model with fp32 copies of its weights.
    strategy = "ddp:master,view" if case.strategy == "ddp" else case.strategy
    answer = est.estimate(graph, case.allocation, batch_per_gpu=case.batch, strategy=strategy)
    reserved = reserved_bytes(answer, graph)
    published = case.published_gib
    return asdict(replace(case, strategy=strategy)) | {
        "live_bytes": answer.peak_memory_bytes,
        "reserved_bytes": reserved,
        "fits": answer.fits,
        "error_ratio": None if published is None else reserved / (published * 2**30) - 1,
    }


def run(options: Options) -> Iterator[dict[str, Any]]:
    """The published peaks, each off by at most the bound."""
    for case in PUBLISHED:
        row = predicted(case)
        name = f"{case.model} on {case.allocation}, batch {case.batch}, {row['strategy']}"
        if case.compiled:
            name += ", compiled"
        say(f"{name}: {percent(row['error_ratio'], '+')}")
        yield {**row, "id": name, "value": abs(row["error_ratio"]), "bound": BOUND_RATIO}
