"""Join the steps of several jobs that share a device, so that their memory is planned together.

The jobs take turns step by step, as under Gandiva's time-slicing (Xiao et al., OSDI 2018): what one
job holds between its steps may be away while the others run, and all share the host link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from estimator.advise.swap_problem import PlannedTensor, SwapProblem
from estimator.errors import WorkloadError


def joined(jobs: Sequence[SwapProblem]) -> SwapProblem:
    """One step of every job, one after the other, as a problem of its own.

    Raises WorkloadError where there are none, or their links are not the same.
    """
    if not jobs:
        raise WorkloadError("there are no jobs to plan memory for; give at least one")
    first = jobs[0]
    if any((job.d2h, job.h2d) != (first.d2h, first.h2d) for job in jobs):
        raise WorkloadError("jobs that share a device share its host link; give all the same one")
    ops = sum(job.ops for job in jobs)
    tensors: list[PlannedTensor] = []
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    for job in jobs:
        begin, number = len(reads), len(tensors)
        end = begin + job.ops
        for tensor in job.tensors:
            last = ops if tensor.is_standing else min(tensor.dies + begin, end - 1)
            tensors.append(
                replace(
                    tensor,
                    number=number + tensor.number,
                    born=tensor.born if tensor.is_standing else tensor.born + begin,
                    dies=last,
                    accesses=tuple(op + begin for op in tensor.accesses),
                    writers=tuple(op + begin for op in tensor.writers),
                )
            )
        reads += [tuple(number + tensor for tensor in each) for each in job.reads]
        writes += [tuple(number + tensor for tensor in each) for each in job.writes]
    return SwapProblem(
        op_s=np.concatenate([job.op_s for job in jobs]),
        tensors=tuple(tensors),
        reads=tuple(reads),
        writes=tuple(writes),
        repeatable=tuple(each for job in jobs for each in job.repeatable),
        workspace_bytes=np.concatenate([job.workspace_bytes for job in jobs]),
        fixed_bytes=sum(job.fixed_bytes for job in jobs),
        d2h=first.d2h,
        h2d=first.h2d,
        order=tuple(op for job in jobs for op in job.order),
        names=tuple(f"job {index}: {name}" for index, job in enumerate(jobs) for name in job.names),
    )
