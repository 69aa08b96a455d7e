"""Tell how torch.compile was asked to run a model: whole, each block, or parts."""

from __future__ import annotations

from typing import Literal

from torch import nn

_SHOWN = 3


def compiled_as(model: nn.Module) -> tuple[bool | Literal["blocks"] | None, str | None]:
    """(`compiled` as trace_model takes it, what is assumed) of a model as it was given.

    ``torch.compile(model)`` returns a module that holds the model, ``model.compile()`` keeps what
    is called instead of the model within it (torch/_dynamo/eval_frame.py, torch/nn/modules/
    module.py). Blocks are compiled where all members of lists of modules are, and nothing else.
    """
    if _is_compiled(model):
        return True, None
    parts = [name for name, module in model.named_modules() if _is_compiled(module)]
    if not parts:
        return None, None
    named = dict(model.named_modules())
    lists = {name.rpartition(".")[0] for name in parts}
    members = {f"{each}.{name}" for each in lists for name, _ in named[each].named_children()}
    if all(isinstance(named[each], nn.ModuleList) for each in lists) and members == set(parts):
        return "blocks", None
    shown = ", ".join(f"'{name}'" for name in parts[:_SHOWN])
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return None, f"torch.compile of {shown}{more} alone is not modelled: all runs eagerly"


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
