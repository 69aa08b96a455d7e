"""Count the FLOPs of a step by which MFU and HFU are told.

Counted are matmuls, convolutions, recurrent layers and attention, a multiply-add as 2,
whether a kernel fuses them or not; look-ups, elementwise operators and the update are not. In
attention every query counts with every key, also where a mask hides some: so do PaLM (Chowdhery et
al. 2022, appendix B) and torchtitan (``12 * n_layers * n_heads * head_dim * seq_len`` a token).
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.graph.costs.call_costs import family_of, op_cost
from estimator.graph.costs.matmuls import whole_attention_flops
from estimator.graph.ir.op_graph import BoundGraph
from estimator.tensors import OpCall
from estimator.workload.precision import TF32_BY_DEFAULT

# A part of a step known by its time carries the FLOPs that were given for the model.
_COUNTED = ("matmul", "convolution", "recurrent", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one micro-batch, forward and backward.

    `model` are those that the model needs, each matmul once: they give the MFU (model FLOPs
    utilization). `hardware` adds what is computed again in the backward phase, by activation
    checkpoints and inside attention kernels: they give the HFU (hardware FLOPs utilization;
    Korthikanti et al. 2022 tell the two apart so). `tf32_by_default` are those of the latter that a
    GPU rounds to TF32 unless told otherwise.
    """

    model: float
    hardware: float
    tf32_by_default: float = 0.0


def step_flops(bound: BoundGraph) -> StepFlops:
    """The FLOPs of a graph at one batch size."""
    model = hardware = tf32 = 0.0
    known: dict[int, tuple[float, float, bool]] = {}
    for op, call in zip(bound.graph.ops, bound.calls, strict=True):
        # Many ops share one call, which `bound` keeps alive.
        if id(call) not in known:
            known[id(call)] = (*op_flops(call), family_of(call.target) in TF32_BY_DEFAULT)
        needed, executed, in_tf32 = known[id(call)]
        model += 0.0 if op.is_repeated else needed
        hardware += executed
        tf32 += executed if in_tf32 else 0.0
    return StepFlops(model=model, hardware=hardware, tf32_by_default=tf32)


def op_flops(call: OpCall) -> tuple[float, float]:
    """(flops that the model needs of a call, flops that the call executes)."""
    family = family_of(call.target)
    if family == "attention":
        return whole_attention_flops(call)
    cost = op_cost(call) if family in _COUNTED else None
    return (0.0, 0.0) if cost is None else (cost.flops, cost.flops)
