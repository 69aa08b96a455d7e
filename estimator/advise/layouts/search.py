"""Rank how the devices at hand can share a model: layouts, strategies, micro-batches.

Kernels of one family, the host, the update and collectives over the same groups err alike in all
layouts of a model on the same devices, each as much as it takes of the step. What ranks wait for,
and what the model of a step itself misses, each layout has for itself.

Every layout that fits is a candidate; one is worked out only while its bounds say that it may be
among the best. These never exceed the step itself, so that none of the best is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from estimator.advise.layouts.candidates import Candidate, LayoutBounds, candidates, divisors
from estimator.cache import collected_later
from estimator.coefficients import Z_80, Calibration
from estimator.errors import ProfileError, StrategyError, WorkloadError
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import NOT_FIT_MARGIN_RATIO, Estimate, interval_ratio
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table.table import map_shared
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.experts import has_experts
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.placement import Placement
from estimator.placement.topology import Cluster
from estimator.timeline.plan import slowest_kind
from estimator.timeline.rank.program import COPIES_ERROR, MEDIAN_TO_SIGMA
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule
from estimator.workload.strategies import (
    MOST_GLOBAL_BATCH,
    SEARCHED_WITH_LAYOUTS,
    Strategy,
    check_count,
)

Value = TypeVar("Value")


class StepErrors(NamedTuple):
    """One standard deviation of a step by its sources, as shares of the step.

    Of `shared` sources each is the same unknown in every layout; `own` is all the rest.
    """

    shared: Mapping[str, float]
    own: float

    def ratio_error(self, other: StepErrors) -> float:
        """One standard deviation of the logarithm of two steps' ratio.

        >>> slow, fast = StepErrors({"gemm": 0.3}, 0.03), StepErrors({"gemm": 0.26}, 0.0)
        >>> round(slow.ratio_error(fast), 6)
        0.05
        """
        sources = {**self.shared, **other.shared}
        apart = [self.shared.get(name, 0.0) - other.shared.get(name, 0.0) for name in sources]
        return math.hypot(*apart, self.own, other.own)


def step_errors(answer: Estimate) -> StepErrors:
    """What the interval of an estimate is made of, by the plan that it was answered with."""
    plan, parts, step_s = answer.plan, answer.breakdown, answer.step_time_s
    kind = slowest_kind(plan.kinds, plan.shards)
    program, lane = kind.program, kind.lane
    kernels_s = parts.forward_s + parts.backward_s
    spent_s = sum(seconds for seconds, _ in program.kernels.values()) or 1.0
    errors = {
        f"kernels {family} {source}": MEDIAN_TO_SIGMA * error_s * kernels_s / spent_s
        for (family, source), (_, error_s) in program.kernels.items()
    }
    errors["device"] = program.durations.shared_error * kernels_s
    layer_collectives = plan.members.table.shape.layer_collectives
    if layer_collectives is not None and program.exchanged.relative_error:
        error_s = program.exchanged.relative_error * parts.layer_communication_s
        errors[f"exchanges {layer_collectives.groups}"] = MEDIAN_TO_SIGMA * error_s
    errors["host"] = MEDIAN_TO_SIGMA * lane.host_error * parts.host_exposed_s
    errors["update"] = MEDIAN_TO_SIGMA * lane.update_error * parts.update_s
    errors["copies"] = MEDIAN_TO_SIGMA * COPIES_ERROR * parts.copies_exposed_s
    errors["interference"] = lane.interference_error * (step_s - parts.input_stall_s)
    shared = {name: error_s / step_s for name, error_s in errors.items()}
    spread = math.log(answer.high_s / answer.low_s) / (2 * Z_80)
    # A calibrated step is off by less than what it was made of.
    known = math.hypot(*shared.values())
    scale = min(1.0, spread / known) if known else 1.0
    own = math.sqrt(max(spread**2 - (scale * known) ** 2, 0.0))
    return StepErrors({name: scale * error for name, error in shared.items()}, own)


def are_alike(slower: tuple[float, StepErrors], faster: tuple[float, StepErrors]) -> bool:
    """Whether two steps cannot be told apart: their ratio may be 1 in its 80 % interval."""
    (slower_s, its), (faster_s, others) = slower, faster
    return bool(slower_s / faster_s <= interval_ratio(its.ratio_error(others)))


SCHEDULES: tuple[str, ...] = ("1f1b", "gpipe", "interleaved:2", "interleaved:4", "zb", "zbv")
SCHEDULES += ("dualpipev", "dualpipe")
# How a candidate is seen before it is worked out, each time closer.
_LOOKS = (LayoutBounds.closer, LayoutBounds.played)
# Shorter ones are divided over no ranks: their attention is little beside what ranks exchange.
LONG_SAMPLE_TOKENS = 4096
# Tensor-parallel ranks share whatever they can share of each other's work.
_SHARED = ((True, True), (True, False), (False, False))
_Report = Callable[[str, float], None]
_REFUSALS = (StrategyError, WorkloadError, ProfileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """A candidate that fits, and its estimate; `why` says what makes it slower than the best.

    `like_best` where they cannot be told apart: by what both are not off together.
    """

    layout: str
    strategy: str
    checkpoint: str | None
    batch_per_gpu: int
    micro_batches: int
    answer: Estimate
    why: str = ""
    like_best: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        answer = self.answer
        names = ("step_time_s", "low_s", "high_s", "samples_per_s", "tokens_per_s", "mfu_ratio")
        return {
            "layout": self.layout,
            "strategy": self.strategy,
            "checkpoint": self.checkpoint,
            "batch_per_gpu": self.batch_per_gpu,
            "micro_batches": self.micro_batches,
            **{name: getattr(answer, name) for name in names},
            "peak_memory_bytes": answer.peak_memory_bytes,
            "fits": answer.fits,
            "why": self.why or None,
            "like_best": self.like_best,
            "breakdown": asdict(answer.breakdown),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRanking:
    """The best layouts, the fastest first, and how many there were.

    Of `candidates`, `worked_out` were estimated; the bounds of the others say that they do not fit
    (`too_large`) or are slower than all in `rows`. `refusals` counts those without an answer, and
    `left_out` says what is not among the candidates.
    """

    rows: tuple[LayoutRow, ...]
    candidates: int
    worked_out: int
    too_large: int
    refusals: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "candidates": self.candidates,
            "worked_out": self.worked_out,
            "too_large": self.too_large,
            "refusals": dict(self.refusals),
            "left_out": list(self.left_out),
            "layouts": [row.to_dict() for row in self.rows],
        }


def best_layouts(
    graphs: OpGraph | Sequence[OpGraph],
    allocation: str | Allocation,
    *,
    global_batch: int,
    strategies: Sequence[str | Strategy] = SEARCHED_WITH_LAYOUTS,
    schedules: Sequence[str] = SCHEDULES,
    most: int = 10,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
    prune: bool = True,
    report: _Report | None = None,
    executor: Executor | None = None,
    engine: Engine = DEFAULT,
) -> LayoutRanking:
    """The layouts by which an allocation trains a model fastest, `most` of them.

    Several graphs are one model traced with other activation checkpoints. Tensor parallelism goes
    over the divisors of a node's devices and twice them, pipelines and expert parallelism over
    those of the ranks; the samples of a micro-batch are a power of two, or the micro-batches of a
    rank are. Without `prune` every candidate is worked out. `report` is told what is under way and
    how far that is. With an `executor` candidates are worked out on its workers, to each of which
    graphs are sent once.
    Raises WorkloadError where nothing fits, AllocationError, ProfileError; StrategyError for a
    graph of a module that was divided before it was traced.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> ranking = est.best_layouts(graph, "1x2:t4-g4dn", global_batch=8)
    >>> ranking.rows[0].answer.global_batch
    8
    """
    several = (graphs,) if isinstance(graphs, OpGraph) else tuple(graphs)
    check_count(global_batch, "global batch", most=MOST_GLOBAL_BATCH)
    if own := next(filter(None, (one.layout or one.strategy for one in several)), None):
        raise StrategyError(
            f"layouts are those of a whole model, found the graph of a rank of '{own}', by which "
            "its module was divided before it was traced; trace the module before it is divided"
        )
    placement = engine.place(allocation, cluster=cluster, profile=profile)
    request = EstimateRequest.of(
        several[0], placement, cluster=cluster, calibration=calibration, profile=profile
    )
    search = _LayoutSearch(several, placement, engine, most, request, report or _silent)
    parsed = tuple(map(Strategy.parse, strategies))
    order = tuple(map(Schedule.parse, schedules))
    prune = prune and calibration is None
    ranked = search.ranked(global_batch, parsed, order, prune=prune, executor=executor)
    if not ranked.rows:
        reason = next((text for text, _ in ranked.refusals), "")
        if ranked.too_large or search.unfit or not reason:
            reason = "nothing fits into the devices' memory"
            if not any(one.checkpoint for one in several):
                reason += "; trace it with checkpoint='full' too, or give more ranks"
        raise WorkloadError(
            f"no layout trains {several[0].name} on '{placement.allocation}' with a global batch "
            f"of {global_batch}: {reason}"
        )
    return ranked


class _Shared(NamedTuple):
    """What all candidates have in common."""

    graphs: Sequence[OpGraph]
    request: EstimateRequest
    engine: Engine | None


def _answer(shared: _Shared, kept: dict[str, Any], candidate: Candidate) -> Estimate | str:
    """The estimate of a candidate, or why there is none."""
    number, layout, strategy, batch, micro_batches = candidate
    engine = shared.engine or DEFAULT
    if "placement" not in kept:
        request = shared.request
        kept["placement"] = engine.place(
            request.allocation, cluster=request.cluster, profile=request.profile
        )
    try:
        return engine.estimate(
            shared.request.changed(
                graph=shared.graphs[number],
                allocation=kept["placement"],
                batch_per_gpu=batch,
                accumulation_steps=micro_batches,
                strategy=strategy,
                layout=None if layout.is_data_parallel else layout,
            )
        )
    except _REFUSALS as error:
        return str(error)


# (step seconds, number in the order of answers, candidate, its estimate)
_Found = tuple[float, int, Candidate, Estimate]


class _LayoutSearch:
    """Works out candidates in the order of their bounds, and keeps the best."""

    def __init__(
        self,
        graphs: Sequence[OpGraph],
        placement: Placement,
        engine: Engine,
        most: int,
        asked: EstimateRequest,
        report: _Report,
    ) -> None:
        self._graphs, self._placement, self._engine = graphs, placement, engine
        self._most, self._asked, self._report = most, asked, report
        self._bounds = [LayoutBounds(graph, placement, engine) for graph in graphs]
        self._refusals: Counter[str] = Counter()
        # Those that were worked out and do not fit.
        self.unfit = 0

    @collected_later()
    def ranked(
        self,
        global_batch: int,
        strategies: Sequence[Strategy],
        schedules: Sequence[Schedule],
        *,
        prune: bool,
        executor: Executor | None,
    ) -> LayoutRanking:
        """All candidates by step time, as far as the bounds ask for."""
        every = [
            candidate._replace(graph=number)
            for number, graph in enumerate(self._graphs)
            for candidate in candidates(
                graph,
                self._placement,
                global_batch,
                strategies,
                schedules,
                [*self._divided(graph)],
            )
        ]
        fitting = [(0.0, candidate) for candidate in every]
        if prune:
            self._report("bounds", 0.0)
            fitting = [
                (self._bound(LayoutBounds.step_s, candidate, 0.0), candidate)
                for candidate in every
                if self._bound(LayoutBounds.memory_ratio, candidate, 0.0)
                <= 1 + NOT_FIT_MARGIN_RATIO
            ]
        fitting.sort(key=lambda pair: pair[0])
        answered: list[_Found] = []
        worked_out, too_large = 0, list[Candidate]()

        turns = self._in_turn(fitting, answered, too_large, prune=prune)
        for candidate, answer in map_shared(executor, _answer, self._shared(executor), turns):
            worked_out += 1
            if isinstance(answer, str):
                self._refusals[answer] += 1
            elif answer.fits == "no":
                self.unfit += 1
            else:
                answered.append((answer.step_time_s, worked_out, candidate, answer))
                answered.sort(key=lambda entry: entry[:2])
        best = answered[: self._most]
        known = [(step_s, step_errors(answer)) for step_s, *_, answer in best]
        return LayoutRanking(
            rows=tuple(
                self._row(candidate, answer, best[0][3], like_best=are_alike(each, known[0]))
                for (*_, candidate, answer), each in zip(best, known, strict=True)
            ),
            candidates=len(every),
            worked_out=worked_out,
            too_large=len(every) - len(fitting) + len(too_large),
            refusals=tuple(self._refusals.most_common()),
            left_out=tuple(self._left_out()),
        )

    def _left_out(self) -> Iterator[str]:
        """Ways to train that are no candidates, in words."""
        graphs = self._graphs
        if all((graph.tokens_per_sample or 0) < LONG_SAMPLE_TOKENS for graph in graphs):
            yield f"cp, of samples under {LONG_SAMPLE_TOKENS} tokens"
        if any(graph.recipe is None for graph in graphs):
            yield "Megatron-LM's layers, of a graph without a recipe of it"
        else:
            yield "pipelines other than 1f1b and interleaved, which Megatron-LM has not"
        if not any(graph.checkpoint for graph in graphs):
            yield "activation checkpoints"
        yield "stages that are cut by hand, cp rings, tp over more than two nodes"

    def _in_turn(
        self,
        fitting: Sequence[tuple[float, Candidate]],
        answered: Sequence[_Found],
        too_large: list[Candidate],
        *,
        prune: bool,
    ) -> Iterator[Candidate]:
        """Candidates by their bounds, each seen closer before its turn, while they may be best."""
        first = 0 if prune else len(_LOOKS)
        waiting = [(least_s, n, first, candidate) for n, (least_s, candidate) in enumerate(fitting)]
        while waiting:
            least_s, number, looks, candidate = heappop(waiting)
            if prune and len(answered) >= self._most and least_s > answered[self._most - 1][0]:
                return
            if looks == len(_LOOKS):
                self._report(str(candidate.layout), 1 - len(waiting) / len(fitting))
                yield candidate
                continue
            closer_s, ratio = self._bound(_LOOKS[looks], candidate, (0.0, 0.0))
            if ratio > 1 + NOT_FIT_MARGIN_RATIO:
                too_large.append(candidate)
            else:
                heappush(waiting, (max(least_s, closer_s), number, looks + 1, candidate))

    def _divided(self, graph: OpGraph) -> Iterator[Layout]:
        """The ways in which ranks can share layers, tokens and experts of a graph."""
        for of_layers in self._tensor_parallel(graph):
            for shared in (of_layers, *self._context_parallel(graph, of_layers)):
                yield shared
                yield from self._expert_parallel(graph, shared)

    def _tensor_parallel(self, graph: OpGraph) -> list[Layout]:
        """The tensor-parallel degrees that can divide a graph, each sharing most that it can."""
        layouts = [Layout()]
        node = max(self._placement.ranks_per_node)
        for tp in (*divisors(node)[1:], 2 * node):
            if self._placement.ranks % tp:
                continue
            self._report(f"tp={tp}", 0.0)
            for sequence, vocabulary in _SHARED:
                layout = Layout(tp=tp, sequence=sequence, vocabulary=vocabulary)
                try:
                    self._engine.split(graph, layout)
                except StrategyError as error:
                    refusal = str(error)
                else:
                    layouts.append(layout)
                    break
            else:
                self._refusals[refusal] += 1
        return layouts

    def _context_parallel(self, graph: OpGraph, shared: Layout) -> Iterator[Layout]:
        """A layout with long samples divided too, within twice a node."""
        most = 2 * max(self._placement.ranks_per_node) // shared.tp
        if (graph.tokens_per_sample or 0) < LONG_SAMPLE_TOKENS:
            return
        for cp in divisors(self._placement.ranks // shared.tp)[1:]:
            layout = replace(shared, cp=cp)
            if cp > most:
                return
            if self._can_split(graph, layout):
                yield layout

    def _expert_parallel(self, graph: OpGraph, shared: Layout) -> Iterator[Layout]:
        """A layout with experts divided too, by all-to-all or summed by ranks that share tokens."""
        if not has_experts(graph):
            return
        for ep in divisors(self._placement.ranks)[1:]:
            if ep % shared.tp:
                continue
            for sums in (False, True) if ep == shared.tp and shared.cp == 1 else (False,):
                layout = replace(shared, ep=ep, sums_experts=sums)
                self._report(str(layout), 0.0)
                if self._can_split(graph, layout):
                    yield layout

    def _can_split(self, graph: OpGraph, layout: Layout) -> bool:
        """Whether a graph can be divided so; counts the reason where it cannot."""
        try:
            self._engine.split(graph, layout)
        except StrategyError as error:
            self._refusals[str(error)] += 1
            return False
        return True

    def _bound(
        self,
        bound: Callable[[LayoutBounds, Candidate], Value],
        candidate: Candidate,
        unknown: Value,
    ) -> Value:
        """What one of the bounds says of a candidate, where it is known."""
        try:
            return bound(self._bounds[candidate.graph], candidate)
        except _REFUSALS:
            return unknown

    def _shared(self, executor: Executor | None) -> _Shared:
        """What the workers need to know; the engine is each worker's own."""
        if executor is None:
            return _Shared(self._graphs, self._asked, self._engine)
        request = self._asked.changed(allocation=self._placement.allocation)
        return _Shared(self._graphs, request, None)

    def _row(
        self, candidate: Candidate, answer: Estimate, best: Estimate, *, like_best: bool
    ) -> LayoutRow:
        is_best = answer is best
        return LayoutRow(
            layout=str(candidate.layout),
            strategy=str(candidate.strategy),
            checkpoint=self._graphs[candidate.graph].checkpoint,
            batch_per_gpu=candidate.batch,
            micro_batches=candidate.micro_batches,
            answer=answer,
            why="" if is_best else why_slower(answer, best),
            like_best=like_best and not is_best,
        )


_WORDS = {
    "forward_s": "compute",
    "backward_s": "compute",
    "host_exposed_s": "host",
    "communication_exposed_s": "gradients, sends",
    "straggler_s": "stragglers",
    "update_s": "update",
    "copies_exposed_s": "copies",
    "idle_s": "bubble",
    "input_stall_s": "input",
    "layer_communication_s": "layer exchange",
}


def why_slower(answer: Estimate, best: Estimate) -> str:
    """What of a step takes most longer than in the best one, in words and seconds."""
    more: Counter[str] = Counter()
    for name, words in _WORDS.items():
        more[words] += getattr(answer.breakdown, name) - getattr(best.breakdown, name)
    words, seconds = more.most_common(1)[0]
    return f"{words} +{seconds / best.step_time_s:.0%}" if seconds > 0 else ""


def _silent(what: str, done_ratio: float) -> None:
    """Report nothing."""
