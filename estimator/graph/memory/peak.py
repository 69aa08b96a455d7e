"""Name the peak of a rank's memory and its parts, for any number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from estimator.elementwise import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The most memory that live tensors of one rank take during a step, and its parts.

    Each part is that part's own maximum; `total_bytes` is the maximum over time of their sum, which
    is less: gradients grow while activations shrink. `activations_bytes` is the most that
    activations, temporaries of the graph and workspaces of its operators hold at once.
    `bucket_bytes` are DDP's buckets, or the buffers of a sharded step's collectives.
    `update_bytes` is what the optimizer needs beyond its state while it updates. `peak_op` is the
    op at which the total is reached (None: during the update).
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    bucket_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int
    update_bytes: int
    total_bytes: int
    peak_op: int | None


@overload
def held_bytes(fixed_bytes: int, sharded_bytes: int, shards: int) -> int: ...
@overload
def held_bytes(fixed_bytes: int | Sizes, sharded_bytes: int | Sizes, shards: Sizes) -> Sizes: ...
def held_bytes(
    fixed_bytes: int | Sizes, sharded_bytes: int | Sizes, shards: int | Sizes
) -> int | Sizes:
    """Bytes of a rank that holds `fixed_bytes` whole and one of `shards` shards of the others.

    >>> held_bytes(100, 10, 4)
    103
    """
    # The part that is divided is rounded up.
    return fixed_bytes - (-sharded_bytes // shards)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The most that a rank holds over some instants, for any number of shards.

    At each instant a rank holds fixed bytes and sharded bytes / shards: a line in 1 / shards.
    `lines` are the pairs (fixed, sharded) of the instants that are the largest for some number of
    shards from 1 on, the one for the most shards first.
    """

    lines: tuple[tuple[int, int], ...]

    @classmethod
    def through(cls, lines: Sequence[tuple[int, int]]) -> Envelope:
        """The envelope of any lines, at least one.

        >>> Envelope.through([(0, 80), (50, 20), (40, 10), (10, 60), (60, 0)]).lines
        ((60, 0), (50, 20), (0, 80))
        """
        return cls(tuple(lines[index] for index in upper_lines(lines)))

    @overload
    def at(self, shards: int) -> int: ...
    @overload
    def at(self, shards: Sizes) -> Sizes: ...
    def at(self, shards: int | Sizes) -> int | Sizes:
        """Bytes of a rank at a number of shards, or at each of an array."""
        if isinstance(shards, np.ndarray):
            levels = [held_bytes(fixed, sharded, shards) for fixed, sharded in self.lines]
            return np.asarray(np.maximum.reduce(levels))
        return max([held_bytes(fixed, sharded, shards) for fixed, sharded in self.lines])


def upper_lines(lines: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the lines (at 0, slope) that are above all others somewhere between 0 and 1.

    They stand in the order in which they are the highest, from 0 on.
    """
    kept: list[int] = []
    for index in sorted(range(len(lines)), key=lambda i: (-lines[i][0], -lines[i][1])):
        at_zero, slope = lines[index]
        if kept and slope <= lines[kept[-1]][1]:
            continue
        while len(kept) > 1:
            (first, low), (middle, mid) = (lines[each] for each in kept[-2:])
            # Where the new line passes the first of them, the one between is not above it yet.
            if (first - at_zero) * (mid - low) > (first - middle) * (slope - low):
                break
            kept.pop()
        # It is passed at 1 at the earliest by the time it would matter.
        if not kept or at_zero + slope > sum(lines[kept[-1]]):
            kept.append(index)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMemory:
    """`PeakMemory` of a rank for any number of shards; `peak_ops` belong to the lines of `total`.

    `passes` is the most that is held before the update.
    Shards are taken to be even. FSDP2 cuts a tensor along its first dimension and pads: a rank's
    shard may have up to a row of each tensor more.
    """

    total: Envelope
    peak_ops: tuple[int | None, ...]
    passes: Envelope
    parameters: Envelope
    gradients: Envelope
    optimizer_state: Envelope
    buckets: Envelope
    update: Envelope
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int

    @overload
    def total_bytes(self, shards: int) -> int: ...
    @overload
    def total_bytes(self, shards: Sizes) -> Sizes: ...
    def total_bytes(self, shards: int | Sizes) -> int | Sizes:
        """Bytes at the peak where that many ranks share what is sharded."""
        return self.total.at(shards)

    def peak(self, shards: int) -> PeakMemory:
        """The peak and its parts, each at its own maximum, where `shards` ranks share."""
        levels = [held_bytes(fixed, sharded, shards) for fixed, sharded in self.total.lines]
        total = max(levels)
        return PeakMemory(
            parameters_bytes=self.parameters.at(shards),
            gradients_bytes=self.gradients.at(shards),
            optimizer_state_bytes=self.optimizer_state.at(shards),
            bucket_bytes=self.buckets.at(shards),
            buffers_bytes=self.buffers_bytes,
            inputs_bytes=self.inputs_bytes,
            activations_bytes=self.activations_bytes,
            update_bytes=self.update.at(shards),
            total_bytes=total,
            peak_op=self.peak_ops[levels.index(total)],
        )
