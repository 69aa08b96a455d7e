"""Say whether a machine can run the steps of a graph at all, however fast."""

from __future__ import annotations

from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile

# torch/_inductor/exc.py, GPUTooOldForTriton: its compiler serves NVIDIA's chips from there on.
_COMPILED_CAPABILITY = 7.0


def why_not_on(graph: OpGraph, machine: MachineProfile) -> str | None:
    """Why a machine cannot run a graph's step and what to do, in one sentence; None if it can."""
    if graph.target != machine.kind:
        return (
            f"{graph.name} was traced for {graph.target} but '{machine.name}' has {machine.kind} "
            f"devices; trace it with target='{machine.kind}'"
        )
    if graph.execution == "eager":
        return None
    capability = machine.devices[0].compute_capability
    if capability is not None and capability < _COMPILED_CAPABILITY:
        return (
            f"'{machine.name}' has compute capability {capability}, and torch.compile needs "
            f"{_COMPILED_CAPABILITY} or more; trace {graph.name} without compiled (--compile, "
            "--cuda-graphs)"
        )
    return None
