"""Name the precision that a model is trained in, and the dtypes that this means."""

from __future__ import annotations

from typing import Literal, get_args

from estimator.errors import StrategyError, quoted

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-amp", "fp16-amp"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def check_precision(text: str) -> str:
    """The precision's name, or StrategyError."""
    if text not in PRECISIONS:
        raise StrategyError(
            f"precision {quoted(text)} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    return text


# torch lets cuDNN round fp32 convolutions to TF32 unless told otherwise; matmuls only when told
# (torch.backends.cudnn.allow_tf32 is True, torch.backends.cuda.matmul.allow_tf32 False).
TF32_BY_DEFAULT = ("convolution", "recurrent")


def peak_dtype(precision: str) -> str:
    """The dtype of the device's peak that a model of this precision computes under.

    >>> peak_dtype("bf16-amp"), peak_dtype("tf32")
    ('bfloat16', 'tfloat32')
    """
    dtype = {"fp32": "float32", "tf32": "tfloat32"}.get(precision)
    if dtype is None:
        dtype = "bfloat16" if precision.startswith("bf16") else "float16"
    return dtype


# The dtype that parameters are in under a precision where autocast or nothing casts them.
PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def parameter_dtype(precision: str) -> str:
    """What a model's parameters are in under a precision: fp32, bf16 or fp16.

    >>> parameter_dtype("bf16"), parameter_dtype("bf16-amp")
    ('bf16', 'fp32')
    """
    return precision if precision in PARAMETER_BYTES else "fp32"
