"""Predict real training steps on this machine, write the predictions down, then measure them.

``python benchmarks/local_accuracy.py`` probes the machine, predicts every case of
`local_models.ALL` (two batch sizes, one and two ranks) with the methods ``probe`` and ``measured``,
then trains each case in fresh processes, round-robin over the cases, and prints both side by side.
Everything found is appended to a file in --work, from which a second run continues.
``--draw N --seed S`` does so on one device with N models of `drawn_models`, that nobody has seen.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from canaries import canary_drift, note_canary
from local_cases import MODELS, OPTIMIZER, PRECISION, Case, assemble, draw_cases, read_cases
from local_report import BOUNDS, DRAWN_BOUNDS, report, report_drawn
from options import add_prediction, add_profile, add_repeats, add_work, parser_of, print_found
from records import Progress, Record, Records, say
from summary import summarise

from estimator.errors import EstimatorError, ModelError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

REPEATS, QUICK_REPEATS = 7, 3
LONG_STEP_S = 1.0
PREDICTION_LIMIT_S = 900.0


def find_profile(options: argparse.Namespace, home: Path) -> MachineProfile:
    """The profile called local in an otherwise empty store: given, kept from before, or probed."""
    os.environ["ESTIMATOR_HOME"] = str(home)
    kept = home / "machines" / "local.json"
    if options.profile:
        load_profile(options.profile).save(kept)
    elif not kept.exists():
        from estimator.probe.machine import probe_machine

        say("probing this machine")
        probe_machine(name="local", strict=True).save(kept)
    profile = load_profile(kept)
    if profile.missing:
        say(f"the profile lacks {', '.join(profile.missing)}")
    return profile


def predict(case: Case, method: str, rank_counts: Sequence[int], graphs: Path) -> list[Record]:
    """Look at the model and estimate it on each number of devices; runs in its own process.

    It is traced once for both methods: its graph stays in the folder `graphs`.
    """
    import torch

    import estimator
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.graph.models.model_text import load_model
    from estimator.probe.ops import measure_ops

    torch.set_num_threads(1)
    begun = time.perf_counter()
    canaries: list[float] = []
    kept = graphs / f"{case.model}-b{case.batch}.graph"
    if not kept.exists():
        model, batch, loss, _ = load_model(case.model_text, batch=case.batch or None)
        graph = estimator.trace_model(
            model,
            batch,
            loss=loss,
            optimizer=OPTIMIZER,
            precision=PRECISION,
            target=load_profile("local").kind,
        )
        graphs.mkdir(exist_ok=True)
        graph.save(kept)
    graph = OpGraph.load(kept)
    if method == "measured":
        timings = measure_ops(graph, load_profile("local"), on_canary=canaries.append)
        graph = replace(graph, timings=timings, timed_on="local")
    look_s = time.perf_counter() - begun
    records = []
    for ranks in rank_counts:
        answer = estimator.estimate(graph, f"1x{ranks}:local", strategy=case.strategy)
        records.append(
            {
                "ranks": ranks,
                "predicted_s": answer.step_time_s,
                "low_s": answer.low_s,
                "high_s": answer.high_s,
                "global_batch": answer.global_batch,
                "batch_per_gpu": answer.batch_per_gpu,
                "breakdown": asdict(answer.breakdown),
                "op_time_in_grid_ratio": answer.op_time_in_grid_ratio,
                "peak_memory_bytes": answer.peak_memory_bytes,
                "assumptions": list(answer.assumptions),
                "look_s": look_s,
                "canary_s": canaries[-1] if canaries else None,
            }
        )
    return records


def predict_all(cases: Sequence[Case], options: argparse.Namespace, records: Records) -> None:
    """Write down a prediction, or why there is none, for every case and method that lacks one."""
    looks: dict[tuple[str, int, str], list[Case]] = {}
    for case in cases:
        for method in options.methods:
            written = records.of("prediction", case.key, method=method)
            if options.repredict or not written or written[-1]["predicted_s"] is None:
                looks.setdefault((case.model, case.batch, method), []).append(case)
    progress = Progress("predicted", len(looks))
    for (model, batch, method), members in looks.items():
        rank_counts = [case.ranks for case in members]
        found, reason = predict_apart(members[0], method, rank_counts, options.work / "graphs")
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
    cases: Sequence[Case],
    profile: MachineProfile,
    options: argparse.Namespace,
    records: Records,
    *,
    repeats: int,
) -> None:
    """Train every case `repeats` times in fresh processes, one round over all cases at a time."""
    # Drawn models import torchvision, which loads beside a CPU torch only once `drawn_models` has
    # said how: the ranks import for themselves.
    if not options.draw:
        import_models(cases)
    counts = {case.key: len(records.of("measurement", case.key)) for case in cases}
    broken: set[str] = set()
    progress = Progress("trained", sum(max(0, repeats - count) for count in counts.values()))
    for done in range(repeats):
        for case in cases:
            if counts[case.key] > done or case.key in broken:
                continue
            try:
                record = measure(case, profile, options, records)
            except EstimatorError as error:
                # One failure is enough: the case counts as failed, and the others go on.
                broken.add(case.key)
                progress.total -= repeats - done - 1
                records.add({"kind": "failure", "key": case.key, "reason": str(error)[:500]})
                progress.advance(f"{case.key}: {error}")
                continue
            records.add({"kind": "measurement", "key": case.key, **record})
            progress.advance(f"{case.key} {1e3 * record['step_s']:.1f} ms")


def import_models(cases: Sequence[Case]) -> None:
    """Build each model once here: ranks then start with what that has imported."""
    from estimator.graph.models.model_text import load_model

    for text in {case.model_text for case in cases}:
        # A model that cannot be built fails again, and is noted, when it is to be trained.
        with contextlib.suppress(ModelError):
            load_model(text)


def measure(
    case: Case, profile: MachineProfile, options: argparse.Namespace, records: Records
) -> Record:
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
        strategy=case.strategy,
        steps=max(5, options.steps // 3) if is_long else options.steps,
        warmup_steps=options.warmup_steps,
        phases=options.phases,
        canaries=bool(options.draw),
    )
    slowest = run.step_s.index(run.slowest_step_s)
    return {
        "step_s": run.slowest_step_s,
        "canary_s": run.canary_s,
        "steps_s": run.step_times_s[slowest],
        "canaries_s": run.canaries_s[slowest],
        "faults_per_step": run.faults_per_step[slowest],
        "peak_memory_bytes": run.peak_memory_bytes,
        "phases_s": dict(run.phases_s[slowest]) if options.phases else None,
    }


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = parser_of(__doc__)
    add_work(parser, "local_accuracy")
    add_profile(parser)
    # 7 repeats, 3 with --quick.
    add_repeats(parser, repeats=None, steps=15)
    add_prediction(parser)
    add = parser.add_argument
    add("--models", type=Path, default=MODELS, help="a Python file whose ALL lists functions")
    add("--draw", type=int, help="so many models drawn at random instead, on one device")
    add("--seed", type=int, default=0, help="of the draw")
    add("--only", type=comma_list, help="names of models, joined by commas")
    add("--methods", type=comma_list, default=["probe", "measured"], help="of probe,measured")
    add("--ranks", type=comma_list, default=["1", "2"], help="numbers of devices")
    add("--strategy", default="ddp", help="such as ddp, zero1 or fsdp")
    add("--warmup-steps", type=int, default=3)
    add("--quick", action="store_true", help="four models at their default batch, 3 repeats")
    add("--phases", action="store_true", help="time forward, backward and update apart")
    options = parser.parse_args(arguments)
    if options.draw:
        options.work, options.ranks = options.work / f"drawn_{options.seed}", ["1"]
    options.is_own_list = options.models == MODELS
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    if not set(options.methods) <= BOUNDS.keys():
        parser.error(f"--methods takes {', '.join(BOUNDS)}, found {','.join(options.methods)}")
    if not all(text.isdigit() and int(text) for text in options.ranks):
        parser.error(f"--ranks takes numbers such as 1,2, found {','.join(options.ranks)}")
    options.ranks = [int(text) for text in options.ranks]
    return options


def comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, write down, measure, report."""
    options = parse_options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "records.jsonl")
    cases = draw_cases(options, records) if options.draw else read_cases(options)
    profile = find_profile(options, options.work.resolve() / "home")
    if max(options.ranks) > len(profile.devices):
        raise SystemExit(
            f"--ranks asks for {max(options.ranks)} devices, {profile.name} has "
            f"{len(profile.devices)}; probe with more --devices or ask for fewer ranks"
        )
    note_canary(profile, records)
    if options.repredict:
        shutil.rmtree(options.work / "graphs", ignore_errors=True)
    # The machine changes within minutes: a drawn model trains just after its operators were timed.
    for group in [[case] for case in cases] if options.draw else [cases]:
        predict_all(group, options, records)
        if not options.predict_only:
            first = 1 if options.draw else options.repeats
            measure_all(group, profile, options, records, repeats=first)
    if options.draw and not options.predict_only:
        trained = [case for case in cases if records.of("measurement", case.key)]
        measure_all(trained, profile, options, records, repeats=options.repeats)
    found = assemble(cases, profile, options.methods, records)
    canary = canary_drift(profile, records)
    print_found(
        options,
        (report_drawn if options.draw else report)(found, canary),
        machine=profile.devices[0].name,
        cases=found,
        summary=summarise(found, bounds=DRAWN_BOUNDS if options.draw else BOUNDS),
        canary=canary,
    )


if __name__ == "__main__":
    main()
