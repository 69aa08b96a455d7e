"""Cut a graph into the stages of a pipeline, plan each on its ranks, and answer the step.

A stage's plan is that of one micro-batch on the ranks that hold it, with the communication and the
update of a whole step. Its passes follow the schedule; what follows the last of a rank's
(gradients that are still reduced, the update) comes after. The parts are those of the rank that
ends last; what it waits for the others in is `idle_s`, what it waits for transfers is exposed
communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.elementwise import Array, Indices
from estimator.errors import StrategyError
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.memory.peak import PeakMemory
from estimator.graph.partition.stages import (
    Blocks,
    Stage,
    held_between_passes,
    pass_seconds,
    stage_graphs,
    weight_shares,
)
from estimator.kernels.durations import bound_of, columns_of, costed, op_durations, structure_of
from estimator.machines.profile import CollectiveName
from estimator.placement.mesh import Mesh, ProcessGroup
from estimator.placement.placement import NodeKind, Placement
from estimator.timeline.collectives.costs import CollectiveCosts, SizedCollective
from estimator.timeline.collectives.overlap import NO_OVERLAP
from estimator.timeline.pipelines.simulation import (
    StageCosts,
    contended,
    last_ends_s,
    most_held_bytes,
    pipeline_tasks,
    step_items,
)
from estimator.timeline.plan import (
    Breakdown,
    Members,
    StepAnswer,
    StepPlan,
    answer_of,
    members_of,
    slowest_kind,
    step_plan,
)
from estimator.timeline.rank.layer_collectives import LayerCollectives
from estimator.timeline.rank.program import LaneCosts, RankClass, at_peak_s
from estimator.timeline.rank.rules import StepShape, without_cost
from estimator.timeline.rank.updates import accumulate_s, trained_of
from estimator.timeline.simulator.simulation import simulate
from estimator.timeline.simulator.tasks import LANES, Label, SpanColumns, Timeline
from estimator.workload.layouts import layers_of
from estimator.workload.schedules import Schedule

# What two ranks gather is twice what each sends the other, in one round: what sending it takes.
_SEND: CollectiveName = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage, the plan of one micro-batch on its ranks, and what passing on its output takes.

    `beside` are the costs of the slowest of its ranks while all of its nodes compute, `apart` the
    same while no other stage does, which shortens its update by `relief_s`. Each micro-batch holds
    `kept_bytes` between its passes.
    """

    stage: Stage
    plan: StepPlan
    beside: StageCosts
    apart: StageCosts
    relief_s: float
    tied_s: float
    kept_bytes: int

    def under(self, coefficients: Coefficients) -> StagePlan:
        """The same under other coefficients."""
        compute, sending = coefficients.compute_ratio, coefficients.communication_ratio
        return replace(
            self,
            plan=self.plan.under(coefficients),
            beside=self.beside.times(compute, sending),
            apart=self.apart.times(compute, sending),
            relief_s=self.relief_s * coefficients.update_ratio,
            tied_s=self.tied_s * sending,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedStep:
    """The passes and transfers of a pipeline's step, and what its ranks do after their last pass.

    `costs` are those of the stages, `points` the modules at which they begin, `ranks` how many
    ranks the mesh has; `is_ddp` where DDP reduces gradients among some of them. `fullest` is, of
    the stages of the fullest rank, the one with most activations.
    """

    schedule: Schedule
    micro_batches: int
    costs: Sequence[StageCosts]
    tails_s: Sequence[float]
    points: Sequence[str]
    ranks: int
    is_ddp: bool
    fullest: StepPlan

    def assumptions(self) -> Iterator[str]:
        """What an answer takes for granted of stages, in sentences."""
        yield (
            f"stages begin at {', '.join(self.points)}; what they send slows no compute; a stage's "
            "host is ahead of its device within a run of micro-batches"
        )
        if self.schedule.is_two_way:
            yield (
                "ranks hold two copies of the model, whose gradients pairs of ranks add up after "
                "their last pass; a forward beside a backward pass takes as long as one after the "
                "other"
            )
        if self.is_ddp and not self.schedule.backward_is_whole:
            yield (
                "gradients are reduced after a backward pass in two parts as after a whole one; "
                "torch's DDP reduces none of them (pytorch/pytorch, issue 144530), its FSDP does"
            )

    def timeline(self) -> Timeline:
        """Passes on the lane of compute, what is sent on that of the network of who sends it."""
        count = len(self.tails_s)
        asked = self.schedule, count, self.micro_batches
        tasks, last = pipeline_tasks(*asked, self.costs)
        simulated = simulate(tasks.tasks, NO_OVERLAP)
        starts_s, ends_s = simulated.start_s[:, 0], simulated.end_s[:, 0]
        per_stage, stages = self.ranks // count, self.schedule.model_stages(count)
        compute, network = LANES.index("compute"), LANES.index("network")
        labels, rows = list[Label](), list[tuple[int, int, int, float, float]]()
        for number, item in enumerate(step_items(*asked)):
            (kind, stage, micro_batch), rank, to_rank, _ = item
            name = f"{kind} of stage {stage % stages}, micro-batch {micro_batch}"
            labels.append(Label(name, phase=kind))
            # The first rank of those that work or send there.
            place = number, rank * per_stage, compute if to_rank is None else network
            rows.append((*place, float(starts_s[number]), float(tasks.tasks[number].cost_s)))
        labels.append(Label("gradients and update"))
        for rank, (number, tail_s) in enumerate(zip(last, self.tails_s, strict=True)):
            rows.append((len(labels) - 1, rank * per_stage, compute, float(ends_s[number]), tail_s))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return Timeline(
            step_time_s=float(max(ends_s[last] + np.array(self.tails_s))),
            spans=SpanColumns(
                labels=labels,
                label=columns[0],
                rank=columns[1],
                lane=columns[2],
                start_s=columns[3],
                duration_s=columns[4],
            ),
            ranks_like=tuple(rank // per_stage * per_stage for rank in range(self.ranks)),
        )


class PipelineAnswer(NamedTuple):
    """A pipeline's step, the plan of the stage that takes longest, and the fullest rank's memory.

    `used_ratio` is the share of its device's memory.
    """

    answer: StepAnswer
    plan: StepPlan
    memory: PeakMemory
    used_ratio: float
    step: PipelinedStep


def pipeline_answer(
    schedule: Schedule, ranks: int, micro_batches: int, stages: Sequence[StagePlan]
) -> PipelineAnswer:
    """The step of `ranks` pipeline ranks; raises StrategyError, ProfileError."""
    # Stages that compute the same on equal ranks have one plan.
    distinct = {id(stage.plan): stage.plan for stage in stages}
    answered = {key: answer_of(plan) for key, plan in distinct.items()}
    peaks = {key: plan.memory()[0] for key, plan in distinct.items()}
    answers = [answered[id(stage.plan)] for stage in stages]
    passes = schedule.passes_of(micro_batches)
    held = [schedule.stages_of(rank, ranks) for rank in range(ranks)]
    beside_s = [_tail_s(answers, stages, own, passes) for own in held]
    relief_s = [sum(stages[number].relief_s for number in own) for own in held]
    beside, apart = [stage.beside for stage in stages], [stage.apart for stage in stages]
    costs, tails = contended(schedule, ranks, micro_batches, beside, apart, beside_s, relief_s)
    ends = last_ends_s(schedule, ranks, micro_batches, costs)
    step_s, last = max(
        (end + tail, rank) for rank, (end, tail) in enumerate(zip(ends, tails, strict=True))
    )
    still = [cost._replace(sent_s=0.0, returned_s=0.0) for cost in costs]
    unsent_s = last_ends_s(schedule, ranks, micro_batches, still)[last] + tails[last]
    parts = _parts(
        [answers[number].parts for number in held[last]],
        sum(costs[n].both_s for n in held[last]),
        passes,
        relief_s=sum(stages[n].beside.both_s - costs[n].both_s for n in held[last]),
        update_relief_s=beside_s[last] - tails[last],
        added_s=(passes - 1) * sum(costs[number].added_s for number in held[last]),
        tied_s=sum(stages[number].tied_s for number in held[last]),
        moved_s=max(step_s - unsent_s, 0.0),
        step_s=step_s,
    )
    longest = max(held[last], key=lambda number: answers[number].slowest.lane.lane_s)
    own = [answers[n].slowest.lane for n in held[last]]
    at_peak = _at_peak_s(held, passes / micro_batches, stages)
    slowest = _with_lanes(answers[longest].slowest, own, passes, at_peak)
    each_peak = [peaks[id(stage.plan)] for stage in stages]
    memories = [
        _memory(schedule, ranks, rank, micro_batches, stages, each_peak) for rank in range(ranks)
    ]
    fullest, (memory, used_ratio) = max(enumerate(memories), key=lambda pair: pair[1][1])
    widest = max(held[fullest], key=lambda number: each_peak[number].activations_bytes)
    found = StepAnswer(parts, slowest, answers[longest].communication)
    first = stages[0].plan
    step = PipelinedStep(
        schedule=schedule,
        micro_batches=micro_batches,
        costs=costs,
        tails_s=tails,
        points=[stage.stage.point for stage in stages[1 : schedule.model_stages(ranks)]],
        ranks=first.mesh.placement.ranks,
        is_ddp=first.members.table.shape.strategy.keeps.state == "whole"
        and first.mesh.replicas > 1,
        fullest=stages[widest].plan,
    )
    return PipelineAnswer(found, stages[longest].plan, memory, used_ratio, step)


def _tail_s(
    answers: Sequence[StepAnswer],
    stages: Sequence[StagePlan],
    own: Sequence[int],
    passes: int,
) -> float:
    """What a rank does after its last pass, and the spread between ranks."""
    parts = [answers[number].parts for number in own]
    after_s = sum(p.communication_exposed_s + p.copies_exposed_s + p.update_s for p in parts)
    spread_s = sum(p.straggler_s for p in parts) * passes
    return float(after_s + spread_s + sum(stages[number].tied_s for number in own))


def _parts(
    stage_parts: Sequence[Breakdown[Any]],
    passes_s: float,
    passes: int,
    *,
    relief_s: float,
    update_relief_s: float,
    added_s: float,
    tied_s: float,
    moved_s: float,
    step_s: float,
) -> Breakdown[Any]:
    """The parts of the rank that ends last: its stages' passes, each as often as they compute.

    What its passes take beyond kernels and the collectives among them is the host's. Kernels of a
    pass take `relief_s` less than beside neighbours that are always busy, the update
    `update_relief_s`.
    """
    total = {
        item.name: float(sum(getattr(parts, item.name) for parts in stage_parts))
        for item in fields(Breakdown)
    }
    left = max(1.0 - relief_s / (total["forward_s"] + total["backward_s"] or 1.0), 0.0)
    for name in ("forward_s", "backward_s", "layer_communication_s", "straggler_s"):
        total[name] *= passes * (left if name in ("forward_s", "backward_s") else 1.0)
    kernels_s = total["forward_s"] + total["backward_s"] + total["layer_communication_s"]
    total["host_exposed_s"] = max(passes_s * passes - kernels_s, 0.0)
    total["update_s"] -= update_relief_s
    total["copies_exposed_s"] += added_s
    total["communication_exposed_s"] += tied_s + moved_s
    busy_s = sum(total.values())
    return Breakdown(**{**total, "idle_s": max(step_s - busy_s, 0.0)})


def _at_peak_s(
    held: Sequence[Sequence[int]], passes_ratio: float, stages: Sequence[StagePlan]
) -> tuple[float, float]:
    """Seconds of a micro-batch's FLOPs at the peak of all devices; see `ranks.at_peak_s`.

    A stage computes this ratio of a step's micro-batches.
    """
    work: list[tuple[RankClass, float]] = []
    devices: list[tuple[RankClass, float]] = []
    for rank, numbers in enumerate(held):
        for number in numbers:
            plan = stages[number].plan
            within = _held_by(plan.placement, plan.members, rank, len(held))
            own = [(plan.kinds[kind], ranks) for kind, ranks in within]
            work += [(kind, ranks * passes_ratio) for kind, ranks in own]
        devices += own
    return at_peak_s(work, devices)


def _held_by(
    placement: Placement, members: Members, rank: int, count: int
) -> Iterator[tuple[int, int]]:
    """(number of a kind, how many of its ranks) for each group of nodes in one pipeline rank."""
    per_stage, first = placement.ranks // count, 0
    for node_group, number in zip(placement.node_groups, members.kind_of, strict=True):
        end = first + node_group.ranks
        own = min(end, (rank + 1) * per_stage) - max(first, rank * per_stage)
        if own > 0:
            yield number, own
        first = end


def _with_lanes(
    longest: RankClass, own: Sequence[LaneCosts], passes: int, at_peak: tuple[float, float]
) -> RankClass:
    """The longest stage's rank with the lanes of all its stages and passes together.

    What it computes in one micro-batch at its peak is the mean over ranks, `at_peak`.
    """
    sums = {
        name: passes * sum(getattr(lane, name) for lane in own)
        for name in LaneCosts._fields
        if name.endswith("_s")
    }
    sums |= zip(("model_peak_s", "hardware_peak_s"), at_peak, strict=True)
    # The same kernels run on the same device in all of them: they err together.
    error_s = passes * sum(math.sqrt(lane.kernels_variance_s2) for lane in own)
    return replace(longest, lane=longest.lane._replace(**sums, kernels_variance_s2=error_s**2))


def _memory(
    schedule: Schedule,
    ranks: int,
    rank: int,
    micro_batches: int,
    stages: Sequence[StagePlan],
    each_peak: Sequence[PeakMemory],
) -> tuple[PeakMemory, float]:
    """(what a rank needs at most, its share of the device): all its stages, and what waits.

    The peak of a stage counts one micro-batch; the others hold what their backward pass will read,
    and in the update none is left.
    """
    own = schedule.stages_of(rank, ranks)
    kept = {n: stages[n].kept_bytes for n in own}
    waiting = most_held_bytes(schedule, ranks, rank, micro_batches, kept) - max(kept.values())
    peaks = [each_peak[number] for number in own]
    highest = max(peak.activations_bytes for peak in peaks)
    names = [item.name for item in fields(PeakMemory) if item.name != "peak_op"]
    sums = {name: sum(getattr(peak, name) for peak in peaks) for name in names}
    # Beside one stage at its peak the others are not at theirs.
    beside = waiting - (sums["activations_bytes"] - highest)
    sums["activations_bytes"] += beside
    plans = [stages[number].plan for number in own]
    # The most that each stage's fullest rank holds before the update.
    held = [max(k.program.memory.passes.at(plan.shards) for k in plan.kinds) for plan in plans]
    # All that a stage holds at most while it updates.
    names = [name for name in names if name not in ("total_bytes", "activations_bytes")]
    updating = [min(p.total_bytes, sum(getattr(p, name) for name in names)) for p in peaks]
    sums["total_bytes"] = max(sum(held) + beside, sum(updating))
    found = PeakMemory(**sums, peak_op=None)
    device = min(kind.device.usable_bytes for n in own for kind in stages[n].plan.kinds)
    return found, found.total_bytes / device


def stage_plans(
    graph: OpGraph,
    mesh: Mesh,
    batches: tuple[int, ...] | None,
    shape: StepShape,
    cache: Cache,
    coefficients: Coefficients = UNCALIBRATED,
) -> tuple[StagePlan, ...]:
    """The stages of the graph of one rank, in the order of the model, for one micro-batch each.

    Where ranks hold two copies of the model, those of the second follow. They begin where the
    layout's `cut` says, by default where the slowest one takes least. Raises StrategyError,
    WorkloadError, ProfileError.
    """
    if graph.is_summary:
        raise StrategyError(
            f"{graph.name} is known by a summary, which cannot be cut into stages; trace it"
        )
    strategy = shape.strategy
    if not strategy.goes_with("pp") and strategy.keeps.gradients == "shard":
        raise StrategyError(
            f"'{strategy}' exchanges shards for every micro-batch of a pipeline, which cannot be "
            "estimated; write fsdp:no_reshard, zero1, distributed-optimizer or ddp"
        )
    placement = mesh.placement
    one = shape._replace(accumulation_steps=1)
    axes = mesh.layout, mesh.dp_replicate, mesh.dp_shard, mesh.link_ratio
    compiled = cache.get(
        "stage plans",
        (graph, placement.cluster, *placement.kinds),
        lambda: _Planner(graph, mesh, batches, one, cache).plans(),
        *(placement.allocation, *axes, batches, one),
    )
    if coefficients is UNCALIBRATED:
        return compiled
    return tuple(stage.under(coefficients) for stage in compiled)


class _Planner(NamedTuple):
    """What the stages of a pipeline are planned from."""

    graph: OpGraph
    mesh: Mesh
    batches: tuple[int, ...] | None
    shape: StepShape
    cache: Cache

    @property
    def schedule(self) -> Schedule:
        return self.mesh.layout.schedule

    @property
    def batch(self) -> int | None:
        return self.batches[0] if self.batches else None

    def plans(self) -> tuple[StagePlan, ...]:
        mesh, cache = self.mesh, self.cache
        stages = self._stages()
        if self.schedule.is_two_way:
            stages += stages
        bound = bound_of(self.graph, self.batch, cache)
        held = Counter(name for stage in stages for name in stage.parameters)
        tied = frozenset(name for name, count in held.items() if count > 1)
        plans: dict[Members, StepPlan] = {}
        planned = []
        returned_s = 0.0
        busy = max(kind.ranks_per_node for kind in mesh.placement.kinds)
        for number, stage in enumerate(stages):
            parts = stage.graph, mesh.placement, self.batches, self.shape, cache
            members = members_of(*parts, merging=mesh.replicas > 1)
            own = _held(mesh, members, self.schedule.rank_of(number, mesh.pp))
            plan = plans.get(own)
            if plan is None:
                plan = plans[own] = step_plan(mesh, own, cache)
            slowest = slowest_kind(plan.kinds, plan.shards)
            sent_s = self._passing_s(number, stage.sent_bytes(bound))
            apart, each = self._apart(own, slowest) or (slowest, busy)
            beside, alone = (
                StageCosts(
                    *_passes_s(kind, stage, self.schedule.backward_is_whole, cache),
                    sent_s=sent_s,
                    returned_s=returned_s,
                    added_s=0.0 if mesh.layout.megatron else _added_s(kind, devices_busy, cache),
                )
                for kind, devices_busy in ((slowest, busy), (apart, each))
            )
            update_s, alone_s = (kind.update.update_s(plan.share) for kind in (slowest, apart))
            # Megatron-LM frees what it has sent (deallocate_pipeline_outputs).
            outputs = () if mesh.layout.megatron else stage.outputs
            planned.append(
                StagePlan(
                    stage=stage,
                    plan=plan,
                    beside=beside,
                    apart=alone,
                    relief_s=update_s - alone_s,
                    tied_s=self._tied_s(number, stages, tied),
                    kept_bytes=_kept_bytes(slowest.program.bound, outputs, cache),
                )
            )
            # What a stage sends on comes back as its gradient, over the same link.
            returned_s = sent_s
        return tuple(planned)

    def _apart(self, members: Members, kind: RankClass) -> tuple[RankClass, int] | None:
        """Ranks of a stage, and how many on a node, while others there wait; None: none does."""
        each = self.mesh.placement.ranks // self.mesh.pp
        for node in self.mesh.placement.kinds:
            if each < node.ranks_per_node and members.table[node] is kind:
                return members.table.kind(node.profile, each, node.slowdown_ratio), each
        return None

    def _stages(self) -> tuple[Stage, ...]:
        graph, mesh, cache, points = self.graph, self.mesh, self.cache, self.mesh.layout.cut
        if layers := layers_of(points):
            points = blocks_of(graph, cache).of_layers(layers)
        elif not points:
            points = default_points(graph, mesh, self.batch, self.shape.layer_collectives, cache)
        known = columns_of(graph, cache), blocks_of(graph, cache)
        return cache.get("stages", (graph,), lambda: stage_graphs(graph, points, *known), points)

    def _passing_s(self, number: int, size_bytes: int) -> float:
        """Seconds of passing on what a stage makes; 0 on the same rank and at the end."""
        one, other = (
            self.schedule.rank_of(number_of_stage, self.mesh.pp)
            for number_of_stage in (number, number + 1)
        )
        if not size_bytes or one == other:
            return 0.0
        group, node = _slowest_pair(self.mesh, one, other, self.cache)
        known = [_pair_s(self.mesh, one, other, _SEND, 2 * size_bytes, self.cache)]
        if group.nodes == 1:
            # Gloo's collectives go through threads of their own, what is sent from one rank to
            # another does not (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, send).
            own = (link for link in node.profile.links if link.kind == "loopback")
            known += [link.transfer_time_s(size_bytes) for link in own]
        elif self.schedule.name == "gpipe":
            # Of GPipe only one of the two sends at a time, which over TCP can be faster.
            known.append(float(group.latency_s + size_bytes / group.bytes_per_s))
        return min(known)

    def _tied_s(self, number: int, stages: Sequence[Stage], tied: frozenset[str]) -> float:
        """Seconds in which gradients of weights that ranks share are added up between them.

        `tied` are the names of all weights that several stages hold. What several of one rank hold
        counts for the first of these.
        """
        one, mesh, schedule = stages[number], self.mesh, self.schedule
        if tied.isdisjoint(one.parameters):
            return 0.0
        sizes = [parameter.spec.nbytes for parameter in one.graph.parameters]
        own = dict(zip(one.parameters, sizes, strict=True))
        rank, elsewhere = schedule.rank_of(number, mesh.pp), dict[int, set[str]]()
        for other, stage in enumerate(stages):
            where = schedule.rank_of(other, mesh.pp)
            if where != rank:
                elsewhere.setdefault(where, set()).update(own.keys() & stage.parameters)
            elif other < number:
                for name in own.keys() & stage.parameters:
                    del own[name]
        return sum(
            _pair_s(mesh, rank, where, "all_reduce", sum(own[name] for name in names), self.cache)
            for where, shared in elsewhere.items()
            if (names := shared & own.keys())
        )


def _kept_bytes(bound: BoundGraph, outputs: tuple[int, ...], cache: Cache) -> int:
    structure = structure_of(bound.graph, cache)
    return cache.get(
        "held between passes",
        (bound,),
        lambda: held_between_passes(bound, structure, outputs),
        outputs,
    )


def _added_s(kind: RankClass, devices_busy: int, cache: Cache) -> float:
    """Adding one micro-batch's gradients; Megatron-LM's products add them by themselves.

    Its `gradient_accumulation_fusion` is on by default.
    """
    program = kind.program
    trained = trained_of(program.bound, cache)
    added_s = accumulate_s(trained, program.profile, devices_busy, cache)
    return kind.slowdown_ratio * added_s


def _passes_s(
    kind: RankClass, stage: Stage, is_whole: bool, cache: Cache
) -> tuple[float, float, float]:
    """Passes in a run of micro-batches, whose host is ahead where it can be.

    Of a backward pass that `is_whole` nobody asks what of it is of gradients of weights.
    """

    def made() -> tuple[float, float, float]:
        lanes = replace(kind.program.lanes, count=3, lead_s=0.0)
        before, own = lanes.ends_s(0), lanes.ends_s(1)
        is_forward = structure_of(stage.graph, cache).columns.is_forward
        ended_s = float(own[is_forward.sum() - 1])
        backward_s, share = float(own[-1]) - ended_s, 0.0
        if not is_whole:
            spent = lanes.device_s + lanes.host_s
            shares = cache.get("weights", (stage.graph,), lambda: weight_shares(stage.graph))
            _, input_s, weight_s = pass_seconds(is_forward, shares, spent)
            share = weight_s / (input_s + weight_s or 1.0)
        return ended_s - float(before[-1]), backward_s * (1 - share), backward_s * share

    forward_s, input_s, weight_s = cache.get("passes", (kind.program,), made, is_whole)
    slow = kind.slowdown_ratio
    return slow * forward_s, slow * input_s, slow * weight_s


def default_points(
    graph: OpGraph,
    mesh: Mesh,
    batch: int | None,
    layer_collectives: LayerCollectives | None,
    cache: Cache,
) -> tuple[str, ...]:
    """The points by which the slowest stage takes least, on the first ranks' kind of node.

    Without --pipeline-model-parallel-layout Megatron-LM's stages have as many layers each.
    """
    node = mesh.placement.kinds[0]
    blocks = blocks_of(graph, cache)
    if mesh.layout.megatron and (even := blocks.even(mesh.layout.schedule.model_stages(mesh.pp))):
        return even
    bound = bound_of(graph, batch, cache)

    def spent() -> tuple[Array, ...]:
        profile = costed(node.profile, cache)
        durations = op_durations(bound, profile, devices_busy=node.ranks_per_node, cache=cache)
        device_s, host_s = durations.device_s, durations.host_s
        if layer_collectives:
            device_s = device_s + layer_collectives.seconds(bound, durations).each_s
        return (device_s + host_s,) if profile.kind == "cpu" else (device_s, host_s)

    def balanced() -> tuple[str, ...]:
        lanes = cache.get("op seconds", (bound, node.profile), spent, *details)
        return blocks.balanced(stages, *lanes)

    stages = mesh.layout.schedule.model_stages(mesh.pp)
    details = node.ranks_per_node, layer_collectives
    return cache.get("balanced", (bound, node.profile), balanced, *details, stages)


def blocks_of(graph: OpGraph, cache: Cache) -> Blocks:
    """The blocks of a graph, worked out once."""
    return cache.get("blocks", (graph,), lambda: Blocks.of(graph, columns_of(graph, cache)))


def _held(mesh: Mesh, members: Members, rank: int) -> Members:
    """Of the kinds of nodes, those on which the ranks of one pipeline rank are."""
    held = dict.fromkeys(n for n, _ in _held_by(mesh.placement, members, rank, mesh.pp))
    place = {number: place for place, number in enumerate(held)}
    # Nodes that the stage is not on stand for its first: nothing of them is asked.
    return members._replace(
        kinds=tuple(members.kinds[number] for number in held),
        kind_of=tuple(place.get(number, 0) for number in members.kind_of),
    )


def _pair_s(
    mesh: Mesh, one: int, other: int, op: CollectiveName, size_bytes: int, cache: Cache
) -> float:
    """Seconds of a collective of the ranks of two pipeline ranks, pair by pair and all at once."""
    if one == other:
        return 0.0
    placement = mesh.placement

    def seconds() -> float:
        group, node = _slowest_pair(mesh, one, other, cache)
        profile, cluster = node.profile, placement.cluster
        costs = CollectiveCosts((profile,), op, profile.kind, cluster, cache)
        model = costs.model(group)
        if model.unknown:
            raise without_cost(profile, op)
        sized = SizedCollective(costs.corrections, np.array([float(size_bytes)]))
        return float(sized.time_s(model))

    key = placement.allocation, mesh.link_ratio, mesh.pp, one, other, op, size_bytes
    return cache.get("pair seconds", (placement.cluster, *placement.kinds), seconds, *key)


def _slowest_pair(mesh: Mesh, one: int, other: int, cache: Cache) -> tuple[ProcessGroup, NodeKind]:
    """Of the pairs that two pipeline ranks consist of."""
    placement, count = mesh.placement, mesh.pp

    def slowest() -> tuple[ProcessGroup, NodeKind]:
        rows: Indices = np.arange(placement.ranks).reshape(count, -1)
        pairs = mesh.groups_along(rows[[one, other]].T)
        return min(pairs, key=lambda pair: pair[0].bytes_per_s)

    key = placement.allocation, mesh.link_ratio, count, one, other
    return cache.get("pair", (placement.cluster, *placement.kinds), slowest, *key)
