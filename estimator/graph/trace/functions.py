"""Run functions on fake tensors as eager training does, and as a CUDA device would.

A CPU build of torch cannot run autograd on fake CUDA tensors (its device guard is missing), so the
graph of a GPU is traced on fake CPU tensors, with the functions replaced that choose by device.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from estimator.errors import TraceError
from estimator.graph.trace.constant_propagation import Constants


def quiet_fakes() -> AbstractContextManager[Any]:
    """torch logs the traceback of an operator that a batch does not fit; we raise a sentence."""
    return patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True)


@contextmanager
def unlike_tracing() -> Iterator[None]:
    """Let code take the branches of eager training although it meets fake tensors.

    transformers looks for them (utils.import_utils.is_tracing) and then builds masks that eager
    training skips; the recorder knows the values that its eager branches ask for. A module moved to
    its own device in forward (losses of detection models) keeps its fakes, which torch cannot swap.
    """
    swap_tensors = torch.utils.swap_tensors

    def swap(one: Tensor, two: Tensor) -> None:
        if one.dtype != two.dtype or one.shape != two.shape:
            swap_tensors(one, two)

    imports = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        if hasattr(imports, "is_fake_tensor"):
            stack.enter_context(patch.object(imports, "is_fake_tensor", lambda _tensor: False))
        yield


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


aten = torch.ops.aten

CUDA_ASSUMPTION = (
    "the GPU runs torch's default operators (flash or memory-efficient attention, cuDNN recurrent "
    "layers and batch norm, fused dropout and RMS norm), traced without one"
)

# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32: run in float32 under autocast on CUDA. Products and
# convolutions, which run in the lower precision, are the same on the CPU and left to its autocast.
# fmt: off
_IN_FLOAT32 = frozenset((
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "group_norm",
    "norm", "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "cdist",
    "renorm", "logsumexp",
))
# AT_FORALL_FP32_SET_OPT_DTYPE: give a float32 result.
_TO_FLOAT32 = frozenset(("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"))
# fmt: on

# torch.backends.cudnn.rnn.get_cudnn_mode
_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash
_MOST_FLASH_HEAD_DIM = 256


class CudaFunctions(EagerFunctions):
    """Replaces the functions that run other operators on CUDA than on the CPU."""

    def __init__(self, constants: Constants) -> None:
        super().__init__(constants)
        self._by_name: dict[str, Callable[..., Any]] = {
            "dropout": _dropout,
            "scaled_dot_product_attention": _attention,
            "multi_head_attention_forward": _multi_head_attention,
            "batch_norm": _batch_norm,
            "rms_norm": _rms_norm,
            "one_hot": _one_hot,
            **{name: _recurrent(name) for name in _CUDNN_MODES},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rule = self._by_name.get(name)
        if rule is not None:
            return rule(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                args = tuple(_widened(argument) for argument in args)
                kwargs = {key: _widened(value) for key, value in kwargs.items()}
            elif name in _TO_FLOAT32 and _is_narrow(args[0]) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        return super().__torch_function__(func, types, args, kwargs)


def _is_narrow(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dtype in (torch.float16, torch.bfloat16)


def _widened(argument: Any) -> Any:
    return argument.float() if _is_narrow(argument) else argument


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Fused on CUDA where it drops anything (aten/src/ATen/native/Dropout.cpp)."""
    if inplace or not training or p in (0.0, 1.0):
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention for half precision without a mask, else memory-efficient or plain one.

    sdp_utils.cpp (aten/src/ATen/native/transformers/cuda) on a device of compute capability 8.0 or
    more: flash takes no mask and heads up to 256, values' as wide as queries', the memory-efficient
    one rows of whole 16 bytes and as many heads of keys as of queries; what neither takes is
    computed product by product.
    """
    head_dim = query.shape[-1]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if query.dim() != 4:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if _is_narrow(query) and head_dim % 8 == 0 and head_dim <= most_cudnn_head_dim():
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        by_cudnn: Tensor = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
        return by_cudnn
    # Flash takes values as wide as queries alone (check_head_dim_size_flash).
    takes_flash = attn_mask is None and value.shape[-1] == head_dim <= _MOST_FLASH_HEAD_DIM
    if _is_narrow(query) and takes_flash:
        query, key, value = (_padded_head(tensor) for tensor in (query, key, value))
        output = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return output if output.shape[-1] == head_dim else output[..., :head_dim]
    # As minimum_gemm_alignment asks for.
    is_aligned = not any(head.shape[-1] * head.itemsize % 16 for head in (query, value))
    if not is_aligned or key.shape[1] != query.shape[1]:
        plain: Tensor = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return plain
    bias = None if attn_mask is None else _bias(attn_mask, query, key, padded=True)
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    result: Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return result


@lru_cache(maxsize=1)
def most_cudnn_head_dim() -> int:
    """Width of head up to which cuDNN goes first in half precision, where a GPU is here to ask.

    check_prefer_cudnn_attention and check_cudnn_tensor_shapes of sdp_utils.cpp, torch 2.11: on
    compute capability 9.0 and 10.0 with cuDNN beyond 9.15.0. 0 elsewhere, and without a GPU.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or not torch.cuda.is_available():
        return 0
    cudnn = torch.backends.cudnn.version() or 0
    if cudnn <= 91500 or torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        return 0
    return 128


def _padded_head(tensor: Tensor) -> Tensor:
    """pad_last_dim of aten/src/ATen/native/transformers/attention.cpp: heads in multiples of 8."""
    missing = -tensor.shape[-1] % 8
    return functional.pad(tensor, (0, missing)) if missing else tensor


# preprocess_mask of aten/src/ATen/native/transformers/attention.cpp, mem_eff_alignment
_BIAS_ALIGNMENT = 8


def _bias(mask: Tensor, query: Tensor, key: Tensor, *, padded: bool = False) -> Tensor:
    """What is added to the scores; `padded` so that every row begins at whole 16 bytes."""
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
        mask = bias.masked_fill_(mask.logical_not(), -math.inf)
    strides = mask.stride()
    if padded and (strides[-1] != 1 or any(step % _BIAS_ALIGNMENT for step in strides[:-1])):
        width = mask.shape[-1]
        missing = _BIAS_ALIGNMENT - width % _BIAS_ALIGNMENT
        mask = functional.pad(mask, (0, missing))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Its own Python calls attention and dropout by the names of its module."""
    replaced = patch.multiple(functional, scaled_dot_product_attention=_attention, dropout=_dropout)
    with replaced:
        return functional.multi_head_attention_forward(*args, **kwargs)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """cuDNN's where _select_batch_norm_backend of aten/src/ATen/native/Normalization.cpp takes it.

    It leaves bfloat16 to torch's own kernel.
    """
    is_wide = input.dtype != torch.bfloat16
    if not (training and is_wide) or weight is None or bias is None or input.dim() < 3:
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, training, momentum, eps, True
        )
    result: Tensor = torch.cudnn_batch_norm(
        input, weight, bias, running_mean, running_var, True, momentum, eps
    )[0]
    return result


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel on CUDA where its tensors are of one dtype (native/layer_norm.cpp)."""
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return torch.rms_norm(input, normalized_shape, weight, eps)
    fused: Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)
    return fused


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's kernel and its gradient: on the CPU autograd sees the operators of a composite."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output, rstd = aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            gradients = aten._fused_rms_norm_backward.default(
                gradient, input, ctx.shape, rstd, weight, wanted
            )
        return gradients[0], None, gradients[1], None


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """On CUDA the range is not checked, which would wait for the device."""
    if num_classes == -1:
        num_classes = int(tensor.max().item()) + 1
    result = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return result.scatter_(-1, tensor.unsqueeze(-1), 1)


def _recurrent(name: str) -> Callable[..., Any]:
    """One cuDNN operator for all layers and steps; packed sequences keep the CPU's operators."""
    is_lstm = name == "lstm"

    def run(*arguments: Any) -> Any:
        # A packed sequence comes as (data, batch sizes, state, weights, ...).
        if isinstance(arguments[3], (list, tuple)):
            return getattr(torch._VF, name)(*arguments)
        source, state, weights, biased, layers, dropout, train, both_ways, batch_first = arguments
        hidden, cell = state if is_lstm else (state, None)
        if torch.is_autocast_enabled("cpu"):
            # _cudnn_rnn_cast_reflatten of aten/src/ATen/cudnn/AutocastRNN.cpp.
            dtype = torch.get_autocast_dtype("cpu")
            source, hidden = source.to(dtype), hidden.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        hidden_size = weights[0].shape[0] // {"lstm": 4, "gru": 3}.get(name, 1)
        projected = hidden.shape[-1] if hidden.shape[-1] != hidden_size else 0
        per_layer = (4 if biased else 2) + (projected > 0)
        output, hidden, cell, _, _ = torch._cudnn_rnn(
            source, weights, per_layer, None, hidden, cell, _CUDNN_MODES[name], hidden_size,
            projected, layers, batch_first, dropout, train, both_ways, [], None,
        )  # fmt: skip
        return (output, hidden, cell) if is_lstm else (output, hidden)

    return run
