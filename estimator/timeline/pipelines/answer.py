"""Answer the step of a pipeline by the plans of its stages: its parts, memory, and who ends last.

A stage's plan is that of one micro-batch on the ranks that hold it, with the communication and the
update of a whole step. Its passes are played by the schedule; what follows the last of a rank's
(gradients that are still reduced, the update) comes after. The parts are those of the rank that
ends last; what it waits for the others in is `idle_s`, what it waits for transfers is exposed
communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from estimator.graph.memory import PeakMemory
from estimator.graph.stages import Stage
from estimator.timeline.overlaps import NO_OVERLAP
from estimator.timeline.pipelines.periods import last_ends_s
from estimator.timeline.pipelines.steps import StageCosts, pipeline_tasks
from estimator.timeline.plan import StepAnswer, StepPlan, answer_of
from estimator.timeline.ranks import LaneCosts, RankKind, at_peak_s
from estimator.timeline.simulation import simulate
from estimator.timeline.spans import LANES, Label, SpanColumns, Timeline
from estimator.timeline.step import Breakdown
from estimator.workload.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage, the plan of one micro-batch on its ranks, and what passing on its output takes.

    `passes_s` are (forward, gradients of inputs, those of weights) of the slowest of its ranks in a
    run of micro-batches; each holds `kept_bytes` between its passes. Adding its gradients to those
    of the ones before takes `added_s`.
    """

    stage: Stage
    plan: StepPlan
    passes_s: tuple[float, float, float]
    sent_s: float
    returned_s: float
    tied_s: float
    kept_bytes: int
    added_s: float


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
        tasks, last = pipeline_tasks(
            self.schedule, count, self.micro_batches, self.costs, labelled=True
        )
        played = simulate(tasks.tasks, NO_OVERLAP)
        ends = played.end_s[:, 0]
        rows = [
            (number, *self._where(task.lane), float(played.start_s[number, 0]), float(task.cost_s))
            for number, task in enumerate(tasks.tasks)
        ]
        each, compute = self.ranks // count, LANES.index("compute")
        labels = [task.label for task in tasks.tasks] + [Label("gradients and update")]
        for rank, (number, tail_s) in enumerate(zip(last, self.tails_s, strict=True)):
            rows.append((len(labels) - 1, rank * each, compute, float(ends[number]), tail_s))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return Timeline(
            step_time_s=float(max(ends[last] + np.array(self.tails_s))),
            spans=SpanColumns(
                labels=labels,
                label=columns[0],
                rank=columns[1],
                lane=columns[2],
                start_s=columns[3],
                duration_s=columns[4],
            ),
            ranks_like=tuple(rank // each * each for rank in range(self.ranks)),
        )

    def _where(self, lane: str) -> tuple[int, int]:
        """(the first rank of those that work or send there, the number of their lane)."""
        words = lane.split()
        sends = words[0] == "from"
        each = self.ranks // len(self.tails_s)
        return int(words[2 if sends else 1]) * each, LANES.index("network" if sends else "compute")


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
    distinct = {id(each.plan): each.plan for each in stages}
    answered = {key: answer_of(plan) for key, plan in distinct.items()}
    peaks = {key: plan.memory()[0] for key, plan in distinct.items()}
    answers = [answered[id(each.plan)] for each in stages]
    passes = schedule.passes_of(micro_batches)
    costs = [_costs(each) for each in stages]
    held = [schedule.stages_of(rank, ranks) for rank in range(ranks)]
    tails = [_tail_s(answers, stages, own, passes) for own in held]
    ends = last_ends_s(schedule, ranks, micro_batches, costs)
    step_s, last = max(
        (end + tail, rank) for rank, (end, tail) in enumerate(zip(ends, tails, strict=True))
    )
    still = [cost._replace(sent_s=0.0, returned_s=0.0) for cost in costs]
    unsent_s = last_ends_s(schedule, ranks, micro_batches, still)[last] + tails[last]
    parts = _parts(
        [answers[number].parts for number in held[last]],
        sum(costs[n].forward_s + costs[n].input_s + costs[n].weight_s for n in held[last]),
        passes,
        added_s=(passes - 1) * sum(costs[number].added_s for number in held[last]),
        tied_s=sum(stages[number].tied_s for number in held[last]),
        moved_s=max(step_s - unsent_s, 0.0),
        step_s=step_s,
    )
    longest = max(held[last], key=lambda number: answers[number].slowest.lane.lane_s)
    own = [answers[n].slowest.lane for n in held[last]]
    at_peak = _at_peak_s(held, passes / micro_batches, stages)
    slowest = _with_lanes(answers[longest].slowest, own, passes, at_peak)
    each_peak = [peaks[id(each.plan)] for each in stages]
    memories = [
        _memory(schedule, ranks, rank, micro_batches, stages, each_peak) for rank in range(ranks)
    ]
    fullest, (memory, used_ratio) = max(enumerate(memories), key=lambda each: each[1][1])
    widest = max(held[fullest], key=lambda number: each_peak[number].activations_bytes)
    found = StepAnswer(parts, slowest, answers[longest].communication)
    first = stages[0].plan
    step = PipelinedStep(
        schedule=schedule,
        micro_batches=micro_batches,
        costs=costs,
        tails_s=tails,
        points=[each.stage.point for each in stages[1 : schedule.model_stages(ranks)]],
        ranks=first.mesh.placement.ranks,
        is_ddp=first.members.table.shape.strategy.kind == "ddp"
        and first.mesh.parallelism.replicas > 1,
        fullest=stages[widest].plan,
    )
    return PipelineAnswer(found, stages[longest].plan, memory, used_ratio, step)


def _costs(stage: StagePlan) -> StageCosts:
    ratio = stage.plan.coefficients.compute_ratio
    forward_s, input_s, weight_s = (ratio * seconds for seconds in stage.passes_s)
    return StageCosts(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        sent_s=stage.sent_s,
        returned_s=stage.returned_s,
        added_s=ratio * stage.added_s,
    )


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
    each: Sequence[Breakdown],
    passes_s: float,
    passes: int,
    *,
    added_s: float,
    tied_s: float,
    moved_s: float,
    step_s: float,
) -> Breakdown:
    """The parts of the rank that ends last: its stages' passes, each as often as they compute.

    What its passes take beyond kernels and the collectives among them is the host's.
    """
    total = {
        item.name: float(sum(getattr(parts, item.name) for parts in each))
        for item in fields(Breakdown)
    }
    for name in ("forward_s", "backward_s", "layer_communication_s", "straggler_s"):
        total[name] *= passes
    kernels_s = total["forward_s"] + total["backward_s"] + total["layer_communication_s"]
    total["host_exposed_s"] = max(passes_s * passes - kernels_s, 0.0)
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
    work: list[tuple[RankKind, float]] = []
    devices: list[tuple[RankKind, float]] = []
    for rank, numbers in enumerate(held):
        for number in numbers:
            own = _ranks_of(stages[number].plan, rank, len(held))
            work += [(kind, ranks * passes_ratio) for kind, ranks in own]
        devices += own
    return at_peak_s(work, devices)


def _ranks_of(plan: StepPlan, rank: int, count: int) -> list[tuple[RankKind, int]]:
    """How many ranks of each kind are one pipeline rank of so many."""
    each = plan.placement.ranks // count
    found, first = [], 0
    for group, number in zip(plan.placement.node_groups, plan.members.kind_of, strict=True):
        end = first + group.ranks
        own = min(end, (rank + 1) * each) - max(first, rank * each)
        if own > 0:
            found.append((plan.kinds[number], own))
        first = end
    return found


def _with_lanes(
    longest: RankKind, own: Sequence[LaneCosts], passes: int, at_peak: tuple[float, float]
) -> RankKind:
    """The longest stage's rank with the lanes of all its stages and passes together.

    What it computes in one micro-batch at its peak is the mean over ranks, `at_peak`.
    """
    sums = {
        name: passes * sum(getattr(lane, name) for lane in own)
        for name in LaneCosts._fields
        if name.endswith("_s")
    }
    sums |= zip(("model_peak_s", "hardware_peak_s"), at_peak, strict=True)
    variance = sum(lane.kernels_variance_s2 for lane in own) * passes**2
    return replace(longest, lane=longest.lane._replace(**sums, kernels_variance_s2=variance))


def _memory(
    schedule: Schedule,
    ranks: int,
    rank: int,
    micro_batches: int,
    stages: Sequence[StagePlan],
    each_peak: Sequence[PeakMemory],
) -> tuple[PeakMemory, float]:
    """(what a rank needs at most, its share of the device): all its stages, and what waits.

    The peak of a stage counts one micro-batch; the others hold what their backward pass will read.
    """
    own = schedule.stages_of(rank, ranks)
    kept = {n: stages[n].kept_bytes for n in own}
    waiting = most_held_bytes(schedule, ranks, rank, micro_batches, kept) - max(kept.values())
    peaks = [each_peak[number] for number in own]
    highest = max(peak.activations_bytes for peak in peaks)
    sums = {
        item.name: sum(getattr(peak, item.name) for peak in peaks)
        for item in fields(PeakMemory)
        if item.name != "peak_op"
    }
    # Beside one stage at its peak the others are not at theirs.
    beside = waiting - (sums["activations_bytes"] - highest)
    sums["activations_bytes"] += beside
    sums["total_bytes"] += beside
    found = PeakMemory(**sums, peak_op=None)
    device = min(kind.device.usable_bytes for n in own for kind in stages[n].plan.kinds)
    return found, found.total_bytes / device


def most_held_bytes(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int, kept: Mapping[int, int]
) -> int:
    """The most that micro-batches hold on a rank, whose stages keep `kept` bytes for each.

    That is p − s times as much at stage s of 1F1B, and all micro-batches in GPipe. What a gradient
    of weights still needs counts.
    """
    own = schedule.stages_of(rank, ranks)
    return max(
        sum(count * kept[stage] for count, stage in zip(counts, own, strict=True))
        for counts in _held_at_once(schedule, ranks, rank, micro_batches)
    )


@lru_cache(maxsize=4096)
def _held_at_once(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each of a rank's stages that are held at once, where none holds more."""
    held = dict.fromkeys(schedule.stages_of(rank, ranks), 0)
    seen: set[tuple[int, ...]] = set()
    for action in schedule.orders(ranks, micro_batches)[rank]:
        if action.kind == "forward":
            held[action.stage] += 1
            seen.add(tuple(held.values()))
        elif action.kind in ("backward", "weight"):
            held[action.stage] -= 1
    return tuple(
        one
        for one in seen
        if not any(
            other != one and all(more >= count for more, count in zip(other, one, strict=True))
            for other in seen
        )
    )
