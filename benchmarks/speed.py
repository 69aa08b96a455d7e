"""Time looks at models, estimates, tables, timelines, refits and start-up against their bounds.

    python benchmarks/speed.py [--parts looks one many memory timeline …]

Estimates, tables and timelines run in one thread and are given in seconds of its CPU, since others
share the machine.
`--adaptdl PYTHON` names an interpreter that has AdaptDL (pip install adaptdl), whose goodput
function is then timed beside ours; without it the same published form (Pollux, OSDI 2020, section
3.2) is, as written here. `cold` times the first answers of fresh processes (wall time), graphs and
machines being written to the folder `--graphs` beforehand, or found there; `loop` times the rounds
of a scheduler that asks of the same jobs again (CPU).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from clocks import cpu_seconds, medians, resident_bytes, seconds

QUIET: dict[str, Any] = {"check": True, "capture_output": True}
GPT2_SMALL = "hf:gpt2"
LLAMA_70B = (
    "hf:llama,hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256"
)
# One line of the report: value, unit, bound (None: told beside the others).
Found = dict[str, tuple[float, str, float | None]]


def main() -> None:
    """Run the parts asked for and print one line each, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--adaptdl", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--graphs", metavar="FOLDER", help="keep what `cold` asks about")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return
    found: Found = {}
    for part in options.parts:
        found.update(PARTS[part](options))
    if options.json:
        lines = [
            {"id": name, "value": value, "unit": unit, "bound": bound}
            for name, (value, unit, bound) in found.items()
        ]
        print(json.dumps({"cases": lines}))
        return
    for name, (value, unit, bound) in found.items():
        print(f"{name:<58} {value:>10.3f} {unit:<5}" + (f" target <= {bound:g}" if bound else ""))


def in_child(
    name: str,
    options: argparse.Namespace,
    python: str = sys.executable,
    *,
    rows: int | None = None,
    threads: int = 1,
) -> Any:
    """Run a part in a process of its own, so that memory and imports are its own."""
    command = [python, __file__, "--child", name, "--repeats", str(options.repeats)]
    command += ["--rows", str(rows or options.rows), "--threads", str(threads)]
    command += ["--graphs", options.graphs] if options.graphs else []
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


# Looks at models


def looks(options: argparse.Namespace) -> Found:
    """Looks at models, beside a bare fake step."""
    return in_child("look", options) | in_child("llama", options)


def look_ratio(options: argparse.Namespace) -> Found:
    """GPT-2-small: the whole look beside a bare fake forward and backward, interleaved."""
    import torch

    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(GPT2_SMALL, weights=False)
    first = seconds(lambda: trace_graph(model, batch))
    bare_fake_step(model, batch)
    looks, bares = [], []
    for _ in range(options.repeats):
        bares.append(seconds(lambda: bare_fake_step(model, batch)))
        looks.append(seconds(lambda: trace_graph(model, batch)))
    look, bare = statistics.median(looks), statistics.median(bares)
    return {
        "look / bare fake step, GPT-2-small": (look / bare, "x", 6),
        "bare fake step, GPT-2-small": (bare, "s", None),
        "look at GPT-2-small, warm": (look, "s", 3),
        "look at GPT-2-small, first in the process": (first, "s", 3),
    }


def bare_fake_step(model: Any, batch: Any) -> None:
    """Forward and backward on fake tensors, recording nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from estimator.graph.stand_ins import kept_as_it_was, put_stand_ins

    with kept_as_it_was(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        put_stand_ins(model, dtype=None, device="cpu")
        fakes = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        with torch.enable_grad():
            model(**fakes).loss.backward()


def look_at_llama(_options: argparse.Namespace) -> Found:
    """Llama-70B built without memory: seconds and resident memory of the whole process."""
    import torch

    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(LLAMA_70B, batch=1, seq_len=2048, weights=False)
    look = seconds(lambda: trace_graph(model, batch))
    return {
        "look at Llama-70B": (look, "s", 30),
        "resident memory, Llama-70B": (resident_bytes() / 2**30, "GiB", 3),
    }


# Estimates, tables and what others take


def one(options: argparse.Namespace) -> Found:
    """Warm estimates of allocations not seen before, parsed and as text."""
    from speed_cases import STRATEGY, Machines, model

    from estimator import Allocation, estimate

    machines, ask = Machines(), partial(estimate, model(), strategy=STRATEGY)
    shapes = ((1, 4), (8, 4), (64, 4), (64, 16))
    parsed_s, text_s, other_s = ({shape: [] for shape in shapes} for _ in range(3))
    for turn in range(options.repeats + 1):
        for shape in shapes:
            texts = machines.texts(300, groups=shape[0], machines=shape[1])
            parsed = [Allocation.parse(text) for text in texts[:150]]
            other = in_child("goodput", options, options.adaptdl, rows=1000)
            times = (medians(partial(ask, each) for each in some) for some in (parsed, texts[150:]))
            # The first turn compiles what each machine runs.
            for found, value in zip(
                (parsed_s, text_s, other_s), (*times, other["one_s"]), strict=True
            ):
                found[shape] += [value] * (turn > 0)
    found: Found = {}
    for shape in shapes:
        one_s, groups = min(parsed_s[shape]), shape[0]
        name = f"one estimate, {groups} groups of {shape[1]} machine types"
        more_s = (min(text_s[shape]) - one_s) / groups
        found[name] = (one_s * 1e6, "µs", 100)
        found[f"{name}, more as text, a group"] = (more_s * 1e6, "µs", 2)
        found[f"{name} / {other['source']}"] = (one_s / min(other_s[shape]), "x", None)
    return found


def traced(options: argparse.Namespace) -> Found:
    """A traced GPT-2 on GPUs of the catalogue; PYTHONPATH may name another tree's package."""
    return in_child("traced", options)


# The machines of `traced`.
SHIPPED = (
    *("h100-sxm", "a100-sxm-80gb", "h200", "v100-sxm", "mi300x", "dgx-a100", "h100-p5", "b200"),
    *("dgx-1", "a100-p4d", "h100-a3", "v100-p3", "dgx-h100", "a100-a2", "h100-nd-v5", "gb200"),
)


def ask_traced(options: argparse.Namespace) -> Found:
    """Questions asked again, of shapes of groups met before, of new ones; rows of a table."""
    from random import Random

    from estimator import Allocation, AllocationColumns, estimate, estimate_many
    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.trace import trace_graph

    model, batch, _, _ = load_model(GPT2_SMALL, weights=False)
    ask = partial(estimate, trace_graph(model, batch, target="cuda"))
    drawn = Random(0)

    def mixed(groups: int, types: int) -> Allocation:
        names = SHIPPED[:types]
        parts = (
            f"{drawn.randint(1, 50)}x{drawn.randint(1, 4)}:{drawn.choice(names)}"
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
        found[f"GPT-2, {name}"] = (
            medians(partial(ask, each) for each in questions) * 1e6,
            "µs",
            bound,
        )
    draw, rows = np.random.default_rng(0), min(options.rows, 200_000)
    groups = {
        name: draw.integers(low, high, (rows, 4), dtype=np.int32)
        for name, low, high in (("machine", 0, 4), ("nodes", 1, 201), ("devices", 1, 5))
    }
    groups["machine"][np.arange(4) >= draw.integers(2, 5, rows)[:, None]] = -1
    columns = AllocationColumns(machines=SHIPPED[:4], **groups)
    cells = zip(*(groups[name].tolist() for name in groups), strict=True)
    texts = [
        "+".join(f"{n}x{d}:{SHIPPED[m]}" for m, n, d in zip(*row, strict=True) if m >= 0)
        for row in cells
    ]
    for name, asked, bound in (("columns", columns, 0.5), ("texts", texts, 1.0)):
        call = partial(estimate_many, ask.args[0], asked)
        call()
        row_s = min(cpu_seconds(call) for _ in range(options.repeats)) / rows
        found[f"GPT-2, a row of {rows} as {name}"] = (row_s * 1e6, "µs", bound)
    return found


def many(options: argparse.Namespace) -> Found:
    """Tables: distinct allocations, uneven and mixed, batches varying, as columns and as texts."""
    from speed_cases import STRATEGY, Machines, columns, model, texts

    from estimator import estimate_many

    rows, graph, _machines = options.rows, model(), Machines()
    asked, batches = columns(rows)
    lines = list(texts(rows))
    other = in_child("goodput", options, options.adaptdl)

    def row_s(allocations: Any) -> list[float]:
        call = partial(estimate_many, graph, allocations, batch_per_gpu=batches, strategy=STRATEGY)
        return [cpu_seconds(call) / rows for _ in range(options.repeats + 1)]

    compiling_s, *column_s = row_s(asked)
    text_s = row_s(lines)
    best = min(column_s)
    return {
        f"a row of {rows:.0e} as columns, least of {len(column_s)}": (best * 1e6, "µs", 0.5),
        "a row as columns, median": (statistics.median(column_s) * 1e6, "µs", 0.5),
        "a row as columns, compiling its classes first": (compiling_s * 1e6, "µs", None),
        f"a row as text, least of {len(text_s)}": (min(text_s) * 1e6, "µs", 2),
        "a row as text, median": (statistics.median(text_s) * 1e6, "µs", 2),
        f"a row / {other['source']}": (best / other["row_s"], "x", None),
    }


def goodput(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a throughput model that knows ranks, nodes and batch alone: one and a row."""
    try:
        from adaptdl.goodput import GoodputFunction

        call: Callable[..., Any] = GoodputFunction((1, 1, 1, 1, 1, 1, 2), (1, 1), 1).evaluate
        source = "AdaptDL"
    except ImportError:
        call, source = pollux_throughput, "Pollux form"
    sizes = np.arange(options.rows)
    nodes = 1 + sizes % 64
    batch = 4 + sizes % 29
    ones = [partial(call, 1 + i % 9, 9 + i, 4 + i % 29, 0) for i in range(2000)]
    rows = [cpu_seconds(partial(call, nodes, nodes * 8, batch, 0)) for _ in range(options.repeats)]
    return {"one_s": medians(ones), "row_s": min(rows) / len(sizes), "source": source}


def pollux_throughput(nodes: Any, replicas: Any, batch: Any, accumulation: int) -> Any:
    """Samples per second: T = (T_grad^γ + T_sync^γ)^(1/γ), Pollux (OSDI 2020), section 3.2."""
    grad_s = 1.0 + 1.0 * batch
    sync_s = np.where(replicas > 1, np.where(nodes > 1, 1.0, 0.5) * (1 + 0.1 * (replicas - 2)), 0)
    step_s = accumulation * grad_s + (grad_s**2 + sync_s**2) ** 0.5
    return replicas * batch * (accumulation + 1) / step_s


def memory(options: argparse.Namespace) -> Found:
    """The most memory held over 10⁶ and over 10⁷ texts, in chunks."""
    few, more = (in_child("chunks", options, rows=rows) for rows in (10**6, 10**7))
    return {
        "memory, chunks of 1e6 texts": (few / 2**20, "MiB", None),
        "memory, chunks of 1e7 texts": (more / 2**20, "MiB", None),
        "memory, ten times the rows": (more / few, "x", 1.1),
    }


def chunks(options: argparse.Namespace) -> int:
    """The most memory that this process holds over the rows."""
    from speed_cases import STRATEGY, Machines, model, texts

    from estimator import estimate_chunks

    _machines = Machines()
    lines = texts(options.rows)
    done = sum(len(table) for table in estimate_chunks(model(), lines, strategy=STRATEGY))
    assert done == options.rows
    return resident_bytes()


# Timelines


def timeline(options: argparse.Namespace) -> Found:
    """An event timeline of a 2,000-op model on 1,024 ranks in 16 unlike classes."""
    from speed_cases import DEVICES, Machines, model

    from estimator import estimate

    machines, graph = Machines(), model(layers=290)
    text = "+".join(f"8x{DEVICES}:{name}" for name in machines.names)
    compiling_s = cpu_seconds(lambda: estimate(graph, text))
    whole_s = min(
        cpu_seconds(lambda: estimate(graph, text).timeline) for _ in range(options.repeats)
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


def calibration(options: argparse.Namespace) -> Found:
    """Refits and calibrated estimates."""
    from speed_calibration import refit

    return refit(options)


# Start-up


def start_up(options: argparse.Namespace) -> Found:
    """Medians over fresh processes of the command's help and of the import."""
    commands = {
        "help": [sys.executable, "-m", "estimator", "--help"],
        "import": [sys.executable, "-c", "import estimator"],
        "bare": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(max(5, options.repeats)):
        for name, command in commands.items():
            times[name].append(seconds(partial(subprocess.run, command, **QUIET)))
    return {
        "estimator --help": (statistics.median(times["help"]), "s", 0.3),
        "import estimator": (statistics.median(times["import"]), "s", 0.15),
        "python itself": (statistics.median(times["bare"]), "s", None),
    }


# The first answers of a process


def cold_answers(options: argparse.Namespace) -> Found:
    """Every job and machine unknown."""
    from speed_cold import cold

    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        options.graphs = options.graphs or folder
        in_child("cases", options)
        return cold(options, in_child)


def rounds(options: argparse.Namespace) -> Found:
    """A scheduler's first and later rounds."""
    from speed_loop import loop

    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        options.graphs = options.graphs or folder
        in_child("cases", options)
        return loop(options, in_child)


def ask_rounds(options: argparse.Namespace, *, is_prepared: bool = False) -> dict[str, Any]:
    """Ask all questions of `loop`."""
    from speed_loop import ask

    return ask(options, is_prepared=is_prepared)


def layouts(options: argparse.Namespace) -> Found:
    """Answers about layouts: a plan of 1,024 GPUs, a new layout, warm ones."""
    return {name: tuple(line) for name, line in in_child("layouts", options).items()}


def ask_layouts(options: argparse.Namespace) -> Found:
    """Ask all questions of `layouts`."""
    from speed_layouts import times_of

    return times_of(f"{LLAMA_70B},gradient_checkpointing=true", options.repeats)


def write_cases(options: argparse.Namespace) -> None:
    """Write the graphs and machines of `cold`."""
    from speed_cold import write_cases

    write_cases(Path(options.graphs))


def ask_cold(options: argparse.Namespace) -> dict[str, Any]:
    """Ask all questions of `cold`."""
    from speed_cold import ask

    return ask(options)


PARTS = {
    "looks": looks,
    "one": one,
    "traced": traced,
    "many": many,
    "memory": memory,
    "timeline": timeline,
    "calibration": calibration,
    "start-up": start_up,
    "cold": cold_answers,
    "loop": rounds,
    "layouts": layouts,
}
CHILDREN: dict[str, Callable[[argparse.Namespace], Any]] = {
    "look": look_ratio,
    "llama": look_at_llama,
    "traced": ask_traced,
    "goodput": goodput,
    "chunks": chunks,
    "cases": write_cases,
    "cold": ask_cold,
    "loop": ask_rounds,
    "layouts": ask_layouts,
    "prepared": partial(ask_rounds, is_prepared=True),
}


if __name__ == "__main__":
    main()
