"""Divide a step among the model's modules: time, FLOPs and memory at the peak."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from estimator.advise.memory import memory_of
from estimator.estimates import Estimate
from estimator.graph.memory_curve import by_module, module_path
from estimator.graph.utilization import op_flops

# Names of a path that are told apart, as in transformer.h.0.
_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """What a module, with those inside it, takes of a step of one rank.

    `time_s` is that of the rank's own lane, forward and backward, host included; `flops` those that
    the model needs; `memory_bytes` the parameters, gradients and activations at the step's peak.
    """

    module: str
    time_s: float
    flops: float
    memory_bytes: int


def costs_by_module(answer: Estimate) -> list[ModuleCost]:
    """The modules of an estimated step by time, the update last; raises WorkloadError.

    Where ranks differ, of one that needs the most memory. Times add up to its forward, backward,
    host, copies and update: communication, waiting and adding up the gradients of micro-batches
    belong to no module.
    """
    report = memory_of(answer)
    bound = report.bound
    seconds, flops = defaultdict[str, float](float), defaultdict[str, float](float)
    kind = report.kind
    each_s = np.diff(kind.program.lanes.ends_s(0) * kind.slowdown_ratio, prepend=0.0)
    update_s = float(kind.update.update_s(answer.plan.share))
    for op, call, op_s in zip(bound.graph.ops, bound.calls, each_s.tolist(), strict=True):
        path = module_path(op.module, _DEPTH)
        seconds[path] += op_s * answer.accumulation_steps
        flops[path] += 0.0 if op.is_repeated else op_flops(call)[0] * answer.accumulation_steps
    memory = by_module(report.tensors, _DEPTH)
    rows = [
        ModuleCost(
            module=path,
            time_s=seconds[path],
            flops=flops[path],
            memory_bytes=memory.get(path, 0),
        )
        for path in dict.fromkeys((*seconds, *memory))
    ]
    rows.sort(key=lambda row: -row.time_s)
    return [*rows, ModuleCost(module="update", time_s=update_s, flops=0.0, memory_bytes=0)]
