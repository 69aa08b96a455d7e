"""Compare the predicted peak of live memory of a training step with what the allocator counted.

Every allocation and release of one real step on the CPU is read from torch's profiler
(``profile_memory``), on top of what is held when the step starts. The prediction is written down
before the step is run. The bound is 2 % on each model of `local_models.py`; on
architectures drawn at random a median of 0.5 % and 3 % at worst, and the level during
95 % of the operators within 2 % of the peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from drawn_models import CANDIDATES_PER_MODEL, build, candidates, tried
from local_cases import model_functions
from memory_steps import measured_step, optimizer_of
from options import Options
from records import Records, say
from traced_models import answer, define_torchvision_schemas

from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.graph.trace.training_call import TrainingCall, as_phases

BOUND_RATIO = 0.02
DRAWN_MEDIAN_RATIO, DRAWN_WORST_RATIO = 0.005, 0.03
NEAR_RATIO, RIGHT_RATIO = 0.95, 0.98
DRAWN, DRAWN_SEED = 24, 1
# Steps of more parameters take minutes on one core: images have more values than short texts.
MOST_PARAMETERS = {"timm": 50_000_000, "transformers": 150_000_000}
TRACED_BATCH = 2
DRAWN_BATCHES = (TRACED_BATCH, 3, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and optimizer: peak of live bytes predicted, and measured on this CPU.

    `curve_ratio` is the share of its operators during which both levels are within 2 % of the peak.
    """

    model: str
    optimizer: str
    batch_per_gpu: int | None
    checkpoints: bool
    predicted_bytes: int
    measured_bytes: int
    curve_ratio: float

    @property
    def error_ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def cases_of(
    name: str,
    build: Callable[[int | None], Any],
    optimizers: list[str],
    *,
    batches: tuple[int | None, ...] = (None,),
    checkpoints: bool = False,
) -> Iterator[Case]:
    """Trace a model once, then predict and run it with every batch and optimizer."""
    model, batch, *rest = build(batches[0])
    model, loss = as_phases(model, rest[0] if rest else None)
    graph = trace_graph(model, batch, loss=loss)
    for size in batches:
        if size is not None and graph.batch is not None:
            # The leading size of the inputs may be several to one of ours.
            at = graph.at(graph.batch * size // (batches[0] or size))
        elif size == batches[0]:
            at = graph.at()
        else:
            continue
        for optimizer in optimizers:
            torch.manual_seed(0)
            model, batch, *rest = build(size)
            model, loss = as_phases(model, rest[0] if rest else None)
            curve = memory_alone(replace(at, graph=replace(at.graph, optimizer=optimizer))).curve()
            trained = [p for p in model.parameters() if p.requires_grad]
            call = TrainingCall.of(model, batch, loss)
            step = measured_step(model, call, optimizer_of(optimizer, trained), at.graph)
            peak = step.peak_bytes
            pairs = step.beside(curve.total)
            near = [abs(mine - theirs) <= BOUND_RATIO * peak for mine, theirs in pairs]
            yield Case(
                model=name,
                optimizer=optimizer,
                batch_per_gpu=at.batch,
                checkpoints=checkpoints,
                predicted_bytes=curve.peak_bytes,
                measured_bytes=peak,
                curve_ratio=sum(near) / len(near),
            )


def look_at(name: str) -> dict[str, Any]:
    """Every case of a drawn architecture."""
    parameters = sum(parameter.numel() for parameter in build(name, TRACED_BATCH)[0].parameters())
    if parameters > MOST_PARAMETERS[name.partition(",")[0]]:
        return {"status": "passed over", "reason": f"{parameters} parameters"}
    cases: list[Case] = []
    for again in (False, True):
        if again:
            try:
                build(name, TRACED_BATCH, again=True)
            except Exception as error:  # noqa: BLE001 - any model may have no checkpoints
                say(f"{name}: no checkpoints: {error}")
                continue
        made = partial(build, name, again=again)
        cases += cases_of(name, made, ["sgd", "adamw"], batches=DRAWN_BATCHES, checkpoints=again)
    return {"status": "ok", "cases": [asdict(case) for case in cases]}


def drawn_cases(count: int, seed: int, records: Records) -> list[Case]:
    """The cases of so many architectures, each in a process that may die."""
    names = candidates(CANDIDATES_PER_MODEL * count, seed)
    found = islice(tried(names, records, __file__), count)
    return [Case(**case) for record in found for case in record["cases"]]


def boundary(cases: list[Case]) -> tuple[int, int]:
    """(right answers, questions): does a batch fit where a tenth more, or less, just would.

    The limits lie a tenth of the batch above and below what was measured, by the growth measured
    between two batches of the same step.
    """
    of_step: dict[tuple[str, str, bool], list[Case]] = {}
    for case in cases:
        of_step.setdefault((case.model, case.optimizer, case.checkpoints), []).append(case)
    right = asked = 0
    for same in of_step.values():
        for one, two in pairwise(same):
            if one.batch_per_gpu is None or two.batch_per_gpu is None:
                continue
            grown = two.measured_bytes - one.measured_bytes
            tenth = grown / (two.batch_per_gpu - one.batch_per_gpu) * one.batch_per_gpu / 10
            if tenth > 0:
                asked += 2
                right += one.predicted_bytes <= one.measured_bytes + tenth
                right += one.predicted_bytes > one.measured_bytes - tenth
    return right, asked


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Models of `local_models.py` or of a file, then drawn ones; a quick run takes two of these."""
    torch.set_num_threads(1)
    define_torchvision_schemas()
    listed: list[Case] = []
    for make in model_functions(options, "gpt2", "resnet"):
        torch.manual_seed(0)
        say(make.__name__)
        listed += cases_of(make.__name__, lambda _batch, make=make: make(), ["sgd", "adamw"])
    yield from figures("listed", listed, BOUND_RATIO, BOUND_RATIO)
    if not (options.quick or options.only or options.models):
        drawn = drawn_cases(DRAWN, DRAWN_SEED, Records(options.work / "drawn.jsonl"))
        yield from figures("drawn", drawn, DRAWN_MEDIAN_RATIO, DRAWN_WORST_RATIO)


def figures(
    kind: str, cases: list[Case], median_ratio: float, worst_ratio: float
) -> Iterator[dict[str, Any]]:
    """How far each peak is off, and all of them together."""
    errors = [abs(case.error_ratio) for case in cases]
    for case, error in zip(cases, errors, strict=True):
        name = f"{case.model}, {case.optimizer}, batch {case.batch_per_gpu or 'as it is'}"
        name += ", checkpoints" if case.checkpoints else ""
        yield {"id": name, "value": error, "bound": worst_ratio, **asdict(case)}
    if cases:
        median = statistics.median(errors)
        yield {"id": f"{kind}: median error of the peak", "value": median, "bound": median_ratio}
        near = sum(case.curve_ratio >= NEAR_RATIO for case in cases) / len(cases)
        yield {"id": f"{kind}: cases whose level is near throughout", "value": near}
    right, asked = boundary(cases)
    if asked:
        share = {"value": right / asked, "least": RIGHT_RATIO}
        yield {"id": f"{kind}: fits or not, a tenth of the batch off", **share}


if __name__ == "__main__":
    answer(look_at)
