"""Compare observed steps of a model with the engine's predictions and the calibrated ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.observations import ObservationStore
from estimator.calibrate.observed import Observation
from estimator.engine import DEFAULT, estimate_graph
from estimator.errors import EstimatorError, ObservationError, printable
from estimator.graph.files import is_saved_graph
from estimator.graph.op_graph import OpGraph, workload_name
from estimator.placement.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStep:
    """One allocation at one batch: the median of what was observed, and both predictions.

    The ratios are the factors on the engine's compute and communication in the calibrated answer.
    """

    allocation: str
    batch_per_gpu: int
    accumulation_steps: int
    strategy: str
    layout: str | None
    observations: int
    observed_s: float
    engine_s: float
    calibrated_s: float
    compute_ratio: float
    communication_ratio: float


def observations_of(store: ObservationStore, model: str, precision: str) -> list[Observation]:
    """The observations of a MODEL of the command line; raises ObservationError.

    The workload of a function is named after the function, that of a saved graph in its file; a
    precision other than fp32 makes another workload. In Python it may have gone by any name: where
    none fits, these are all observations of which the content is known.
    """
    name = (
        OpGraph.load(model).workload if is_saved_graph(model) else workload_name(model, precision)
    )
    function = workload_name(model.rpartition(":")[2], precision)
    for workload in (name, name.removeprefix("hf:"), function):
        if found := store.observations(workload=workload):
            return found
    if found := store.observations(of_known_content=True):
        return found
    known = ", ".join(store.workload_names()[:5])
    has = f"has {printable(known)}; name one of these" if known else "is empty"
    raise ObservationError(
        f"no step of '{name}' was observed in {store.path}, which {has}; 'estimator calibrate "
        "observe' keeps steps"
    )


def fitted_steps(
    graph: OpGraph,
    observations: Iterable[Observation],
    calibrator: Calibrator,
    *,
    cluster: Cluster | None = None,
) -> Iterator[FittedStep]:
    """One for each distinct step observed of the graph's job.

    Those that cannot be estimated any more are left out. Raises ObservationError for none.
    """
    observed: dict[tuple[str, int, int, str, str], list[float]] = defaultdict(list)
    job = DEFAULT.content(graph).fingerprint
    of_job = [one for one in observations if one.fingerprint in (None, job)]
    if not of_job:
        raise ObservationError(
            f"no step of {graph.workload} was observed that computes the same; give the sequence "
            "length, optimizer and precision that were observed ('estimator calibrate show')"
        )
    for one in of_job:
        if one.outlier_reason is None:
            batches = one.batch_per_gpu, one.accumulation_steps
            key = (one.allocation, *batches, one.strategy, one.layout or "")
            observed[key].append(one.step_time_s)
    for step, times_s in sorted(observed.items()):
        allocation, batch, accumulation_steps, strategy, layout = step
        try:
            cold, calibrated = (
                estimate_graph(
                    graph,
                    allocation,
                    batch_per_gpu=batch,
                    accumulation_steps=accumulation_steps,
                    strategy=strategy,
                    layout=layout or None,
                    cluster=cluster,
                    calibration=calibration,
                )
                for calibration in (None, calibrator)
            )
        except EstimatorError:
            continue
        factors = calibrated.plan.coefficients
        yield FittedStep(
            allocation=allocation,
            batch_per_gpu=batch,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
            layout=layout or None,
            observations=len(times_s),
            observed_s=statistics.median(times_s),
            engine_s=cold.step_time_s,
            calibrated_s=calibrated.step_time_s,
            compute_ratio=factors.compute_ratio,
            communication_ratio=factors.communication_ratio,
        )
