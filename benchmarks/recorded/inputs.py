"""Write the files that questions name: machines, clusters, observations, jobs, plans, summaries."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import estimator as est
from estimator.cli.main import main

from .machines import write_clusters, write_machines
from .questions import GRAPHS

_MODELS = ("gpt2-amp", "resnet", "mini-adamw")

# Store → (machine, devices of a node, seconds of a micro-batch, of each of its samples, of merging
# gradients within a node, and of merging them between nodes on top).
_OBSERVED = {
    "gpt2-cpu": ("slow", 4, 2e-2, 0.13, 5e-2, 0.3),
    "gpt2-amp": ("h100-sxm", 8, 3e-3, 5e-5, 1e-3, 1e-3),
}
_BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
_FILES = {
    "resnet/config.json": {
        "model_type": "resnet",
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [32, 64, 128, 256],
        "embedding_size": 32,
    },
    "plan.json": {
        f"model.layers.*.{name}": style
        for style, names in (
            ("colwise", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("rowwise", ("self_attn.o_proj", "mlp.down_proj")),
            ("colwise", ("mlp.gate_proj", "mlp.up_proj")),
        )
        for name in names
    },
    "flops.json": {
        "parameter_bytes": 700 << 20,
        "tensors": 48,
        "flops_per_sample": 8e11,
        "activation_bytes_per_sample": 90 << 20,
        "tokens_per_sample": 512,
        "batch": 4,
        "precision": "bf16-amp",
    },
    "timed.json": {
        "parameter_bytes": 438_000_000,
        "tensors": 199,
        "machine": "t4-g4dn",
        "step_times": [[4, 0.455], [12, 0.922]],
    },
    "jobs.json": {
        "jobs": [
            {
                "name": f"j{number}",
                "arrival_s": 40.0 * number,
                "model": f"{_MODELS[number % 3]}.graph",
                "samples": 2e5 * (1 + number % 4),
                "devices": 1 + number % 4,
                "global_batch": 32 * (1 + number % 2),
                "most_batch_per_gpu": 16,
                "most_global_batch": 256,
                "gradient_noise_samples": 100.0 * (1 + number),
                "epoch_samples": 2e4,
            }
            for number in range(10)
        ]
    },
}
_SEEN = """\
workload,allocation,batch_per_gpu,step_time_s,accumulation_steps,strategy,at
net,1x1:t4-g4dn,8,0.21,1,ddp,2026-01-01T00:00:00Z
net,1x4:t4-g4dn,8,0.24,1,ddp,2026-01-01T01:00:00Z
net,2x4:t4-g4dn,8,0.35,2,zero1,2026-01-01T02:00:00Z
net,2x4:t4-g4dn,8,-1,2,zero1,2026-01-01T03:00:00Z
net,2x4:t4-g4dn,8,0.35,2,nothing,2026-01-01T04:00:00Z
"""
_PRICES = "Machine,AcceleratorCount,Price\nt4-g4dn,4,2.5\na100-p4d,8,30\nh100-p5,8,70\n"


def write_inputs(folder: Path) -> None:
    """All files but graphs, and what is observed."""
    write_machines(folder / "home")
    write_clusters(folder)
    (folder / "resnet").mkdir()
    for name, content in _FILES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "seen.csv").write_text(_SEEN)
    (folder / "prices.csv").write_text(_PRICES)


def need(text: str) -> None:
    """Make the graphs and stores that a question names, where they are not there yet."""
    named = [*re.findall(r"([\w-]+)\.(graph|db)", text)]
    if "jobs.json" in text:
        named += [(model, "graph") for model in _MODELS]
    for name, kind in named:
        if kind == "graph" and name in GRAPHS and not Path(f"{name}.graph").exists():
            _trace(name)
        elif kind == "db" and name in _OBSERVED and not Path(f"{name}.db").exists():
            need(f"{name}.graph")
            _observe(name)


def _trace(name: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(["trace", *shlex.split(GRAPHS[name]), "-o", f"{name}.graph"])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{name} was not traced: {said.getvalue()}") from None


def _observe(name: str) -> None:
    """Keep step times of a graph by a plain rule: the last ones drift, and one is an outlier."""
    machine, devices, start_s, sample_s, within_s, between_s = _OBSERVED[name]
    graph = est.OpGraph.load(f"{name}.graph")
    calibrator, draw = est.Calibrator(f"{name}.db"), random.Random(name)
    for number in range(40):
        used, nodes = draw.choice((1, 2, devices)), draw.choice((1, 1, 2))
        batch, accumulation = draw.choice((1, 3, 8, 64)), draw.choice((1, 1, 2))
        step_s = (start_s + sample_s * batch) * accumulation
        step_s += within_s * (used > 1) + between_s * (nodes > 1)
        slower = 1.4 if number >= 30 else 6.0 if number == 12 else 1.0
        calibrator.observe(
            graph,
            f"{nodes}x{used}:{machine}",
            step_time_s=step_s * slower * draw.lognormvariate(0, 0.03),
            batch_per_gpu=batch,
            accumulation_steps=accumulation,
            strategy=draw.choice(("ddp", "ddp", "zero2", "zero1")),
            at=_BEGUN + timedelta(hours=number),
            identity=f"{name} {number}",
        )
