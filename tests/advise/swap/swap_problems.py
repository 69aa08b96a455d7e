"""Small steps whose every number is chosen, for tests of plans of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from estimator.advise.swap.problem import PlannedTensor, SwapProblem
from estimator.machines.profile import Link, LinkKind, Provenance

CHOSEN = Provenance(source="measured", samples=1, relative_error=0.0)


def link(kind: LinkKind, bytes_per_s: float) -> Link:
    return Link(kind=kind, latency_s=0.0, bandwidth_bytes_per_s=bytes_per_s, provenance=CHOSEN)


def problem_of(
    op_s: Sequence[float],
    tensors: Sequence[tuple[int, int, int, Sequence[int]]],
    *,
    forward: int = 0,
    fixed_bytes: int = 0,
    bytes_per_s: float = 1.0,
) -> SwapProblem:
    """A step from (size, born, dies, accesses) of its tensors; born -1 is held across steps.

    A tensor is written by the op that makes it, one that is held across steps by the last op that
    touches it. The first `forward` ops may run again.
    """
    reads: list[list[int]] = [[] for _ in op_s]
    writes: list[list[int]] = [[] for _ in op_s]
    found = []
    for number, (size, born, dies, accesses) in enumerate(tensors):
        writer = born if born >= 0 else accesses[-1]
        writes[writer].append(number)
        for access in accesses:
            if access != born:
                reads[access].append(number)
        found.append(
            PlannedTensor(
                number=number,
                kind="activation" if born >= 0 else "state",
                size_bytes=size,
                born=born,
                dies=dies,
                accesses=tuple(accesses),
                writers=(writer,),
            )
        )
    return SwapProblem(
        op_s=np.array(op_s, dtype=float),
        tensors=tuple(found),
        reads=tuple(tuple(each) for each in reads),
        writes=tuple(tuple(each) for each in writes),
        repeatable=tuple(op < forward for op in range(len(op_s))),
        workspace_bytes=np.zeros(len(op_s), dtype=np.int64),
        fixed_bytes=fixed_bytes,
        d2h=link("d2h", bytes_per_s),
        h2d=link("h2d", bytes_per_s),
    )


def chain(layers: int, *, size: int = 4, seconds: float = 4.0) -> SwapProblem:
    """Forward ops that each make a tensor from the one before; backward ops that read them back.

    Op k makes tensor k; op 2·layers - 1 - k reads it last.
    """
    ops = 2 * layers
    tensors = []
    for k in range(layers):
        last = ops - 1 - k
        # Two numbers may be equal where the turn lies between neighbours.
        tensors.append((size, k, last, sorted({k, min(k + 1, last), last})))
    return problem_of([seconds] * ops, tensors, forward=layers)
