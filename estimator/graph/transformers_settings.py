"""Read a transformers config.json, as models are published with, and say which one is needed."""

from __future__ import annotations

import os
from typing import Any

from estimator.errors import ModelError, quoted
from estimator.files import parse_json, read_text

# Said of a file's weights, of its code or of the program that wrote it: the precision is an option
# here, and code is not fetched.
_NOT_SETTINGS = frozenset(
    ("model_type", "dtype", "torch_dtype", "auto_map", "transformers_version", "_name_or_path")
)
# More than any model; sizes beyond would be allocated before anything else can refuse them.
_MOST_LAYERS, _MOST_SIZE = 10_000, 10**8


def is_configuration_file(named: str) -> bool:
    """Whether ``hf:`` is followed by a file rather than by a type.

    >>> is_configuration_file("llama"), is_configuration_file("mine/config.json")
    (False, True)
    """
    return named.endswith(".json") or os.path.exists(os.path.join(named, "config.json"))


def read_configuration(named: str) -> tuple[str, dict[str, Any]]:
    """The type and the settings of a config.json, or of a folder with one; raises ModelError."""
    path = named if named.endswith(".json") else os.path.join(named, "config.json")
    try:
        found = parse_json(read_text(path))
    except OSError as error:
        raise ModelError(
            f"hf:{named} cannot be read: {error.strerror or error}; name a model's config.json"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}; name a model's config.json") from None
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise ModelError(
            f"{path} has no 'model_type', which a transformers config.json has; name such a file"
        )
    settings = _without_notes(found)
    _check_sizes(kind, settings)
    return kind, settings


def check_no_hub_id(kind: str) -> None:
    """Raise ModelError, with the file that is needed, where a model of the hub is named."""
    if "/" in kind:
        raise ModelError(
            f"'{kind}' is a model of the Hugging Face hub, which is never asked here; save its "
            "config.json (no weights are needed) and write hf:PATH/config.json"
        )


def check_size(kind: str, key: str, value: Any) -> None:
    """Raise ModelError for a size that no model has; ids of tokens may be -1."""
    if isinstance(value, bool) or not isinstance(value, int) or key.endswith("_id"):
        return
    most = _MOST_LAYERS if "layer" in key else _MOST_SIZE
    if not 0 <= value <= most:
        raise ModelError(
            f"{key} of '{kind}' is {quoted(value)}; a model has 0 to {most:g}, correct it"
        )


def _without_notes(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_notes(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in _NOT_SETTINGS
    }


def _check_sizes(kind: str, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(kind, value)
        elif value != -1:  # "none" of many older files
            check_size(kind, key, value)
