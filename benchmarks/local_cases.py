"""Say which models are trained on this machine, and what was predicted and measured of each."""

from __future__ import annotations

import inspect
import os
import runpy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import Options
from records import Record, Records, judged_case

from estimator.machines.profile import MachineProfile

MODELS = Path(__file__).with_name("local_models.py")
QUICK_MODELS = ("gpt2", "resnet", "lstm", "recommender")
OPTIMIZER, PRECISION, STRATEGY = "adamw", "fp32", "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to train: a model at a batch size on a number of this machine's devices."""

    file: str
    model: str
    batch: int
    ranks: int

    @property
    def key(self) -> str:
        return f"{self.model}-b{self.batch}-r{self.ranks}"

    @property
    def model_text(self) -> str:
        return f"{self.file}:{self.model}"

    @property
    def allocation(self) -> str:
        return f"1x{self.ranks}:local"


def model_functions(options: Options, *quick: str) -> list[Callable[..., Any]]:
    """The functions of `ALL` of ``--models FILE``, by default those here; a quick run has a few."""
    path = models_file(options)
    if path.suffix != ".py" or not path.is_file():
        raise SystemExit(f"{path} is no Python file; name one that defines ALL = [function, ...]")
    functions: list[Callable[..., Any]] = runpy.run_path(str(path)).get("ALL", [])
    if not functions:
        raise SystemExit(f"{path} has no list ALL; check names")
    if options.quick and not (options.only or options.models):
        functions = [function for function in functions if function.__name__ in quick]
    return [function for function in functions if options.takes(function.__name__)]


def models_file(options: Options) -> Path:
    """The file of `model_functions`."""
    return (options.models or MODELS).resolve()


def read_cases(options: Options, rank_counts: Sequence[int]) -> list[Case]:
    """The models of the file's `ALL`, each at two batch sizes and on each number of ranks."""
    return [
        Case(
            file=os.path.relpath(models_file(options)),
            model=function.__name__,
            batch=batch,
            ranks=ranks,
        )
        for function in model_functions(options, *QUICK_MODELS)
        for batch in batch_sizes(function, default_only=options.quick)
        for ranks in rank_counts
    ]


def batch_sizes(function: Callable[..., Any], *, default_only: bool) -> list[int]:
    """The default of the parameter `batch` and half of it; 0 stands for a model without one."""
    parameter = inspect.signature(function).parameters.get("batch")
    if parameter is None:
        return [0]
    default = int(parameter.default)
    return [default] if default_only or default < 2 else [default, default // 2]


def draw_cases(count: int, seed: int, records: Records) -> list[Case]:
    """Models drawn at random, each at the batch of its name on one device."""
    import drawn_models

    file = os.path.relpath(drawn_models.__file__)
    names = drawn_models.drawn(count, seed, records)
    return [Case(file=file, model=name, batch=0, ranks=1) for name in names]


def case_canaries(key: str, profile: MachineProfile, records: Records) -> dict[str, float | None]:
    """Median seconds of a fixed matmul at the probe, beside timed operators, beside steps."""
    timed = [each.get("canary_s") for each in records.of("prediction", key, method="measured")]
    trained = [
        seconds
        for run in records.of("measurement", key)
        for seconds in run.get("canaries_s") or [run["canary_s"]]
    ]
    return {
        "probe_s": profile.canary_s,
        "timing_s": timed[-1] if timed else None,
        "training_s": statistics.median(trained) if trained else None,
    }


def assemble(
    cases: Sequence[Case], profile: MachineProfile, methods: Sequence[str], records: Records
) -> list[Record]:
    """The cases of DESIGN: one per case and method, failed ones included."""
    return [assemble_case(case, method, profile, records) for case in cases for method in methods]


def assemble_case(case: Case, method: str, profile: MachineProfile, records: Records) -> Record:
    """One case with its last prediction and all its measurements; nulls where there are none."""
    kept = ("predicted_s", "low_s", "high_s", "breakdown", "op_time_in_grid_ratio", "assumptions")
    kept += ("batch_per_gpu", "global_batch")
    found = judged_case(records, case.key, kept, method=method)
    found["batch_per_gpu"] = found["batch_per_gpu"] or case.batch or None
    found["global_batch"] = found["global_batch"] or case.batch * case.ranks or None
    faults = [run["faults_per_step"] for run in records.of("measurement", case.key)]
    return {
        "id": f"{case.key}-{method}",
        "source": "local_accuracy",
        "model": case.model,
        "machine": profile.name,
        "allocation": case.allocation,
        "ranks": case.ranks,
        "nodes": 1,
        "strategy": STRATEGY,
        "precision": PRECISION,
        "optimizer": OPTIMIZER,
        "method": method,
        "k": 0,
        "draw": 0,
        **found,
        "canaries": case_canaries(case.key, profile, records),
        "faults_per_step": statistics.median(faults) if faults else None,
    }
