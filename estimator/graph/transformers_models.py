"""Build a transformers model of any type from its configuration, with random weights, offline."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from estimator.errors import ModelError, quoted
from estimator.graph.model_functions import Loaded, suggestion
from estimator.graph.transformers_batches import make_batch
from estimator.graph.transformers_repairs import (
    Settings,
    fill_gaps,
    fit_rotary_sections,
    mend_contradictions,
    parts_of,
)
from estimator.graph.transformers_settings import (
    check_no_hub_id,
    check_size,
    is_configuration_file,
    read_configuration,
)
from estimator.graph.user_code import UserCode
from estimator.graph.without_weights import WithoutWeights
from estimator.units import parse_knobs

# The head taken where the text names none: the first of these that the type has. Names are those of
# transformers' classes AutoModelFor...; a TASK is one of them, in any case and hyphenation.
HEADS = (
    "CausalLM",
    "Seq2SeqLM",
    "MaskedLM",
    "ImageTextToText",
    "MultimodalLM",
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "CTC",
    "SpeechSeq2Seq",
    "ObjectDetection",
    "SemanticSegmentation",
    "UniversalSegmentation",
    "InstanceSegmentation",
    "VideoClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
    "NextSentencePrediction",
    "PreTraining",
    "MaskedImageModeling",
    "DepthEstimation",
    "TimeSeriesPrediction",
    "VisualQuestionAnswering",
    "DocumentQuestionAnswering",
    "TableQuestionAnswering",
    "ImageToImage",
    "ZeroShotImageClassification",
    "ZeroShotObjectDetection",
    "AudioFrameClassification",
    "AudioXVector",
    "TextToSpectrogram",
    "TextToWaveform",
    "RNNT",
    "TDT",
    "ImageMatting",
    "PoseEstimation",
)
DEFAULT_BATCH = 8
# Above this a model that is only traced is left without weights.
MOST_WEIGHT_BYTES = 4 << 30


def build_transformers_model(
    text: str, *, batch: int | None, seq_len: int | None, weights: bool
) -> Loaded:
    """The model, batch, no loss (its own) and name of ``hf:TYPE[:TASK][,key=value...]``.

    For TYPE the path of a config.json may stand.
    """
    transformers = _transformers()
    kind, task, overrides = _parse(text)
    saved: dict[str, Any] = {}
    if is_configuration_file(kind):
        kind, saved = read_configuration(kind)
    # A method of the model, not a field of its configuration.
    checkpointing = overrides.pop("gradient_checkpointing", False)
    with _offline(), _quiet(transformers):
        config = _configuration(transformers, kind, saved, overrides)
        head, auto_class = _find_head(transformers, config, kind, task)
        set_here = mend_contradictions(config)
        _prepare(config, head)
        model, filled = _build_completed(auto_class, config, text, weights=weights)
        set_here.update(filled)
        if type(model).forward is torch.nn.Module.forward:
            raise ModelError(
                f"transformers' '{kind}' has no head to train; write a function that adds a loss"
            )
        if checkpointing:
            advice = "leave gradient_checkpointing out"
            with UserCode(f"'{kind}' has no checkpoints", advice=advice, error=ModelError):
                _enable_checkpointing(model)
        with UserCode(
            f"no batch is known for {text}", advice="write a function for it", error=ModelError
        ):
            example = make_batch(model, config, head, batch or DEFAULT_BATCH, seq_len)
    name = _name(text, set_here)
    pictured = "pixel_values" in inspect.signature(model.forward).parameters
    if pictured and not any(key.startswith("pixel_values") for key in example):
        name += " (text alone)"
    return model, example, None, name


def _enable_checkpointing(model: Any) -> None:
    # The method's name since transformers 5, and before.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


def _name(text: str, set_here: Settings) -> str:
    """The text after ``hf:``, with what had to be set beside it, written as a user would."""
    settings = (f"{key}={_shown(value)}" for key, value in set_here.items())
    return ",".join((text.removeprefix("hf:"), *settings))


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and value.count(value[0]) == len(value):
        return f"[{value[0]!r}]*{len(value)}"
    return str(value).replace(" ", "")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "an hf: model needs transformers; install throughput-estimator[models]"
        ) from None
    return transformers


def _parse(text: str) -> tuple[str, str | None, dict[str, Any]]:
    named, _, settings = text.removeprefix("hf:").partition(",")
    kind, _, task = named.partition(":")
    overrides: dict[str, Any] = {}
    try:
        knobs = parse_knobs(settings)
    except ValueError as error:
        raise ModelError(f"{quoted(text)}: {error}") from None
    for key, value in knobs.items():
        if not key or not value:
            raise ModelError(
                f"{quoted(key)} in {quoted(text)} is no setting; write key=value, as in "
                "hf:llama,hidden_size=2048"
            )
        overrides[key] = _literal(value)
        check_size(kind, key, overrides[key])
    return kind.strip(), task.strip() or None, overrides


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _configuration(
    transformers: Any, kind: str, saved: dict[str, Any], overrides: dict[str, Any]
) -> Any:
    """The type's configuration: its defaults, then what a file says, then what the text says."""
    from transformers.models.auto import configuration_auto

    check_no_hub_id(kind)
    known = list(vars(configuration_auto)["CONFIG_MAPPING_NAMES"])
    if kind not in known:
        raise ModelError(f"transformers has no type '{kind}'; {suggestion(kind, known)}")
    advice = f"check the settings against transformers' configuration of '{kind}'"
    with UserCode(f"the configuration of '{kind}' fails", advice=advice, error=ModelError):
        plain = transformers.AutoConfig.for_model(kind, **saved)
        for key in overrides:
            name = key.partition(".")[0]
            # Given as attn_implementation, kept as _attn_implementation.
            if not hasattr(plain, name) and not hasattr(plain, f"_{name}"):
                raise ModelError(
                    f"the configuration of '{kind}' has no '{key}'; "
                    f"{suggestion(key, list(plain.to_dict()))}"
                )
        flat = {key: value for key, value in overrides.items() if "." not in key}
        config = transformers.AutoConfig.for_model(kind, **saved | flat) if flat else plain
        for key, value in overrides.items():
            *path, last = key.split(".")
            holder = config
            for part in path:
                holder = getattr(holder, part)
            if path:
                setattr(holder, last, value)
    return config


def heads_of(transformers: Any, config: Any) -> dict[str, Any]:
    """The heads that a configuration can be trained with, by name, the default one first."""
    found = {}
    for head in HEADS:
        auto_class = getattr(transformers, f"AutoModelFor{head}", None)
        classes = {} if auto_class is None else auto_class._model_mapping
        if type(config) in classes and _takes(classes[type(config)], config):
            found[head] = auto_class
    return found


def _takes(model_class: Any, config: Any) -> bool:
    """Whether a class is built from this configuration, not from a part of it (its text model)."""
    classes = model_class if isinstance(model_class, (list, tuple)) else (model_class,)
    parts = {type(part) for path, part in parts_of(config) if path}
    return any(getattr(each, "config_class", None) not in parts for each in classes)


def _find_head(transformers: Any, config: Any, kind: str, task: str | None) -> tuple[str, Any]:
    heads = heads_of(transformers, config)
    if not heads:
        raise ModelError(
            f"transformers' '{kind}' has no head to train; write a function that adds a loss"
        )
    if task is None:
        return _default_head(heads, config)
    wanted = task.lower().replace("-", "").replace("_", "")
    for head, auto_class in heads.items():
        if head.lower() == wanted:
            return head, auto_class
    raise ModelError(f"'{kind}' has no task '{task}'; it has {', '.join(heads)}")


def _default_head(heads: dict[str, Any], config: Any) -> tuple[str, Any]:
    """The head that the type is trained with: many types also have one for a part of them alone."""
    # A config.json names the class of its weights, such as BertForSequenceClassification.
    first = [name.partition("For")[2] for name in config.architectures or ()]
    if getattr(config, "is_encoder_decoder", False):
        first += ["Seq2SeqLM", "SpeechSeq2Seq"]
    elif getattr(config, "is_decoder", None) is False:
        first += ["MaskedLM"]
    head = next((name for name in first if name in heads), next(iter(heads)))
    return head, heads[head]


def _prepare(config: Any, head: str) -> None:
    """Training settings: no cache, and the token ids without which no batch can be formed."""
    if config.architectures is None:
        # Read where a type has several classes for one head.
        config.architectures = []
    for _, part in parts_of(config):
        if getattr(part, "use_cache", None):
            part.use_cache = False
        for name in ("image_token_id", "image_token_index", "video_token_id"):
            if getattr(part, name, 0) is None:
                # The last id, which no other special token has.
                setattr(part, name, int(config.get_text_config().vocab_size) - 1)
        if hasattr(part, "vocab_size") or part is config:
            for name in ("pad_token_id", "decoder_start_token_id"):
                if getattr(part, name, None) is None:
                    setattr(part, name, 0)


def _build_completed(
    auto_class: Any, config: Any, text: str, *, weights: bool
) -> tuple[torch.nn.Module, Settings]:
    """The model, and what had to be set because the type's default configuration lacks it."""
    filled: Settings = {}
    while True:
        try:
            model = _build(auto_class, config, text, weights=weights)
        except ModelError as error:
            more = fill_gaps(config, error.__cause__)
            if more.items() <= filled.items():
                raise
            filled.update(more)
        else:
            return model, {**filled, **fit_rotary_sections(model)}


def _build(auto_class: Any, config: Any, text: str, *, weights: bool) -> torch.nn.Module:
    advice = "check its settings, or write a function that builds the model"
    failed = UserCode(f"{text} cannot be built", advice=advice, error=ModelError)
    empty: torch.nn.Module | None = None
    try:
        with failed, WithoutWeights():
            empty = auto_class.from_config(config)
    except ModelError as error:
        # Some constructors compute with weights, which do not have values here.
        if not isinstance(error.__cause__, (RuntimeError, NotImplementedError)):
            raise
    if empty is not None:
        size = sum(parameter.nbytes for parameter in empty.parameters())
        if not weights or size > MOST_WEIGHT_BYTES:
            return empty.train()
    with failed:
        model: torch.nn.Module = auto_class.from_config(config)
    return model.train()


@contextmanager
def _offline() -> Iterator[None]:
    """No network: for huggingface_hub's switch as it was read at import, and for later readers."""
    import huggingface_hub.constants as constants

    before = os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before[1]
        if before[0] is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before[0]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """transformers warns of settings that nobody chose here."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    with ExitStack() as stack:
        stack.callback(logging.set_verbosity, before)
        logging.set_verbosity_error()
        yield
