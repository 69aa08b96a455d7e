"""Time looks at models, estimates, tables, timelines, refits and start-up against their bounds.

Parts, of which ``--only`` names some, run in fresh processes. Estimates, tables and timelines run
in one thread and are given in seconds of its CPU, since others share the machine. `cold` times the
first answers of processes (wall time), graphs being written to the work's folder beforehand, or
found there; `loop` times the rounds of a scheduler that asks of the same jobs again (CPU).
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from options import Options
from records import Record, in_child, kept_graph

ROOT = Path(__file__).resolve().parents[1]
GPT2_SMALL = "hf:gpt2"
LLAMA_70B = (
    "hf:llama,hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256"
)
# Figures by name: value, unit, bound (None: told beside the others).
Found = dict[str, tuple[float, str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often is timed, over how many rows and in how many threads, and where graphs are kept."""

    graphs: Path
    repeats: int = 5
    rows: int = 10**6
    threads: int = 1


def run(options: Options) -> Iterator[Record]:
    """The parts asked for; a quick run has two of them."""
    effort = Effort(graphs=options.work / "graphs", repeats=2 if options.quick else 5)
    usual = ("traced", "start-up") if options.quick else tuple(PARTS)
    for part in [part for part in PARTS if part in options.only] if options.only else usual:
        for name, (value, unit, bound) in PARTS[part](effort).items():
            yield {"id": name, "value": value, "unit": unit, "bound": bound}


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call in which this thread computes."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def medians(calls: Iterable[Callable[[], Any]], groups: int = 5) -> float:
    """The least of some medians of calls: what shares the machine slows whole stretches."""
    times = [cpu_seconds(call) for call in calls]
    size = max(len(times) // groups, 1)
    return min(
        statistics.median(times[first : first + size])
        for first in range(0, len(times) - size + 1, size)
    )


def resident_bytes() -> int:
    """The most memory this process has held."""
    # getrusage's maximum begins with what the parent held.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/status has no VmHWM; run this on Linux")


def traced(model: str, batch: int | None = None, length: int | None = None, **how: Any) -> Any:
    """The graph of a MODEL text, built without weights, for GPUs."""
    from estimator.graph.models import load_model
    from estimator.graph.trace.trace import trace_graph

    built, example, loss, _ = load_model(model, batch=batch, seq_len=length, weights=False)
    return trace_graph(built, example, loss=loss, target="cuda", **how)


# Looks at models


def look_at_gpt2(effort: Effort) -> Found:
    """GPT-2-small: the whole look beside a bare fake forward and backward, interleaved."""
    import torch

    from estimator.graph.models import load_model
    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(GPT2_SMALL, weights=False)
    first = seconds(lambda: trace_graph(model, batch))
    bare_fake_step(model, batch)
    looks, bares = [], []
    for _ in range(effort.repeats):
        bares.append(seconds(lambda: bare_fake_step(model, batch)))
        looks.append(seconds(lambda: trace_graph(model, batch)))
    look, bare = statistics.median(looks), statistics.median(bares)
    return {
        "look / bare fake step, GPT-2-small": (look / bare, "x", 6),
        "bare fake step, GPT-2-small": (bare, "s", None),
        "look at GPT-2-small, warm": (look, "s", 2),
        "look at GPT-2-small, first in the process": (first, "s", 2),
    }


def bare_fake_step(model: Any, batch: Any) -> None:
    """Forward and backward on fake tensors, recording nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from estimator.graph.trace.fake_tensors import kept_as_it_was, put_fake_tensors

    with kept_as_it_was(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        put_fake_tensors(model, dtype=None)
        fakes = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        with torch.enable_grad():
            model(**fakes).loss.backward()


def look_at_llama(_effort: Effort) -> Found:
    """Llama-70B built without memory: seconds, resident memory of the whole process, its file."""
    import torch

    from estimator.graph.models import load_model
    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(LLAMA_70B, batch=1, seq_len=2048, weights=False)
    graphs: dict[str, Any] = {}
    look = seconds(lambda: graphs.update({"Llama-70B": trace_graph(model, batch)}))
    held = resident_bytes()
    graphs["16 layers of it"] = traced(LLAMA_70B.replace("layers=80", "layers=16"), 1, 2048)
    loads: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, graph in graphs.items():
            path = Path(folder, f"{name}.graph")
            graph.save(path)
            load_s = min(cpu_seconds(partial(type(graph).load, path)) for _ in range(5))
            loads[f"a saved graph read, {name}"] = (load_s * 1e3, "ms", 50)
    return {
        "look at Llama-70B": (look, "s", 10),
        "resident memory, Llama-70B": (held / 2**30, "GiB", 3),
        **loads,
    }


# Estimates and tables of a traced GPT-2 on GPUs of the catalogue

SHIPPED = (
    *("h100-sxm", "a100-sxm-80gb", "h200", "v100-sxm", "mi300x", "dgx-a100", "h100-p5", "b200"),
    *("dgx-1", "a100-p4d", "h100-a3", "v100-p3", "dgx-h100", "a100-a2", "h100-nd-v5", "gb200"),
)


def one_and_many(effort: Effort) -> Found:
    """Questions asked again, of shapes of groups met before, of new ones; rows of a table."""
    from estimator import Allocation, estimate, estimate_many

    ask, drawn = partial(estimate, traced(GPT2_SMALL)), random.Random(0)

    def mixed(groups: int, types: int) -> Allocation:
        parts = (
            f"{drawn.randint(1, 50)}x{drawn.randint(1, 4)}:{drawn.choice(SHIPPED[:types])}"
            for _ in range(groups)
        )
        return Allocation.parse("+".join(parts))

    def met() -> Allocation:
        # Another object each time: one that comes again is a question asked again.
        return Allocation(Allocation.parse("2x8:h100-sxm").groups)

    ask(met())
    medians(partial(ask, mixed(64, 16)) for _ in range(200))
    found: Found = {}
    for name, questions, bound in (
        ("asked again", ["2x8:h100-sxm"] * 1000, 3),
        ("shape met", [met() for _ in range(1000)], 40),
        ("new shape", [Allocation.parse(f"{n}x8:h100-sxm") for n in range(3, 1000)], 70),
        ("64 groups of 16 types", [mixed(64, 16) for _ in range(200)], 120),
    ):
        one_s = medians(partial(ask, each) for each in questions)
        found[f"GPT-2, {name}"] = (one_s * 1e6, "µs", bound)
    rows = min(effort.rows, 200_000)
    columns = table_columns(rows)
    for name, asked, bound in (("columns", columns, 0.5), ("texts", [*table_texts(columns)], 1.0)):
        call = partial(estimate_many, ask.args[0], asked)
        call()
        row_s = min(cpu_seconds(call) for _ in range(effort.repeats)) / rows
        found[f"GPT-2, a row of {rows} as {name}"] = (row_s * 1e6, "µs", bound)
    if find_spec("adaptdl"):
        found |= goodput_function(rows, effort.repeats)
    return found


def goodput_function(rows: int, repeats: int) -> Found:
    """AdaptDL's, where it is installed: seven fitted numbers of a job, and nothing of its model."""
    from adaptdl.goodput import GoodputFunction, GradParams, PerfParams

    of_job = PerfParams(0.1, 0.01, 0.02, 0.001, 0.05, 0.002, 1.5)
    asked = GoodputFunction(of_job, GradParams(sqr=1.0, var=1.0), 32)
    one_s = medians(partial(asked.evaluate, 2, 16, 32, 0) for _ in range(1000))
    columns = (np.full(rows, number) for number in (2, 16, 32, 0))
    every = partial(asked.evaluate, *columns)
    row_s = min(cpu_seconds(every) for _ in range(repeats)) / rows
    return {
        "AdaptDL's goodput function": (one_s * 1e6, "µs", None),
        f"AdaptDL's goodput function, a row of {rows}": (row_s * 1e6, "µs", None),
    }


def table_columns(rows: int, seed: int = 0) -> Any:
    """Uneven allocations of two to four groups of four machine types."""
    from estimator import AllocationColumns

    draw = np.random.default_rng(seed)
    groups = {
        name: draw.integers(low, high, (rows, 4), dtype=np.int32)
        for name, low, high in (("machine", 0, 4), ("nodes", 1, 201), ("devices", 1, 5))
    }
    groups["machine"][np.arange(4) >= draw.integers(2, 5, rows)[:, None]] = -1
    return AllocationColumns(machines=SHIPPED[:4], **groups)


def table_texts(columns: Any) -> Iterator[str]:
    """The same allocations as texts."""
    cells = (getattr(columns, name).tolist() for name in ("machine", "nodes", "devices"))
    for row in zip(*cells, strict=True):
        groups = zip(*row, strict=True)
        yield "+".join(f"{n}x{d}:{SHIPPED[m]}" for m, n, d in groups if m >= 0)


def memory(effort: Effort) -> Found:
    """The most memory held over 10⁶ and over 10⁷ texts, in chunks."""
    few, more = (in_child(chunks, replace(effort, rows=rows)) for rows in (10**6, 10**7))
    return {
        "memory, chunks of 1e6 texts": (few / 2**20, "MiB", None),
        "memory, chunks of 1e7 texts": (more / 2**20, "MiB", None),
        "memory, ten times the rows": (more / few, "x", 1.1),
    }


def chunks(effort: Effort) -> int:
    """The most memory that this process holds over the rows."""
    from estimator import estimate_chunks

    at_once = 1 << 14
    texts = (
        text
        for first in range(0, effort.rows, at_once)
        for text in table_texts(table_columns(min(at_once, effort.rows - first), first))
    )
    done = sum(len(table) for table in estimate_chunks(traced(GPT2_SMALL), texts))
    assert done == effort.rows
    return resident_bytes()


def timeline(effort: Effort) -> Found:
    """An event timeline of some 2,000 operators on 1,024 ranks in 16 unlike classes."""
    from estimator import estimate

    graph = traced(f"{GPT2_SMALL},n_layer=24")
    text = "+".join(f"16x4:{name}" for name in SHIPPED)
    compiling_s = cpu_seconds(lambda: estimate(graph, text))
    whole_s = min(
        cpu_seconds(lambda: estimate(graph, text).timeline) for _ in range(effort.repeats)
    )
    spans = estimate(graph, text).timeline.spans
    name = f"timeline, {len(graph.ops)} ops, 1,024 ranks, 16 classes"
    return {
        name: (whole_s, "s", 0.5),
        "its spans": (len(spans), "", None),
        "its spans as objects": (cpu_seconds(lambda: list(spans)), "s", None),
        "compiling 16 machines first": (compiling_s, "s", None),
    }


# Refits

OBSERVATIONS, TURNS, ESTIMATES, ROUNDS = 1000, 20, 300, 5


def calibration(_effort: Effort) -> Found:
    """Medians over single new observations, each followed by a refit; calibrated estimates."""
    from estimator import Calibrator, estimate
    from estimator.calibrate.observed import Observation

    draw, graph = random.Random(0), traced(GPT2_SMALL)

    def step_s(allocation: str, batch: int, calibration: Calibrator | None = None) -> float:
        answer = estimate(graph, allocation, batch_per_gpu=batch, calibration=calibration)
        return answer.step_time_s

    def observation(allocation: str) -> Observation:
        batch = draw.choice((4, 8, 16, 32))
        # As a machine that is a tenth slower than its profile and noisy would be seen.
        seen_s = step_s(allocation, batch) * draw.lognormvariate(0.1, 0.05)
        about = {"workload": graph.name, "allocation": allocation, "strategy": "ddp"}
        return Observation(**about, batch_per_gpu=batch, step_time_s=seen_s)

    every = [f"{nodes}x{devices}:h100-sxm" for nodes in range(1, 201) for devices in range(1, 9)]
    asked = draw.sample(every, OBSERVATIONS + ESTIMATES)
    seen, texts = [observation(text) for text in asked[:OBSERVATIONS]], asked[OBSERVATIONS:]
    with tempfile.TemporaryDirectory() as folder:
        calibrator = Calibrator(Path(folder, "observations.db"))
        calibrator.store.add_many(seen[:-TURNS])
        first_s = seconds(lambda: step_s(asked[-1], 8, calibrator))
        taken_s, refit_s = [], []
        for one in seen[-TURNS:]:
            taken_s.append(seconds(partial(calibrator.store.add_many, [one])))
            refit_s.append(seconds(calibrator.fit))
        cold_s, new_s, known_s = [], [], []
        for text in texts:
            step_s(text, 16)
            new_s.append(seconds(partial(step_s, text, 16, calibrator)))
        # As a scheduler asks in one round after another: with and without by turns.
        for _ in range(ROUNDS):
            for times, calibration in ((cold_s, None), (known_s, calibrator)):
                times += [seconds(partial(step_s, text, 16, calibration)) for text in texts]
    median = statistics.median
    return {
        f"refit on {OBSERVATIONS} observations": (median(refit_s) * 1e3, "ms", 100),
        "one observation taken in": (median(taken_s) * 1e3, "ms", 5),
        "first learning of a workload": (first_s * 1e3, "ms", None),
        "an estimate without calibration": (median(cold_s) * 1e6, "µs", None),
        "a calibrated estimate of a step asked for before": (median(known_s) * 1e6, "µs", None),
        "that over one without": (median(known_s) / median(cold_s), "x", 1.3),
        "a calibrated estimate of a new step": (median(new_s) * 1e6, "µs", 200),
    }


# Start-up


def start_up(effort: Effort) -> Found:
    """Medians over fresh processes of the command's help and of the import."""
    commands = {
        "help": [sys.executable, "-m", "estimator", "--help"],
        "import": [sys.executable, "-c", "import estimator"],
        "bare": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(max(5, effort.repeats)):
        for name, command in commands.items():
            run = partial(subprocess.run, command, check=True, capture_output=True)
            times[name].append(seconds(run))
    return {
        "estimator --help": (statistics.median(times["help"]), "s", 0.3),
        "import estimator": (statistics.median(times["import"]), "s", 0.15),
        "python itself": (statistics.median(times["bare"]), "s", None),
    }


# The first answers of a process, as a scheduler asks: 40 jobs, each on the same 32 allocations


class Trace(NamedTuple):
    """A model, the batch and length that it is looked at with, and how it is trained."""

    model: str
    batch: int
    length: int | None = None
    precision: str = "bf16-amp"
    more: dict[str, Any] = {}  # noqa: RUF012 - nothing changes it


_MOMENTUM = {"optimizer": "sgd-momentum"}
_SMALL_LLAMA = "hf:llama,hidden_size=1024,num_hidden_layers=9,intermediate_size=2816"
TRACES = {
    "gpt2": Trace("hf:gpt2", 8, 512, "fp32"),
    "gpt2-amp": Trace("hf:gpt2", 8, 1024),
    "llama": Trace("hf:llama,hidden_size=2048,num_hidden_layers=10", 2, 1024, "bf16"),
    "llama-amp": Trace(_SMALL_LLAMA, 4, 512),
    "resnet": Trace("hf:resnet", 32, None, "tf32", _MOMENTUM),
    "resnet-amp": Trace("hf:resnet", 32, None, "fp16-amp", _MOMENTUM | {"channels_last": True}),
    "bert": Trace("hf:bert", 16, 128, "fp32"),
    "bert-amp": Trace("hf:bert", 16, 512),
    "vit": Trace("hf:vit", 32, None, "tf32"),
    "t5": Trace("hf:t5,num_layers=4,num_decoder_layers=4", 8, 256, more={"optimizer": "adam"}),
}
# Each graph is asked at these shares of the batch at which it was traced, each time another job.
SHARES = (0.5, 1.0, 1.5, 2.0)
STRATEGIES = ("ddp", "fsdp", "ddp:bucket=5MiB,view", "zero1", "zero2")
ACCUMULATION = (1, 1, 4)
# Devices of a node of the machines asked about; the last was probed.
MEASURED = "h100-80gb"
COLD_MACHINES = {"dgx-h100": 8, "dgx-a100": 8, "v100-p3dn": 8, "t4-g4dn": 1, MEASURED: 1}
ALLOCATIONS, THREADS = 32, 16
# (machine, its nodes, devices of a node) of the scheduler's loop: 24 A100, 24 V100 and 16 T4.
FLEET = (("dgx-a100", 3, 8), ("v100-p3dn", 3, 8), ("t4-g4dn", 4, 4))
LOOP_ROUNDS = 10


def write_graphs(effort: Effort) -> None:
    """Trace the graphs that are not in the folder yet, and put the probed machine there."""
    from estimator.machines.catalogue import load_profile

    folder = effort.graphs
    probed = load_profile(str(ROOT / "data" / "measured" / f"{MEASURED}.json"))
    # It was probed alone.
    network = load_profile("h100-sxm").network
    replace(probed, network=network).save(folder / "machines" / f"{MEASURED}.json")
    for name, each in TRACES.items():
        how = {"precision": each.precision, "name": name, **each.more}
        look = partial(traced, each.model, each.batch, each.length, **how)
        kept_graph(folder / f"{name}.graph", look)


def jobs(folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Graphs and how they are trained: strategies and accumulation go round."""
    from estimator import OpGraph

    queue: list[tuple[Any, dict[str, Any]]] = []
    for name, each in TRACES.items():
        graph = OpGraph.load(folder / f"{name}.graph")
        for share in SHARES:
            number = len(queue)
            how = {
                "batch_per_gpu": max(round(each.batch * share), 1),
                "strategy": STRATEGIES[number % len(STRATEGIES)],
                "accumulation_steps": ACCUMULATION[number % len(ACCUMULATION)],
            }
            queue.append((graph, how))
    return queue


def allocations() -> list[str]:
    """Distinct ones: 1 to 8 nodes of every machine, some of two machines."""
    draw, machines = random.Random(11), list(COLD_MACHINES)

    def group(machine: str) -> str:
        return f"{draw.randint(1, 8)}x{draw.randint(1, COLD_MACHINES[machine])}:{machine}"

    texts: dict[str, None] = {}
    while len(texts) < ALLOCATIONS:
        machine = machines[len(texts) % len(machines)]
        mixed = f"+{group(draw.choice(machines))}" if len(texts) % 8 == 7 else ""
        texts[group(machine) + mixed] = None
    return list(texts)


def ask_cold(effort: Effort) -> dict[str, Any]:
    """Every job on every allocation, in a process that has answered nothing yet."""
    os.environ["ESTIMATOR_HOME"] = str(effort.graphs)
    from estimator import estimate

    def answer(question: tuple[Any, dict[str, Any], str]) -> tuple[float, float, int]:
        graph, how, text = question
        began = time.perf_counter()
        found = estimate(graph, text, **how)
        return time.perf_counter() - began, found.step_time_s, found.peak_memory_bytes

    queue = jobs(effort.graphs)
    questions = [(*job, text) for job in queue for text in allocations()]
    began, began_cpu = time.perf_counter(), time.process_time()
    if effort.threads == 1:
        answers = [answer(each) for each in questions]
    else:
        with ThreadPoolExecutor(effort.threads) as pool:
            answers = list(pool.map(answer, questions))
    return {
        "ops": [len(graph.ops) for graph, _ in queue],
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu,
        "took_s": [each[0] for each in answers],
        "answers": [each[1:] for each in answers],
    }


def cold(effort: Effort) -> Found:
    """The first answers of fresh processes, with one thread and with many."""
    in_child(write_graphs, effort)
    runs: dict[int, list[dict[str, Any]]] = {1: [], THREADS: []}
    for _ in range(effort.repeats):
        for threads, some in runs.items():
            some.append(in_child(ask_cold, replace(effort, threads=threads)))
    one, many = runs[1], runs[THREADS]
    if any(run["answers"] != one[0]["answers"] for run in (*one, *many)):
        sys.exit("answers differ between processes or numbers of threads")
    ops, questions = one[0]["ops"], len(one[0]["took_s"])
    wall_s, cpu_s = (min(run[key] for run in one) / questions for key in ("wall_s", "cpu_s"))
    walls = [min(run["wall_s"] for run in some) for some in (one, many)]
    took_s = min(one, key=lambda run: run["wall_s"])["took_s"]
    name = f"cold, {len(ops)} jobs x {ALLOCATIONS} allocations"
    return {
        f"{name}, ops of a graph, least": (min(ops), "", None),
        f"{name}, ops of a graph, most": (max(ops), "", None),
        f"{name}, mean, least of {len(one)} processes": (wall_s * 1e3, "ms", 2.5),
        f"{name}, mean of the CPU": (cpu_s * 1e3, "ms", None),
        f"{name}, median": (statistics.median(took_s) * 1e3, "ms", None),
        f"{name}, the first of a job, median": (
            statistics.median(took_s[::ALLOCATIONS]) * 1e3,
            "ms",
            None,
        ),
        f"{name}, slowest": (max(took_s) * 1e3, "ms", None),
        f"{name}, all, 1 thread": (walls[0], "s", None),
        f"{name}, all, {THREADS} threads": (walls[1], "s", None),
        f"{name}, {THREADS} threads / 1 thread": (walls[1] / walls[0], "x", 1.0),
    }


def candidates() -> list[str]:
    """The smallest allocations of each machine, in turns: 1, 2, 4, … devices, then more nodes."""
    of_machine = [
        [f"{n}x{d}:{machine}" for n in range(1, nodes + 1) for d in range(1, devices + 1)]
        for machine, nodes, devices in FLEET
    ]
    width = max(map(len, of_machine))
    turns = [texts[place] for place in range(width) for texts in of_machine if place < len(texts)]
    return turns[:ALLOCATIONS]


def ask_rounds(effort: Effort, *, is_prepared: bool = False) -> dict[str, Any]:
    """Some rounds of a scheduler in a process that has answered nothing yet, prepared or not."""
    import estimator as est

    queue, texts = jobs(effort.graphs), candidates()
    machines = [machine for machine, _, _ in FLEET]

    def prepare() -> None:
        for graph, how in queue:
            est.prepare(graph, machines, **how)

    def decide() -> None:
        for graph, how in queue:
            table = est.estimate_many(graph, texts, **how)
            np.nanargmax(table.samples_per_s / np.sqrt(table.ranks))

    prepared_s = cpu_seconds(prepare) if is_prepared else 0.0
    rounds = [cpu_seconds(decide) for _ in range(LOOP_ROUNDS)]
    return {"prepare_s": prepared_s, "rounds_s": rounds, "jobs": len(queue)}


def loop(effort: Effort) -> Found:
    """The first and the later rounds of fresh processes, in seconds of their CPU."""
    in_child(write_graphs, effort)
    unprepared = [in_child(ask_rounds, effort) for _ in range(effort.repeats)]
    ahead = [in_child(partial(ask_rounds, is_prepared=True), effort) for _ in range(effort.repeats)]
    first_s, prepared_first_s = (
        min(run["rounds_s"][0] for run in runs) for runs in (unprepared, ahead)
    )
    later_s = min(statistics.median(run["rounds_s"][1:]) for run in unprepared)
    name = f"loop, {unprepared[0]['jobs']} jobs x {ALLOCATIONS} allocations"
    return {
        f"{name}, first round, cold": (first_s, "s", 2.0),
        f"{name}, later rounds": (later_s * 1e3, "ms", 20.0),
        f"{name}, prepare": (min(run["prepare_s"] for run in ahead), "s", None),
        f"{name}, first round, prepared": (prepared_first_s * 1e3, "ms", None),
    }


# Layouts of a 70B transformer, a step of 2,048 samples of 2,048 tokens

PLACE, VAST, GLOBAL_BATCH = "128x8:h100-sxm", "12512x8:h100-sxm", 2048
PIPELINE = {"layout": "tp=8,pp=16,dp=*", "batch_per_gpu": 1, "accumulation_steps": 128}
DIVIDED = {"layout": "tp=8,dp=*", "batch_per_gpu": 1}


def layouts(effort: Effort) -> Found:
    """A plan of 1,024 GPUs by a new engine each time, new layouts, layouts known already."""
    from estimator import Allocation, best_layouts, estimate
    from estimator.estimates.engine import Engine

    graph = traced(f"{LLAMA_70B},gradient_checkpointing=true", 2, 2048, precision="bf16")
    plan = partial(best_layouts, graph, PLACE, global_batch=GLOBAL_BATCH)
    plans_s = [seconds(lambda: plan(engine=Engine())) for _ in range(min(effort.repeats, 3))]
    count = plan(engine=Engine()).candidates
    ask = partial(estimate, graph)
    ask("16x8:h100-sxm", **PIPELINE)
    ask(PLACE, **DIVIDED)
    new_s = [
        cpu_seconds(partial(ask, PLACE, layout=f"tp={tp},pp={pp},dp=*", batch_per_gpu=1))
        for tp, pp in ((8, 2), (8, 4), (4, 4), (2, 8))
    ]
    vast_s = cpu_seconds(partial(ask, VAST, layout="tp=8,pp=16,dp=*", batch_per_gpu=1))
    warm_s = medians(partial(ask, "16x8:h100-sxm", **PIPELINE) for _ in range(100))
    unseen = [Allocation.parse(f"{nodes}x8:h100-sxm") for nodes in range(2, 102)]
    unseen_s = medians(partial(ask, place, **DIVIDED) for place in unseen)
    median = statistics.median
    return {
        f"best layout of {PLACE}, {count:,} candidates": (median(plans_s), "s", 4),
        "new layout of a traced model, median of four": (1e3 * median(new_s), "ms", 50),
        f"a layout on {VAST}, 100,096 GPUs": (vast_s, "s", 1),
        "16 stages x 128 micro-batches, warm": (1e3 * warm_s, "ms", 1),
        "warm layout, allocations not seen": (1e6 * unseen_s, "us", 200),
    }


PARTS: dict[str, Callable[[Effort], Found]] = {
    "looks": lambda effort: in_child(look_at_gpt2, effort) | in_child(look_at_llama, effort),
    "traced": partial(in_child, one_and_many),
    "memory": memory,
    "timeline": partial(in_child, timeline),
    "calibration": partial(in_child, calibration),
    "start-up": start_up,
    "cold": cold,
    "loop": loop,
    "layouts": partial(in_child, layouts),
}
