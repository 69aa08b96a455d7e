"""Choices of what to rent, and training among revocations, against brute force.

Tables are `pollux_t4`, `sia_hetero` and `cmdare_workers`. Choices: the cheapest
measured configuration within a time, for 50 budgets of each model, chosen by step times that were
predicted after single devices and six steps on several; what costs the same within the noise of
repeated measurements counts as the same. Workers: steps of 3, 5, 6 and 7 asynchronous workers,
fitted on 1, 2, 4 and 8. Then closed forms against training that is played.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibration.machine_priors import priors_of
from calibration.protocols import few_shot
from calibration.rivals import (
    AsynchronousOptimusRegressor,
    AsynchronousRegressor,
    IndependentWorkers,
)
from calibration.tables import Job, read_steps, read_workers
from numpy.typing import ArrayLike
from options import Options
from records import Record, say
from simulated_failures import simulated_asynchronous_s, simulated_lives_s, simulated_times_s

from estimator.advise.rent.revocations import Lives, Revocations
from estimator.advise.rent.transient import (
    TransientCluster,
    Worker,
    checkpoint_s,
    expected_time_s,
)
from estimator.calibrate.regressor import StepTimeRegressor

BUDGETS = 50
# Second measurements that are drawn.
DRAWS = 10
METHODS = ("calibrated", "linear", "largest", "again")
SAMPLES = 1e6
# USD per GPU and hour: T4 of g4dn.12xlarge and A100 of p4d.24xlarge (data/prices); of GPUs that are
# not rented by the hour, what is stated here.
PRICES = {"T4": 3.912 / 4, "A100": 21.957642 / 8, "2080": 0.50, "QUADRO": 1.00}
HOUR = 3600.0


class Configuration(NamedTuple):
    """A measured placement and batch: time and cost of the work, measured, predicted and linear.

    `noise_ratio` is half the 10-90 % range of errors of the measured time.
    """

    gpu: str
    name: str
    ranks: int
    batch_per_gpu: float
    noise_ratio: float
    time_s: float
    usd: float
    predicted_s: float
    predicted_usd: float
    linear_s: float
    linear_usd: float


def configurations(job: Job) -> Iterator[Configuration]:
    """Every placement and batch of a job, repetitions taken together.

    The nodes of a job are alike, so that 1+3 and 3+1 devices of them are one placement.
    """
    (split,) = few_shot(job)
    X, y = job.X(), job.y()
    fitted = StepTimeRegressor(priors=priors_of(job.steps[0])).fit(X[split.train], y[split.train])
    predicted = fitted.predict(X)
    alone = {step.batch_per_gpu: step.step_time_s for step in job.steps if step.ranks == 1}
    usd_per_hour = next(usd for name, usd in PRICES.items() if name in job.gpu.upper())
    repeated: defaultdict[tuple[tuple[int, ...], float], list[int]] = defaultdict(list)
    for row, step in enumerate(job.steps):
        repeated[tuple(sorted(step.node_sizes)), step.batch_per_gpu].append(row)
    noise = replicate_noise_ratio([y[rows] for rows in repeated.values()])
    for (sizes, batch), rows in repeated.items():
        step = job.steps[rows[0]]
        steps = SAMPLES / step.global_batch
        times = [
            steps * float(np.median(y[rows])),
            steps * float(np.median(predicted[rows])),
            steps * alone.get(batch, np.nan),
        ]
        costs = [step.ranks * usd_per_hour * each / HOUR for each in times]
        pairs = [value for pair in zip(times, costs, strict=True) for value in pair]
        noise_ratio = noise / np.sqrt(len(rows))
        name = f"{'+'.join(map(str, sizes))}, batch {batch:g}"
        yield Configuration(job.gpu, name, step.ranks, batch, noise_ratio, *pairs)


def replicate_noise_ratio(repetitions: Iterable[ArrayLike]) -> float:
    """Half the 10-90 % range of one measurement's error, from all repetitions of a job together.

    Two repetitions say little of a configuration's own noise, all pairs of a job say enough.
    Errors about a mean of n are too small by sqrt((n - 1) / n).
    """
    logs = [np.log(each) for each in repetitions if np.size(each) > 1]
    if not logs:
        return 0.0
    errors = [(each - each.mean()) * np.sqrt(len(each) / (len(each) - 1)) for each in logs]
    low, high = np.quantile(np.concatenate(errors), [0.1, 0.9])
    return float(high - low) / 2


class Chosen(NamedTuple):
    """How a way to choose did over the budgets of a model.

    A choice that is not the same is late; or a configuration in time and cheaper was thought to be
    late, or to cost more.
    """

    same_ratio: float
    late_ratio: float
    regret: float
    best_thought_late_ratio: float
    best_thought_dear_ratio: float


def judged(rows: Sequence[Configuration]) -> dict[str, Chosen]:
    """Choices of each method within each budget, against a look at everything measured."""
    found: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    again = [list(_measured_again(rows, seed)) for seed in range(DRAWS)]
    for budget in budgets(rows):
        best = _best(rows, budget)
        for method, columns in (("calibrated", "predicted"), ("linear", "linear")):
            chosen = _within(rows, budget, f"{columns}_s", f"{columns}_usd")
            thought_s = getattr(best, f"{columns}_s")
            found[method].append(_verdict(chosen, best, budget, thought_s))
        largest = max(rows, key=lambda row: (row.ranks, -row.time_s))
        found["largest"].append(_verdict(largest, best, budget, best.predicted_s))
        at = rows.index(best)
        for measured in again:
            chosen = rows[measured.index(_within(measured, budget, "predicted_s", "predicted_usd"))]
            found["again"].append(_verdict(chosen, best, budget, measured[at].predicted_s))
    return {
        method: Chosen(*(float(np.mean(column)) for column in zip(*results, strict=True)))
        for method, results in found.items()
    }


def budgets(rows: Sequence[Configuration]) -> Iterator[float]:
    """Times in seconds, log-spaced from the fastest measured configuration to the cheapest."""
    ends = min(row.time_s for row in rows), min(rows, key=lambda row: row.usd).time_s
    yield from np.geomspace(*ends, BUDGETS) * (1 + 1e-9)


def _best(rows: Sequence[Configuration], budget: float) -> Configuration:
    return min((row for row in rows if row.time_s <= budget), key=lambda row: row.usd)


def _verdict(
    chosen: Configuration, best: Configuration, budget: float, best_thought_s: float
) -> tuple[bool, bool, float, bool, bool]:
    """The fields of `Chosen` for one choice; `best_thought_s` is the time predicted of the best.

    Costs tie that differ by no more than two measurements do, each with the noise of its own.
    """
    is_late = chosen.time_s > budget * (1 + chosen.noise_ratio)
    costs_more = chosen.usd / best.usd - 1
    noise = float(np.hypot(best.noise_ratio, chosen.noise_ratio))
    is_same = chosen is best or (not is_late and costs_more <= noise)
    is_wrong, best_late = not (is_same or is_late), best_thought_s > budget
    regret = max(costs_more, 0.0)
    return is_same, is_late, regret, is_wrong and best_late, is_wrong and not best_late


def _measured_again(rows: Sequence[Configuration], seed: int) -> Iterator[Configuration]:
    """Configurations predicted by a second measurement, which has noise of its own.

    From the first it differs by the errors of both. A range from 10 to 90 % of a normal error is
    2.56 standard deviations wide.
    """
    draw = np.random.default_rng(seed)
    for row in rows:
        off = float(np.exp(draw.normal(0.0, np.sqrt(2) * row.noise_ratio / 1.28)))
        yield row._replace(predicted_s=row.time_s * off, predicted_usd=row.usd * off)


def _within(rows: Sequence[Configuration], budget: float, time: str, cost: str) -> Configuration:
    """The cheapest that is thought to end in time, else the one thought fastest."""
    # A batch that was not measured on one device cannot be scaled.
    known = [row for row in rows if np.isfinite(getattr(row, time))] or list(rows)
    in_time = [row for row in known if getattr(row, time) <= budget]
    if in_time:
        return min(in_time, key=lambda row: float(getattr(row, cost)))
    return min(known, key=lambda row: float(getattr(row, time)))


def measured_models(folder: Path) -> Iterator[tuple[str, str, list[Configuration]]]:
    """Table, model and configurations on every GPU of which few-shot calibration has its steps."""
    for table in ("pollux_t4", "sia_hetero"):
        if not (folder / f"{table}.csv").exists():
            say(f"{table} does not ship; --data names a folder that holds {table}.csv")
            continue
        models: defaultdict[str, list[Configuration]] = defaultdict(list)
        for job in read_steps([folder / f"{table}.csv"]).jobs:
            if few_shot(job):
                models[job.model] += configurations(job)
        for model, rows in models.items():
            yield table, model, rows


def choices(models: Sequence[tuple[str, str, list[Configuration]]]) -> Iterator[Record]:
    """How well is chosen: any placement and batch, or any placement at each batch per GPU."""
    everything: defaultdict[tuple[str, str], list[Chosen]] = defaultdict(list)
    for table, model, rows in models:
        by_batch: defaultdict[float, list[Configuration]] = defaultdict(list)
        for row in rows:
            by_batch[row.batch_per_gpu].append(row)
        several = [each for each in by_batch.values() if len(each) > 2]
        for among, questions in (("all", [rows]), ("placements", several)):
            judgements = [judged(each) for each in questions]
            for method in METHODS:
                chosen = Chosen(*np.mean([each[method] for each in judgements], axis=0))
                everything[among, method].append(chosen)
                if method == "calibrated":
                    yield from _figures(f"{table}, {model}, among {among}, {method}", chosen)
    for (among, method), each in everything.items():
        goals = {"least": 0.95, "bound": 0.05} if method == "calibrated" else {}
        mean = Chosen(*np.mean(each, axis=0))
        yield from _figures(f"mean, among {among}, {method}", mean, **goals)


def _figures(
    name: str, chosen: Chosen, least: float | None = None, bound: float | None = None
) -> Iterator[Record]:
    about = {f"{field}": float(value) for field, value in chosen._asdict().items()}
    yield {"id": f"{name}: same choice", "value": about["same_ratio"], "least": least, **about}
    yield {"id": f"{name}: regret", "value": about["regret"], "bound": bound}


# Numbers of asynchronous workers that are learnt from.
WORKERS_SEEN = (1, 2, 4, 8)


def asynchronous_workers(folder: Path) -> Iterator[Record]:
    """The mean error of numbers of workers that were not seen, ours and those of other forms."""
    forms = (AsynchronousRegressor, IndependentWorkers, AsynchronousOptimusRegressor)
    errors: dict[str, list[float]] = {form.__name__: [] for form in forms}
    inside: list[bool] = []
    for X, y in read_workers(folder / "cmdare_workers.csv").values():
        seen = np.isin(X[:, 0], WORKERS_SEEN)
        if seen.all() or not seen.any():
            continue
        for form in forms:
            fitted = form().fit(X[seen], y[seen])
            errors[form.__name__] += np.abs(fitted.predict(X[~seen]) / y[~seen] - 1).tolist()
            if isinstance(fitted, AsynchronousRegressor):
                low_s, high_s = fitted.predict_interval(X[~seen])
                inside += ((low_s <= y[~seen]) & (y[~seen] <= high_s)).tolist()
    name = f"asynchronous workers, {len(inside)} rows"
    ours, independent, optimus = (float(np.mean(each)) for each in errors.values())
    yield {"id": f"{name}: mean error", "value": ours, "bound": 0.04}
    yield {"id": f"{name}: inside 80 %", "value": float(np.mean(inside))}
    yield {"id": f"{name}: mean error of the sum of workers", "value": independent}
    yield {"id": f"{name}: mean error of Optimus' form", "value": optimus}


def played() -> Iterator[Record]:
    """Closed forms against training that is played."""
    for mtbf_h in (0.5, 2.0, 12.0, 72.0):
        costs = {"checkpoint_s": 60.0, "restart_s": 300.0, "mtbf_s": mtbf_h * HOUR}
        interval_s = 1000.0
        expected = expected_time_s(100 * interval_s, interval_s, **costs)
        times = simulated_times_s(100 * interval_s, interval_s, **costs, runs=20_000)
        yield _off(f"synchronous, a failure every {mtbf_h:g} h", expected, times.mean())
    by_hour = (0.0,) * 8 + (1.0,) * 10 + (0.3,) * 6
    for work_h, start_hour, lifetime_h, warning_s in (
        *((4, 0.0, np.inf, 0.0), (4, 10.0, np.inf, 0.0), (72, 6.3, np.inf, 0.0)),
        *((72, 6.3, 24, 0.0), (72, 6.3, 24, 60.0)),
    ):
        taken = Revocations(per_hour=by_hour, lifetime_s=lifetime_h * HOUR)
        lives = Lives(
            revocations=taken,
            interval_s=1800.0,
            checkpoint_s=60.0,
            restart_s=300.0,
            warning_s=warning_s,
        )
        (expected,) = lives.expected_s([work_h * HOUR], start_hour)
        times = simulated_lives_s(lives, work_h * HOUR, start_hour=start_hour, runs=10_000)
        label = f"by the hour, {work_h} h from {start_hour:g}, {lifetime_h:g} h at most"
        yield _off(f"{label}, warned {warning_s:g} s before", expected, times.mean())
    for count, per_hour, most in ((4, 0.2, np.inf), (8, 1.0, 50.0), (16, 2.0, np.inf)):
        worker = Worker(steps_per_s=10.0, revocations=Revocations(per_hour=(per_hour,)))
        cluster = TransientCluster(
            workers=(worker,) * count,
            replace_s=90.0,
            checkpoint_s=checkpoint_s(100e6),
            checkpoint_every_steps=4000.0,
            most_steps_per_s=most,
        )
        steps = 1e6
        expected = cluster.asynchronous_s(steps)
        mean = float(np.mean([simulated_asynchronous_s(cluster, steps, seed=n) for n in range(40)]))
        label = f"asynchronous, {count} workers revoked {per_hour:g} times an hour"
        yield _off(f"{label}, servers take {most:g} steps/s", expected, mean)


def _off(label: str, expected_s: float, played_s: float) -> Record:
    off = abs(played_s / expected_s - 1)
    about = {"expected_s": expected_s, "played_s": float(played_s)}
    return {"id": f"{label}: closed form off by", "value": float(off), "bound": 0.01, **about}


def run(options: Options) -> Iterator[Record]:
    """Every figure; a quick run plays no training."""
    yield from choices(list(measured_models(options.data)))
    yield from asynchronous_workers(options.data)
    if not options.quick:
        yield from played()
