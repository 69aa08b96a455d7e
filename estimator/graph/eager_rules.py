"""Run as eager training does the few functions that behave otherwise on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from estimator.errors import TraceError
from estimator.graph.constant_propagation import Constants

# Losses of object detection match boxes by scipy, on costs that depend on weights.
_AS_ZEROS = "activations that the model hands to numpy (matching) are taken as zeros"


class EagerFunctions(TorchFunctionMode):
    """Replaces torch functions that run other operators on fake tensors than on real ones."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self._rules: dict[Any, Callable[..., Any]] = {
            torch._C._nn.one_hot: self._one_hot,
            Tensor.tolist: self._tolist,
            Tensor.__format__: self._format,
            torch.tensor: self._tensor,
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._array,
        }
        self._known = constants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func, func)
        return rule(*args, **(kwargs or {}))

    def _value(self, tensor: Tensor, what: str) -> Tensor:
        value = self._known.read(tensor)
        if value is None:
            raise TraceError(
                f"{what} needs the values of a tensor that depends on weights, which a trace does "
                "not have; trace a variant of the model that does not read them"
            )
        return value

    def _tolist(self, tensor: Tensor) -> Any:
        value = self._value(tensor, "Tensor.tolist")
        with _disable_current_modes():
            return value.tolist()

    def _format(self, tensor: Tensor, spec: str) -> str:
        # A real scalar tensor is formatted as its value, and expert modules are named by it.
        value = self._known.read(tensor) if tensor.dim() == 0 else None
        with _disable_current_modes():
            return format(tensor if value is None else value, spec)

    def _tensor(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            data = self._plain(data)
        return torch.tensor(data, *args, **kwargs)

    def _plain(self, data: Any) -> Any:
        """Lists of scalar tensors as lists of numbers: torch.tensor reads them one by one."""
        if isinstance(data, (list, tuple)):
            return [self._plain(item) for item in data]
        return self._tolist(data) if isinstance(data, Tensor) else data

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        value = self._known.read(tensor)
        with _disable_current_modes():
            if value is None:
                self._known.assumptions[_AS_ZEROS] = None
                value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
            return value.numpy(**kwargs)

    def _array(self, tensor: Tensor, dtype: Any = None) -> Any:
        array = self._numpy(tensor)
        return array if dtype is None else array.astype(dtype, copy=False)

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """aten/src/ATen/native/Onehot.cpp compares on fake tensors, but scatters on real ones."""
        if tensor.numel() == 0:
            return torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype)
        low, high = torch.aminmax(tensor)
        if self._known.of(tensor) is not None:
            low.item()
            largest = int(high.item())
            num_classes = largest + 1 if num_classes == -1 else num_classes
        elif num_classes == -1:
            self._value(tensor, "one_hot without a number of classes")
        shape = (*tensor.shape, num_classes)
        result = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return result.scatter_(-1, tensor.unsqueeze(-1), 1)
