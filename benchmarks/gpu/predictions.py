"""Predict cases from traced graphs, from the probe alone or with the model's operators timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from records import Record, Records, say
from zoo.gpu import BY_NAME

from estimator.errors import EstimatorError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.tensors import OpCall
from gpu.cases import Case

OPTIMIZER = "adamw"
# A worker holds a model of up to 5 GB.
MOST_TRACERS = 12
REPLAY_S = 12.0


def graph_path(folder: Path, case: Case) -> Path:
    """The file of a case's graph: its own where the model's batch is fixed, else that of all."""
    own = folder / f"{case.workload}-{case.precision}-b{case.batch}.json.gz"
    return own if own.exists() else folder / f"{case.workload}-{case.precision}.json.gz"


def trace_missing(cases: Sequence[Case], folder: Path, target: DeviceKind, notes: Records) -> None:
    """Trace what has no file yet, several models at once; what fails is noted and left out."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, list[str]] = {}
    for case in cases:
        precisions = wanted.setdefault(case.workload, [])
        if not graph_path(folder, case).exists() and case.precision not in precisions:
            precisions.append(case.precision)
    jobs = [(name, precisions) for name, precisions in wanted.items() if precisions]
    if not jobs:
        return
    tracers = min(MOST_TRACERS, len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(max_workers=tracers, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(trace_workload, name, precisions, folder, target): name
            for name, precisions in jobs
        }
        for future, name in futures.items():
            error = future.exception()
            if error is not None:
                reason = f"{type(error).__name__}: {error}"[:500]
                notes.add({"kind": "untraced", "key": name, "reason": reason})
                say(f"could not trace {name}: {reason}")


def trace_workload(name: str, precisions: Sequence[str], folder: Path, target: DeviceKind) -> None:
    """Build a model once on the CPU and look at it in each precision."""
    import torch

    from estimator.graph.trace.trace import trace_graph

    torch.set_num_threads(1)
    workload = BY_NAME[name]
    model = workload.build()
    for precision in precisions:

        def look(batch: int, precision: str = precision) -> OpGraph:
            return trace_graph(
                model,
                workload.inputs(batch),
                loss=workload.loss,
                optimizer=OPTIMIZER,
                precision=precision,
                target=target,
                name=name,
            )

        large, small = workload.batches
        graph = look(large)
        graph.save(folder / f"{name}-{precision}.json.gz")
        if graph.other_batch is None:
            look(small).save(folder / f"{name}-{precision}-b{small}.json.gz")


def load_graph(folder: Path, case: Case) -> OpGraph:
    """The case's graph as it is executed; raises EstimatorError."""
    from estimator.graph.compile.fusion import compile_graph

    graph = OpGraph.load(graph_path(folder, case))
    return graph if case.execution == "eager" else compile_graph(graph, "compiled")


def predict(case: Case, graph: OpGraph, profile: MachineProfile) -> Record:
    """What the engine says of a case on one device."""
    import estimator

    answer = estimator.estimate(
        graph, f"1x1:{profile.name}", batch_per_gpu=case.batch, profile=profile
    )
    return {
        "predicted_s": answer.step_time_s,
        "low_s": answer.low_s,
        "high_s": answer.high_s,
        "breakdown": asdict(answer.breakdown),
        "bottleneck": answer.bottleneck,
        "op_time_in_grid_ratio": answer.op_time_in_grid_ratio,
        "peak_memory_bytes": answer.peak_memory_bytes,
        "memory": asdict(answer.memory),
        "assumptions": list(answer.assumptions),
        "ops": len(graph.ops),
    }


def predict_all(
    cases: Sequence[Case], folder: Path, profile: MachineProfile, records: Records
) -> None:
    """Write down what the probe alone predicts, or why nothing, before anything is trained."""
    for case in cases:
        if records.of("prediction", case.key, method="probe"):
            continue
        found: Record = {"predicted_s": None}
        try:
            found |= predict(case, load_graph(folder, case), profile)
        except (EstimatorError, OSError) as error:
            found["reason"] = f"{type(error).__name__}: {error}"[:500]
        records.add({"kind": "prediction", "key": case.key, "method": "probe", **found})


def predict_with_timings(case: Case, folder: Path, profile: MachineProfile) -> Record:
    """Time the operators of the case on this device, then predict; called in the device's process.

    The operators run in this process, as the probe runs them in one of its own: starting one for
    each case would take longer than timing them. Raises EstimatorError.
    """
    import torch

    from estimator.probe.ops import distinct_calls, replay, replay_plan

    torch.manual_seed(0)
    graph = load_graph(folder, case)
    bound = graph.at(case.batch)
    calls = distinct_calls(bound)
    timings: dict[OpCall, OpTiming] = {}
    skipped: list[Any] = []

    def take(message: dict[str, Any]) -> None:
        for number, seconds, noise_ratio in message.get("timings", ()):
            timings[calls[number]] = OpTiming(seconds=seconds, noise_ratio=noise_ratio)
        skipped.extend([calls[n].target, reason] for n, reason in message.get("skipped", ()))

    backend = device_backend(profile.kind)
    replay(
        backend,
        take,
        budget_s=REPLAY_S,
        plan=replay_plan(bound),
        usual_canary_s=profile.canary_s,
    )
    timed = replace(graph, timings=timings, timed_on=profile.name)
    return {
        **predict(case, timed, profile),
        "ops_timed": len(timings),
        "ops_skipped": skipped,
        "timings": [[call.encode(), timing.seconds] for call, timing in timings.items()],
        "device_s": sum(
            timings[call].seconds
            for op, call in zip(graph.ops, bound.calls, strict=True)
            if not op.is_view and call in timings
        ),
    }


_backends: dict[str, Any] = {}


def device_backend(kind: DeviceKind) -> Any:
    """The backend of this process, its device warm."""
    from estimator.probe.devices.backend import open_backend

    if kind not in _backends:
        _backends[kind] = open_backend(kind, 0)
        _backends[kind].warm_up(1.0 if kind == "cuda" else 0.1)
    return _backends[kind]
