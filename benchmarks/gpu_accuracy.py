"""Predict training steps on one GPU, write the predictions down, then measure them.

The models of `gpu_models` are traced for CUDA and every case is predicted from the profile alone;
then, in order of information and as long as the time lasts, the operators of a case are timed, it
is predicted again, and trained for real (`gpu_steps`). Everything found is appended to a file of
the work, from which a second run continues. A quick run has three tiny cases, for cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpu_steps import MODELS, OPTIMIZER, Case, device_backend, release, run_for_real
from options import Options, local_machine
from records import NOT_YET, Record, Records, judged_case, kept_graph, prediction_of, say
from summary import Bound, describe, noise_ratio, summarise
from zoo.trained import TRAINED

from estimator.errors import EstimatorError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.tensors import OpCall

BATCHES = {name: each["batches"] for name, each in (TRAINED["gpu"] | TRAINED["tiny"]).items()}
COMPILED = ("gpt2", "bert_base", "resnet50", "vit_b")
IN_TF32 = ("gpt2", "bert_base", "dlrm")
# The largest errors with which each method passes: of step times, then of memory peaks.
BOUNDS = {
    "probe": Bound(median_ratio=0.08, worst_ratio=0.25),
    "measured": Bound(median_ratio=0.04, worst_ratio=0.12),
}
MEMORY_BOUND_RATIO = 0.05
MOST_TRACERS, REPLAY_S = 12, 12.0
CASE_LIMIT_S, COMPILED_LIMIT_S = 60.0, 150.0
# What a case must have left to be begun.
LEAST_S, LEAST_COMPILED_S = 15.0, 60.0
# What a case may fail with: the engine, torch (memory among it), the process.
FAILURES = (
    *(EstimatorError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(ImportError, OSError, AssertionError, NotImplementedError, TimeoutError),
)


def gpu_cases() -> list[Case]:
    """Every model at its larger batch in either precision, then the smaller, then the variants.

    The larger batch is bound by the device, the smaller one more often by the host; compiling takes
    longest and comes last.
    """
    usual = product((0, 1), TRAINED["gpu"], ("bf16-amp", "fp32"))
    asked = [(name, place, {"precision": precision}) for place, name, precision in usual]
    asked += [(name, 0, {"precision": "tf32"}) for name in IN_TF32]
    compiled = {"precision": "bf16-amp", "execution": "compiled"}
    asked += [(name, 0, compiled) for name in COMPILED]
    return [Case(workload=name, batch=BATCHES[name][place], **how) for name, place, how in asked]


def tiny_cases() -> list[Case]:
    """Three cases that two CPU cores run in a minute."""
    return [
        Case(workload=name, batch=BATCHES[name][0], precision=precision)
        for name, precision in zip(TRAINED["tiny"], ("fp32", "bf16-amp", "fp32"), strict=True)
    ]


# Predictions


def graph_of(case: Case, folder: Path, target: DeviceKind) -> OpGraph:
    """The case's graph as it is executed, from the folder or traced into it; raises EstimatorError.

    That of a model's larger batch serves the other too, unless its shapes allow no other batch.
    """
    from estimator.graph.compile.fusion import compile_graph

    name, (batch, *_) = f"{case.workload}-{case.precision}", BATCHES[case.workload]
    graph = kept_graph(folder / f"{name}.json.gz", partial(_traced, case, batch, target))
    if graph.other_batch is None and case.batch != batch:
        path = folder / f"{name}-b{case.batch}.json.gz"
        graph = kept_graph(path, partial(_traced, case, case.batch, target))
    return graph if case.execution == "eager" else compile_graph(graph, "compiled")


def _traced(case: Case, batch: int, target: DeviceKind) -> OpGraph:
    import torch

    from estimator.graph.models import load_model
    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    model, inputs, loss, _ = load_model(f"{MODELS}:{case.workload}", batch=batch, weights=False)
    how = {"optimizer": OPTIMIZER, "precision": case.precision, "name": case.workload}
    return trace_graph(model, inputs, loss=loss, target=target, **how)


def trace_all(cases: Sequence[Case], folder: Path, target: DeviceKind) -> None:
    """Trace what has no file yet, several models at once; what fails says why when it is asked."""
    missing = {(case.workload, case.precision): case for case in cases}
    tracers = min(MOST_TRACERS, len(missing), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=tracers, mp_context=context) as pool:
        futures = {pool.submit(graph_of, case, folder, target): case for case in missing.values()}
        for future, case in futures.items():
            if (error := future.exception()) is not None:
                say(f"could not trace {case.workload}: {_words(error)}")


def predict(case: Case, graph: OpGraph, profile: MachineProfile) -> Record:
    """What the engine says of a case on one device."""
    import estimator

    asked = {"batch_per_gpu": case.batch, "profile": profile}
    return prediction_of(estimator.estimate(graph, f"1x1:{profile.name}", **asked))


def predict_all(
    cases: Sequence[Case], folder: Path, profile: MachineProfile, records: Records
) -> None:
    """Write down what the probe alone predicts, or why nothing, before anything is trained."""
    for case in cases:
        if not records.of("prediction", case.key, method="probe"):
            found: Record = {"predicted_s": None}
            try:
                found |= predict(case, graph_of(case, folder, profile.kind), profile)
            except (EstimatorError, OSError) as error:
                found["reason"] = _words(error)
            records.add({"kind": "prediction", "key": case.key, "method": "probe", **found})


def predict_with_timings(case: Case, folder: Path, profile: MachineProfile) -> Record:
    """Time the operators of the case on this device, then predict; called in the device's process.

    The operators run in this process, as the probe runs them in one of its own: starting one for
    each case would take longer than timing them. Raises EstimatorError.
    """
    import torch

    from estimator.probe.ops import distinct_calls, replay, replay_plan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph = graph_of(case, folder, profile.kind)
    bound = graph.at(case.batch)
    calls = distinct_calls(bound)
    timings: dict[OpCall, OpTiming] = {}
    skipped: list[Any] = []

    def take(message: dict[str, Any]) -> None:
        for number, seconds, noise in message.get("timings", ()):
            timings[calls[number]] = OpTiming(seconds=seconds, noise_ratio=noise)
        skipped.extend([calls[n].target, reason] for n, reason in message.get("skipped", ()))

    how = {"budget_s": REPLAY_S, "plan": replay_plan(bound), "usual_canary_s": profile.canary_s}
    try:
        replay(device_backend(profile.kind), take, **how)
    finally:
        release(profile.kind)
    return {
        **predict(case, replace(graph, timings=timings, timed_on=profile.name), profile),
        "ops_skipped": skipped,
        "timings": [[call.encode(), timing.seconds] for call, timing in timings.items()],
        "device_s": sum(
            timings[call].seconds
            for op, call in zip(graph.ops, bound.calls, strict=True)
            if not op.is_view and call in timings
        ),
    }


# Measurements


class DeviceProcess:
    """One process that holds the device, started again after it died, hung or broke its context."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """The function's result there; raises what it raised, TimeoutError after `limit_s`."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context)
        try:
            return self._pool.submit(function, *arguments).result(timeout=limit_s)
        except (TimeoutError, BrokenProcessPool, RuntimeError) as error:
            # After an error of the device every later call of that process fails too.
            if isinstance(error, (TimeoutError, BrokenProcessPool)) or "CUDA" in str(error):
                self.close()
            raise

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def measure_all(
    cases: Sequence[Case], folder: Path, profile: MachineProfile, records: Records, end: float
) -> None:
    """Time operators, predict, train, each case as it comes, until the time is over."""
    device = DeviceProcess()
    try:
        for number, case in enumerate(cases, start=1):
            compiled = case.execution != "eager"
            if records.of("measurement", case.key) or records.of("failure", case.key):
                continue
            if end - time.monotonic() < (LEAST_COMPILED_S if compiled else LEAST_S):
                say(f"the time is over before {case.key}, {len(cases) - number + 1} cases left")
                return
            begun, key = time.monotonic(), case.key
            if not compiled and not records.of("prediction", key, method="measured"):
                given = predict_with_timings, case, folder, profile
                found = _tried(device, *given, limit_s=CASE_LIMIT_S)
                predicted = {"predicted_s": None, **found}
                records.add({"kind": "prediction", "key": key, "method": "measured", **predicted})
            limit_s = min(COMPILED_LIMIT_S if compiled else CASE_LIMIT_S, end - time.monotonic())
            found = _tried(device, run_for_real, case, profile.kind, limit_s=max(limit_s, 1.0))
            records.add(
                {"kind": "failure" if "reason" in found else "measurement", "key": key} | found
            )
            say(f"{number}/{len(cases)} {key}: {time.monotonic() - begun:.1f} s")
    finally:
        device.close()


def _tried(device: DeviceProcess, *call: Any, limit_s: float) -> Record:
    """What a call in the device's process finds, or the reason why it finds nothing."""
    try:
        return device.call(*call, limit_s=limit_s)  # type: ignore[no-any-return]
    except FAILURES as error:
        say(_words(error))
        return {"reason": _words(error)}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


# Report

_KEPT = (
    *("predicted_s", "low_s", "high_s", "breakdown", "bottleneck", "op_time_in_grid_ratio"),
    *("peak_memory_bytes", "assumptions", "device_s", "ops_skipped"),
)


def assemble(cases: Sequence[Case], profile: MachineProfile, records: Records) -> list[Record]:
    """One entry per case and method, failed ones included."""
    return [_assembled(case, method, profile, records) for case in cases for method in BOUNDS]


def _assembled(case: Case, method: str, profile: MachineProfile, records: Records) -> Record:
    found = judged_case(records, case.key, _KEPT, method=method)
    runs = records.of("measurement", case.key)
    run: Record = runs[-1] if runs else {}
    peak = run.get("peak_bytes")
    return {
        "id": f"{case.key}-{method}",
        "source": "gpu_accuracy",
        "model": case.workload,
        "machine": profile.name,
        "allocation": f"1x1:{profile.name}",
        "ranks": 1,
        "nodes": 1,
        "strategy": "ddp",
        "precision": case.precision,
        "execution": case.execution,
        "batch_per_gpu": case.batch,
        "global_batch": case.batch,
        "method": method,
        **found,
        **{name: run.get(name) for name in ("wall_s", "host_s")},
        # Of the steps of one process: others are not started, minutes on a GPU are scarce.
        "noise_ratio": noise_ratio(run["steps_s"]) if run else None,
        # The most that torch held for the case itself.
        "peak_measured_bytes": None if peak is None else peak - run["allocated_before_bytes"],
    }


def figures(cases: Sequence[Record]) -> Iterator[Record]:
    """How far predicted peaks of memory are off, in the median."""
    errors = [
        abs(case["peak_memory_bytes"] / case["peak_measured_bytes"] - 1)
        for case in cases
        if case["method"] == "probe" and case["peak_measured_bytes"] and case["peak_memory_bytes"]
    ]
    if errors:
        median = {"value": statistics.median(errors), "bound": MEMORY_BOUND_RATIO}
        yield {"id": f"peak memory of {len(errors)} cases: median error", **median}


def judged(
    work: Path, profile: Path | None, target: DeviceKind, seconds: float, only: Sequence[str]
) -> Mapping[str, Any]:
    """Trace, predict, write down, measure within the time, report."""
    end = time.monotonic() + seconds
    work.mkdir(parents=True, exist_ok=True)
    records, graphs = Records(work / "records.jsonl"), work / "graphs"
    cases = tiny_cases() if target == "cpu" else gpu_cases()
    cases = [case for case in cases if not only or case.workload in only]
    trace_all(cases, graphs, target)
    machine = local_machine(work, profile)
    predict_all(cases, graphs, machine, records)
    measure_all(cases, graphs, machine, records, end)
    found = assemble(cases, machine, records)
    rows = summarise(found, by=("method",), bounds=BOUNDS)
    report = list(describe(found, BOUNDS))
    return {"cases": [*found, *figures(found)], "summary": rows, "report": report}


def run(options: Options) -> Mapping[str, Any]:
    """Twelve minutes of cases on this machine's GPU; a quick run has the tiny ones."""
    target: DeviceKind = "cpu" if options.quick else "cuda"
    return judged(options.work, None, target, 720.0, options.only)


def main(arguments: Sequence[str] | None = None) -> None:
    """What `gpu_run.sh` runs where the time is short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="of this machine; without it, a probe")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=720.0, help="time for all of it")
    options = parser.parse_args(arguments)
    found = judged(options.work, options.profile, options.target, options.seconds, ())
    print("\n".join(found["report"]))
    # 1: what was asked for is not all there yet; a further run continues.
    sys.exit(int(any(case.get("reason") == NOT_YET for case in found["cases"])))


if __name__ == "__main__":
    main()
