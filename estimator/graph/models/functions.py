"""Build the model that a user's Python function returns, and check what it returned."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from estimator.errors import ModelError, UserCode, one_line
from estimator.graph.trace.fake_tensors import (
    WeightsTooLarge,
    WithoutWeights,
    counting_weights,
    with_values,
)
from estimator.graph.trace.training_call import as_phases
from estimator.units import format_bytes

Say = Callable[[str], None]

# Of a model that is only to be traced; larger ones are made without weights.
MOST_WEIGHT_BYTES = 1 << 30

Loaded = tuple[nn.Module, Any, Callable[[Any, Any], Any] | None, str]


def call_model_function(
    text: str,
    *,
    batch: int | None,
    seq_len: int | None,
    weights: bool = True,
    say: Say | None = None,
) -> Loaded:
    """What the function that `text` names returns, and its name; raises ModelError.

    Without `weights` a large model is made without them; where its code needs their values it is
    made with them, and `say` is told beforehand.
    """
    where, separator, function_name = text.rpartition(":")
    if not separator or not where or not function_name:
        raise ModelError(
            f"'{text}' does not name a model; write path/to/file.py:function, "
            "package.module:function, hf:gpt2, or the path of a saved graph or of a summary (.json)"
        )
    function = _find_function(where, function_name)
    accepted = inspect.signature(function).parameters
    if seq_len is not None and "seq_len" not in accepted:
        raise ModelError(f"{text} takes no seq_len; let it, or leave --seq-len out")
    options = {"batch": batch, "seq_len": seq_len}
    given = {
        name: value for name, value in options.items() if value is not None and name in accepted
    }
    if weights:
        result = _call(function, text, given)
    else:
        result = _call_lightly(function, text, given, say)
    model, example, loss = _checked_result(result, text)
    return model, example, loss, function_name


def _find_function(where: str, function_name: str) -> Callable[..., Any]:
    module = _load_file(Path(where)) if where.endswith(".py") else _load_package(where)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelError(
            f"{where} has no function '{function_name}'; {suggestion(function_name, names)}"
        )
    inner: Callable[..., Any] = function
    return inner


def suggestion(wrong: str, names: list[str]) -> str:
    """What to write instead of a wrong name."""
    close = difflib.get_close_matches(wrong, names, n=3, cutoff=0.5) or sorted(names)[:5]
    return f"did you mean {' or '.join(close)}?" if close else "it has none; check the name"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"there is no file {path}; check the path before the colon")
    # Named by its path, so that two files of one name do not hide each other; registered, because
    # dataclasses and pickling look their module up.
    name = "estimator_model_" + "_".join(path.resolve().with_suffix("").parts[1:])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be imported; give a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    advice = "fix the file"
    if (path.parent / "__init__.py").is_file():  # relative imports need the package's name
        package = path.resolve().parent.name
        advice += f", or write {package}.{path.stem}:function where {package} is a folder"
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        with UserCode(f"{path} cannot be imported", advice=advice, error=ModelError):
            spec.loader.exec_module(module)
    except ModelError:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module


def _load_package(name: str) -> ModuleType:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with UserCode(
            f"module '{name}' cannot be imported",
            advice="write package.module:function or path/to/file.py:function",
            error=ModelError,
        ):
            return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def _call(function: Callable[..., Any], text: str, given: dict[str, Any]) -> Any:
    with UserCode(f"{text} raised", advice="fix the function", error=ModelError):
        return function(**given)


def _call_lightly(
    function: Callable[..., Any], text: str, given: dict[str, Any], say: Say | None
) -> Any:
    """Its result, the model without weights where these are large."""
    try:
        with counting_weights(MOST_WEIGHT_BYTES):
            return _call(function, text, given)
    except ModelError as error:
        if not isinstance(error.__cause__, WeightsTooLarge):
            raise
    try:
        with counting_weights() as weights, WithoutWeights():
            model, example, *loss = _call(function, text, given)
    except (ModelError, TypeError, ValueError) as error:
        if say is not None:
            say(
                f"building {text} with its weights, at least "
                f"{format_bytes(max(weights.total_bytes, MOST_WEIGHT_BYTES))}, since without them "
                f"it fails ({one_line(str(error))})"
            )
        return _call(function, text, given)
    return model, with_values(example), *loss


def _checked_result(result: Any, text: str) -> tuple[nn.Module, Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        given = result if isinstance(result, (tuple, list)) else ()
        has_optimizer = any(hasattr(part, "param_groups") for part in given)
        more = "; the optimizer is for --optimizer" if has_optimizer else ""
        raise ModelError(
            f"{text} returned {_kind(result)}; return (model, batch) or (model, batch, loss){more}"
        )
    model, example, loss = (*result, None)[:3]
    model, loss = as_phases(model, loss)
    if not isinstance(model, nn.Module):
        are_several = isinstance(model, (tuple, list))
        write = "([nn.Module, …], batch, step)" if are_several else "(nn.Module, batch)"
        if isinstance(model, type):
            write = f"({model.__name__}(…), batch)"
        raise ModelError(f"{text} returned {_kind(model)} as the model; return {write}")
    if loss is not None and not callable(loss):
        raise ModelError(
            f"{text} returned {_kind(loss)} as the loss; return a function of (output, targets)"
        )
    return model, example, loss


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "None"
