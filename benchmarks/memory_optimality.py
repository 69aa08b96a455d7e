"""How far the planner of memory is from the exact optimum on small random steps.

    python benchmarks/memory_optimality.py [--graphs 50] [--seed 0] [--time-limit 60]

Every step has a forward pass of up to six ops, each of which reads the one before and often an
earlier one, and a backward pass that reads them in reverse. The budget lies at random between the
least that is possible and the peak without a plan. Only steps whose optimum is proven count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

import numpy as np
from swap.exact import exact_step_s
from swap.tensile import tensile

from estimator.advise.swap.problem import PlannedTensor, SwapProblem
from estimator.advise.swap.search import least_bytes, plan_within
from estimator.machines.profile import Link, LinkKind, Provenance
from estimator.units import format_ratio


def random_problem(chance: random.Random) -> SwapProblem:
    """A step of at most 12 ops."""
    layers = chance.randint(4, 6)
    ops = 2 * layers
    reads: list[set[int]] = [set() for _ in range(ops)]
    for op in range(1, layers):
        reads[op].add(op - 1)
        if op > 1 and chance.random() < 0.4:
            reads[op].add(chance.randrange(op - 1))
    for op in range(layers, ops):
        reads[op].add(ops - 1 - op)
        if op < ops - 1 and chance.random() < 0.5:
            reads[op].add(ops - 2 - op)
    tensors = []
    for number in range(layers):
        accesses = sorted({number, *(op for op in range(ops) if number in reads[op])})
        tensors.append(
            PlannedTensor(
                number=number,
                kind="activation",
                size_bytes=chance.randint(1, 20),
                born=number,
                dies=accesses[-1],
                accesses=tuple(accesses),
                writers=(number,),
            )
        )
    rate = chance.choice([2.0, 5.0, 10.0])
    return SwapProblem(
        op_s=np.array([chance.uniform(0.5, 4.0) for _ in range(ops)]),
        tensors=tuple(tensors),
        reads=tuple(tuple(sorted(each)) for each in reads),
        writes=tuple((op,) if op < layers else () for op in range(ops)),
        repeatable=tuple(op < layers for op in range(ops)),
        workspace_bytes=np.array([chance.randint(0, 6) for _ in range(ops)], dtype=np.int64),
        fixed_bytes=0,
        d2h=_link("d2h", rate),
        h2d=_link("h2d", rate),
    )


def _link(kind: LinkKind, rate: float) -> Link:
    source = Provenance(source="measured", note="chosen")
    return Link(kind=kind, latency_s=0.0, bandwidth_bytes_per_s=rate, provenance=source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=60.0)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    gaps: list[float] = []
    missed = unproven = impossible = 0
    while len(gaps) + missed < chosen.graphs:
        problem = random_problem(chance)
        low, high = least_bytes(problem), problem.vanilla_bytes
        budget = chance.randint(low, high)
        exact = exact_step_s(problem, budget, time_limit_s=chosen.time_limit)
        if not exact.is_proven:
            unproven += 1
            continue
        if exact.step_s is None:
            impossible += 1
            continue
        found = plan_within(problem, budget, seeds=tensile(problem)).played
        if found.peak_bytes > budget:
            missed += 1
            print(f"{len(gaps) + missed:3}: budget {budget} of {high} missed", flush=True)
            continue
        gaps.append(found.step_s / exact.step_s - 1)
        print(
            f"{len(gaps) + missed:3}: {budget:3} of {high:3}: {format_ratio(gaps[-1])}", flush=True
        )
    print(
        f"{len(gaps)} steps: median gap {format_ratio(statistics.median(gaps))}, "
        f"worst {format_ratio(max(gaps))}, least {format_ratio(min(gaps))}; "
        f"{missed} budgets missed, {unproven} optima not proven, {impossible} budgets impossible"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
