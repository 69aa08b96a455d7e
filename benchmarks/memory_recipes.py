"""Sweep the microbatch of language models and show peak memory beside what was published.

Published figures are those of torchtitan's log, the most that the allocator had reserved. Predicted
is what live tensors take, what the stream of reductions keeps of gradient shards between steps, and
the allocator's usual fragmentation on both (`estimator/machines/typical.py`). The bound is
10 % on each published row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from options import parser_of
from published.language_sources import LLAMA, LLAMA_3_VOCABULARY
from records import say
from zoo.llama import llama

import estimator as est
from estimator.graph.models.model_text import load_model
from estimator.machines.typical import FRAGMENTATION_RATIO
from estimator.units import format_bytes, format_ratio
from estimator.workload import Strategy

BOUND_RATIO = 0.10
SHARDED = "fsdp:param=bf16,reduce=fp32"
HYBRID = "fsdp:shard=8,param=bf16,reduce=fp32"
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


def sweep() -> Iterator[Case]:
    """Every microbatch of every model under every strategy, with and without checkpoints."""
    for model, batches, strategies in (
        ("gpt2", (4, 8, 16, 32, 64), ("ddp", SHARDED, HYBRID)),
        ("llama-3-8b", (1, 2, 4, 8), ("ddp", SHARDED, HYBRID)),
        ("llama-3-70b", (1, 2, 4), (SHARDED, HYBRID)),
    ):
        for checkpoint in (None, "full"):
            for strategy in strategies:
                for batch in batches:
                    yield Case(
                        model=model,
                        allocation="8x8:h100-sxm",
                        batch=batch,
                        strategy=strategy,
                        checkpoint=checkpoint,
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
        built = llama(2, vocabulary=LLAMA_3_VOCABULARY, length=8192, **settings)
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
    shards = strategy.sharded_ranks(answer.ranks)
    kept = graph.parameter_count * FP32_BYTES / shards if shards > 1 else 0.0
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


def line_of(row: dict[str, Any]) -> str:
    """One row as people read it."""
    mode = f"checkpoint {row['checkpoint'] or 'none'}" + (
        ", compiled blocks" if row["compiled"] else ""
    )
    found = f"{format_bytes(row['live_bytes']):>9} live {format_bytes(row['reserved_bytes']):>9}"
    text = (
        f"{row['model']:12} {row['allocation']:14} batch {row['batch']:3} {row['strategy']:37} "
        f"{mode:41} {found} reserved"
    )
    if row["published_gib"] is None:
        return f"{text}  fits: {row['fits']}"
    return (
        f"{text}  published {row['published_gib']:.1f} GiB "
        f"{format_ratio(row['error_ratio']):>6}  {row['source']}"
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--published-only", action="store_true", help="without the sweep")
    chosen = parser.parse_args()
    rows = []
    for case in (*PUBLISHED, *(() if chosen.published_only else sweep())):
        row = predicted(case)
        rows.append(row)
        print(line_of(row), file=sys.stderr if chosen.json else sys.stdout, flush=True)
    errors = [abs(row["error_ratio"]) for row in rows if row["error_ratio"] is not None]
    if chosen.json:
        print(json.dumps({"bound_ratio": BOUND_RATIO, "cases": rows}))
    else:
        print(
            f"{len(errors)} published peaks: median {format_ratio(statistics.median(errors))}, "
            f"worst {format_ratio(max(errors))}; bound {format_ratio(BOUND_RATIO)} each"
        )
    return 0 if max(errors) <= BOUND_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
