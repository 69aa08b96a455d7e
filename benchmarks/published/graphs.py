"""Trace the models of published tables once each and keep their graphs in files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from records import kept_graph, say

import estimator as est
from estimator.errors import EstimatorError
from published.own_kernels import ATTENTION, with_own_kernels
from published.rows import NotMapped

# Shapes are affine in the batch size: one traced batch serves all.
_TRACE_BATCH = 2
BUILDERS = {
    name: f"zoo.{module}"
    for module, names in {
        "language": ("decoder", "from_transformers"),
        "megatron": ("megatron_gpt",),
        "convolutional": ("resnet", "cifar_resnet18", "efficientnet"),
        "sequence": (
            *("deepspeech2", "word_lstm", "translator", "transformer_xl", "gnmt", "ncf"),
            *("jasper", "quartznet"),
        ),
        "dense": ("unet", "ssd", "retinanet"),
    }.items()
    for name in names
}

# Models of the tables by name, and sizes of families.
KNOWN = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
# Traced models of published rows, of this checkout.
GRAPHS = Path(__file__).resolve().parents[2] / "build" / "graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A builder of the zoo and its settings; `name` is what people call the model.

    The setting `trace_batch` is not the builder's: the batch to trace with. `compiled`,
    `checkpoint` and `float8` are those of `trace_model`; `own_softmax` names modules whose softmax
    is a kernel of their library's, and `attention` the library whose attention is not torch's.
    """

    name: str
    builder: str
    settings: tuple[tuple[str, Any], ...] = ()
    compiled: bool | str = False
    channels_last: bool = False
    checkpoint: str | None = None
    float8: str | None = None
    own_softmax: str | None = None
    attention: Literal["cudnn", "triton"] | None = None

    @property
    def is_forward_only(self) -> bool:
        """Whether the source measured no backward pass."""
        return dict(self.settings).get("training", True) is False

    @classmethod
    def of(cls, name: str, builder: str, **settings: Any) -> ModelSpec:
        """The spec with its settings as keywords."""
        return cls(name=name, builder=builder, settings=tuple(sorted(settings.items())))

    @classmethod
    def known(cls, name: str) -> ModelSpec:
        """One of `models.json`."""
        about = {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in KNOWN["specs"][name].items()
            if field != "source"
        }
        return cls.of(name, **about)

    @classmethod
    def sized(cls, name: str, builder: str, family: str, size: str, **settings: Any) -> ModelSpec:
        """One of a family of `models.json`."""
        sizes = zip(KNOWN[family]["columns"], KNOWN[family][size], strict=False)
        return cls.of(name, builder, **dict(sizes), **settings)

    def with_settings(self, **more: Any) -> ModelSpec:
        """The same model with other settings."""
        changed = {**dict(self.settings), **more}
        return replace(self, settings=tuple(sorted(changed.items())))


class GraphStore:
    """Graphs in a folder, by what they were traced from; traced where they are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[ModelSpec, str, str], est.OpGraph] = {}

    def graph(self, spec: ModelSpec, precision: str, optimizer: str) -> est.OpGraph:
        """The model's graph under a precision and an optimizer, the same object every time.

        Raises NotMapped where the model cannot be traced.
        """
        key = spec, precision, optimizer
        if key not in self._known:
            path = self.folder / _file_name(spec, precision)
            graph = kept_graph(path, partial(_traced, spec, precision))
            # Calibration tells jobs apart by this name.
            name = f"{spec.name}, {precision}"
            name += f", float8 {spec.float8}" if spec.float8 else ""
            name += (", compiled" if spec.compiled else "") + (
                ", nhwc" if spec.channels_last else ""
            )
            if spec.own_softmax:
                graph = with_own_kernels(graph, spec.own_softmax)
            if spec.attention:
                graph = ATTENTION[spec.attention](graph)
            if spec.is_forward_only:
                graph, name = forward_only(graph), f"{name}, forward"
            self._known[key] = replace(graph, name=name, optimizer=optimizer)
        return self._known[key]


def _traced(spec: ModelSpec, precision: str) -> est.OpGraph:
    say(f"tracing {spec.name} in {precision}")
    build: Callable[..., Any] = getattr(import_module(BUILDERS[spec.builder]), spec.builder)
    settings = dict(spec.settings)
    model, batch, loss = build(settings.pop("trace_batch", _TRACE_BATCH), **settings)
    try:
        return est.trace_model(
            model,
            batch,
            loss=loss,
            precision=precision,
            target="cuda",
            name=spec.name,
            compiled=spec.compiled,
            channels_last=spec.channels_last,
            checkpoint=spec.checkpoint,
            float8=spec.float8,
        )
    except EstimatorError as error:
        raise NotMapped(f"its model cannot be traced: {error}") from None


def _file_name(spec: ModelSpec, precision: str) -> str:
    """Readable, and different for different models, settings and precisions."""
    modes = [mode for mode in ("compiled", "channels_last") if getattr(spec, mode)]
    modes += [
        text for text in (spec.compiled, spec.checkpoint, spec.float8) if isinstance(text, str)
    ]
    # Compiled graphs of earlier versions lack the eager operators that layouts divide.
    modes += ["with eager"] if spec.compiled else []
    described = json.dumps([spec.builder, spec.settings, precision, *modes], sort_keys=True)
    plain = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    return f"{plain}_{precision}_{hashlib.sha256(described.encode()).hexdigest()[:12]}.graph"


def forward_only(graph: est.OpGraph) -> est.OpGraph:
    """The graph without its backward pass and with nothing to update.

    Indices stay what they are: forward ops come first, and values of the backward pass are merely
    used by none. The parameters stand as frozen, so that memory still holds them.
    """
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if op.phase == "forward"),
        parameters=(),
        frozen_parameter_bytes=graph.frozen_parameter_bytes + graph.parameter_bytes,
    )
