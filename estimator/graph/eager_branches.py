"""Keep torch and transformers from doing anything else on fake tensors than eager training does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch logs the traceback of an operator that a batch does not fit; we raise a sentence."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def unlike_tracing() -> Iterator[None]:
    """Let code take the branches of eager training although it meets fake tensors.

    transformers looks for them (utils.import_utils.is_tracing) and then builds masks that eager
    training skips; the recorder knows the values that its eager branches ask for. A module moved to
    its own device in forward (losses of detection models) keeps its fakes, which torch cannot swap.
    """

    def swap(one: Tensor, two: Tensor) -> None:
        if one.dtype != two.dtype or one.shape != two.shape:
            swap_tensors(one, two)

    swap_tensors = torch.utils.swap_tensors
    imports: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(imports, "is_fake_tensor", None)
    torch.utils.swap_tensors = swap
    if is_fake_tensor is not None:
        imports.is_fake_tensor = lambda _tensor: False
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap_tensors
        if is_fake_tensor is not None:
            imports.is_fake_tensor = is_fake_tensor
