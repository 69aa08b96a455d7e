"""The plan of a probe of several nodes: what all ranks measure together, step by step.

A step is a function of the group, the plan and the seconds it may take. All ranks run it; findings
are kept on the home rank, which also decides what follows from them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any

from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.placement.mesh import carrier_of
from estimator.probe.cluster.findings import (
    ClusterFindings,
    World,
    shape_words,
    shapes,
    slow_links,
    slow_nodes,
)
from estimator.probe.cluster.group import Group
from estimator.probe.devices.backend import open_backend
from estimator.probe.devices.jobs import canary_s
from estimator.probe.links.collectives import (
    OTHER_SIZES_BYTES,
    SIZES_BYTES,
    TimedPart,
    shape_costs,
    time_collectives,
)
from estimator.probe.links.copies import MESSAGE_SIZES_BYTES, typical_link
from estimator.probe.links.network import (
    CELL_SIZES_BYTES,
    grouped,
    network_kind,
    pair_link,
    pair_matrix,
    time_pairs,
)
from estimator.probe.links.overlap import overlap_cost, time_overlaps
from estimator.units import MIB

# A step of so many planned seconds also starts and ends; that much of them is for measuring.
MEASURING_RATIO = 0.85
# A step that has less time than this is not begun.
LEAST_STEP_S = 0.3
# Above this many nodes every pair is measured only if asked for.
FEW_NODES = 16


@dataclass(slots=True, kw_only=True)
class ProbePlan:
    """What was found, whole on the home rank alone, and the names of the steps that are `left`.

    The home rank calls `keep` whenever there is something new, and `say` with sentences for people.
    """

    findings: ClusterFindings = field(default_factory=lambda: ClusterFindings(at=""))
    keep: Callable[[], None] = lambda: None
    left: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda sentence: None

    def miss(self, *sentences: str) -> None:
        """Keep and say what was not measured, and why."""
        self.findings.missing += sentences
        for sentence in sentences:
            self.say(f"not measured: {sentence}")

    def remark(self, *sentences: str) -> None:
        """Keep and say what else is worth knowing."""
        self.findings.remarks += sentences
        for sentence in sentences:
            self.say(sentence)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, its share of the time, and how to measure it.

    `measure` returns why something of it could not be measured, if so; what the home rank says
    counts.
    """

    name: str
    share: float
    measure: Callable[[Group, ProbePlan, float], str | None]


def steps_of(world: World, *, all_pairs: bool | None = None) -> list[Step]:
    """In order of importance; only what these nodes and devices have.

    `all_pairs` None measures every pair of nodes where they are few.
    """
    several = len(world.nodes) > 1
    # Of two ranks the only group is everything, whose collectives are timed already.
    few, two_ranks = len(world.nodes) <= FEW_NODES, len(world.members) == 2
    pairs = several and (few if all_pairs is None else all_pairs)
    wanted = (
        (several, Step("speed of each node", 0.02, node_speeds)),
        (several, Step("links between nodes", 0.16, links_between_nodes)),
        (True, Step("all-reduce over everything", 0.26, all_reduce_everywhere)),
        (True, Step("all-reduce over smaller groups", 0.16, all_reduce_in_groups)),
        (pairs, Step("every pair of nodes", 0.09, every_pair)),
        (True, Step("other collectives", 0.08, other_collectives)),
        (several and not two_ranks, Step("sharding in groups", 0.10, sharding_in_groups)),
        (several, Step("communication beside compute", 0.11, beside_compute)),
    )
    return [step for is_wanted, step in wanted if is_wanted]


def run_steps(group: Group, plan: ProbePlan, *, seconds: float, all_pairs: bool | None) -> None:
    """Measure step after step, each within its share of the time that is left."""
    ends_at = time.monotonic() + seconds
    steps = steps_of(group.world, all_pairs=all_pairs)
    for number, step in enumerate(steps):
        rest = steps[number:]
        plan.left = [one.name for one in rest]
        left_s = group.agreed(ends_at - time.monotonic())
        if left_s < LEAST_STEP_S:
            plan.miss(f"{', '.join(plan.left)}: the budget was over")
            return
        planned_s = left_s * step.share / sum(one.share for one in rest)
        if reason := step.measure(group, plan, planned_s):
            plan.miss(f"{step.name}: {reason}")


# Longer than the period in which Linux rations CPU time, 0.1 s by default.
_CANARY_TURNS, _CANARY_TURN_S = 3, 0.2


def node_speeds(group: Group, plan: ProbePlan, _seconds: float) -> None:
    """How long one device of each node takes for the same matmul."""
    reports = group.measured(group.world.firsts, _time_canary)
    taken_s = {host: mine[0] for host, mine in zip(group.world.nodes, reports, strict=False)}
    plan.remark(*slow_nodes(taken_s))


def _time_canary(*, kind: DeviceKind, **_more: Any) -> list[float]:
    """On average and not in the middle: a node whose CPU time is rationed computes at full speed
    most of the time, and not at all in between.
    """
    backend = open_backend(kind)
    means_s = []
    for _ in range(_CANARY_TURNS):
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + _CANARY_TURN_S:
            canary_s(backend)
            count += 1
        means_s.append((time.perf_counter() - began) / count)
    # Other programs only ever add to it.
    return [min(means_s)]


_PAIRS_PER_CLASS = 3
# A pair this much slower than the middle one of its reach is timed once more, for this share of the
# time again: most such pairs were only disturbed.
_SLOW_RATIO = 0.9
_AGAIN_SHARE = 0.3

PairMessages = dict[tuple[str, str], Mapping[str, Any]]


def links_between_nodes(group: Group, plan: ProbePlan, seconds: float) -> None:
    """A few pairs of nodes of one rack, and of unlike ones; the middle pair stands for all."""
    world = group.world
    chosen: list[tuple[str, str]] = []
    for locality in ("rack", "cluster"):
        near = [pair for pair in permutations(world.nodes, 2) if world.locality(*pair) == locality]
        # Spread over the nodes.
        chosen += near[:: max(1, len(near) // _PAIRS_PER_CLASS)][:_PAIRS_PER_CLASS]
    pairs = _node_pairs(group, chosen, MESSAGE_SIZES_BYTES, seconds)
    kind = network_kind(group.kind)
    for locality in ("rack", "cluster"):
        links = [
            pair_link(kind, locality, message, note=f"{source} to {target}")
            for (source, target), message in pairs.items()
            if world.locality(source, target) == locality
        ]
        if links:
            plan.findings.network.append(typical_link(links))


def every_pair(group: Group, plan: ProbePlan, seconds: float) -> str:
    """Every node to every other, by a cheaper measurement."""
    hosts = tuple(group.world.nodes)
    # By distance in the list, so that a budget that ends early leaves no node out.
    chosen = [
        (hosts[i], hosts[(i + step) % len(hosts)])
        for step in range(1, len(hosts))
        for i in range(len(hosts))
    ]
    pairs = _node_pairs(group, chosen, CELL_SIZES_BYTES, seconds)
    slow = [tuple(pair) for pair in group.agreed(_slow_pairs(group.world, pairs))]
    if slow:
        again = _node_pairs(group, slow, CELL_SIZES_BYTES, _AGAIN_SHARE * seconds)
        for pair, message in again.items():
            # What else runs on a machine makes messages slower, never faster.
            pairs[pair] = max(pairs[pair], message, key=_rate_bytes_per_s)
    if not pairs:
        return "the budget was over"
    plan.findings.pairs = pair_matrix(hosts, pairs, at=plan.findings.at)
    plan.remark(*slow_links(plan.findings.pairs))
    missing = len(chosen) - len(pairs)
    return f"{missing} of {len(chosen)}: the budget was over" if missing else ""


def _node_pairs(
    group: Group, chosen: Sequence[tuple[str, str]], sizes_bytes: Sequence[int], seconds: float
) -> PairMessages:
    """Time messages between the first ranks of pairs of nodes, apart where they may meet."""
    world = group.world
    hosts = [host for host in world.nodes if any(host in pair for pair in chosen)]
    place = {host: position for position, host in enumerate(hosts)}
    links = {(place[a], place[b]): world.links_between(a, b) for a, b in chosen}
    ranks = [world.nodes[host][0] for host in hosts]
    timed = measure_pairs(group, ranks, grouped(links, links), sizes_bytes, seconds)
    return {(hosts[source], hosts[target]): message for (source, target), message in timed.items()}


def measure_pairs(
    group: Group,
    ranks: Sequence[int],
    pairs: Sequence[Sequence[tuple[int, int]]],
    sizes_bytes: Sequence[int],
    seconds: float,
) -> dict[tuple[int, int], Mapping[str, Any]]:
    """What the senders of `pairs` of positions in `ranks` report, by (from, to)."""
    budget_s = MEASURING_RATIO * seconds
    measure = partial(time_pairs, pairs, sizes_bytes=sizes_bytes, budget_s=budget_s)
    reports = group.measured(ranks, measure)
    return {
        (message["from"], message["to"]): message for messages in reports for message in messages
    }


def _slow_pairs(world: World, timed: PairMessages) -> list[tuple[str, str]]:
    """The pairs that look slow among those of the same locality."""
    rates = {pair: _rate_bytes_per_s(message) for pair, message in timed.items()}
    usual: dict[str, float] = {}
    for locality in ("rack", "cluster"):
        near = [rate for pair, rate in rates.items() if world.locality(*pair) == locality]
        usual[locality] = statistics.median(near or [0.0])
    return [
        pair for pair, rate in rates.items() if rate < _SLOW_RATIO * usual[world.locality(*pair)]
    ]


def _rate_bytes_per_s(message: Mapping[str, Any]) -> float:
    return pair_link("tcp", "rack", message).bandwidth_bytes_per_s


# The first groups are measured well: each may take one in so many of what is left.
_GROUPS_AT_MOST = 3
_LEAST_GROUP_RATIO = 0.1


def all_reduce_everywhere(group: Group, plan: ProbePlan, seconds: float) -> None:
    """The group that data-parallel training uses, also with two all-reduces at once."""
    parts = [TimedPart("calls", "all_reduce", 2.0), TimedPart("pairs", "all_reduce")]
    measure_collectives(group, plan, next(shapes(group.world)), parts, seconds, SIZES_BYTES)


def all_reduce_in_groups(group: Group, plan: ProbePlan, seconds: float) -> str:
    """Smaller groups, as far as the time goes."""
    groups = list(shapes(group.world))[1:]
    planned_end = time.monotonic() + seconds
    for number, ranks in enumerate(groups):
        left_s = group.agreed(planned_end - time.monotonic())
        if left_s < _LEAST_GROUP_RATIO * seconds:
            words = ", ".join(shape_words(group.world, ranks) for ranks in groups[number:])
            return f"{words}: the budget was over"
        own_s = left_s / min(_GROUPS_AT_MOST, len(groups) - number)
        measure_collectives(group, plan, ranks, _calls_of("all_reduce"), own_s, SIZES_BYTES)
    return ""


def other_collectives(group: Group, plan: ProbePlan, seconds: float) -> None:
    """What sharded training and parameter servers use, over everything."""
    parts = _calls_of(*_sharding_ops(group.kind), "broadcast")
    measure_collectives(group, plan, next(shapes(group.world)), parts, seconds, OTHER_SIZES_BYTES)


def sharding_in_groups(group: Group, plan: ProbePlan, seconds: float) -> None:
    """What FSDP does where several groups hold a replica each: across two nodes, in a node."""
    world = group.world
    ops = _sharding_ops(group.kind)
    # Calls inside nodes are short, and as they share the cores of a node, uneven.
    measure_collectives(
        group, plan, world.firsts[:2], _calls_of(*ops), 0.4 * seconds, OTHER_SIZES_BYTES
    )
    per_node = world.devices_per_node
    if per_node > 1:
        # Groups inside nodes, in all nodes at the same time, as HSDP shards a model.
        groups = [positions[:per_node] for positions in world.nodes.values()]
        ranks = [position for positions in groups for position in positions]
        parts = _calls_of(*ops, "all_reduce")
        measure_collectives(
            group, plan, ranks, parts, 0.6 * seconds, OTHER_SIZES_BYTES, groups=groups
        )


def measure_collectives(
    group: Group,
    plan: ProbePlan,
    ranks: Sequence[int],
    parts: Sequence[TimedPart],
    seconds: float,
    sizes_bytes: Sequence[int],
    *,
    groups: Sequence[Sequence[int]] = (),
) -> None:
    """Time collectives over `ranks`, or over several `groups` of them at the same time."""
    world = group.world
    handles = {tuple(each): group.handle(each) for each in groups or [ranks]}
    own = next((handle for each, handle in handles.items() if group.rank in each), None)
    budget_s = MEASURING_RATIO * seconds
    measure = partial(time_collectives, parts, own=own, sizes_bytes=sizes_bytes, budget_s=budget_s)
    reports = group.measured(ranks, measure)
    if not reports:
        return
    costs, notes = shape_costs(reports, world.backend, world.hosts(ranks))
    if groups:
        size = len(groups[0])
        costs = [replace(cost, group_size=size, nodes=1, hosts=cost.hosts[:size]) for cost in costs]
    plan.findings.collectives += costs
    plan.miss(*notes)
    plan.keep()


def _calls_of(*ops: CollectiveName) -> list[TimedPart]:
    """Each of these collectives call by call, the first for twice as long."""
    return [TimedPart("calls", op, 1.0 if number else 2.0) for number, op in enumerate(ops)]


def _sharding_ops(kind: DeviceKind) -> list[CollectiveName]:
    """The collectives of FSDP, but those that another one is run for."""
    ops: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter")
    return [op for op in ops if carrier_of(op, kind) == op]


_OVERLAP_SIZES_BYTES = (25 * MIB, 8 * MIB, 4 * MIB, 1 * MIB)
_COMPUTE_RATIO = 2.0
# Rounds of overlap.time_overlaps with its warm-up, each of two computes and three collectives,
# beside two kinds of compute.
_OVERLAP_FACTOR = 2 * 4.5 * (2 * _COMPUTE_RATIO + 3)


def beside_compute(group: Group, plan: ProbePlan, seconds: float) -> str:
    """Two nodes first, then everything, at sizes that the links carry in time."""
    world = group.world
    groups = list(dict.fromkeys((world.firsts[:2], next(shapes(world)))))
    planned_s = MEASURING_RATIO * seconds / len(groups)
    for ranks in groups:
        cases = group.agreed(_overlap_cases(plan, world.hosts(ranks), planned_s))
        if not cases:
            words = shape_words(world, ranks)
            return f"{words}: the links are too slow to do it in time; use a larger --budget"
        measure_overlaps(group, plan, ranks, cases, _COMPUTE_RATIO, planned_s)
    return ""


def measure_overlaps(
    group: Group,
    plan: ProbePlan,
    ranks: Sequence[int],
    cases: Sequence[tuple[int, int]],
    compute_ratio: float,
    budget_s: float,
) -> None:
    measure = partial(time_overlaps, cases, compute_ratio=compute_ratio, budget_s=budget_s)
    world = group.world
    nodes = len(set(world.hosts(ranks)))
    plan.findings.overlaps += [
        overlap_cost(messages, world.backend, nodes=nodes)
        for messages in zip(*group.measured(ranks, measure), strict=True)
    ]
    plan.keep()


def _overlap_cases(
    plan: ProbePlan, hosts: Sequence[str], planned_s: float
) -> list[tuple[int, int]]:
    """(bytes, all-reduces in flight) that fit: the largest size, then two of it, then 1 MiB."""
    costs = [cost for cost in plan.findings.collectives if cost.op == "all_reduce"]
    cost = next((cost for cost in costs if cost.hosts == hosts), None)
    if cost is None:
        return []

    def seconds(size: int) -> float:
        return _OVERLAP_FACTOR * (cost.latency_s + size / cost.bandwidth_bytes_per_s)

    largest = next((size for size in _OVERLAP_SIZES_BYTES if seconds(size) <= planned_s), MIB)
    cases: list[tuple[int, int]] = []
    left_s = planned_s
    for size, flights in dict.fromkeys(((largest, 1), (largest, 2), (MIB, 1))):
        taken_s = seconds(size * flights)
        if taken_s <= left_s:
            cases.append((size, flights))
            left_s -= taken_s
    return cases
