"""Jobs and machines that a process has not seen, and how long its first answers about them take.

A scheduler's pattern: 40 jobs, each asked on the same 32 allocations. Graphs are traced and
machines made before, into files; loading the graphs is not timed, reading the machines is.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# (name, model, batch, sequence length, how it is traced), all for GPUs.
TRACES: tuple[tuple[str, str, int, int | None, dict[str, Any]], ...] = (
    ("gpt2", "hf:gpt2", 8, 512, {"precision": "fp32"}),
    ("gpt2-amp", "hf:gpt2", 8, 1024, {"precision": "bf16-amp"}),
    ("llama", "hf:llama,hidden_size=2048,num_hidden_layers=10", 2, 1024, {"precision": "bf16"}),
    (
        "llama-amp",
        "hf:llama,hidden_size=1024,num_hidden_layers=9,intermediate_size=2816",
        4,
        512,
        {"precision": "bf16-amp"},
    ),
    ("resnet", "hf:resnet", 32, None, {"precision": "tf32", "optimizer": "sgd-momentum"}),
    (
        "resnet-amp",
        "hf:resnet",
        32,
        None,
        {"precision": "fp16-amp", "channels_last": True, "optimizer": "sgd-momentum"},
    ),
    ("bert", "hf:bert", 16, 128, {"precision": "fp32"}),
    ("bert-amp", "hf:bert", 16, 512, {"precision": "bf16-amp"}),
    ("vit", "hf:vit", 32, None, {"precision": "tf32"}),
    (
        "t5",
        "hf:t5,num_layers=4,num_decoder_layers=4",
        8,
        256,
        {"precision": "bf16-amp", "optimizer": "adam"},
    ),
)
# Each graph is asked at these shares of the batch at which it was traced, each time another job.
BATCHES = (0.5, 1.0, 1.5, 2.0)
STRATEGIES = ("ddp", "fsdp", "ddp:bucket=5MiB,view", "zero1", "zero2")
ACCUMULATION = (1, 1, 4)
BY_DATASHEET = ("dgx-h100", "dgx-a100", "v100-p3dn", "t4-g4dn")
# Probed machines are made of these, every call of the probe's grid timed as the model has it.
PROBED = {"probed-a100": "a100-p4d", "probed-h100": "h100-p5", "probed-a10g": "a10g-g5"}
# How far a timed call is from the kernel model, one standard deviation of the logarithm.
SCATTER = 0.15
ALLOCATIONS, THREADS = 32, 16


def write_cases(folder: Path) -> None:
    """Trace the graphs and make the machines that are not in the folder yet."""
    machines = folder / "machines"
    machines.mkdir(parents=True, exist_ok=True)
    for name, model, batch, length, how in TRACES:
        path = folder / f"{name}.graph"
        if not path.exists():
            _trace(name, model, batch, length, how).save(path)
    for name, like in PROBED.items():
        path = machines / f"{name}.json"
        if not path.exists():
            _probed(name, like).save(path)


def _trace(name: str, model: str, batch: int, length: int | None, how: dict[str, Any]) -> Any:
    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.trace import trace_graph

    built, example, loss, _ = load_model(model, batch=batch, seq_len=length, weights=False)
    return trace_graph(built, example, loss=loss, target="cuda", name=name, **how)


def _probed(name: str, like: str) -> Any:
    """A machine of the catalogue as a probe of it would describe it."""
    from estimator import load_profile
    from estimator.kernels.roofline import Roofline
    from estimator.machines.profile import Contention, HostCost, KernelCost, KernelPoint, Provenance
    from estimator.machines.typical import with_typical_costs

    chosen, scatter = (
        Provenance(source="measured", samples=1, relative_error=0.05),
        random.Random(7),
    )
    known = with_typical_costs(load_profile(like))
    kernel_models = {math_: Roofline(known, precision=math_ or "fp32") for math_ in ("", "tf32")}
    points: defaultdict[tuple[str, str], list[KernelPoint]] = defaultdict(list)
    for call, math_ in _grid():
        found = kernel_models[math_].predict(call)
        if found is not None:
            off = math.exp(scatter.gauss(0.0, SCATTER))
            point = KernelPoint(
                call=call.encode(), warm_s=found.warm_s * off, cold_s=found.cold_s * off
            )
            points[call.target, "tfloat32" if math_ else call.dtype].append(point)
    kernels = tuple(
        KernelCost(target=target, dtype=dtype, points=tuple(some), provenance=chosen)
        for (target, dtype), some in points.items()
    )
    contentions = tuple(
        Contention(
            bound=bound,
            devices_busy=busy,
            points=((1e5, 1.0), (1e7, 1.0 + 0.005 * busy), (1e9, 1.0 + 0.01 * busy)),
            provenance=chosen,
        )
        for bound in ("compute", "memory", "update")
        for busy in (2, 4, 8)
    )
    assert isinstance(known.host, HostCost)
    return replace(
        known, name=name, kernels=kernels, contentions=contentions, rank_jitter_ratio=0.01
    )


def _grid() -> Iterator[tuple[Any, str]]:
    """Every call of the probe's grid for GPUs with its outputs, and its kind of arithmetic."""
    import torch

    from estimator.probe.devices.calls import find_operator, output_tensors, real_arguments, spec_of
    from estimator.probe.devices.calls import torch_dtype as dtype_of
    from estimator.probe.grid.kernels import kernel_grid

    for each in kernel_grid("cuda"):
        tensors = (
            torch.empty_strided(
                spec.shape,
                spec.strides or torch.empty(spec.shape, device="meta").stride(),
                dtype=dtype_of(spec.dtype),
                device="meta",
            )
            for spec in each.call.inputs
        )
        try:
            given, named = real_arguments(each.call, tensors, device="meta")
            made = output_tensors(find_operator(each.call.target)(*given, **named))
        # What has no shape function, or looks at values: a probe leaves out what cannot run, too.
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            continue
        yield replace(each.call, outputs=tuple(map(spec_of, made))), each.math


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a scheduler's queue."""

    graph: Any
    batch: int
    strategy: str
    accumulation_steps: int


def jobs(folder: Path) -> list[Job]:
    """Graphs by batch sizes; strategies and accumulation go round."""
    from estimator import OpGraph

    found: list[Job] = []
    for name, _, batch, _, _ in TRACES:
        graph = OpGraph.load(folder / f"{name}.graph")
        for share in BATCHES:
            number = len(found)
            found.append(
                Job(
                    graph=graph,
                    batch=max(round(batch * share), 1),
                    strategy=STRATEGIES[number % len(STRATEGIES)],
                    accumulation_steps=ACCUMULATION[number % len(ACCUMULATION)],
                )
            )
    return found


def allocations() -> list[str]:
    """Distinct ones: 1 to 8 nodes of every machine, 1 to 8 devices each, some of two machines."""
    chosen, machines = random.Random(11), (*BY_DATASHEET, *PROBED)
    # What the smaller machines have.
    most = {"t4-g4dn": 1, "a10g-g5": 1}

    def group(machine: str) -> str:
        devices = chosen.randint(1, most.get(machine, most.get(PROBED.get(machine, ""), 8)))
        return f"{chosen.randint(1, 8)}x{devices}:{machine}"

    found: dict[str, None] = {}
    while len(found) < ALLOCATIONS:
        machine = machines[len(found) % len(machines)]
        mixed = len(found) % 8 == 7
        found[f"{group(machine)}+{group(chosen.choice(machines))}" if mixed else group(machine)] = (
            None
        )
    return list(found)


def ask(options: argparse.Namespace) -> dict[str, Any]:
    """Every job on every allocation, in a process that has answered nothing yet."""
    folder = Path(options.graphs)
    os.environ["ESTIMATOR_HOME"] = str(folder)
    from estimator import estimate

    queue, texts = jobs(folder), allocations()

    def answer(job: Job, text: str) -> tuple[float, float, int]:
        began = time.perf_counter()
        found = estimate(
            job.graph,
            text,
            batch_per_gpu=job.batch,
            strategy=job.strategy,
            accumulation_steps=job.accumulation_steps,
        )
        took_s = time.perf_counter() - began
        return took_s, found.step_time_s, found.peak_memory_bytes

    questions = [(job, text) for job in queue for text in texts]
    began, began_cpu = time.perf_counter(), time.process_time()
    if options.threads == 1:
        answers = [answer(*each) for each in questions]
    else:
        with ThreadPoolExecutor(options.threads) as pool:
            answers = list(pool.map(lambda each: answer(*each), questions))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "ops": [len(job.graph.ops) for job in queue],
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "took_s": [each[0] for each in answers],
        "answers": [each[1:] for each in answers],
    }


def cold(options: argparse.Namespace, in_child: Callable[..., Any]) -> Any:
    """The first answers of fresh processes, with one thread and with many."""
    runs: dict[int, list[dict[str, Any]]] = {1: [], THREADS: []}
    for _ in range(options.repeats):
        for threads, some in runs.items():
            some.append(in_child("cold", options, threads=threads))
    one, many = runs[1], runs[THREADS]
    if any(run["answers"] != one[0]["answers"] for run in (*one, *many)):
        sys.exit("answers differ between processes or numbers of threads")
    ops, questions = one[0]["ops"], len(one[0]["took_s"])

    def per_question_ms(some: list[dict[str, Any]], key: str) -> float:
        return min(run[key] for run in some) / questions * 1e3

    name = f"cold, {len(ops)} jobs x {ALLOCATIONS} allocations"
    walls = [min(run["wall_s"] for run in some) for some in (one, many)]
    took_s = min(one, key=lambda run: run["wall_s"])["took_s"]
    first_s = took_s[::ALLOCATIONS]
    return {
        f"{name}, ops of a graph, least": (min(ops), "", None),
        f"{name}, ops of a graph, most": (max(ops), "", None),
        f"{name}, mean, least of {len(one)} processes": (
            per_question_ms(one, "wall_s"),
            "ms",
            3.0,
        ),
        f"{name}, mean of the CPU": (per_question_ms(one, "cpu_s"), "ms", None),
        f"{name}, median": (statistics.median(took_s) * 1e3, "ms", None),
        f"{name}, the first of a job, median": (statistics.median(first_s) * 1e3, "ms", None),
        f"{name}, slowest": (max(took_s) * 1e3, "ms", None),
        f"{name}, all, 1 thread": (walls[0], "s", None),
        f"{name}, all, {THREADS} threads": (walls[1], "s", None),
        f"{name}, {THREADS} threads / 1 thread": (walls[1] / walls[0], "x", 1.0),
    }
