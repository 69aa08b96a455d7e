"""Offers of rented machines for a piece of training: cost, time, and which to choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from itertools import combinations
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from estimator.advise.layouts.search import best_layouts
from estimator.advise.rent.transient import Spot, pareto_front
from estimator.coefficients import Calibration
from estimator.errors import AllocationError, PriceError, WorkloadError, quoted
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.table import EstimateTable, estimate_many
from estimator.estimates.table.table import TableOptions
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.machines.prices import Price, PriceList
from estimator.placement.allocation import Allocation
from estimator.units import format_bytes
from estimator.workload.loader import Loader
from estimator.workload.strategies import MOST_BATCH, SEARCHED

# Micro-batches that a rank's share of a global batch is tried in, until one fits.
_MOST_MICRO_BATCHES = 256
_MOST_NODES = 4096
# What twice the batch must train faster by to be worth more samples a step.
_LEAST_GAIN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An allocation with its best strategy and layout: time and cost of the whole training.

    `layout` is None where all ranks are data-parallel, `batch_per_gpu` 0 where unlike devices share
    the batch by speed. `low_s` and `high_s` bound `duration_s`, `low_usd` and `high_usd` `usd`.
    With revocations times are expected ones, with a checkpoint after every `interval_s` of training
    (None: at its end alone, and within the warning of a revocation).
    """

    strategy: str
    layout: str | None
    checkpoint: str | None
    batch_per_gpu: int
    accumulation_steps: int
    global_batch: int
    fits: str
    step_time_s: float
    samples_per_s: float
    allocation: str
    ranks: int
    duration_s: float
    low_s: float
    high_s: float
    usd: float
    low_usd: float
    high_usd: float
    usd_per_hour: float
    interval_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return asdict(self)


def allocations_of(
    machines: Sequence[str], max_nodes: int, *, mixed: bool = False
) -> Iterator[str]:
    """One node with 1, 2, 4, … devices, then whole nodes up to `max_nodes`, of each machine.

    Node counts are powers of two and the last. With `mixed`, of every two machines as many nodes
    together too. Raises AllocationError.

    >>> list(allocations_of(["t4-g4dn"], 3))
    ['1x1:t4-g4dn', '1x2:t4-g4dn', '1x4:t4-g4dn', '2x4:t4-g4dn', '3x4:t4-g4dn']
    >>> list(allocations_of(["t4-g4dn", "a100-p4d"], 2, mixed=True))[-1]
    '1x4:t4-g4dn+1x8:a100-p4d'
    """
    if not 1 <= max_nodes <= _MOST_NODES:
        raise AllocationError(
            f"at most {max_nodes} nodes are asked for; give a number from 1 to {_MOST_NODES}"
        )
    for machine in dict.fromkeys(machines):
        all_devices = len(named_profile(machine).devices)
        powers = {1 << power for power in range(all_devices.bit_length())}
        for devices in sorted(powers | {all_devices}):
            yield f"1x{devices}:{machine}"
        nodes = {1 << power for power in range(1, max_nodes.bit_length())} | {max_nodes}
        for count in sorted(nodes - {1}):
            yield f"{count}x{all_devices}:{machine}"
    for one, other in combinations(dict.fromkeys(machines), 2) if mixed else ():
        for power in range((max_nodes // 2).bit_length()):
            of_each = (
                f"{1 << power}x{len(named_profile(name).devices)}:{name}" for name in (one, other)
            )
            yield "+".join(of_each)


def offers(
    graph: OpGraph,
    allocations: Sequence[str],
    *,
    samples: float | None = None,
    tokens: float | None = None,
    prices: PriceList | None = None,
    spot: bool | Spot = False,
    strategies: Sequence[str] = SEARCHED,
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    loader: str | Loader | None = None,
    calibration: Calibration | None = None,
    layouts_of: Sequence[OpGraph] = (),
    report: Callable[[str, float], None] | None = None,
    executor: Executor | None = None,
) -> Offered:
    """Each allocation that can train so much, with the fastest of the strategies that fit.

    With a `global_batch` each rank takes its share, in the fewest micro-batches that fit; else each
    has `batch_per_gpu` samples, and the global batch grows with the ranks. By default that is the
    traced batch, doubled while that trains faster and fits, or halved until it fits. All are fed by
    a `loader`. Prices are those of `spot` instances where it is true; a `Spot` counts revocations.
    `layouts_of` are graphs of the model, each with other activation checkpoints, by whose layouts
    ranks may share a `global_batch` too (`layouts.best_layouts`, which `executor` goes to).
    Raises PriceError where a machine has no price, WorkloadError where none is answered.
    """
    amount = _samples(graph, samples, tokens)
    known = prices or PriceList.load()
    parsed = [Allocation.parse(text) for text in allocations]
    for allocation in parsed:
        hourly_usd(known, allocation, spot=bool(spot))
    feed = None if loader is None else Loader.parse(loader)
    options: TableOptions = {"calibration": calibration, "loader": feed}
    found, refused = _by_strategy(graph, parsed, strategies, batch_per_gpu, global_batch, options)
    best = {number: table.row(row) for number, (_, table, row) in found.items()}
    for number, allocation in enumerate(parsed if layouts_of else ()):
        if report is not None:
            report(str(allocation), number / len(parsed))
        laid_out = _laid_out(layouts_of, allocation, global_batch, options, executor)
        held = best.get(number)
        if laid_out is not None and (held is None or _rate(laid_out) > _rate(held)):
            best[number] = laid_out
    left_out = {
        str(allocation): _why_not(refused.get(number), allocation, global_batch)
        for number, allocation in enumerate(parsed)
        if number not in best
    }
    if not best and all(math.isinf(answer.value) for answer in refused.values()):
        reason = next(iter(left_out.values()), "no allocation was given")
        raise WorkloadError(f"no allocation can train {graph.name}: {reason}")
    offered: list[Offer] = []
    for number in sorted(best):
        allocation = parsed[number]
        offer = _offer(allocation, best[number], amount, known, spot)
        if offer is not None:
            offered.append(offer)
        else:
            left_out[str(allocation)] = "no training ends with revocations as frequent"
    return Offered(offers=offered, left_out=left_out)


class Offered(NamedTuple):
    """What can be rented, and of each other allocation why not."""

    offers: list[Offer]
    left_out: dict[str, str]


def _rate(answer: Estimate) -> float:
    return answer.samples_per_s or 0.0


class _Row(NamedTuple):
    """A row of a table by its samples/s; of what cannot train by its peak (infinite: no answer)."""

    value: float
    table: EstimateTable
    row: int


def _why_not(refused: _Row | None, allocation: Allocation, global_batch: int | None) -> str:
    if refused is None:
        return f"its {allocation.ranks} ranks are more than a global batch of {global_batch}"
    if math.isinf(refused.value):
        return refused.table.errors[refused.row]
    answer = refused.table.row(refused.row)
    return (
        f"needs {format_bytes(answer.peak_memory_bytes)} a device under {answer.strategy}, "
        f"{format_bytes(-answer.spare_memory_bytes)} more than there is"
    )


def _by_strategy(
    graph: OpGraph,
    allocations: Sequence[Allocation],
    strategies: Sequence[str],
    batch_per_gpu: int | None,
    global_batch: int | None,
    options: TableOptions,
) -> tuple[dict[int, _Row], dict[int, _Row]]:
    """Of each allocation how it trains fastest, and the nearest miss of what does not fit."""
    best: dict[int, _Row] = {}
    refused: dict[int, _Row] = {}
    for strategy in strategies:
        for table, rows in _tables(
            graph, allocations, batch_per_gpu, global_batch, {**options, "strategy": strategy}
        ):
            for row, number in enumerate(rows):
                if not table.answered[row] or table.fits[row] == "no":
                    peak = table.peak_memory_bytes[row] if table.answered[row] else math.inf
                    missed = _Row(float(peak), table, row)
                    refused[number] = min(refused.get(number, missed), missed, key=itemgetter(0))
                    continue
                trained = _Row(float(table.samples_per_s[row]), table, row)
                best[number] = max(best.get(number, trained), trained, key=itemgetter(0))
    return best, refused


def _laid_out(
    graphs: Sequence[OpGraph],
    allocation: Allocation,
    global_batch: int | None,
    options: TableOptions,
    executor: Executor | None,
) -> Estimate | None:
    """The best layout of an allocation; None where none trains it, or devices are unlike."""
    if global_batch is None:
        raise WorkloadError("layouts share the samples of a step; give a global batch")
    if len(allocation.groups) > 1:
        return None
    try:
        ranking = best_layouts(
            graphs,
            allocation,
            global_batch=global_batch,
            calibration=options["calibration"],
            most=1,
            executor=executor,
        )
    except WorkloadError:
        return None
    answer = ranking.rows[0].answer
    if options["loader"] is not None:
        answer = DEFAULT.estimate(answer.request.changed(loader=options["loader"]))
    return answer


def _samples(graph: OpGraph, samples: float | None, tokens: float | None) -> float:
    if (samples is None) == (tokens is None):
        raise WorkloadError("say how much is trained: give samples or tokens, one of them")
    for name, amount in (("samples", samples), ("tokens", tokens)):
        if amount is not None and not 0 < amount < math.inf:
            raise WorkloadError(f"{amount:g} {name} are to be trained; give a number above 0")
    if samples is not None:
        return samples
    if not graph.tokens_per_sample or tokens is None:
        raise WorkloadError(f"{graph.name} has no tokens to count; give samples")
    return tokens / graph.tokens_per_sample


def _tables(
    graph: OpGraph,
    allocations: Sequence[Allocation],
    batch_per_gpu: int | None,
    global_batch: int | None,
    options: TableOptions,
) -> Iterator[tuple[EstimateTable, list[int]]]:
    """Tables of what is asked, with the numbers of their allocations."""
    if global_batch is None:
        yield from _by_batch(graph, allocations, batch_per_gpu, options)
        return
    most = {
        number: global_batch // one.ranks
        for number, one in enumerate(allocations)
        if global_batch >= one.ranks
    }
    if not most:
        raise WorkloadError(
            f"a global batch of {global_batch} leaves ranks of every allocation without a sample; "
            "give a larger one"
        )
    micro_batches, left = 1, list(most)
    while left and micro_batches <= _MOST_MICRO_BATCHES:
        rows = [number for number in left if most[number] >= micro_batches]
        if rows:
            parts: TableOptions = {**options, "accumulation_steps": micro_batches}
            table = estimate_many(
                graph,
                [allocations[number] for number in rows],
                # Unlike devices share it by speed.
                global_batch=global_batch,
                **parts,
            )
            yield table, rows
            fitting = {
                number
                for row, number in enumerate(rows)
                if not table.answered[row] or table.fits[row] != "no"
            }
            left = [number for number in left if number not in fitting]
        micro_batches *= 2


def _by_batch(
    graph: OpGraph,
    allocations: Sequence[Allocation],
    batch_per_gpu: int | None,
    options: TableOptions,
) -> Iterator[tuple[EstimateTable, list[int]]]:
    """Tables of a batch per device, or of those around the traced one that are worth a try."""

    def tabled(rows: list[int], batch: int | None) -> EstimateTable:
        some = [allocations[number] for number in rows]
        return estimate_many(graph, some, batch_per_gpu=batch, **options)

    rows = list(range(len(allocations)))
    table = tabled(rows, batch_per_gpu)
    yield table, rows
    if batch_per_gpu is not None or graph.batch is None:
        return
    fits = (table.fits != "no") & table.answered
    for grows, chosen in ((True, fits), (False, ~fits & table.answered)):
        batch, rates = graph.batch, table.samples_per_s[chosen]
        left = [number for number, is_chosen in zip(rows, chosen, strict=True) if is_chosen]
        while left and (batch * 2 <= MOST_BATCH if grows else batch > 1):
            batch = batch * 2 if grows else batch // 2
            tried = tabled(left, batch)
            yield tried, left
            fitting = (tried.fits != "no") & tried.answered
            if grows:
                goes_on = fitting & (tried.samples_per_s > rates * _LEAST_GAIN)
            else:
                goes_on = ~fitting
            left = [number for number, more in zip(left, goes_on, strict=True) if more]
            rates = tried.samples_per_s[goes_on]


def _offer(
    allocation: Allocation,
    answer: Estimate,
    samples: float,
    prices: PriceList,
    spot: bool | Spot,
) -> Offer | None:
    """None where revocations are so frequent that no training ends."""
    work_s = samples / _rate(answer)
    duration_s, interval_s = work_s, None
    low_s, high_s = (work_s * s / answer.step_time_s for s in (answer.low_s, answer.high_s))
    if isinstance(spot, Spot):
        works_s = [work_s, low_s, high_s]
        (duration_s, low_s, high_s), every_s = spot.times_s(works_s, spot.of_any(allocation))
        interval_s = every_s if every_s < work_s else None
        if not math.isfinite(high_s):
            return None
    usd, low_usd, high_usd = (
        paid_usd(prices, allocation, time_s, spot=bool(spot))
        for time_s in (duration_s, low_s, high_s)
    )
    return Offer(
        strategy=answer.strategy,
        layout=answer.layout,
        checkpoint=answer.request.graph.checkpoint,
        batch_per_gpu=answer.batch_per_gpu or 0,
        accumulation_steps=answer.accumulation_steps,
        global_batch=answer.global_batch or 0,
        fits=answer.fits,
        step_time_s=answer.step_time_s,
        low_s=low_s,
        high_s=high_s,
        samples_per_s=_rate(answer),
        allocation=str(allocation),
        ranks=allocation.ranks,
        duration_s=duration_s,
        usd=usd,
        low_usd=low_usd,
        high_usd=high_usd,
        usd_per_hour=hourly_usd(prices, allocation, spot=bool(spot)),
        interval_s=interval_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Offers that keep a deadline and a budget, by what is wanted of them.

    `front` has those that no other beats in both time and cost, the fastest first; `cheapest` and
    `fastest` are its ends, None where no offer keeps both. `as_cheap` and `as_fast` cannot be told
    apart from them: their intervals meet. `left_out` says of allocations that cannot train why,
    `assumptions` what the times of spot instances take to be so.
    """

    offers: tuple[Offer, ...]
    front: tuple[Offer, ...]
    cheapest: Offer | None
    fastest: Offer | None
    as_cheap: tuple[Offer, ...]
    as_fast: tuple[Offer, ...]
    left_out: Mapping[str, str]
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "cheapest": self.cheapest.to_dict() if self.cheapest else None,
            "fastest": self.fastest.to_dict() if self.fastest else None,
            "as_cheap": [offer.allocation for offer in self.as_cheap],
            "as_fast": [offer.allocation for offer in self.as_fast],
            "front": [offer.to_dict() for offer in self.front],
            "offers": [offer.to_dict() for offer in self.offers],
            "left_out": dict(self.left_out),
            "assumptions": list(self.assumptions),
        }


def choose(
    offered: Sequence[Offer],
    *,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    left_out: Mapping[str, str] = MappingProxyType({}),
    assumptions: Sequence[str] = (),
) -> Choice:
    """Sort out offers by time and cost; raises WorkloadError for a bound that is none."""
    for name, bound in (("deadline_s", deadline_s), ("budget_usd", budget_usd)):
        if bound is not None and not bound >= 0:
            raise WorkloadError(f"{name} is {bound:g}; give a number from 0 on, or none")
    kept = [
        offer
        for offer in offered
        if (deadline_s is None or offer.duration_s <= deadline_s)
        and (budget_usd is None or offer.usd <= budget_usd)
    ]
    front = pareto_front(kept, lambda offer: (offer.duration_s, offer.usd))
    fastest, cheapest = (front[0], front[-1]) if front else (None, None)
    return Choice(
        offers=tuple(offered),
        front=tuple(front),
        cheapest=cheapest,
        fastest=fastest,
        as_cheap=tuple(
            offer
            for offer in kept
            if cheapest and offer is not cheapest and offer.low_usd <= cheapest.high_usd
        ),
        as_fast=tuple(
            offer
            for offer in kept
            if fastest and offer is not fastest and offer.low_s <= fastest.high_s
        ),
        left_out=left_out,
        assumptions=tuple(assumptions),
    )


def rent(
    graph: OpGraph,
    machines: Sequence[str],
    *,
    max_nodes: int = 8,
    mixed: bool = False,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    spot: bool | Spot = False,
    **options: Any,
) -> Choice:
    """What to rent to train a graph: `choose` among `offers` on some machine types.

    `options` go to `offers`: `samples` or `tokens`, `prices`, `strategies`, `batch_per_gpu` or
    `global_batch`, `loader`, `layouts_of`, `calibration`, `executor`. With `mixed` nodes of two
    machines may train together; `spot` instances are as often taken as a `Spot` says. Raises
    PriceError, WorkloadError, AllocationError.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> found = est.rent(graph, ["t4-g4dn"], samples=1e9, max_nodes=1)
    >>> found.cheapest.usd <= found.fastest.usd
    True
    """
    if isinstance(machines, str):
        raise WorkloadError(f"machines are the text {quoted(machines)}; give a list of names")
    if not machines:
        raise WorkloadError("no machine was given; name at least one")
    allocations = list(allocations_of(machines, max_nodes, mixed=mixed))
    if isinstance(spot, Spot):
        spot.check_named(machines)
    offered = offers(graph, allocations, spot=spot, **options)
    return choose(
        offered.offers,
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        left_out=offered.left_out,
        assumptions=spot.assumptions if isinstance(spot, Spot) else (),
    )


def paid_usd(
    prices: PriceList, allocation: Allocation, duration_s: float, *, spot: bool = False
) -> float:
    """What all instances of an allocation cost for a time, as it is billed; raises PriceError."""
    instances = _instances(prices, allocation, spot)
    return sum(nodes * price.usd(duration_s, spot=spot) for nodes, price in instances)


def hourly_usd(prices: PriceList, allocation: Allocation, *, spot: bool = False) -> float:
    """The rate of all instances of an allocation; raises PriceError."""
    instances = _instances(prices, allocation, spot)
    return sum(nodes * (price.rate(spot=spot) or 0.0) for nodes, price in instances)


def _instances(
    prices: PriceList, allocation: Allocation, spot: bool
) -> Iterator[tuple[int, Price]]:
    for group in allocation.groups:
        if group.machine is None:
            raise PriceError(f"'{group}' names a host, which has no price; name its machine type")
        yield group.nodes, prices.price(group.machine, group.devices_per_node, spot=spot)
