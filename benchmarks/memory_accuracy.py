"""Compare the predicted peak of live memory of a training step with what the allocator counted.

Every allocation and release of one real step on the CPU is read from torch's profiler
(``profile_memory``), on top of what is held when the step starts. The prediction is written down
before the step is run. The bound is 2 % on each model of `local_models.py`; on
architectures drawn at random (`--draw`) a median of 0.5 % and 3 % at worst, and the level during
95 % of the operators within 2 % of the peak.

    python benchmarks/memory_accuracy.py [--only MODEL ...]
    python benchmarks/memory_accuracy.py --draw 24 --seed 1 [--results FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import local_models
import memory_models
import torch
from memory_steps import measured_step, optimizer_of
from options import parser_of
from traced_models import answer, ask_all, define_torchvision_schemas

from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.graph.trace.training_call import TrainingCall
from estimator.units import format_bytes, format_ratio
from estimator.workload.optimizers import OPTIMIZERS

BOUND_RATIO = 0.02
DRAWN_MEDIAN_RATIO, DRAWN_WORST_RATIO = 0.005, 0.03
NEAR_RATIO = 0.95
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
    graph = trace_graph(model, batch, loss=rest[0] if rest else None)
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
            curve = memory_alone(replace(at, graph=replace(at.graph, optimizer=optimizer))).curve()
            trained = [p for p in model.parameters() if p.requires_grad]
            call = TrainingCall.of(model, batch, rest[0] if rest else None)
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


def line_of(case: Case) -> str:
    """One case as people read it."""
    predicted, measured = format_bytes(case.predicted_bytes), format_bytes(case.measured_bytes)
    sizes = f"predicted {predicted:>9}  measured {measured:>9}"
    kind = f"{case.optimizer}{' again' if case.checkpoints else ''}"
    near = f"  {format_ratio(case.curve_ratio)} of ops near"
    return (
        f"{case.model:40} {case.batch_per_gpu or '':>4} {kind:13} {sizes}  "
        f"{format_ratio(case.error_ratio):>7}{near}"
    )


def look_at(name: str) -> dict[str, Any]:
    """Every case of a drawn architecture."""
    parameters = memory_models.size_of(name)
    if parameters > memory_models.MOST_PARAMETERS[name.partition(":")[0]]:
        return {"status": "passed over", "reason": f"{parameters} parameters"}
    cases: list[Case] = []
    for again in (False, True):

        def build(batch: int | None, *, again: bool = again) -> Any:
            return memory_models.build(name, batch or TRACED_BATCH, again=again)

        if again:
            try:
                build(TRACED_BATCH)
            except Exception as error:  # noqa: BLE001 - any model may have no checkpoints
                print(f"{name}: no checkpoints: {error}", file=sys.stderr)
                continue
        cases += cases_of(name, build, ["sgd", "adamw"], batches=DRAWN_BATCHES, checkpoints=again)
    return {"status": "ok", "cases": [asdict(case) for case in cases]}


def drawn_cases(count: int, seed: int, results: Path | None) -> list[Case]:
    """The cases of so many architectures, each in a process that may die; others are said."""
    names = memory_models.names_of(count, seed)
    known: dict[str, Any] = {}
    if results is not None and results.exists():
        lines = results.read_text(encoding="utf-8").splitlines()
        known = {each["model"]: each for each in map(json.loads, lines)}
    left = [name for name in names if name not in known]
    asked = ask_all([sys.executable, __file__, "--worker"], left)
    cases: list[Case] = []
    done = 0
    for name in names:
        if done == count:
            break
        found = known.get(name) or {"model": name, **next(asked)[1]}
        if name not in known and results is not None:
            with results.open("a", encoding="utf-8") as log:
                log.write(json.dumps(found) + "\n")
        if found["status"] != "ok":
            print(f"{name}: {found['status']}: {found['reason'][:200]}", file=sys.stderr)
            continue
        done += 1
        cases += [Case(**each) for each in found["cases"]]
        for each in found["cases"]:
            print(line_of(Case(**each)), file=sys.stderr, flush=True)
    return cases


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


def listed_cases(only: list[str] | None, optimizers: list[str]) -> list[Case]:
    """Those of `local_models.py`."""
    cases = []
    for make in local_models.ALL:
        if only and make.__name__ not in only:
            continue
        torch.manual_seed(0)
        for case in cases_of(make.__name__, lambda _batch, make=make: make(), optimizers):
            cases.append(case)
            print(line_of(case), file=sys.stderr, flush=True)
    return cases


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="names of local_models.py")
    parser.add_argument("--optimizer", nargs="+", default=["sgd", "adamw"], choices=OPTIMIZERS)
    parser.add_argument("--draw", type=int, help="so many architectures drawn at random instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file that a stopped draw goes on with")
    parser.add_argument("--worker", action="store_true", help="answer names on stdin")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    define_torchvision_schemas()
    if chosen.worker:
        answer(look_at)
        return 0
    if chosen.draw:
        cases = drawn_cases(chosen.draw, chosen.seed, chosen.results)
    else:
        cases = listed_cases(chosen.only, chosen.optimizer)
    if not cases:
        print(f"no model is called {chosen.only}; see local_models.py", file=sys.stderr)
        return 2
    errors = [abs(case.error_ratio) for case in cases]
    curves = [case.curve_ratio for case in cases]
    followed = sum(curve >= NEAR_RATIO for curve in curves)
    if chosen.json:
        rows = [asdict(case) | {"error_ratio": case.error_ratio} for case in cases]
        print(json.dumps({"bound_ratio": BOUND_RATIO, "cases": rows}))
    else:
        print("\n".join(map(line_of, cases)))
        print(
            f"{len(cases)} cases of {len({case.model for case in cases})} models: median "
            f"{format_ratio(statistics.median(errors))}, worst {format_ratio(max(errors))}; levels "
            f"near at {format_ratio(statistics.median(curves))} of the ops of the median case, at "
            f"{format_ratio(NEAR_RATIO)} or more in {followed} cases"
        )
        right, asked = boundary(cases)
        if asked:
            print(f"fits or not, a tenth of the batch off: {right} of {asked} right")
    if chosen.draw:
        near = statistics.median(errors) <= DRAWN_MEDIAN_RATIO
        return 0 if near and max(errors) <= DRAWN_WORST_RATIO else 1
    return 0 if max(errors) <= BOUND_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
