"""Tell a recorder of the calls that a traced model makes in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from estimator.graph.record import Recorder


@contextmanager
def watched_calls(recorder: Recorder) -> Iterator[None]:
    """Note calls of modules, and in the forward pass those of autograd functions in Python."""
    before = register_module_forward_pre_hook(recorder.enter_module)
    after = register_module_forward_hook(recorder.leave_module, always_call=True)
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Those of DTensor are part of what its calls of modules are probed to cost.
        own = not cls.__module__.startswith("torch.distributed.tensor")
        recorder.function_calls += recorder.phase == "forward" and own
        return original.__func__(cls, *args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original
        before.remove()
        after.remove()
