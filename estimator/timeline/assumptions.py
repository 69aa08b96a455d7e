"""Say in sentences what a planned step takes for granted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from estimator.kernels.datasheet_model import assumed_of
from estimator.kernels.durations import summary_assumptions
from estimator.kernels.host import described
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import is_known_by_datasheet
from estimator.placement.placement import NodeKind
from estimator.placement.topology import network_of
from estimator.timeline.plan import StepPlan
from estimator.timeline.rank.layer_collectives import ranks_of_own
from estimator.timeline.rank.program import StepProgram
from estimator.timeline.rank.rules import Rules
from estimator.timeline.rank.updates import recipe_assumptions
from estimator.units import format_bytes, format_ratio, format_split
from estimator.workload.optimizers import RULES
from estimator.workload.recipe import peak_dtype

_MOST_NAMED_OPS = 5
_FLASH_CAPABILITY = 8.0
# The least share of the time that is printed as more than nothing.
_NAMED_RATIO = 5e-4


def plan_assumptions(plan: StepPlan, ranks: int) -> tuple[str, ...]:
    """What a step on some ranks takes for granted of its machines, network and graph."""
    assumptions: list[str] = []
    programs = [kind.program for kind in dict.fromkeys(plan.kinds)]
    for number, program in enumerate(programs):
        is_first = number == 0
        rows = plan.rules.cache.get(
            "assumptions",
            (program,),
            partial(_class_assumptions, program, plan.rules, is_first),
            is_first,
        )
        assumptions.extend(row for row in rows if row not in assumptions)
    own = ranks_of_own(programs[0].bound.graph, plan.rules.cache)
    if own is not None and own != ranks:
        assumptions.append(
            f"the model calls collectives itself, among {own} ranks as it was traced: trace it "
            f"with --ranks {ranks}, trace_model(..., ranks={ranks})"
        )
    profiles = [program.profile for program in programs]
    if ranks > 1 and not any(profile.overlaps for profile in profiles):
        assumptions.append("communication is assumed to overlap compute perfectly: not probed")
    group = plan.group
    if group.nodes > 1:
        assumptions.extend(dict.fromkeys(_unmeasured_collectives(plan)))
        cards = [_card_assumption(kind) for kind in plan.placement.kinds]
        assumptions.extend(dict.fromkeys(text for text in cards if text is not None))
    if group.nodes > 1 and len({profile.name for profile in profiles}) > 1:
        assumptions.append(f"unlike machines are joined at {group.link or 'the slower network'}")
    return tuple(assumptions)


def _unmeasured_collectives(plan: StepPlan) -> Iterator[str]:
    """What reduces gradients between nodes and was not measured over such a group."""
    for what, group, source in plan.reductions:
        if group.nodes > 1 and source != "measured":
            yield (
                f"{what} over {group.ranks} ranks on {group.nodes} nodes was not measured: "
                f"{plan.rules.unmeasured}"
            )


def split_assumptions(batches: tuple[int, ...], padding: int) -> tuple[str, ...]:
    """What unlike batches per rank, one for each group of devices, ask of the training script.

    `padding` is how many samples the global batch lacks for all ranks of a group to have as many.
    """
    if len(set(batches)) == 1 and not padding:
        return ()
    shares = f"{format_split(batches)} per device, group by group"
    if padding:
        shares = f"at most {format_split(batches)} per device, {padding} fewer in all"
    return (
        f"batches differ ({shares}): DDP averages gradients over ranks, so multiply each rank's "
        "mean loss by its batch over the mean batch of all ranks",
    )


def _class_assumptions(program: StepProgram, rules: Rules[Any], graph_too: bool) -> list[str]:
    graph, machine = program.bound.graph, program.profile
    assumptions = list(graph.assumptions) if graph_too else []
    durations = program.durations
    total = float(durations.device_s.sum()) or 1.0
    assumed: dict[str, float] = defaultdict(float)
    for index, op in enumerate(graph.ops):
        if durations.sources[index] == "assumed":
            assumed[op.call.target] += float(durations.device_s[index])
    worst = sorted(assumed.items(), key=lambda item: -item[1])
    for target, seconds in worst[:_MOST_NAMED_OPS]:
        assumptions.append(
            f"{target} has no cost formula or probed relative: charged as a copy of its bytes, "
            f"{format_ratio(seconds / total)} of the kernel time"
        )
    if rest := worst[_MOST_NAMED_OPS:]:
        share = sum(seconds for _, seconds in rest) / total
        assumptions.append(
            f"{len(rest)} more operators likewise, {format_ratio(share)} of the kernel time"
        )
    device = machine.devices[0]
    if device.kind == "cpu":
        cores = len(device.cores)
        plural = "s" if cores > 1 else ""
        assumptions.append(f"a device is {cores} CPU core{plural}, pinned, with as many threads")
        assumptions.append(_memory_assumption(machine))
    if machine.interference is not None and machine.interference.matters:
        assumptions.append(
            f"'{machine.name}' was disturbed when it was probed ({machine.interference}): "
            "intervals are wider for it; 'estimator probe' on a quiet machine mends that"
        )
    if machine.device_faults:
        assumptions.append(f"when '{machine.name}' was probed, {'; '.join(machine.device_faults)}")
    if machine.is_cut:
        assumptions.append(_cut_assumption(program))
    if is_known_by_datasheet(machine):
        assumptions.extend(_datasheet_assumptions(program))
    assumptions.extend(_attention_assumptions(program))
    assumptions.extend(_waiting_assumptions(program))
    host_s = machine.host.dtensor_forward_s if machine.host else 0.0
    if not host_s and any(op.enters_dtensor for op in graph.ops):
        assumptions.append(
            "what DTensor does on the host is not counted, some 0.4 ms for each divided module and "
            f"micro-batch (torch 2.13 on a Xeon): '{machine.name}' was not probed for it"
        )
    if summed := program.exchanged.summed_again:
        times = RULES[graph.optimizer].gradient_reads
        assumptions.append(
            f"DTensor sums gradients of {summed} vectors {times} times: for each operator of "
            f"{graph.optimizer} that reads them"
        )
    assumptions.extend(recipe_assumptions(graph, rules.assumptions(), machine.name))
    if graph.is_summary:
        assumptions.extend(summary_assumptions(program.bound, machine, program.strategy))
    if graph.timings:
        assumptions.extend(_timing_assumptions(program))
    assumptions.extend(f"not probed: {part}" for part in machine.missing)
    return assumptions


def _timing_assumptions(program: StepProgram) -> Iterator[str]:
    """What operators that were timed one by one stand for here."""
    graph, machine, batch = program.bound.graph, program.profile.name, program.bound.batch
    if not graph.timings_on(machine):
        yield (
            f"operators were timed on '{graph.timed_on}': on '{machine}' they take what its own "
            "profile says"
        )
    elif batch != graph.batch:
        yield f"ops were timed at batch {graph.batch} and scaled to batch {batch}"


def _waiting_assumptions(program: StepProgram) -> Iterator[str]:
    """Where the host cannot run ahead, if that costs anything."""
    awaited, lanes = program.durations.awaited, program.lanes
    if not awaited:
        return
    lost_s = lanes.end_s - replace(lanes, awaited=()).end_s
    if lost_s < _NAMED_RATIO * lanes.end_s:
        return
    times = f"{len(awaited)} times" if len(awaited) > 1 else "once"
    yield (
        f"the host waits for the device {times} in each micro-batch (most often for "
        f"{described(program.bound.graph, awaited)}), which is "
        f"{format_ratio(lost_s / lanes.end_s)} of its time"
    )


def _cut_assumption(program: StepProgram) -> str:
    """What a probe that timed few kernels leaves to those of the same family."""
    machine, durations = program.profile, program.durations
    timed = {kernel.target for kernel in machine.kernels}
    others_s = sum(
        seconds
        for op, source, seconds in zip(
            program.bound.graph.ops, durations.sources, durations.device_s.tolist(), strict=True
        )
        if source == "fitted" and op.call.target not in timed
    )
    share = others_s / (float(durations.device_s.sum()) or 1.0)
    return (
        f"the probe of '{machine.name}' was cut short: it timed "
        f"{format_ratio(machine.kernels_timed_ratio or 0.0)} of its kernel calls, and operators "
        f"that are {format_ratio(share)} of the kernel time are priced by others of their family; "
        "'estimator probe' with more --budget mends that"
    )


def _datasheet_assumptions(program: StepProgram) -> list[str]:
    machine, precision = program.profile, program.bound.graph.precision
    missing = [
        f"'{machine.name}' is known by its datasheet only: kernels by the performance model fitted "
        "to published ones, host and optimizer costs as usual on servers with GPUs; "
        "'estimator probe' on one measures them"
    ]
    if assumed := assumed_of(machine.devices[0]):
        missing.append(
            f"'{machine.name}' does not say all that the kernel model asks of a chip: "
            f"{', '.join(assumed)} assumed"
        )
    dtype = peak_dtype(precision)
    if dtype not in machine.devices[0].peak_flops_per_s:
        missing.append(
            f"the datasheet of '{machine.name}' gives no peak in {dtype}: {precision} computes at "
            "the rate of float32"
        )
    return missing


def _attention_assumptions(program: StepProgram) -> list[str]:
    """Flash attention asks NVIDIA's chips for capability 8.0 (torch's sdp_utils.cpp)."""
    machine = program.profile
    capability = machine.devices[0].compute_capability
    if capability is None or capability >= _FLASH_CAPABILITY:
        return []
    if not any("flash_attention" in op.call.target for op in program.bound.graph.ops):
        return []
    return [
        f"'{machine.name}' (compute capability {capability}) has no flash attention: the "
        "memory-efficient kernel that it runs instead is costed alike"
    ]


def _card_assumption(kind: NodeKind) -> str | None:
    network = network_of(kind.profile)
    if network is None or network.cards == 1:
        return None
    some = (
        "1 rank on a node" if kind.ranks_per_node == 1 else f"{kind.ranks_per_node} ranks on a node"
    )
    verb = "uses" if kind.ranks_per_node == 1 else "use"
    return (
        f"{some} of '{kind.profile.name}' {verb} {network.cards_near(kind.ranks_per_node)} of its "
        f"{network.cards} network cards, the nearest ones, as NCCL does"
    )


def _memory_assumption(machine: MachineProfile) -> str:
    text = "the process keeps freed memory (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ high)"
    touch = machine.memory.first_touch_s_per_byte if machine.memory else 0.0
    if not touch:
        return text
    per_gib = touch * 2**30
    return (
        f"{text}; glibc's defaults return memory to the system and pay {per_gib:.2g} s for each "
        f"{format_bytes(2**30)} touched again"
    )
