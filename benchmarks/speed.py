"""Time the one-time look at a model (P1), a warm estimate (P2) and start-up (P6) of TARGETS."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

QUIET: dict[str, Any] = {"check": True, "capture_output": True}
GPT2_SMALL = "hf:gpt2"
LLAMA_70B = (
    "hf:llama,hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256"
)


def main() -> None:
    """Run the parts asked for and print one line each, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("look", "llama"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child = {"look": look_ratio, "llama": look_at_llama}[options.child]
        print(json.dumps(child(options.repeats)))
        return
    found: dict[str, Any] = {}
    for part in options.parts:
        found.update(PARTS[part](options.repeats))
    if options.json:
        print(json.dumps(found))
    else:
        for name, (value, unit, bound) in found.items():
            print(f"{name:<48} {value:>9.3f} {unit:<5} target <= {bound:g}")


def in_child(name: str, repeats: int) -> dict[str, Any]:
    """Run a part in a process of its own, so that memory and imports are its own."""
    command = [sys.executable, __file__, "--child", name, "--repeats", str(repeats)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# P1


def look_ratio(repeats: int) -> dict[str, Any]:
    """GPT-2-small: the whole look beside a bare fake forward and backward, interleaved."""
    import torch

    from estimator.graph.models import load_model
    from estimator.graph.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(GPT2_SMALL, weights=False)
    first = seconds(lambda: trace_graph(model, batch))
    bare_fake_step(model, batch)
    looks, bares = [], []
    for _ in range(repeats):
        bares.append(seconds(lambda: bare_fake_step(model, batch)))
        looks.append(seconds(lambda: trace_graph(model, batch)))
    look, bare = statistics.median(looks), statistics.median(bares)
    return {
        "P1 look / bare fake step, GPT-2-small": (look / bare, "x", 6),
        "P1 bare fake step, GPT-2-small": (bare, "s", 0.43),
        "P1 look at GPT-2-small, warm": (look, "s", 3),
        "P1 look at GPT-2-small, first in the process": (first, "s", 3),
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


def look_at_llama(_repeats: int) -> dict[str, Any]:
    """Llama-70B built without memory: seconds and resident memory of the whole process."""
    import torch

    from estimator.graph.models import load_model
    from estimator.graph.trace import trace_graph

    torch.set_num_threads(1)
    model, batch, _, _ = load_model(LLAMA_70B, batch=1, seq_len=2048, weights=False)
    look = seconds(lambda: trace_graph(model, batch))
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "P1 look at Llama-70B": (look, "s", 30),
        "P1 resident memory, Llama-70B": (resident_bytes / 2**30, "GiB", 3),
    }


def looks(repeats: int) -> dict[str, Any]:
    """P1."""
    return in_child("look", repeats) | in_child("llama", repeats)


# P2


def estimates(repeats: int) -> dict[str, Any]:
    """A warm estimate of a parsed allocation not seen before, on the local machine's profile."""
    import torch

    import estimator

    profile_name = "local"
    try:
        estimator.load_profile(profile_name)
    except LookupError:
        print("P2 needs a profile: run 'estimator probe' first", file=sys.stderr)
        return {}
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50)))
    graph = estimator.trace_model(model, torch.randn(8, 64))
    shapes = [(nodes, devices) for nodes in range(1, 65) for devices in (1, 2)]
    allocations = [
        estimator.Allocation.parse(f"{nodes}x{devices}:{profile_name}") for nodes, devices in shapes
    ]
    times = []
    for allocation in allocations:
        times.append(seconds(partial(estimator.estimate, graph, allocation)))
    return {"P2 one estimate, warm": (statistics.median(times) * 1e6, "µs", 100)}


# P6


def start_up(repeats: int) -> dict[str, Any]:
    """Medians over fresh processes of the command's help and of the import."""
    main_call = "from estimator.cli import main; main()"
    commands = {
        "help": [sys.executable, "-c", main_call, "--help"],
        "import": [sys.executable, "-c", "import estimator"],
        "bare": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(max(5, repeats)):
        for name, command in commands.items():
            times[name].append(seconds(partial(subprocess.run, command, **QUIET)))
    return {
        "P6 estimator --help": (statistics.median(times["help"]), "s", 0.3),
        "P6 import estimator": (statistics.median(times["import"]), "s", 0.15),
        "P6 python itself": (statistics.median(times["bare"]), "s", 0.3),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


PARTS = {"looks": looks, "estimates": estimates, "start-up": start_up}


if __name__ == "__main__":
    main()
