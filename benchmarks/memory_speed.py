"""CPU seconds of the lifetimes of a large graph, and of one plan of its memory.

    python benchmarks/memory_speed.py GRAPH [--on 1x1:h100-sxm] [--saving 0.2] [--lifetimes-only]

GRAPH is a saved graph. CPU seconds of this process are counted, which other work on the machine
disturbs less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from estimator.advise.swap.problem import swap_problem
from estimator.advise.swap.search import plan_within
from estimator.estimates.engine import estimate_graph
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.curve import live_tensors, memory_curve, tensors_of
from estimator.units import format_ratio
from estimator.workload import Strategy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--on", default="1x1:h100-sxm")
    parser.add_argument("--saving", type=float, default=0.2)
    parser.add_argument("--lifetimes-only", action="store_true")
    chosen = parser.parse_args()
    graph = OpGraph.load(chosen.graph)
    begin = time.process_time()
    bound = graph.at()
    curve = memory_curve(bound, optimizer=graph.optimizer, strategy=Strategy(), merging=False)
    tensors = live_tensors(tensors_of(bound), curve.peak_at)
    spent_s = time.process_time() - begin
    print(f"{len(graph.ops)} ops, {len(tensors)} tensors at the peak: lifetimes {spent_s:.2f} s")
    if chosen.lifetimes_only:
        return 0
    answer = estimate_graph(graph, chosen.on)
    begin = time.process_time()
    problem = swap_problem(answer)
    found = plan_within(problem, int((1 - chosen.saving) * problem.vanilla_bytes)).played
    print(
        f"plan {time.process_time() - begin:.1f} s: MSR {format_ratio(found.saved_ratio)}, "
        f"EOR {format_ratio(found.overhead_ratio)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
