"""Build a transformers model of any type from its configuration, with random weights, offline.

Some types leave settings to their checkpoints' files: ``EsmConfig()`` has no vocabulary size, so
that transformers itself cannot build a model from it. What is set here is returned, to be said.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from estimator.errors import ModelError, UserCode, quoted
from estimator.files import parse_json, read_text
from estimator.graph.models.functions import Loaded, suggestion
from estimator.graph.models.transformers_batches import make_batch
from estimator.graph.trace.fake_tensors import WithoutWeights
from estimator.units import parse_knobs

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
        content = parse_json(read_text(path))
    except OSError as error:
        raise ModelError(
            f"hf:{named} cannot be read: {error.strerror or error}; name a model's config.json"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}; name a model's config.json") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise ModelError(
            f"{path} has no 'model_type', which a transformers config.json has; name such a file"
        )
    return kind, _settings(kind, content)


def check_size(kind: str, key: str, value: Any) -> None:
    """Raise ModelError for a size that no model has; ids of tokens may be -1."""
    if isinstance(value, bool) or not isinstance(value, int) or key.endswith("_id"):
        return
    most = _MOST_LAYERS if "layer" in key else _MOST_SIZE
    if not 0 <= value <= most:
        raise ModelError(
            f"{key} of '{kind}' is {quoted(value)}; a model has 0 to {most:g}, correct it"
        )


def _settings(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """What a file says of the model itself; raises ModelError for sizes that no model has."""
    settings = {}
    for key, value in content.items():
        if key in _NOT_SETTINGS:
            continue
        if isinstance(value, dict):
            value = _settings(kind, value)
        elif value != -1:  # "none" of many older files
            check_size(kind, key, value)
        settings[key] = value
    return settings


Settings = dict[str, Any]

_VOCABULARY = 32_000
_EXPERTS = 8
_EXPERTS_PER_TOKEN = 2
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def parts_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and the ones inside it, each with its dotted path from the outermost."""
    yield path, config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and part is not config and hasattr(part, "to_dict"):
            yield from parts_of(part, f"{path}.{name}" if path else name)


def mend_contradictions(config: Any) -> Settings:
    """Set right what lets a model be built but no step run; returns what was set, by path."""
    rules = (partial(_fill_missing, _CHOSEN), _even_rotary_heads, _fit_images_to_text)
    return {name: value for rule in rules for name, value in _apply(config, rule).items()}


def fill_gaps(config: Any, error: BaseException | None) -> Settings:
    """Set what no model can be built without, where a build failed with `error`.

    Returns what was set by dotted path, nothing if no rule fits.
    """
    if isinstance(error, ImportError):
        return {}
    missing = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(error, AttributeError) and error.name in _ABSENT:
        name, holder = error.name, error.obj
        return _apply(config, lambda part: {name: _ABSENT[name](part)} if part is holder else {})
    if isinstance(error, TypeError) and "can only concatenate list" in str(error):
        return _apply(
            config,
            lambda part: {n: list(v) for n, v in vars(part).items() if isinstance(v, tuple)},
        )
    if missing is not None:
        return _apply(config, lambda part: _rotate_layer_type(part, missing))
    missing_values = _apply(config, partial(_fill_missing, _FILLERS))
    return {**missing_values, **_apply(config, _divide_width_by_heads)}


def fit_rotary_sections(model: nn.Module) -> Settings:
    """Scale the shares of rotary dimensions (time, height, width) that do not add up to them."""
    settings: Settings = {}
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(sections, (list, tuple)) or not isinstance(frequencies, Tensor):
            continue
        needed, stated = frequencies.numel(), sum(sections)
        if stated not in (0, needed):
            scaled = [section * needed // stated for section in sections]
            scaled[0] += needed - sum(scaled)
            module.mrope_section = settings["mrope_section"] = scaled  # type: ignore[assignment]
    return settings


def _apply(config: Any, rule: Callable[[Any], Settings]) -> Settings:
    settings: Settings = {}
    for path, part in parts_of(config):
        for name, value in rule(part).items():
            if "." not in name:
                setattr(part, name, value)
            settings[f"{path}.{name}".lstrip(".")] = value
    return settings


def _read(part: Any, name: str) -> Any:
    # Past the attribute access of configurations, which refuses settings that differ by layer.
    return vars(part).get(getattr(part, "attribute_map", {}).get(name, name))


def _number(part: Any, name: str) -> int | None:
    value = _read(part, name)
    return value if type(value) is int and value > 0 else None


def _fill_missing(fillers: Mapping[str, Callable[[Any], Any]], part: Any) -> Settings:
    """What the settings of a part become that it has without a value."""
    settings: Settings = {}
    for name, fill in fillers.items():
        held = getattr(part, "attribute_map", {}).get(name, name)
        if vars(part).get(held, ...) is None and (value := fill(part)) is not None:
            settings[name] = value
    return settings


# The same where a model can be built without them, but no step be run: experts of which none is
# chosen, one adapter per language of which none is the default.
_CHOSEN: dict[str, Callable[[Any], Any]] = {
    "num_experts_per_tok": lambda part: (
        _EXPERTS_PER_TOKEN if _number(part, "n_routed_experts") else None
    ),
    "default_language": lambda part: next(iter(_read(part, "languages") or ()), None),
}


def _head_size(part: Any) -> int | None:
    width, heads = _number(part, "hidden_size"), _number(part, "num_attention_heads")
    return width // heads if width and heads else None


def _per_layer(kind: str) -> Callable[[Any], list[str] | None]:
    return lambda part: [kind] * (_number(part, "num_hidden_layers") or 0) or None


# What a setting without a value becomes; most types have such values by default.
_FILLERS: dict[str, Callable[[Any], Any]] = {
    "vocab_size": lambda _: _VOCABULARY,
    "head_dim": _head_size,
    "num_key_value_heads": lambda part: _number(part, "num_attention_heads"),
    "layer_types": _per_layer("full_attention"),
    "mlp_layer_types": _per_layer("sparse"),
    "n_routed_experts": lambda _: _EXPERTS,
    "num_experts": lambda _: _EXPERTS,
    "num_experts_per_tok": lambda _: _EXPERTS_PER_TOKEN,
    "top_k_experts": lambda _: _EXPERTS_PER_TOKEN,
    "n_shared_experts": lambda _: 1,
    "n_group": lambda _: 1,
    "topk_group": lambda _: 1,
    "moe_intermediate_size": lambda part: (_number(part, "intermediate_size") or 0) // 4 or None,
    "deepstack_layer_map": lambda _: [],
    "vocabulary_map": lambda part: {"<image>": part.get_text_config().vocab_size - 1},
}


# What an attribute becomes that a model reads and its configuration does not have at all.
_ABSENT: dict[str, Callable[[Any], Any]] = {
    "rope_theta": lambda _: _ROPE["rope_theta"],
    "num_key_value_heads": lambda part: _number(part, "num_attention_heads"),
    "shared_expert_intermediate_size": lambda part: _number(part, "moe_intermediate_size"),
}


def _divide_width_by_heads(part: Any) -> Settings:
    """The nearest lower number of heads that divides the width, where heads have no own size."""
    width, heads = _number(part, "hidden_size"), _number(part, "num_attention_heads")
    if not width or not heads or width % heads == 0 or _number(part, "head_dim"):
        return {}
    dividing = next(number for number in range(heads, 0, -1) if width % number == 0)
    return {"num_attention_heads": dividing}


def _rotate_layer_type(part: Any, missing: Any) -> Settings:
    """Rotary settings by layer type, where those of a type of layer are missing."""
    rotary = _read(part, "rope_parameters")
    if not isinstance(rotary, dict) or missing not in (_read(part, "layer_types") or ()):
        return {}
    return {"rope_parameters": {**rotary, missing: dict(_ROPE)}}


def _even_rotary_heads(part: Any) -> Settings:
    """Rotary dimensions come in pairs, so that heads of an odd size cannot be rotated."""
    size = _head_size(part)
    rotary = isinstance(_read(part, "rope_parameters"), dict)
    return _divide_width_by_heads(part) if rotary and size is not None and size % 2 else {}


def _fit_images_to_text(part: Any) -> Settings:
    """Features of images take the places of tokens, so that they are as wide."""
    vision, text = _read(part, "vision_config"), _read(part, "text_config")
    if vision is None or text is None:
        return {}
    width, wanted = _number(vision, "out_hidden_size"), _number(text, "hidden_size")
    if width and wanted and width != wanted:
        vision.out_hidden_size = wanted
        return {"vision_config.out_hidden_size": wanted}
    return {}


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
        if "attn_implementation" not in overrides:
            set_here.update(_fuse_attention(transformers, model))
        if type(model).forward is torch.nn.Module.forward:
            raise ModelError(
                f"transformers' '{kind}' has no head to train; write a function that adds a loss"
            )
        if checkpointing:
            advice = "leave gradient_checkpointing out"
            with UserCode(f"'{kind}' has no checkpoints", advice=advice, error=ModelError):
                # The method's name since transformers 5, and before.
                built: Any = model
                enable = getattr(built, "activation_checkpointing_enable", None)
                (enable or built.gradient_checkpointing_enable)()
        with UserCode(
            f"no batch is known for {text}", advice="write a function for it", error=ModelError
        ):
            example = make_batch(model, config, head, batch or DEFAULT_BATCH, seq_len)
    name = _name(text, set_here)
    pictured = "pixel_values" in inspect.signature(model.forward).parameters
    if pictured and not any(key.startswith("pixel_values") for key in example):
        name += " (text alone)"
    return model, example, None, name


_FUSED_ATTENTION = "fused"


def _fuse_attention(transformers: Any, model: Any) -> Settings:
    """Let attention that transformers configures as products be one kernel, if a kernel has it.

    Of models without torch's fused attention (sinks) those are trained with flash attention's or
    cuDNN's kernels; ``attn_implementation=eager`` takes the products.
    """
    is_eager = getattr(model.config, "_attn_implementation", None) == "eager"
    has_kernel = getattr(model, "_supports_flash_attn", False)
    if not is_eager or not has_kernel or getattr(model, "_supports_sdpa", True):
        return {}
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    known = transformers.AttentionInterface
    known.register(_FUSED_ATTENTION, _fused_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FUSED_ATTENTION, flash_attention_mask)
    model.set_attn_implementation(_FUSED_ATTENTION)
    return {"attn_implementation": _FUSED_ATTENTION}


def _fused_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """A call as long as that of the model's kernel: each query of a window meets so many keys."""
    samples, heads, tokens = query.shape[:3]
    window = sliding_window or tokens
    is_cut = attention_mask is None and window < tokens and tokens % window == 0
    if is_cut:
        query, key, value = (
            tensor.unflatten(2, (-1, window)).transpose(1, 2).flatten(0, 1)
            for tensor in (query, key, value)
        )
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        attention_mask is None and not is_cut,
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )
    if is_cut:
        output = output.unflatten(0, (samples, -1)).transpose(1, 2).flatten(2, 3)
    return output.transpose(1, 2).contiguous(), None


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

    if "/" in kind:
        raise ModelError(
            f"'{kind}' is a model of the Hugging Face hub, which is never asked here; save its "
            "config.json (no weights are needed) and write hf:PATH/config.json"
        )
    known = list(vars(configuration_auto)["CONFIG_MAPPING_NAMES"])
    if kind not in known:
        raise ModelError(f"transformers has no type '{kind}'; {suggestion(kind, known)}")
    advice = f"check the settings against transformers' configuration of '{kind}'"
    with UserCode(f"the configuration of '{kind}' fails", advice=advice, error=ModelError):
        plain = transformers.AutoConfig.for_model(kind, **saved)
        for key in overrides:
            name = key.partition(".")[0]
            # Given as attn_implementation, kept as _attn_implementation; some models read the width
            # of heads where there is one.
            has = hasattr(plain, name) or hasattr(plain, f"_{name}")
            if not has and name != "head_dim":
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
    heads = {}
    for head in HEADS:
        auto_class = getattr(transformers, f"AutoModelFor{head}", None)
        classes = {} if auto_class is None else auto_class._model_mapping
        if type(config) in classes and _takes(classes[type(config)], config):
            heads[head] = auto_class
    return heads


def _takes(model_class: Any, config: Any) -> bool:
    """Whether a class is built from this configuration, not from a part of it (its text model)."""
    classes = model_class if isinstance(model_class, (list, tuple)) else (model_class,)
    parts = {type(part) for path, part in parts_of(config) if path}
    return any(getattr(kind, "config_class", None) not in parts for kind in classes)


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
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
