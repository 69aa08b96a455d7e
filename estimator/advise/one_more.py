"""Ask what one more device is worth, and which batch is best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimator.advise.largest_batch import largest_batch
from estimator.engine import estimate_graph
from estimator.errors import AllocationError, quoted
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.workload import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGpu:
    """An allocation with one device more, and what that adds to the samples a second."""

    allocation: str
    answer: Estimate
    gain_samples_per_s: float

    @property
    def gain_ratio(self) -> float:
        """Over the throughput of one device of the allocation, on average: 1 scales linearly."""
        total = self.answer.samples_per_s or 0.0
        before = (total - self.gain_samples_per_s) / (self.answer.ranks - 1)
        return self.gain_samples_per_s / before


def next_gpu(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    machines: Sequence[str] = (),
    **asked: Any,
) -> list[NextGpu]:
    """Where one more device helps most: on the last node, on another, or of other machines.

    The most gained first; `asked` goes to `estimate`, as `batch_per_gpu` and `strategy` do. Raises
    AllocationError where there is no such device.
    """
    if isinstance(machines, str):
        raise AllocationError(f"machines are the text {quoted(machines)}; give a list of names")
    held = Allocation.parse(allocation)
    now = estimate_graph(graph, held, **asked).samples_per_s or 0.0
    rows = []
    refusal: AllocationError | None = None
    for more in _with_one_more(held, machines):
        try:
            answer = estimate_graph(graph, more, **asked)
        except AllocationError as error:
            refusal = error
            continue
        rows.append(
            NextGpu(
                allocation=str(more),
                answer=answer,
                gain_samples_per_s=(answer.samples_per_s or 0.0) - now,
            )
        )
    if not rows:
        raise refusal or AllocationError(
            f"'{held}' names hosts, which have no next device; name its machine type"
        )
    return sorted(rows, key=lambda row: -row.gain_samples_per_s)


def _with_one_more(held: Allocation, machines: Sequence[str]) -> Iterator[Allocation]:
    last = held.groups[-1]
    if last.machine is not None and last.devices_per_node < len(
        named_profile(last.machine).devices
    ):
        one, others = replace(last, nodes=1, devices_per_node=last.devices_per_node + 1), last.nodes
        before = (replace(last, nodes=others - 1),) if others > 1 else ()
        yield Allocation((*held.groups[:-1], *before, one))
    own = [group.machine for group in held.groups if group.machine is not None]
    for machine in dict.fromkeys([*own, *machines]):
        node = DeviceGroup(nodes=1, devices_per_node=1, machine=machine)
        yield Allocation((*held.groups, node))


def best_batch(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    most_per_gpu: int | None = None,
    **asked: Any,
) -> Estimate:
    """The batch per device and micro-batch with most samples a second that surely fits.

    Tried are 1, 2, 4, … samples up to the largest that fits (see `largest_batch`), or
    `most_per_gpu`. Raises WorkloadError.
    """
    if most_per_gpu is not None:
        check_count(most_per_gpu, "most_per_gpu")
    limit = largest_batch(graph, allocation, **asked)
    most = min(limit.batch_per_gpu, most_per_gpu or limit.batch_per_gpu)
    if not most:
        raise AllocationError(
            f"not even one sample of {graph.name} fits on '{allocation}'; give devices with more "
            "memory, or another strategy"
        )
    tried = {1 << power for power in range(most.bit_length())} | {most}
    answers = [
        estimate_graph(graph, allocation, batch_per_gpu=batch, **asked) for batch in sorted(tried)
    ]
    return max(answers, key=lambda answer: answer.samples_per_s or 0.0)
