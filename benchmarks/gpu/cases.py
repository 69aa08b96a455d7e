"""List the cases of a run on a GPU, the most informative first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zoo.gpu import ALL, TINY
from zoo.inputs import Workload

PRECISIONS = ("fp32", "bf16-amp")
COMPILED = ("gpt2", "bert_base", "resnet50", "vit_b")
IN_TF32 = ("gpt2", "bert_base", "dlrm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model at one batch size in one precision, eager or compiled."""

    workload: str
    batch: int
    precision: str
    execution: str = "eager"

    @property
    def key(self) -> str:
        how = "" if self.execution == "eager" else f"-{self.execution}"
        return f"{self.workload}-b{self.batch}-{self.precision}{how}"


def gpu_cases(workloads: Sequence[Workload] = ALL) -> list[Case]:
    """Every model at its larger batch in either precision, then the smaller, then the variants.

    The larger batch is bound by the device, the smaller one more often by the host; compiling takes
    longest and comes last.
    """
    found = [
        Case(workload=workload.name, batch=workload.batches[position], precision=precision)
        for position in (0, 1)
        for workload in workloads
        for precision in reversed(PRECISIONS)
    ]
    named = {workload.name: workload for workload in workloads}
    found += [
        Case(workload=name, batch=named[name].batches[0], precision="tf32")
        for name in IN_TF32
        if name in named
    ]
    found += [
        Case(
            workload=name, batch=named[name].batches[0], precision="bf16-amp", execution="compiled"
        )
        for name in COMPILED
        if name in named
    ]
    return found


def tiny_cases() -> list[Case]:
    """Three cases that two CPU cores run in a minute."""
    return [
        Case(workload=workload.name, batch=workload.batches[0], precision=precision)
        for workload, precision in zip(TINY, ("fp32", "bf16-amp", "fp32"), strict=True)
    ]
