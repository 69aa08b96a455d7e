"""Write attention over the tokens of several ranks as one of them runs it, block by block.

As torch's ``context_parallel`` (experimental/_context_parallel/_attention.py): keys and values of
all ranks are gathered once a pass, or go around a ring; gradients of them always go around. Under
a causal mask a rank has an early and a late part of every sample, so that all compute alike: its
own block under the mask, then half of every other rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from estimator.graph.cost_kernels import attention_arguments
from estimator.graph.cost_registry import argument
from estimator.graph.exchanges import Overlapped, collective_call, ring_call
from estimator.tensors import OpCall, TensorSpec

_TOKENS = 2  # of (samples, heads, tokens, width)
# A block's output is weighed by the sums of its rows: out - sigmoid(...) * (out - block's).
_PASSES_OF_A_MERGE = 3


class Step(NamedTuple):
    """One call of a pass; `in2` is the attention's third tensor, `out0` its first result."""

    name: str
    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    computes: bool = True


def attention_steps(call: OpCall, axis: str, degree: int, *, ring: bool) -> Iterator[Step]:
    """What one of `degree` ranks runs for a call of attention on its own tokens."""
    start, is_backward, _ = attention_arguments(call)
    names = [f"in{number}" for number in range(len(call.inputs))]
    keys = call.arguments[start + 1], call.arguments[start + 2]
    of_keys = names[start + 1], names[start + 2]
    for step in range(degree):
        if step < degree - 1 and (ring or step == 0):
            yield _joined(f"joined{step}", keys, of_keys)
            yield _sent(f"arrived{step}", keys, f"joined{step}", axis, degree, ring=ring)
        block = call if step == 0 else _block(call)
        given, found = list(names), [f"out{n}" for n in range(len(call.outputs))]
        if step:
            given[start + 1] = given[start + 2] = f"arrived{step - 1 if ring else 0}"
            found = [f"block{step}_{n}" for n in range(len(call.outputs))]
            of_keys = given[start + 1], given[start + 2]
        yield Step(f"block{step}", block, tuple(given), tuple(found))
        if is_backward:
            yield from _gradients(call, step, found, axis, degree)
        elif step:
            for turn in range(_PASSES_OF_A_MERGE):
                yield _sum(f"merged{step}_{turn}", call.outputs[0], ("out0", found[0]))


def _gradients(call: OpCall, step: int, found: list[str], axis: str, degree: int) -> Iterator[Step]:
    """Sums in float32, and those of keys and values to the next rank."""
    for number in range(3):
        yield _sum(f"sum{step}_{number}", call.outputs[number], (f"out{number}", found[number]))
    keys = _wide(call.outputs[1]), _wide(call.outputs[2])
    yield _joined(f"gradients{step}", keys, (f"sum{step}_1", f"sum{step}_2"))
    last = step == degree - 1
    yield _sent(f"back{step}", keys, f"gradients{step}", axis, degree, ring=True, overlaps=not last)


def _joined(name: str, keys: tuple[TensorSpec, TensorSpec], given: tuple[str, str]) -> Step:
    """Keys and values in one buffer."""
    call = OpCall("aten.cat.default", (keys, 3), (), (_both(keys),))
    return Step(name, call, given, (name,))


def _sent(
    name: str,
    keys: tuple[TensorSpec, TensorSpec],
    given: str,
    axis: str,
    degree: int,
    *,
    ring: bool,
    overlaps: bool = True,
) -> Step:
    both = _both(keys)
    if ring:
        call = ring_call(axis, both, degree, overlaps=overlaps)
    else:
        gathered = TensorSpec((degree * both.shape[0], *both.shape[1:]), both.dtype)
        beside: Overlapped | None = "attention" if overlaps else None
        call = collective_call("all_gather", axis, both, gathered, overlaps=beside)
    return Step(name, call, (given,), (name,), computes=False)


def _both(keys: tuple[TensorSpec, TensorSpec]) -> TensorSpec:
    key, value = keys
    return TensorSpec((*key.shape[:3], key.shape[3] + value.shape[3]), key.dtype)


def _sum(name: str, spec: TensorSpec, given: tuple[str, str]) -> Step:
    wide = _wide(spec)
    return Step(name, OpCall("aten.add.Tensor", (wide, wide), (), (wide,)), given, (name,))


def _wide(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, "float32")


def _block(call: OpCall) -> OpCall:
    """All own queries with another rank's keys: the early half of them under a causal mask."""
    start, is_backward, causal_at = attention_arguments(call)
    if not argument(call, causal_at, "is_causal", False):
        return call
    arguments: list[Any] = list(call.arguments)
    for place in (start + 1, start + 2):
        arguments[place] = _half(arguments[place])
    keywords = tuple((name, False if name == "is_causal" else v) for name, v in call.keywords)
    if causal_at < len(arguments):
        arguments[causal_at] = False
    outputs = call.outputs
    if is_backward:
        outputs = (outputs[0], _half(outputs[1]), _half(outputs[2]), *outputs[3:])
    return replace(call, arguments=tuple(arguments), keywords=keywords, outputs=outputs)


def _half(spec: TensorSpec) -> TensorSpec:
    shape = list(spec.shape)
    shape[_TOKENS] //= 2
    return TensorSpec(tuple(shape), spec.dtype)
