"""Build the models that are trained for real, as `trained.json` describes them.

An entry names a model of transformers, with `settings` of its configuration, or of this folder;
`inputs` and `loss` are functions of `inputs.py`. Weights are random; `batches` are sizes whose
steps take tens to hundreds of milliseconds on one core, or fit a GPU of 80 GB. Of the kind ``gpu``
those that tell most of the engine come first: what is not reached in the time is the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from zoo import inputs
from zoo.inputs import Batch, Loss

Built = tuple[nn.Module, Batch] | tuple[nn.Module, Batch, Loss]
# Kinds of models by name: on cores, on a GPU, and so tiny that cores run the GPU's suite.
TRAINED: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def functions(kind: str) -> list[Callable[..., Built]]:
    """A function for each model, as MODEL texts ask: of a batch size, by default its first."""
    return [_function(name, entry) for name, entry in TRAINED[kind].items()]


def _function(name: str, entry: Mapping[str, Any]) -> Callable[..., Built]:
    called_with, *sizes = entry["inputs"]

    def make(batch: int = entry["batches"][0]) -> Built:
        model = _built(entry["model"], entry.get("settings", {})).train()
        given = getattr(inputs, called_with)(batch, *sizes)
        return (model, given, getattr(inputs, entry["loss"])) if "loss" in entry else (model, given)

    make.__name__ = name
    return make


def _built(model: str, settings: Mapping[str, Any]) -> nn.Module:
    module, _, name = model.rpartition(".")
    if module:
        return getattr(import_module(f"zoo.{module}"), name)(**settings)
    import transformers

    config = model.partition("For")[0].removesuffix("LMHeadModel") + "Config"
    return getattr(transformers, model)(getattr(transformers, config)(**settings))
