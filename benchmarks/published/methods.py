"""Predict the step of a published row: cold, after observations of its source, and naively."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from records import now

import estimator as est
from estimator.errors import EstimatorError
from estimator.graph.costs.call_costs import op_cost
from estimator.workload.recipe import peak_dtype
from published.mapping import Question

# Drawn at random for each source and GPU, so many times.
OBSERVATIONS, DRAWS = 8, 5
# The share of the dense peak that the naive line supposes for all models and machines.
NAIVE_MFU_RATIO = 0.4
# 1 part forward, 2 parts backward.
_STEP_OVER_FORWARD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted step and its interval; without seconds, none.

    `unmeasured_s` is what the engine's step takes beside, as the source did not measure it.
    """

    seconds: float | None = None
    unmeasured_s: float = 0.0
    low_s: float | None = None
    high_s: float | None = None
    fits: str | None = None


def ask(question: Question, calibration: est.Calibrator | None = None) -> Prediction:
    """The engine's answer for a row; raises EstimatorError.

    Where the source measured no update, the update is taken off, the interval scaled alike.
    """
    workload = question.workload
    answer = est.estimate(
        question.graph,
        question.allocation,
        batch_per_gpu=question.batch_per_gpu,
        accumulation_steps=question.row.step.accumulation_steps,
        strategy=workload.strategy,
        layout=workload.layout,
        calibration=calibration,
        profile=question.profile,
    )
    update_ratio = answer.breakdown.update_s / answer.step_time_s
    measured = 1.0 if workload.has_update else 1 - update_ratio
    return Prediction(
        seconds=answer.step_time_s * measured,
        unmeasured_s=answer.step_time_s * (1 - measured),
        low_s=answer.low_s * measured,
        high_s=answer.high_s * measured,
        fits=answer.fits,
    )


def cold_cases(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """One case for each row, from the engine without observations."""
    for question in questions:
        yield _case(question, "cold", ask)


def naive_cases(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """One case for each row: operations of the model at a fixed share of the peak, on all ranks."""
    for question in questions:
        yield _case(question, "naive", _naive)


def calibrated_cases(
    questions: Sequence[Question], *, draws: int = DRAWS, observations: int = OBSERVATIONS
) -> Iterator[dict[str, Any]]:
    """Cases of the rows that were not observed, for each draw of observations of one GPU.

    Observations have no layout yet: rows of ranks that share a model are left out.
    """
    questions = [each for each in questions if each.workload.layout is None]
    for draw in range(draws):
        order = random.Random(draw).sample(range(len(questions)), len(questions))
        if len(order) <= observations:
            return
        seen = [questions[index] for index in order[:observations]]
        judged = [questions[index] for index in sorted(order[observations:])]
        with TemporaryDirectory() as folder:
            taught = partial(ask, calibration=_taught(Path(folder, "observations.db"), seen))
            for question in judged:
                yield _case(question, "calibrated", taught, k=observations, draw=draw)


def _taught(path: Path, seen: Sequence[Question]) -> est.Calibrator:
    """A calibrator that has observed some rows.

    It learns of a workload when asked for it: asked first, all are learnt together by one fit.
    """
    calibrator = est.Calibrator(path)
    for question in seen:
        try:
            cold = ask(question, calibrator)
        except EstimatorError:
            continue
        calibrator.observe(
            question.graph,
            question.allocation,
            # The engine's step has an update also where what was measured has none.
            step_time_s=question.row.step.step_time_s + cold.unmeasured_s,
            batch_per_gpu=question.batch_per_gpu,
            accumulation_steps=question.row.step.accumulation_steps,
            strategy=question.workload.strategy,
            source=question.row.id,
        )
    return calibrator.fit()


def _naive(question: Question) -> Prediction:
    device = question.profile.devices[0]
    peaks = device.peak_flops_per_s
    peak = peaks.get(peak_dtype(question.workload.precision)) or peaks["float32"]
    passes = 1.0 if question.workload.spec.is_forward_only else _STEP_OVER_FORWARD
    fixed, per_sample = _forward_flops(question.graph)
    step = question.row.step
    flops = passes * (fixed + per_sample * step.batch_per_gpu) * step.accumulation_steps
    return Prediction(seconds=flops / (NAIVE_MFU_RATIO * peak))


_flops: dict[int, tuple[est.OpGraph, tuple[float, float]]] = {}


def _forward_flops(graph: est.OpGraph) -> tuple[float, float]:
    """(fixed, per sample) operations of the forward pass; shapes are affine in the batch."""
    if id(graph) not in _flops:
        forward = [op for op in graph.ops if op.phase == "forward"]
        one = _flops_of([op.call for op in forward])
        batch, other = graph.batch or 1, graph.other_batch
        slope = one / batch
        if other is not None:
            slope = (_flops_of([op.other_call for op in forward]) - one) / (other - batch)
        _flops[id(graph)] = graph, (one - slope * batch, slope)
    return _flops[id(graph)][1]


def _flops_of(calls: Sequence[Any]) -> float:
    costs = (op_cost(call) for call in calls)
    return math.fsum(cost.flops for cost in costs if cost is not None)


def _case(
    question: Question,
    method: str,
    predict: Callable[[Question], Prediction],
    *,
    k: int | None = None,
    draw: int | None = None,
) -> dict[str, Any]:
    """A prediction beside its measurement, in the form of all accuracy benchmarks."""
    row, reason, prediction = question.row, None, Prediction()
    try:
        prediction = predict(question)
    except EstimatorError as error:
        reason = str(error)
    return {
        "id": f"{row.id}/{method}" + ("" if draw is None else f"/{draw}"),
        "table": row.table,
        **row.step.about(),
        "model": question.workload.spec.name,
        "machine": question.profile.name,
        "gpu": row.step.gpu,
        "allocation": question.allocation,
        "strategy": question.workload.strategy,
        "layout": question.workload.layout,
        "global_batch": question.global_batch,
        "precision": question.workload.precision,
        "method": method,
        "k": k,
        "draw": draw,
        "predicted_s": prediction.seconds,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "measured_s": row.step.step_time_s,
        "noise_ratio": None,
        "predicted_at": now(),
        "measured_at": None,
        "status": "no_prediction" if prediction.seconds is None else "ok",
        "reason": reason,
        "fits": prediction.fits,
        "remarks": list(question.workload.remarks),
    }
