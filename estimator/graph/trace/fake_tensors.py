"""Put fake tensors in place of a model's weights and of a batch, and put everything back."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from estimator.errors import ModelError, quoted


class WithoutWeights(TorchFunctionMode):
    """Makes large tensors without memory (on the meta device), small ones for real.

    Constructors read values of small ones (drop-path rates), and forward those of buffers.
    """

    _FACTORIES = frozenset(
        (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
    )
    _MOST_ELEMENTS = 1 << 14

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._FACTORIES and kwargs.get("device") is None:
            listed = bool(args) and isinstance(args[0], (tuple, list))
            size = kwargs.get("size", args[0] if listed else args)
            if math.prod(size) > self._MOST_ELEMENTS:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class WeightsTooLarge(BaseException):
    """Ends a constructor; no `except Exception` of its own keeps it."""


@dataclass(slots=True)
class Weights:
    """Parameters that modules have registered: bytes held, and with those that take no memory."""

    held_bytes: int = 0
    total_bytes: int = 0


@contextmanager
def counting_weights(most_bytes: float = math.inf) -> Iterator[Weights]:
    """Count the parameters of modules made within.

    Raises WeightsTooLarge as soon as they hold more than `most_bytes`.
    """
    weights = Weights()
    seen: set[int] = set()

    def count(_module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            weights.total_bytes += parameter.nbytes
            weights.held_bytes += 0 if parameter.is_meta else parameter.nbytes
        if weights.held_bytes > most_bytes:
            raise WeightsTooLarge

    handle = register_module_parameter_registration_hook(count)
    try:
        yield weights
    finally:
        handle.remove()


def with_values(batch: Any) -> Any:
    """The batch with zeros where `WithoutWeights` left tensors without values."""

    def filled(item: Any) -> Any:
        is_empty = isinstance(item, torch.Tensor) and item.is_meta
        return torch.zeros(item.shape, dtype=item.dtype) if is_empty else item

    return pytree.tree_map(filled, batch)


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
    model: nn.Module, *, dtype: torch.dtype | None, channels_last: bool = False
) -> FakeTensors:
    """Replace every parameter and buffer by a fake, inside a fake mode; `dtype` casts floats.

    References to them that modules keep elsewhere (RNNs keep flat lists) are replaced as well.
    """
    fakes = FakeTensors()
    made = fakes.made

    def fake_of(name: str, real: Tensor, *, is_parameter: bool) -> Tensor:
        fake = made.get(id(real))
        if fake is None:
            fake = _fake(real, dtype, channels_last)
            if is_parameter:
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
                fakes.parameters[name] = fake
            else:
                fakes.buffers[name], fakes.real_buffers[name] = fake, real
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
    return fakes


def _fake(real: Tensor, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    if isinstance(real, (UninitializedParameter, UninitializedBuffer)):
        raise ModelError(
            "the model has lazy parameters without a shape; call it once on a real batch first"
        )
    if type(real).__name__ == "DTensor":
        from estimator.graph.trace.parallel_modules import fake_part

        return fake_part(real, lambda part: _fake(part, dtype, channels_last))
    wanted = dtype if dtype is not None and real.is_floating_point() else real.dtype
    if real.layout is not torch.strided:
        raise ModelError(
            f"the model has a {real.layout} parameter or buffer; only dense tensors can be traced"
        )
    return laid_out(real, wanted, channels_last)


def laid_out(real: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """An empty tensor like a real one; images and filters with their channels last if asked."""
    if channels_last and real.dim() == 4:
        return torch.empty(real.shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)
    return torch.empty_strided(real.shape, real.stride(), dtype=dtype, device="cpu")


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
        if type(tree) is dict:
            return items
        # As transformers' BatchEncoding, which is read by attribute too.
        rebuild: Any = type(tree)
        try:
            return rebuild(items)
        except TypeError:
            return items
    if isinstance(tree, (list, tuple)):
        changed = [map_tensors(item, change, f"{join}{i}") for i, item in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*changed)
        return tuple(changed) if isinstance(tree, tuple) else changed
    return tree


# A mapping of lists of mappings, as detection models take, has three.
_MOST_LEVELS = 16


def checked_dim(dim: Any) -> int:
    """The dimension of the samples, by default the first; raises ModelError."""
    if dim is None:
        return 0
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise ModelError(
            f"batch_dim is the number of the dimension of the samples, found {quoted(dim)}; write "
            "one from 0"
        )
    return dim


def sample_count(batch: Any, dim: int) -> int | None:
    """The size along `dim` that most inputs share; a list counts as one entry per sample."""
    sizes = Counter(_sizes(batch, dim))
    if not sizes:
        return None
    samples, times = sizes.most_common(1)[0]
    return None if times == 1 and len(sizes) > 1 else samples


def check_batch(batch: Any) -> None:
    """Raise ModelError for a batch that no step can be traced with."""
    left = [(batch, 0)]
    while left:
        item, depth = left.pop()
        if depth > _MOST_LEVELS:
            raise ModelError(
                f"the batch is nested more than {_MOST_LEVELS} levels deep, or holds itself; give "
                "tensors in lists or mappings"
            )
        if isinstance(item, Mapping):
            left += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, (list, tuple)):
            left += [(inner, depth + 1) for inner in item]
        elif isinstance(item, Tensor) and (
            item.is_quantized or item.is_nested or item.layout is not torch.strided
        ):
            kind = "a quantised tensor" if item.is_quantized else "a sparse or nested tensor"
            raise ModelError(f"the batch holds {kind}, which cannot be traced; give a dense one")


def _sizes(batch: Any, dim: int) -> Iterator[int]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    for item in batch if isinstance(batch, (tuple, list)) else (batch,):
        if isinstance(item, Tensor):
            if item.dim() > dim:
                yield item.shape[dim]
        elif isinstance(item, Mapping):
            yield from _sizes(item, dim)
        elif isinstance(item, (list, tuple)) and item:
            yield len(item)


def with_samples(batch: Any, dim: int, samples: int, *, packed: bool = False) -> Any:
    """The batch with every sample twice.

    With `packed`, inputs hold several rows per sample (the patches of all images in one list): any
    whose size is a multiple of the samples is doubled.
    """

    def double(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: double(value) for key, value in item.items()}
        if isinstance(item, (list, tuple)):
            if hasattr(item, "_fields"):
                return type(item)(*map(double, item))
            return type(item)((*item, *item)) if len(item) == samples else item
        if not isinstance(item, Tensor) or item.dim() <= dim:
            return item
        rows = item.shape[dim]
        if rows % samples or not rows or (rows != samples and not packed):
            return item
        if item.device.type == "meta" or item.requires_grad:
            shape = list(item.shape)
            shape[dim] *= 2
            return torch.empty(shape, dtype=item.dtype, device="meta")
        return torch.cat((item, item), dim=dim)

    if isinstance(batch, (tuple, list)):
        doubled = [double(item) for item in batch]
        return type(batch)(*doubled) if hasattr(batch, "_fields") else type(batch)(doubled)
    return double(batch)


def value_range(tensor: Tensor) -> tuple[int | None, int | None]:
    """The smallest and largest value of an integer tensor, None of any other."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
        return None, None
    if tensor.dtype == torch.bool or not tensor.numel():
        return None, None
    low, high = tensor.aminmax()
    return int(low), int(high)


def tokens_per_sample(batch: Any, samples: int | None) -> int | None:
    """The length of the first integer input of shape (samples, length)."""
    lengths: list[int] = []

    def check(_path: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[0] == samples and tensor.dtype == torch.int64:
            lengths.append(tensor.shape[1])
        return tensor

    map_tensors(batch, check)
    return lengths[0] if lengths else None
