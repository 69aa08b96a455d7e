"""Fit the kernel model to published operators and write the file that ships.

    PYTHONPATH=benchmarks python tools/fit_kernels.py --data DIR --bank DIR
        [--without SOURCE ...] [--out FILE]

Matmuls, attention and memory-bound kernels are fitted to tables of operators, convolutions and what
goes with them to timm's steps, whose graphs are in the bank (`tools/timm_bank.py`).
`--without` leaves sources out, so that what is judged on them was not learnt from them. The error
of each family is that on dies the kernel model was not fitted to (`kernel_accuracy.py`), that of
convolutions the one on models of families that were not fitted to.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from kernel_accuracy import Score, unseen_dies
from kernel_fit import CACHE_SPEEDUP, START_S, Fitted, fit_kernel_model
from kernel_tables import SOURCES, read_op_tables
from options import add_data
from rich.console import Console
from whole_models import (
    CONVOLUTION_PRIORS,
    INFERENCE,
    VISION,
    VISION_MACHINE,
    Design,
    design_of,
    multiples,
    vision_cases,
    without_own_family,
)

from estimator import load_profile
from estimator.files import shipped_data
from estimator.kernels.datasheet_model import MatmulModel, chip_of, sustained_ratio

# Families that no table measures: as far off as a plain share of a roofline usually is.
UNMEASURED_ERROR = 0.3
# What all kernels of a published step are off together, in standard deviations of the logarithm. A
# whole step is off by 0.166, the median over the sources of `published_accuracy.py`
# (docs/accuracy.md), in which what families err (0.10 of a step) and the 0.05 of a step of
# `estimates.estimate` are.
MODEL_ERROR = 0.12
# Convolutions in fp32 without tensor cores, which no table times apart from other kernels. cuDNN
# runs 3 × 3 filters by Winograd's transform, 2.25 times fewer multiplications (Lavin and Gray,
# 2016) of which some two thirds are gained, and half of that backward, where gradients of filters
# are sums over all positions; 3 × 3 × 3 filters as matmuls; others between the two.
VECTOR_CONVOLUTIONS = {
    "vector transformed.forward": [0.55, 1.5],
    "vector transformed.backward": [0.75, 2.0],
    "vector dense.forward": [0.8, 1.5],
    "vector dense.backward": [0.9, 2.0],
    "vector direct.forward": [1.0, 1.5],
    "vector direct.backward": [1.0, 2.0],
    "vector pointwise.forward": [1.1, 1.2],
    "vector pointwise.backward": [1.2, 2.0],
}
# Torch's fused attention, FlashAttention-2, reaches 35 % of an H100 (Shah et al.: FlashAttention-3,
# 2024); the tables' is TensorRT-LLM's, which uses that chip's own instructions.
WAITING_MACHINE, WAITING_UTILISATION = "h100-sxm", 0.35
# cuDNN's reaches 600 TFLOP/s there forward (529 causal), 518 backward with heads of 128 and 8,192
# tokens, 412 with heads of 64 (same paper, figures 5 and 6): so much more than the tables'.
OVERLAPPING_RATIO = 1.3
KINDS = ("first", "dense", "pointwise", "grouped", "depthwise", "wide depthwise")
PHASES = ("forward", "backward")


def shipped_kernel_model(sources: Sequence[str], folder: Path) -> dict[str, Any]:
    """The kernel model fitted to these tables of operators, as plain JSON values."""
    tables = read_op_tables(folder, tuple(sources))
    fitted = fit_kernel_model(tables.rows)
    memory_bound = {**fitted.memory_bound, "cache_speedup": CACHE_SPEEDUP, "start_s": START_S}
    prior = {name: value for name, (value, _) in CONVOLUTION_PRIORS.items()}
    convolutions = {
        f"{kind}.{phase}": [prior["flops"], prior[f"{phase} bytes"]]
        for kind in KINDS
        for phase in PHASES
    }
    return {
        "matmuls": _rounded(fitted.matmuls),
        "convolutions": convolutions | VECTOR_CONVOLUTIONS,
        "memory_bound": memory_bound,
        "attention": _rounded(
            {
                **fitted.attention,
                "waiting_ratio": waiting_ratio(fitted),
                "overlapping_ratio": OVERLAPPING_RATIO,
            }
        ),
        "errors": {
            **family_errors(unseen_dies(tables.rows)),
            "other": UNMEASURED_ERROR,
            "model": MODEL_ERROR,
        },
        "provenance": {
            "source": "fitted",
            "at": date.today().isoformat(),
            "samples": len(tables.rows),
            "note": f"tools/fit_kernels.py on {', '.join(sources)}",
        },
    }


def waiting_ratio(fitted: Fitted) -> float:
    """What of the tables' attention a kernel reaches that waits for Hopper's tensor cores."""
    chip = chip_of(load_profile(WAITING_MACHINE).devices[0], "bfloat16")
    held = float(sustained_ratio(MatmulModel(**fitted.matmuls).sustained, chip))
    return WAITING_UTILISATION / (fitted.attention["forward_ratio"] * held)


def add_vision(model: dict[str, Any], design: Design) -> None:
    """Put what whole models teach into a model: convolutions, batch norm, pooling, this memory."""
    found = multiples(design)
    device = load_profile(VISION_MACHINE).devices[0]
    ratios, shares = (
        model["memory_bound"]["memory_ratios"],
        model["memory_bound"]["shares"],
    )
    ratio = round(1.0 / found.pop("plain"), 4)
    ratios[str(device.details["architecture"])] = ratio
    for name, multiple in found.items():
        if name.endswith(" flops"):
            kind = name.removesuffix(" flops")
            flops, moved = (found[f"{kind} {term}"] for term in ("flops", "bytes"))
            model["convolutions"][kind] = [round(flops, 4), round(moved * ratio, 4)]
        elif not name.endswith((" bytes", " statistics")) and multiple > 0:
            shares[name] = round(1.0 / (multiple * ratio), 4)
    trained = design.only([not case.is_inference for case in design.cases])
    errors = np.abs(without_own_family(design, trained) / trained.measured_s - 1.0)
    model["errors"]["convolution"] = round(float(np.median(errors)), 3)
    model["provenance"]["samples"] += len(design.cases)
    model["provenance"]["note"] += f", {VISION}, {INFERENCE}"


def family_errors(scores: Sequence[Score]) -> dict[str, float]:
    """Median relative error on an unseen die, by family: the median over dies."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        if score.source == "all":
            found[score.family].append(score.median)
    return {family: round(float(np.median(values)), 3) for family, values in found.items()}


def _rounded(section: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in section.items()}


def main() -> None:
    """Fit and write, whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data(parser)
    parser.add_argument("--bank", type=Path, help="folder of timm's graphs")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=(*SOURCES, VISION), metavar="SOURCE"
    )
    parser.add_argument("--out", type=Path, default=shipped_data("fits") / "kernels.json")
    options = parser.parse_args()
    if options.bank is None and VISION not in options.without:
        parser.error(f"give --bank, the graphs of {VISION}, or leave it out: --without {VISION}")
    sources = [source for source in SOURCES if source not in options.without]
    with Console(stderr=True).status(f"fitting to {', '.join(sources)}"):
        model = shipped_kernel_model(sources, options.data)
    write(model, options.out)
    if VISION not in options.without:
        # The steps are set beside the kernel model of the operators, so that goes first.
        with Console(stderr=True).status(f"fitting to {VISION}"):
            add_vision(model, design_of(vision_cases(options.data, options.bank), options.out))
        write(model, options.out)
    print(f"wrote {options.out.name}, fitted to {model['provenance']['samples']} rows")


def write(model: dict[str, Any], path: Path) -> None:
    """Write a model, whole or not at all."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(model, indent=1) + "\n", encoding="utf-8")
    os.replace(whole, path)


if __name__ == "__main__":
    main()
