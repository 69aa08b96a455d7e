"""Choose which forward values the backward pass of a compiled step computes again.

As torch's partitioner does (torch/_functorch/partitioners.py, solve_min_cut): the saved values are
the cheapest cut between what cannot be repeated and what the backward pass reads. A value weighs
its bytes, twice if nothing but fused kernels read it (it could stay unwritten), and more the
further it is from the backward pass.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from estimator.graph.fusion_parts import Part, SplitGraph

_PER_STEP_AWAY, _MOST_STEPS_AWAY = 1.1, 100
_LONGEST_CHAIN = 100
# scipy's flows are 32-bit: all finite capacities together are scaled to this.
_WHOLE_CAPACITY = 1 << 30


def with_recomputation(split: SplitGraph) -> list[Part]:
    """The parts, with a copy of each that is computed again before its first backward reader."""
    uses = _Uses(split)
    saved = _cheapest_cut(split, uses)
    again: dict[int, int] = {}
    found: list[Part] = []
    for part in split.parts:
        if part.phase == "backward" and part.kind != "whole":
            for maker in _wanted(split, uses, saved, part, again):
                found.append(_repeated(split, split.parts[maker], again))
            part = _reading_again(split, part, again)
        found.append(part)
    return found


def _wanted(
    split: SplitGraph, uses: _Uses, saved: set[int], part: Part, again: Mapping[int, int]
) -> list[int]:
    """The forward parts to run again for what a part reads that is not saved, in their order."""
    makers: set[int] = set()
    ahead = list(split.reads(part))
    while ahead:
        root = ahead.pop()
        maker = uses.maker.get(root)
        if maker is None or root in saved or root in again or not uses.can_repeat[maker]:
            continue
        if maker not in makers:
            makers.add(maker)
            ahead.extend(split.reads(split.parts[maker]))
    return sorted(makers)


def _repeated(split: SplitGraph, part: Part, again: dict[int, int]) -> Part:
    reading = _reading_again(split, part, again)
    for root in sorted(split.writes(part)):
        again[root] = split.new_copy(root)
    writes = tuple(again[split.roots[value]] for value in part.writes)
    return replace(reading, phase="backward", writes=writes)


def _reading_again(split: SplitGraph, part: Part, again: Mapping[int, int]) -> Part:
    return part.reading({value: again.get(split.roots[value], value) for value in part.reads})


class _Uses:
    """Who makes and reads each storage, by index into the parts, and what may be repeated."""

    def __init__(self, split: SplitGraph) -> None:
        self.maker: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.backward: set[int] = set()
        self.materialised: set[int] = set()
        in_backward: set[int] = set()
        rewritten: set[int] = set()
        for index, part in enumerate(split.parts):
            if part.kind == "whole":
                self.materialised |= split.reads(part) | split.writes(part)
            for root in split.reads(part):
                if part.phase == "backward":
                    self.backward.add(root)
                    if part.kind == "whole":
                        in_backward.add(root)
                else:
                    self.readers[root].append(index)
            if part.phase == "forward":
                for root in split.writes(part):
                    rewritten.update({root} & self.maker.keys())
                    self.maker[root] = index
        apart = self._used_far_apart(split) | self._ends_of_long_chains(split)
        self.can_repeat = [
            part.can_repeat
            and part.phase == "forward"
            and index not in apart
            # What a matmul or convolution reads must be in memory anyway.
            and not split.writes(part) & (in_backward | rewritten)
            for index, part in enumerate(split.parts)
        ]

    def _used_far_apart(self, split: SplitGraph) -> set[int]:
        """Parts that read a value beyond the first unfusible operator that depends on it."""
        never = len(split.parts)
        first_whole = [never] * never
        apart: set[int] = set()
        for index in range(never - 1, -1, -1):
            part = split.parts[index]
            if part.phase == "backward":
                continue
            if part.kind == "whole":
                first_whole[index] = index
                continue
            ahead = [first_whole[r] for root in split.writes(part) for r in self.readers[root]]
            first_whole[index] = min(ahead, default=never)
        for readers in self.readers.values():
            limit = min((first_whole[reader] for reader in readers), default=never)
            apart.update(reader for reader in readers if reader > limit)
        return apart

    def _ends_of_long_chains(self, split: SplitGraph) -> set[int]:
        """Parts that a chain of pointwise work reaches only after many others (recurrences)."""
        ends: set[int] = set()
        visited: set[int] = set()
        for start, part in enumerate(split.parts):
            ahead = [start] if part.phase == "forward" and part.kind != "whole" else []
            while ahead:
                index = heapq.heappop(ahead)
                if index in visited:
                    continue
                visited.add(index)
                if index > start + _LONGEST_CHAIN and not ahead:
                    ends.add(index)
                    break
                for root in split.writes(split.parts[index]):
                    for reader in self.readers[root]:
                        if split.parts[reader].kind != "whole":
                            heapq.heappush(ahead, reader)
        return ends


def _cheapest_cut(split: SplitGraph, uses: _Uses) -> set[int]:
    """Storages of the forward pass to save, so that all that backward reads can be had again."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number = {root: index for index, root in enumerate(sorted(uses.maker))}
    source, sink, nodes = 2 * len(number), 2 * len(number) + 1, 2 * len(number) + 2
    weights = _weights(split, uses)
    scale = _WHOLE_CAPACITY / max(sum(weights.values()), 1.0)
    edges: dict[tuple[int, int], int] = {}
    for root, index in number.items():
        edges[2 * index, 2 * index + 1] = int(weights[root] * scale) + 1
        maker = uses.maker[root]
        if not uses.can_repeat[maker]:
            edges[source, 2 * index] = 2 * _WHOLE_CAPACITY - 1
        for read in split.reads(split.parts[maker]) if uses.can_repeat[maker] else ():
            if read in number:
                edges[2 * number[read] + 1, 2 * index] = 2 * _WHOLE_CAPACITY - 1
        if root in uses.backward:
            edges[2 * index + 1, sink] = 2 * _WHOLE_CAPACITY - 1
    if not edges:
        return set()
    ends = np.array(list(edges), dtype=np.int32)
    capacity = csr_array(
        (np.array(list(edges.values()), dtype=np.int32), (ends[:, 0], ends[:, 1])),
        shape=(nodes, nodes),
    )
    flow = maximum_flow(capacity, source, sink).flow
    left = csr_array((capacity - flow) > 0)
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {
        root
        for root, index in number.items()
        if 2 * index in reached and 2 * index + 1 not in reached
    }


def _weights(split: SplitGraph, uses: _Uses) -> dict[int, float]:
    away: dict[int, int] = {}
    for index in range(len(split.parts) - 1, -1, -1):
        part = split.parts[index]
        if part.phase == "forward":
            for root in split.writes(part):
                after = [
                    away.get(written, _MOST_STEPS_AWAY) + 1
                    for reader in uses.readers[root]
                    for written in split.writes(split.parts[reader])
                ]
                near = 1 if root in uses.backward else _MOST_STEPS_AWAY
                away[root] = min([near, *after])
    return {
        root: split.size_bytes(root)
        * (1 if root in uses.materialised else 2)
        * _PER_STEP_AWAY ** min(away[root], _MOST_STEPS_AWAY)
        for root in uses.maker
    }
