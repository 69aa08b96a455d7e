"""Constant propagation: the values of small tensors that no weight goes into, for branches on them.

Token ids, masks, positions and what is computed from them alone are constants of a trace: their
operators are noted as they pass, and replayed for real only when the model asks for a value
(``.item()``, ``nonzero``, a boolean index). Indices chosen by unknown scores (expert routing) are
taken as balanced, and a value read from them is listed as an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# Larger tensors are not worth replaying: no model branches on the values of activations.
MOST_ELEMENTS = 1 << 22

_DRAWN = "random decisions of the model (dropped layers, masked spans) are drawn once"

_SHAPE_ONLY = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.rand_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    }
)


@dataclass(slots=True, eq=False)
class Constant:
    """One tensor whose value can be found by replaying; `root`: the one whose storage it shares."""

    of: Constants
    assumption: str | None
    root: Constant | None = None
    value: Tensor | None = None
    spoiled: bool = False

    @property
    def owner(self) -> Constant:
        return self if self.root is None else self.root


@dataclass(slots=True)
class _Step:
    run: Callable[[], Any]
    outputs: list[tuple[int, Constant]] = field(default_factory=list)


class Constants:
    """The tensors of one run whose values are known, and how to compute them."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._done = 0
        self._random_steps = 0
        self._held: dict[int, Constant] = {}
        self.assumptions: dict[str, None] = {}
        # Whether what is read from now on is read to be written down, as losses after backward().
        self.reads_are_logs = False

    def of(self, tensor: Tensor) -> Constant | None:
        """What is known of a tensor, None if nothing is."""
        constant: Constant | None = getattr(tensor, "_constant", None) or self._held.get(id(tensor))
        if constant is None or constant.of is not self or constant.owner.spoiled:
            return None
        return constant

    def hold(self, real: Tensor) -> None:
        """Know a real tensor, which the caller keeps alive; it is not marked."""
        if type(real) is Tensor and real.device.type != "meta" and real.numel() <= MOST_ELEMENTS:
            constant = self._held[id(real)] = Constant(of=self, assumption=None)
            self._steps.append(_Step(lambda: real.detach().cpu().clone(), [(0, constant)]))

    def give(self, tensor: Tensor, real: Tensor, assumption: str | None = None) -> None:
        """Know that a fake tensor has the value of a real tensor, if that is worth knowing."""
        if real.device.type != "meta" and real.numel() <= MOST_ELEMENTS:
            self._note(lambda: real.detach().cpu().clone(), [(0, tensor, None)], assumption)

    def assume(self, tensor: Tensor, make: Callable[[], Tensor], assumption: str) -> None:
        """Take a tensor to have the value that `make` returns; `assumption` says so to people."""
        if tensor.numel() <= MOST_ELEMENTS:
            self._note(make, [(0, tensor, None)], assumption)

    def expect_check(self, tensor: Tensor, holds: bool) -> None:
        """Expect a comparison of unknown values to give `holds` everywhere, if read as a whole."""
        tensor._expected_check = (self, holds)  # type: ignore[attr-defined]

    def expected_check(self, tensor: Tensor) -> bool | None:
        """What a comparison is expected to find, None if the tensor is none."""
        book, expected = getattr(tensor, "_expected_check", (None, None))
        return expected if book is self else None

    def spoil(self, tensor: Tensor) -> None:
        """Forget a tensor and all that shares its storage: something unknown was written to it."""
        constant = self.of(tensor)
        if constant is not None:
            constant.owner.spoiled = True

    def follow(
        self, func: Any, args: Any, kwargs: Any, outputs: list[tuple[int, Tensor, Tensor | None]]
    ) -> None:
        """Note one operator; `outputs` are (position, tensor, input whose storage it shares)."""
        if any(tensor.numel() > MOST_ELEMENTS for _, tensor, _ in outputs):
            return
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        assumption = _DRAWN if is_random else None

        def replace(leaf: Any) -> Any:
            nonlocal assumption
            if not isinstance(leaf, Tensor):
                return leaf
            constant = self.of(leaf)
            if constant is None:
                return _Unknown(tuple(leaf.shape), leaf.dtype)
            assumption = assumption or constant.assumption
            return constant

        noted_args, noted_kwargs = tree_map(replace, args), tree_map(replace, dict(kwargs))

        self._random_steps += is_random
        seed = self._random_steps

        def run() -> Any:
            if is_random:
                # Its own seed, so that runs at two batch sizes draw the same decisions.
                torch.default_generator.manual_seed(seed)
            return func(*tree_map(_reveal, noted_args), **tree_map(_reveal, noted_kwargs))

        self._note(run, outputs, assumption)

    def knows_result(self, func: Any, tensors: list[Tensor]) -> bool:
        """Whether an operator's result follows from known values, or from shapes alone."""
        return func in _SHAPE_ONLY or all(self.of(tensor) is not None for tensor in tensors)

    def read(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor, None if it is not known."""
        constant = self.of(tensor)
        if constant is None:
            return None
        self._replay()
        if constant.assumption is not None:
            self.assumptions[constant.assumption] = None
        return constant.value

    def _note(
        self,
        run: Callable[[], Any],
        outputs: list[tuple[int, Tensor, Tensor | None]],
        assumption: str | None,
    ) -> None:
        step = _Step(run)
        for position, tensor, shared in outputs:
            base = None if shared is None else self.of(shared)
            constant = Constant(
                of=self, assumption=assumption, root=None if base is None else base.owner
            )
            if base is not None and assumption is not None:
                base.owner.assumption = assumption
            tensor._constant = constant  # type: ignore[attr-defined]
            step.outputs.append((position, constant))
        self._steps.append(step)

    def _replay(self) -> None:
        with _disable_current_modes(), torch.no_grad():
            while self._done < len(self._steps):
                step = self._steps[self._done]
                result = step.run()
                results = flat_results(result)
                for position, constant in step.outputs:
                    constant.value = results[position]
                self._done += 1


def flat_results(result: Any) -> list[Any]:
    """What an operator returned as one list; an operator may return a list among others."""
    if not isinstance(result, (tuple, list)):
        return [result]
    return [leaf for item in result for leaf in flat_results(item)]


@dataclass(frozen=True, slots=True)
class _Unknown:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _reveal(leaf: Any) -> Any:
    if isinstance(leaf, Constant):
        return leaf.value
    if isinstance(leaf, _Unknown):
        return torch.empty((), dtype=leaf.dtype).expand(leaf.shape)
    return leaf


def balanced_choice(shape: tuple[int, ...], dim: int, options: int) -> Tensor:
    """Indices below `options` of the given shape, spread evenly, the ones along `dim` unlike.

    >>> balanced_choice((3, 2), 1, 4).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    moved = [size for axis, size in enumerate(shape) if axis != dim % len(shape)]
    flat = torch.arange(math.prod(shape)) % max(options, 1)
    return flat.reshape(*moved, shape[dim]).movedim(-1, dim).contiguous()
