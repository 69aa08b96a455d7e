"""Describe a tensor by shape, dtype and strides, without holding one.

A call of an operator is described by its target and its *arguments*: a tuple of trees whose leaves
are `TensorSpec`, plain numbers, strings, booleans, None; lists are tuples; keyword arguments stand
in a separate mapping. The same description keys probed kernels, traced ops and timed ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from estimator.errors import cause

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    # Two elements in a byte; a block's scale is a ninth of it.
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
# torch counts elements in 64 bits; its tensors have at most 64 dimensions.
MOST_EXTENT, MOST_DIMENSIONS = 2**63 - 1, 64
# So that bytes fit into 64 bits too.
MOST_ELEMENTS = 2**58


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype (torch's name without ``torch.``) and strides (None: contiguous)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; a tensor expanded by stride 0 counts each element once."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 4)

    @property
    def storage_bytes(self) -> int:
        """Bytes actually spanned in memory: an expanded dimension (stride 0) costs nothing."""
        if self.strides is None:
            return self.nbytes
        unique = math.prod(
            size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0
        )
        return unique * ITEM_BYTES.get(self.dtype, 4)


def tensor_leaves(tree: Any) -> Iterator[TensorSpec]:
    """Every TensorSpec in a tree of tuples, lists and mappings, in order."""
    if isinstance(tree, TensorSpec):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensor_leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensor_leaves(item)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator: ``aten.addmm.default`` with these arguments gives these outputs.

    Hashable, so that equal calls share one timing; `encode` and `decode` go through plain JSON.
    """

    target: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    @property
    def name(self) -> str:
        """The bare name of the operator: ``addmm``."""
        return self.target.split(".")[1]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every tensor among the arguments, in order."""
        tensors: list[TensorSpec] = []
        for argument in (*self.arguments, *[value for _, value in self.keywords]):
            if type(argument) is TensorSpec:
                tensors.append(argument)
            elif isinstance(argument, (tuple, list, dict)):
                tensors.extend(tensor_leaves(argument))
        return tuple(tensors)

    @property
    def dtype(self) -> str:
        """The floating dtype that the kernel computes in: of its first floating tensor."""
        tensors = (*self.inputs, *self.outputs)
        for spec in tensors:
            if "float" in spec.dtype or "complex" in spec.dtype:
                return spec.dtype
        return tensors[0].dtype if tensors else "float32"

    def encode(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, as stored in profiles and in the timing store."""
        return {
            "target": self.target,
            "arguments": encode_tree(self.arguments),
            "keywords": {name: encode_tree(value) for name, value in self.keywords},
            "outputs": encode_tree(self.outputs),
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """Read and written in files as `decode` and `encode` do."""
        from pydantic_core import core_schema

        def read(data: dict[str, Any]) -> OpCall:
            try:
                return cls.decode(data)
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"is no call of an operator: {cause(error)}") from None

        return core_schema.no_info_after_validator_function(
            read,
            core_schema.dict_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.encode),
        )

    @classmethod
    def decode(cls, data: dict[str, Any]) -> OpCall:
        """The inverse of `encode`; raises KeyError, TypeError or ValueError on anything else."""
        target, keywords = data["target"], data.get("keywords", {})
        if not isinstance(target, str) or not target or not isinstance(keywords, dict):
            raise ValueError("an operator has no name, or keywords that are none")
        arguments, outputs = decode_tree(data["arguments"]), decode_tree(data["outputs"])
        if not isinstance(arguments, tuple) or not isinstance(outputs, tuple):
            raise ValueError(f"the arguments or outputs of {target[:60]} are no list")
        if not all(isinstance(spec, TensorSpec) for spec in outputs):
            raise ValueError(f"an output of {target[:60]} is no tensor")
        return cls(
            target=target,
            arguments=arguments,
            keywords=tuple([(name, decode_tree(value)) for name, value in keywords.items()]),
            outputs=outputs,
        )


def encode_tree(tree: Any) -> Any:
    """A tree as JSON: a tensor is ``{"t": shape, "d": dtype[, "s": strides]}``."""
    if isinstance(tree, TensorSpec):
        coded: dict[str, Any] = {"t": list(tree.shape), "d": tree.dtype}
        if tree.strides is not None:
            coded["s"] = list(tree.strides)
        return coded
    if isinstance(tree, (tuple, list)):
        return [encode_tree(item) for item in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"f": str(tree)}
    return tree


def decode_tree(data: Any) -> Any:
    """The inverse of `encode_tree`; lists come back as tuples. Raises KeyError, ValueError."""
    if isinstance(data, dict):
        if "f" in data:
            return float(data["f"])
        strides = data.get("s")
        return _spec(_extents(data["t"]), data["d"], None if strides is None else _extents(strides))
    if isinstance(data, list):
        return tuple([decode_tree(item) for item in data])
    if type(data) is int and abs(data) > 2 * MOST_EXTENT + 1:
        raise ValueError("an argument is a number of more than 64 bits")
    return data


# Thousands of calls have some hundreds of shapes.
@lru_cache(maxsize=1 << 12)
def _spec(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None) -> TensorSpec:
    spec = TensorSpec(shape, dtype, strides)
    if not isinstance(dtype, str):
        raise ValueError("the type of a tensor's elements is no text")
    if strides is not None and len(strides) != len(shape):
        raise ValueError("a tensor has not as many strides as dimensions")
    if spec.numel > MOST_ELEMENTS:
        raise ValueError("a tensor has more than 2^58 elements")
    return spec


def _extents(sizes: Any) -> tuple[int, ...]:
    """Sizes or strides as they stand in JSON."""
    if not isinstance(sizes, (list, tuple)) or len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has no list of at most {MOST_DIMENSIONS} sizes")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MOST_EXTENT:
            raise ValueError("a size of a tensor is no whole number from 0 to 2^63")
    return tuple(sizes)
