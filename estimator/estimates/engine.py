"""Answer how long steps take: what `estimate` and `estimate_many` share, and all that they keep."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

from estimator.cache import Cache
from estimator.coefficients import (
    UNCALIBRATED,
    Coefficients,
    JobContent,
    PredictedStep,
    StepQuestion,
)
from estimator.errors import AllocationError, WorkloadError
from estimator.estimates.estimate import FITS, Estimate, engine_error, fits_code
from estimator.estimates.neighbours import Sender, link_ratios
from estimator.estimates.request import EstimateRequest, Traffic
from estimator.graph.ir.op_graph import OpGraph, job_content
from estimator.graph.memory.peak import PeakMemory
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.plan import Plan
from estimator.graph.partition.repeats import Repeats
from estimator.kernels.durations import columns_of
from estimator.machines.catalogue import load_profile, named_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.mesh import Mesh, batches_of, check_room, crossed, whole_group
from estimator.placement.placement import Placement, check_kinds, place
from estimator.placement.topology import Cluster
from estimator.timeline.pipelines.stage_plans import PipelineAnswer, pipeline_answer, stage_plans
from estimator.timeline.plan import (
    StepAnswer,
    StepPlan,
    answer_of,
    compiled_step,
    members_of,
    step_plan,
)
from estimator.timeline.rank.layer_collectives import layer_collectives_of, ranks_of_own
from estimator.timeline.rank.rules import StepShape
from estimator.workload.layouts import Layout
from estimator.workload.strategies import Strategy, check_count

# Compiled programs of some thousand (graph, machine, batch) and what their estimates share.
CACHE_BYTES = 512 << 20


class Engine:
    """Estimates steps, and keeps what they share: bounded in bytes, safe under threads.

    >>> from estimator.estimates.engine import Engine
    >>> Engine(cache_bytes=1 << 20).cache.limit_bytes
    1048576
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self.cache = Cache(cache_bytes)
        self.answers = RepeatedQuestions(self.cache)

    def place(
        self,
        allocation: str | Allocation | Placement | None,
        *,
        cluster: Cluster | None = None,
        profile: MachineProfile | None = None,
    ) -> Placement:
        """An allocation on its machines, unless it is placed already; see `placement.place`."""
        if isinstance(allocation, Placement):
            return allocation
        if allocation is None:
            raise AllocationError("a step runs on an allocation; write one such as 1x2:local")
        check_kinds(cluster=cluster, profile=profile)
        return place(allocation, cluster=cluster, profile=profile, cache=self.cache)

    def estimate(self, request: EstimateRequest) -> Estimate:
        """Predict the step that a request asks about.

        A global batch is split evenly whatever the devices, as far as it can be; `balance` splits
        it by speed.
        """
        step = self._laid_out(request)
        if request.calibration is not None and request.layout.pp == 1:
            # Calibration asks for the step under other coefficients.
            step = step._replace(plan=self._plan(step, UNCALIBRATED))
        coefficients = self._coefficients(step)
        if request.neighbours:
            ratio, *_ = link_ratios(self.senders([request, *request.neighbours]))
            step = step._replace(mesh=replace(step.mesh, link_ratio=ratio), plan=None)
        if request.layout.pp > 1:
            answer = self._pipelined(step, coefficients)
            stage = _answered(answer.plan, step, answer.answer, answer.memory, answer.used_ratio)
            return replace(stage, model=step.graph.name, pipeline=answer.step)
        plan = self._plan(step, coefficients)
        return _answered(plan, step, answer_of(plan), *plan.memory())

    def _coefficients(self, step: _LaidOutStep) -> Coefficients:
        """What calibration has learnt of a step."""
        request = step.request
        if request.calibration is None:
            return UNCALIBRATED
        trial = TrialEngine(self, request, step)
        (coefficients,) = request.calibration.coefficients_for(
            [step.question(trial.content.fingerprint)], [step.mesh.placement.allocation], trial
        )
        return coefficients

    def senders(self, jobs: Sequence[EstimateRequest | Traffic]) -> list[Sender]:
        """What jobs send over links between nodes; the first one's cluster is that of all.

        Without one the n-th nodes of all jobs are the same. Raises AllocationError where jobs want
        more devices of a node than it has, WorkloadError where clusters differ, and what `estimate`
        raises.
        """
        requests = [job for job in jobs if isinstance(job, EstimateRequest)]
        cluster, profile = requests[0].cluster, requests[0].profile
        if any(request.cluster != cluster for request in requests):
            raise WorkloadError("jobs that share links are of one cluster; give all the same one")
        senders, placements = [], []
        for job in jobs:
            if isinstance(job, Traffic):
                placement = self.place(job.allocation, cluster=cluster, profile=profile)
                rate = whole_group(placement).bytes_per_s
                timing = partial(_traffic_timing, job.bytes_per_s / rate)
            else:
                step = self._laid_out(job)
                placement = step.mesh.placement
                rate = whole_group(placement).bytes_per_s
                timing = partial(self._timing, step, self._coefficients(step))
            placements.append(placement)
            senders.append(Sender(crossed(placement), rate, timing))
        check_room(placements)
        return senders

    def _timing(
        self, step: _LaidOutStep, coefficients: Coefficients, ratio: float
    ) -> tuple[float, float]:
        """(seconds of sending, seconds of the step) by the share of its links; see `Sender`."""
        mesh = replace(step.mesh, link_ratio=ratio)
        answer, _, sends_s = self._parts(step._replace(mesh=mesh, plan=None), coefficients)
        return sends_s, float(answer.parts.total_s)

    def _pipelined(self, step: _LaidOutStep, coefficients: Coefficients) -> PipelineAnswer:
        """The step of ranks that hold stages; raises StrategyError, WorkloadError, ProfileError."""
        mesh, layout = step.mesh, step.request.layout
        parts = step.graph, mesh, step.batches, step.shape, self.cache
        stages = stage_plans(*parts, coefficients)
        pipeline = mesh.pp, mesh.micro_batches
        return pipeline_answer(layout.schedule, *pipeline, stages)

    def _parts(
        self, step: _LaidOutStep, coefficients: Coefficients
    ) -> tuple[StepAnswer, StepPlan, float]:
        """The parts of a step, the plan that they are of, and seconds of all reductions in it."""
        if step.request.layout.pp > 1:
            answer, plan, *_ = self._pipelined(step, coefficients)
        else:
            plan = self._plan(step, coefficients)
            answer = answer_of(plan)
        return answer, plan, plan.alone_s(answer.slowest)

    def split(self, graph: OpGraph, layout: Layout, plan: Plan | None = None) -> OpGraph:
        """The part of a graph that one rank of a layout runs; worked out once.

        Without a `plan` the one that the graph was traced with, else one found by rule. Raises
        StrategyError.
        """
        if not layout.divides_layers:
            return graph
        key = layout.of_layers, plan

        def repeats() -> Repeats | None:
            columns = columns_of(graph, self.cache)
            return self.cache.get("repeats", (graph,), lambda: Repeats.of(graph, columns))

        def made() -> OpGraph:
            return split_by_layout(graph, layout, plan, repeats)

        return self.cache.get("split", (graph,), made, *key)

    def content(self, graph: OpGraph) -> JobContent:
        """What a graph computes; worked out once."""
        return self.cache.get("content", (graph,), lambda: job_content(graph))

    def prepare(
        self,
        graph: OpGraph,
        machines: Iterable[str | MachineProfile],
        *,
        batch_per_gpu: int | Sequence[int] | None = None,
        accumulation_steps: int = 1,
        strategy: str | Strategy = "ddp",
    ) -> None:
        """Compile a graph ahead for machines and batches; see `estimator.prepare`."""
        request = EstimateRequest.of(
            graph, accumulation_steps=accumulation_steps, strategy=strategy
        )
        shape = StepShape(request.strategy, request.accumulation_steps)
        given = batch_per_gpu if isinstance(batch_per_gpu, Sequence) else (batch_per_gpu,)
        batches = [graph.batch if batch is None else check_count(batch) for batch in given]
        for machine in machines:
            profile = machine if isinstance(machine, MachineProfile) else load_profile(machine)
            for batch, several in product(batches, (False, True)):
                table, _ = compiled_step(graph, shape, batch, several, self.cache)
                for busy in range(1, len(profile.devices) + 1 if several else 2):
                    table.kind(profile, busy, 1.0)

    def _laid_out(self, request: EstimateRequest) -> _LaidOutStep:
        """The ranks, batches and part of the graph of a request; raises what `estimate` does."""
        layout, steps, strategy = request.layout, request.accumulation_steps, request.strategy
        placement = self.place(request.allocation, cluster=request.cluster, profile=request.profile)
        mesh = Mesh.laid_out(placement, layout, strategy, micro_batches=steps)
        given = request.batch_per_gpu, request.global_batch
        batches = batches_of(request.graph.batch, mesh, *given, steps, strict=request.strict)
        collectives, graph = None, request.graph
        of_all = placement.ranks > 1 and ranks_of_own(graph, self.cache) is not None
        if layout.divides_layers:
            graph = self.split(graph, layout, request.tp_plan)
        if layout.divides_layers or of_all:
            collectives = layer_collectives_of(mesh, self.cache, strategy, of_all=of_all)
        shape = StepShape(strategy, steps, request.loader, collectives)
        return _LaidOutStep(request, mesh, shape, batches, graph)

    def _plan(self, step: _LaidOutStep, coefficients: Coefficients) -> StepPlan:
        """That of a step without stages; raises ProfileError, WorkloadError."""
        if step.plan is not None:
            return step.plan.under(coefficients)
        parts = step.graph, step.mesh.placement, step.batches, step.shape, self.cache
        members = members_of(*parts, merging=step.mesh.replicas > 1)
        return step_plan(step.mesh, members, self.cache, coefficients)


def _traffic_timing(own: float, ratio: float) -> tuple[float, float]:
    return own / ratio, 1.0


_MOST_ANSWERS = 1 << 12
_COUNTS = (int, type(None))


class _KeptAnswer(NamedTuple):
    """An answer with what it was made of: machines by name, and what calibration had learnt."""

    graph: OpGraph
    machines: tuple[tuple[str, MachineProfile], ...]
    calibration: object
    state: object
    answer: Estimate


class RepeatedQuestions:
    """Answers by the words of their questions, as a scheduler asks the same ones every round.

    An answer holds until the file of one of its machines changes, its calibration learns, or
    `cache` lets go of anything: compiled programs are not kept alive from here.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._dropped = cache, 0
        self._kept: dict[Hashable, _KeptAnswer] = {}

    def key(
        self, graph: object, allocation: object, *counts: object, words: Sequence[object]
    ) -> Hashable | None:
        """The key of a question; None where it cannot be told from others by its words."""
        for count in counts:
            # 8 == 8.0 == True, of which one is a number of samples.
            if type(count) not in _COUNTS:
                return None
        # Allocations of many groups take long to compare.
        where = allocation if type(allocation) is str else id(allocation)
        return id(graph), where, counts, words

    def find(
        self, key: Hashable | None, graph: object, allocation: object, calibration: object
    ) -> Estimate | None:
        """The answer to a question that was asked before, if nothing has changed since."""
        if key is None:
            return None
        if self._cache.dropped != self._dropped:
            self._kept.clear()
            self._dropped = self._cache.dropped
            return None
        try:
            kept = self._kept.get(key)
        except TypeError:
            return None
        if kept is None or kept.graph is not graph or kept.calibration is not calibration:
            return None
        if type(allocation) is not str and kept.answer.allocation is not allocation:
            return None
        if calibration is not None and kept.state is not getattr(calibration, "state", self):
            return None
        for name, profile in kept.machines:
            if named_profile(name) is not profile:
                return None
        return kept.answer

    def keep(
        self, key: Hashable | None, graph: OpGraph, calibration: object, answer: Estimate
    ) -> Estimate:
        """The answer, kept unless nothing tells when its cluster or calibration changes."""
        state = None if calibration is None else getattr(calibration, "state", None)
        placement = answer.plan.placement
        untold = placement.cluster is not None or (calibration is not None and state is None)
        if key is None or untold:
            return answer
        if len(self._kept) >= _MOST_ANSWERS:
            self._kept.clear()
        kept = _KeptAnswer(graph, placement.machines, calibration, state, answer)
        try:  # noqa: SIM105 - entering a context takes a hundredth of an estimate
            self._kept[key] = kept
        except TypeError:
            pass
        return answer


class _LaidOutStep(NamedTuple):
    """What a request comes to before the network and calibration are added.

    `graph` is the part that one rank runs of the request's, `plan` the step's where it is known.
    """

    request: EstimateRequest
    mesh: Mesh
    shape: StepShape
    batches: tuple[int, ...] | None
    graph: OpGraph
    plan: StepPlan | None = None

    def is_of(self, allocation: str | Allocation, batch_per_gpu: int | None) -> bool:
        """Whether it is what the calibration of its own request asks for: without a loader."""
        return (
            allocation is self.mesh.placement.allocation
            and self.request.loader is None
            and (set(self.batches) == {batch_per_gpu} if self.batches else batch_per_gpu is None)
        )

    def question(self, job: str) -> StepQuestion:
        """What calibration is asked."""
        placement, request = self.mesh.placement, self.request
        groups = placement.allocation.groups
        batches = self.batches or (0,) * len(groups)
        ranks, kinds = placement.ranks, placement.kinds
        samples = sum([g.ranks * batch for g, batch in zip(groups, batches, strict=True)])
        return StepQuestion(
            job=job,
            workload=request.graph.workload,
            machines="+".join(sorted({kind.profile.name for kind in kinds})),
            ranks=ranks,
            nodes=placement.nodes,
            most_on_node=max([kind.ranks_per_node for kind in kinds]),
            batch=samples / ranks,
            accumulation_steps=request.accumulation_steps,
            strategy=request.strategy,
            layout=request.layout.apart_from_data,
        )


class TrialEngine(NamedTuple):
    """Predicts steps of a request's graph under trial coefficients; see `coefficients.Engine`.

    `step` is the request's own.
    """

    engine: Engine
    request: EstimateRequest
    step: _LaidOutStep | None = None

    @property
    def content(self) -> JobContent:
        return self.engine.content(self.request.graph)

    @property
    def workload(self) -> str:
        return self.request.graph.workload

    @property
    def slowed_hosts(self) -> frozenset[str]:
        cluster = Cluster.given(self.request.cluster)
        nodes = {} if cluster is None else cluster.nodes
        return frozenset(name for name, node in nodes.items() if node.slowdown_ratio != 1.0)

    @property
    def key(self) -> tuple[Hashable, ...]:
        # Calls that were timed on a machine count as measured there, whatever computes the same.
        request = self.request
        timings = id(request.graph.timings) if request.graph.timings else 0
        machines = id(request.cluster), id(request.profile)
        return self.content.fingerprint, timings, *machines, request.tp_plan

    def predict(
        self,
        allocation: str | Allocation,
        *,
        batch_per_gpu: int | None,
        accumulation_steps: int,
        strategy: str | Strategy,
        coefficients: Coefficients,
        layout: str | None = None,
    ) -> PredictedStep:
        """One step, all groups of the allocation with the same batch."""
        request, step = self.request, self.step
        if step is None or not step.is_of(allocation, batch_per_gpu):
            step = self.engine._laid_out(
                EstimateRequest.of(
                    request.graph,
                    allocation,
                    batch_per_gpu=batch_per_gpu,
                    accumulation_steps=accumulation_steps,
                    strategy=strategy,
                    layout=layout,
                    tp_plan=None if layout is None else request.tp_plan,
                    cluster=request.cluster,
                    profile=request.profile,
                )
            )
        answer, plan, sync_s = self.engine._parts(step, coefficients)
        parts = answer.parts
        lane_s = parts.forward_s + parts.backward_s + parts.host_exposed_s + parts.copies_exposed_s
        # A bubble is as long as the passes that are waited for.
        lane_s += parts.layer_communication_s + parts.idle_s
        return PredictedStep(
            question=step.question(self.content.fingerprint),
            compute_s=lane_s / accumulation_steps + parts.update_s,
            sync_s=sync_s,
            step_s=parts.total_s,
            relative_error=engine_error(plan, answer, None),
        )


@lru_cache(maxsize=1 << 10)
def _text(layout: Layout) -> str:
    return str(layout)


def _answered(
    plan: StepPlan,
    step: _LaidOutStep,
    answer: StepAnswer,
    memory: PeakMemory,
    used_ratio: float,
) -> Estimate:
    parts, slowest, _ = answer
    request, mesh, batches = step.request, step.mesh, step.batches
    graph, step_s = plan.members.table.graph, parts.total_s
    even = batches[0] if batches and batches.count(batches[0]) == len(batches) else None
    global_batch = request.global_batch
    if global_batch is None and batches is not None:
        global_batch = mesh.global_batch(batches)
    samples_per_s = global_batch / step_s if global_batch is not None else None
    tokens = graph.tokens_per_sample
    return Estimate(
        model=graph.name,
        allocation=mesh.placement.allocation,
        ranks=mesh.placement.ranks,
        batch_per_gpu=even,
        batches=batches,
        global_batch=global_batch,
        accumulation_steps=request.accumulation_steps,
        strategy=plan.members.table.strategy_text,
        precision=graph.precision,
        optimizer=graph.optimizer,
        step_time_s=step_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
        peak_memory_bytes=memory.total_bytes,
        memory=memory,
        fits=FITS[fits_code(used_ratio, graph.knows_activations)],
        breakdown=parts,
        op_time_in_grid_ratio=slowest.program.in_grid_ratio,
        plan=plan,
        answer=answer,
        layout=None if request.layout.is_data_parallel else _text(request.layout),
        request=request,
    )


# What is asked without an engine of one's own is asked of this one.
DEFAULT = Engine()
