"""Predict real training steps on this machine, write the predictions down, then measure them.

The machine is probed, every case of `local_models.ALL` (two batch sizes, one and two ranks) is
predicted with the methods ``probe`` and ``measured``, then each is trained in fresh processes,
round-robin over the cases. Everything found is appended to a file, from which a further run
continues. So are, on one device, models of `drawn_models`, that nobody has seen.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from local_cases import OPTIMIZER, PRECISION, STRATEGY, Case, assemble, draw_cases, read_cases
from options import Options, local_machine
from records import Progress, Record, Records, kept_graph, measure_in_turns, prediction_of
from summary import Bound, error_ratio, summarise

from estimator.errors import ModelError, ProbeError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

METHODS, RANKS = ("probe", "measured"), (1, 2)
REPEATS, QUICK_REPEATS, STEPS, WARMUP_STEPS = 7, 3, 15, 3
DRAWN, DRAWN_SEED = 24, 0
# The largest errors with which each method passes.
BOUNDS = {
    "probe": Bound(median_ratio=0.08, worst_ratio=0.25),
    "measured": Bound(median_ratio=0.05, worst_ratio=0.12),
}
# Of models drawn at random: each method is to show this much, and timed operators are to be
# closer than the probe alone on this share of the models.
DRAWN_BOUNDS = {
    "probe": Bound(median_ratio=0.05, worst_ratio=0.20),
    "measured": Bound(median_ratio=0.03, worst_ratio=0.12),
}
CLOSER_RATIO, IN_GRID_BOUND_RATIO = 0.8, 0.1
LONG_STEP_S = 1.0
PREDICTION_LIMIT_S = 900.0


def predict(case: Case, method: str, rank_counts: Sequence[int], graphs: Path) -> list[Record]:
    """Look at the model and estimate it on each number of devices; runs in its own process.

    It is traced once for both methods: its graph stays in the folder `graphs`.
    """
    import torch

    import estimator
    from estimator.graph.models import load_model
    from estimator.probe.ops import measure_ops

    torch.set_num_threads(1)
    begun = time.perf_counter()
    canaries: list[float] = []

    def trace() -> estimator.OpGraph:
        built = load_model(case.model_text, batch=case.batch or None)[:3]
        how = {"optimizer": OPTIMIZER, "precision": PRECISION}
        return estimator.trace_model(*built, **how, target=load_profile("local").kind)

    graph = kept_graph(graphs / f"{case.model}-b{case.batch}.graph", trace)
    if method == "measured":
        timings = measure_ops(graph, load_profile("local"), on_canary=canaries.append)
        graph = replace(graph, timings=timings, timed_on="local")
    look_s = time.perf_counter() - begun
    records = []
    for ranks in rank_counts:
        answer = estimator.estimate(graph, f"1x{ranks}:local", strategy=STRATEGY)
        canary_s = canaries[-1] if canaries else None
        told = {"ranks": ranks, "look_s": look_s, "canary_s": canary_s}
        records.append(told | prediction_of(answer))
    return records


def predict_all(cases: Sequence[Case], graphs: Path, records: Records) -> None:
    """Write down a prediction, or why there is none, for every case and method that lacks one."""
    looks: dict[tuple[str, int, str], list[Case]] = {}
    for case in cases:
        for method in METHODS:
            written = records.of("prediction", case.key, method=method)
            if not written or written[-1]["predicted_s"] is None:
                looks.setdefault((case.model, case.batch, method), []).append(case)
    progress = Progress("predicted", len(looks))
    for (model, batch, method), members in looks.items():
        rank_counts = [case.ranks for case in members]
        found, reason = predict_apart(members[0], method, rank_counts, graphs)
        for case, record in zip(members, found or [{}] * len(members), strict=True):
            kept = {"predicted_s": None, "reason": reason, **record}
            records.add({"kind": "prediction", "key": case.key, "method": method, **kept})
        progress.advance(f"{model} batch {batch}, {method}" + (f": {reason}" if reason else ""))


def predict_apart(
    case: Case, method: str, rank_counts: Sequence[int], graphs: Path
) -> tuple[list[Record], str | None]:
    """`predict` in a fresh process, so that no model disturbs another; what it gave, or why not."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        future = pool.submit(predict, case, method, rank_counts, graphs)
        try:
            error = future.exception(timeout=PREDICTION_LIMIT_S)
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            return [], f"no answer within {PREDICTION_LIMIT_S:.0f} s"
        if error is not None:
            return [], f"{type(error).__name__}: {error}"[:500]
        return future.result(), None


def measure_all(
    cases: Sequence[Case], profile: MachineProfile, records: Records, repeats: int, *, drawn: bool
) -> None:
    """Train every case `repeats` times in fresh processes, one round over all cases at a time."""
    # Drawn models import torchvision, which loads beside a CPU torch only once `drawn_models` has
    # said how: the ranks import for themselves.
    if not drawn:
        import_models(cases)
    runs = {case.key: partial(measure, case, profile, records, canaries=drawn) for case in cases}
    measure_in_turns(records, runs, repeats, "trained")


def import_models(cases: Sequence[Case]) -> None:
    """Build each model once here: ranks then start with what that has imported."""
    from estimator.graph.models import load_model

    for text in {case.model_text for case in cases}:
        # A model that cannot be built fails again, and is noted, when it is to be trained.
        with contextlib.suppress(ModelError):
            load_model(text)


def measure(case: Case, profile: MachineProfile, records: Records, *, canaries: bool) -> Record:
    """One training run in fresh processes: the slowest rank's seconds per step."""
    from estimator.validate.training import train

    known = [record["step_s"] for record in records.of("measurement", case.key)]
    known += [
        record["predicted_s"]
        for record in records.of("prediction", case.key)
        if record["predicted_s"] is not None
    ]
    is_long = bool(known) and known[0] > LONG_STEP_S
    run = train(
        case.model_text,
        profile.devices[: case.ranks],
        batch=case.batch or None,
        optimizer=OPTIMIZER,
        precision=PRECISION,
        strategy=STRATEGY,
        steps=max(5, STEPS // 3) if is_long else STEPS,
        warmup_steps=WARMUP_STEPS,
        canaries=canaries,
    )
    slowest = run.step_s.index(run.slowest_step_s)
    return {
        "step_s": run.slowest_step_s,
        "canary_s": run.canary_s,
        "steps_s": run.step_times_s[slowest],
        "canaries_s": run.canaries_s[slowest],
        "faults_per_step": run.faults_per_step[slowest],
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def run(options: Options) -> Mapping[str, Any]:
    """The listed models, or a file's; then, in a whole run, models that nobody has seen."""
    home = options.work.resolve() / "home"
    os.environ["ESTIMATOR_HOME"] = str(home)
    profile = local_machine(home / "machines")
    if max(RANKS) > len(profile.devices):
        raise ProbeError(f"{profile.name} has {len(profile.devices)} devices of {max(RANKS)} asked")
    repeats = QUICK_REPEATS if options.quick else REPEATS
    records = Records(options.work / "records.jsonl")
    listed = accuracy_of(read_cases(options, RANKS), profile, records, repeats)
    rows, answer = summarise(listed, bounds=BOUNDS), [*listed, *figures(listed)]
    if not (options.quick or options.only or options.models):
        records = Records(options.work / "drawn.jsonl")
        cases = draw_cases(DRAWN, DRAWN_SEED, records)
        seen = [{**case, "source": "drawn"} for case in drawn_accuracy(cases, profile, records)]
        rows += summarise(seen, by=("source", "method"), bounds=DRAWN_BOUNDS)
        answer += [*seen, closer(seen), *figures(seen)]
    return {"cases": answer, "summary": rows}


def accuracy_of(
    cases: Sequence[Case], profile: MachineProfile, records: Records, repeats: int
) -> list[Record]:
    """Predict, write down, train in turns."""
    predict_all(cases, records.path.parent / "graphs", records)
    measure_all(cases, profile, records, repeats, drawn=False)
    return assemble(cases, profile, METHODS, records)


def drawn_accuracy(
    cases: Sequence[Case], profile: MachineProfile, records: Records, repeats: int = REPEATS
) -> list[Record]:
    """The machine changes within minutes: a model trains just after its operators were timed."""
    for case in cases:
        predict_all([case], records.path.parent / "graphs", records)
        measure_all([case], profile, records, 1, drawn=True)
    trained = [case for case in cases if records.of("measurement", case.key)]
    measure_all(trained, profile, records, repeats, drawn=True)
    return assemble(cases, profile, METHODS, records)


def figures(cases: Sequence[Record]) -> Iterator[Record]:
    """How much of the predicted op time was probed in exactly its shape."""
    shares = [
        case["op_time_in_grid_ratio"]
        for case in cases
        if case["method"] == "probe" and case["op_time_in_grid_ratio"] is not None
    ]
    if shares:
        name = "op time whose exact shape is in the probe's grid, median"
        yield {"id": name, "value": statistics.median(shares), "bound": IN_GRID_BOUND_RATIO}


def closer(cases: Sequence[Record]) -> Record:
    """The share of models on which timed operators are closer than the probe alone."""
    errors: dict[str, dict[str, float]] = {}
    for case in cases:
        errors.setdefault(case["model"], {})[case["method"]] = error_ratio(case)
    share = sum(each["measured"] < each["probe"] for each in errors.values()) / len(errors)
    return {"id": "timed operators are closer", "value": share, "least": CLOSER_RATIO}
