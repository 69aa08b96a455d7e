"""Run blocks behind activation checkpoints while traced; tell what torch.compile compiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from estimator.errors import ModelError, quoted
from estimator.graph.ir.op_graph import unit_path

_FORMS = "full, selective:op or selective:N for every N-th block"
# What selective checkpointing by operator keeps: every other product, and attention
# (torchtitan/distributed/activation_checkpoint.py).
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "linear"})
_KEPT = re.compile(r"_scaled_dot_product_\w*attention\w*|max|_scaled_mm|reduce_scatter_tensor")


@contextmanager
def checkpointed(model: nn.Module, form: str | None) -> Iterator[None]:
    """Each repeated block that has parts runs behind a checkpoint, in one of torchtitan's forms.

    "full" computes all of a block again in the backward pass, "selective:2" all of every second
    block, "selective:op" all but attention and every other product. Raises ModelError.
    """
    with ExitStack() as stack:
        for block, context in _chosen(model, form):
            original, own = block.forward, block.__dict__
            if "forward" in own:
                stack.callback(own.__setitem__, "forward", original)
            else:
                stack.callback(own.pop, "forward")
            block.forward = partial(checkpoint, original, use_reentrant=False, **context)
        yield


def _chosen(model: nn.Module, form: str | None) -> list[tuple[nn.Module, dict[str, Any]]]:
    if form is None:
        return []
    _, _, every = form.partition("selective:")
    if form != "full" and every != "op" and not re.fullmatch(r"[1-9][0-9]{0,5}", every):
        raise ModelError(f"checkpoint {quoted(form)} is unknown; write {_FORMS}")
    blocks = [
        module
        for path, module in model.named_modules()
        if path and unit_path(path) == path and any(True for _ in module.children())
    ]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks to checkpoint; use torch's checkpoint "
            "in its forward() instead"
        )
    if every == "op":
        return [(block, {"context_fn": _keeping_every_other_product}) for block in blocks]
    step = int(every or 1)
    return [(block, {}) for block in blocks[step - 1 :: step]]


def _keeping_every_other_product() -> Any:
    first, again = create_selective_checkpoint_contexts(_policy())
    return first, _holding_what_is_left(again)


@contextmanager
def _holding_what_is_left(again: Any) -> Iterator[None]:
    """Compute a block again; what was kept of it is held until then, also what is not asked for.

    The second run stops once it has all that the backward pass reads, often before the last kept
    result: a view of it tells the recorder that it was still there.
    """
    try:
        with again:
            yield
    finally:
        for kept in again.storage.values():
            for entry in tree_leaves(list(kept.values())):
                if isinstance(getattr(entry, "val", None), Tensor):
                    entry.val.view(entry.val.shape)


def _policy() -> Callable[..., CheckpointPolicy]:
    """What to keep of one block; its forward and its second run are counted apart."""
    products = {True: 0, False: 0}

    def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.__name__.split(".")[0]
        kept = _KEPT.fullmatch(name) is not None
        if name in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


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
    members = {f"{owner}.{name}" for owner in lists for name, _ in named[owner].named_children()}
    if all(isinstance(named[owner], nn.ModuleList) for owner in lists) and members == set(parts):
        return "blocks", None
    shown = ", ".join(f"'{name}'" for name in parts[:_SHOWN])
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return None, f"torch.compile of {shown}{more} alone is not modelled: all runs eagerly"


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
