"""Put fake tensors in place of a model's parameters and of a batch, and put everything back."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from estimator.errors import ModelError

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@dataclass(slots=True)
class FakeTensors:
    """The fakes in place of a model's tensors, tied ones once, with the names they go by.

    `made` has them by the id of the real tensor.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    real_buffers: dict[str, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def kept_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore a model's attributes, its containers, and the random state, also after an error.

    What a forward pass writes into modules (caches, counters, new buffers) is undone.
    """
    kept = []
    for module in model.modules():
        attributes = dict(vars(module))
        contents = {
            name: value.copy() for name, value in attributes.items() if type(value) in _CONTAINERS
        }
        kept.append((module, attributes, contents))
    torch_state, python_state = torch.random.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state()
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                container = attributes[name]
                container.clear()
                container.extend(content) if isinstance(content, (list, deque)) else (
                    container.update(content)
                )
        torch.random.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def seed_all(seed: int) -> None:
    """Start torch's, Python's and numpy's generators alike, so that repeated runs draw alike."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def put_fake_tensors(
    model: nn.Module, *, dtype: torch.dtype | None, device: str, channels_last: bool = False
) -> FakeTensors:
    """Replace every parameter and buffer by a fake, inside a fake mode; `dtype` casts floats.

    References to them that modules keep elsewhere (RNNs keep flat lists) are replaced as well.
    """
    found = FakeTensors()
    made = found.made

    def fake_of(name: str, real: Tensor, *, is_parameter: bool) -> Tensor:
        fake = made.get(id(real))
        if fake is None:
            fake = _fake(real, dtype, device, channels_last)
            if is_parameter:
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
                found.parameters[name] = fake
            else:
                found.buffers[name], found.real_buffers[name] = fake, real
            made[id(real)] = fake
        return fake

    modules = list(model.named_modules())
    for prefix, module in modules:
        for is_parameter, held in ((True, module._parameters), (False, module._buffers)):
            for name, real in held.items():
                if real is not None:
                    path = f"{prefix}.{name}" if prefix else name
                    held[name] = fake_of(path, real, is_parameter=is_parameter)
    for _, module in modules:
        _replace_references(vars(module), made)
    return found


def _fake(real: Tensor, dtype: torch.dtype | None, device: str, channels_last: bool) -> Tensor:
    if isinstance(real, (UninitializedParameter, UninitializedBuffer)):
        raise ModelError(
            "the model has lazy parameters without a shape; call it once on a real batch first"
        )
    if type(real).__name__ == "DTensor":
        from estimator.graph.divided_modules import fake_part

        return fake_part(real, lambda part: _fake(part, dtype, device, channels_last))
    wanted = dtype if dtype is not None and real.is_floating_point() else real.dtype
    if real.layout is not torch.strided:
        raise ModelError(
            f"the model has a {real.layout} parameter or buffer; only dense tensors can be traced"
        )
    return laid_out(real, wanted, device, channels_last)


def laid_out(real: Tensor, dtype: torch.dtype, device: str, channels_last: bool) -> Tensor:
    """An empty tensor like a real one; images and filters with their channels last if asked."""
    if channels_last and real.dim() == 4:
        return torch.empty(
            real.shape, dtype=dtype, device=device, memory_format=torch.channels_last
        )
    return torch.empty_strided(real.shape, real.stride(), dtype=dtype, device=device)


def _replace_references(attributes: dict[str, Any], made: Mapping[int, Tensor]) -> None:
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            attributes[name] = made.get(id(value), value)
        elif type(value) is list:
            for position, item in enumerate(value):
                if id(item) in made:
                    value[position] = made[id(item)]
        elif type(value) is tuple and any(id(item) in made for item in value):
            attributes[name] = tuple(made.get(id(item), item) for item in value)


def map_tensors(tree: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A copy of a tree of mappings, tuples and lists with every tensor changed.

    `change` gets the tensor's path: keys and positions joined by dots.
    """
    if isinstance(tree, Tensor):
        return change(path or "0", tree)
    join = f"{path}." if path else ""
    if isinstance(tree, Mapping):
        items = {key: map_tensors(item, change, f"{join}{key}") for key, item in tree.items()}
        # transformers' BatchEncoding and BatchFeature are UserDicts, read by attribute too.
        rebuild: Any = type(tree)
        return rebuild(items) if isinstance(tree, UserDict) else items
    if isinstance(tree, (list, tuple)):
        changed = [map_tensors(item, change, f"{join}{i}") for i, item in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*changed)
        return tuple(changed) if isinstance(tree, tuple) else changed
    return tree
