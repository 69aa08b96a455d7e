"""Turn described operator calls into real ones, and real tensors into descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from estimator.errors import ProbeError
from estimator.tensors import OpCall, TensorSpec


def spec_of(tensor: Any) -> TensorSpec:
    """Describe a torch tensor; strides are left out where it is contiguous."""
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), strides)


def torch_dtype(name: str) -> Any:
    """torch's dtype of a TensorSpec's dtype name; raises ProbeError."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProbeError(
            f"this torch has no dtype '{name}'; use the torch the graph was traced with"
        )
    return found


def find_operator(target: str) -> Callable[..., Any]:
    """The overload that ``aten.addmm.default`` names; raises ProbeError if this torch lacks it."""
    import torch

    found: Any = torch.ops
    for name in target.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise ProbeError(f"this torch has no operator '{target}'; trace the model again")
    return found


def output_tensors(result: Any) -> list[Any]:
    """Every tensor that an operator returned, in order; what it did not compute is left out."""
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in output_tensors(item)]
    return []


def real_arguments(
    call: OpCall, tensors: Iterator[Any], *, device: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments with `tensors` in place of the specs, in their order.

    A ``device`` keyword becomes `device`, so that a graph traced on fake tensors runs here.
    """
    positional = [decode_argument(_fill(argument, tensors)) for argument in call.arguments]
    keywords = {name: decode_argument(_fill(value, tensors)) for name, value in call.keywords}
    if device is not None and keywords.get("device") is not None:
        keywords["device"] = device
    return positional, keywords


def decode_argument(value: Any) -> Any:
    """The inverse of `estimator.graph.record.encode_argument`; lists for tuples.

    >>> decode_argument(("torch.float32", 2))
    [torch.float32, 2]
    """
    import torch

    if isinstance(value, tuple):
        return [decode_argument(item) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _fill(value: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(value, TensorSpec):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_fill(item, tensors) for item in value)
    return value


def span_elements(spec: TensorSpec) -> int:
    """Elements of memory from a tensor's first to its last element."""
    if spec.numel == 0:
        return 0
    if spec.strides is None:
        return spec.numel
    reach = zip(spec.shape, spec.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in reach)
