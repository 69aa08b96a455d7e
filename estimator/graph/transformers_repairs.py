"""Complete a transformers default configuration that no model can be built from, by general rules.

Some types leave settings to their checkpoints' files: ``EsmConfig()`` has no vocabulary size, so
that transformers itself cannot build a model from it. What is set here is returned, to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

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
    rules = (_choose_experts, _even_rotary_heads, _fit_images_to_text, _choose_language)
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
        return _apply(config, _lists_for_tuples)
    if missing is not None:
        return _apply(config, lambda part: _rotate_layer_type(part, missing))
    return {**_apply(config, _fill_missing), **_apply(config, _divide_width_by_heads)}


def fit_rotary_sections(model: nn.Module) -> Settings:
    """Scale the shares of rotary dimensions (time, height, width) that do not add up to them."""
    found: Settings = {}
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(sections, (list, tuple)) or not isinstance(frequencies, Tensor):
            continue
        whole, told = frequencies.numel(), sum(sections)
        if told not in (0, whole):
            scaled = [section * whole // told for section in sections]
            scaled[0] += whole - sum(scaled)
            module.mrope_section = found["mrope_section"] = scaled  # type: ignore[assignment]
    return found


def _apply(config: Any, rule: Callable[[Any], Settings]) -> Settings:
    found: Settings = {}
    for path, part in parts_of(config):
        for name, value in rule(part).items():
            if "." not in name:
                setattr(part, name, value)
            found[f"{path}.{name}".lstrip(".")] = value
    return found


def _read(part: Any, name: str) -> Any:
    # Past the attribute access of configurations, which refuses settings that differ by layer.
    return vars(part).get(getattr(part, "attribute_map", {}).get(name, name))


def _number(part: Any, name: str) -> int | None:
    value = _read(part, name)
    return value if type(value) is int and value > 0 else None


def _fill_missing(part: Any) -> Settings:
    found: Settings = {}
    for name, fill in _FILLERS.items():
        held = getattr(part, "attribute_map", {}).get(name, name)
        if held in vars(part) and vars(part)[held] is None:
            value = fill(part)
            if value is not None:
                found[name] = value
    return found


def _head_size(part: Any) -> int | None:
    width, heads = _number(part, "hidden_size"), _number(part, "num_attention_heads")
    return width // heads if width and heads else None


def _per_layer(kind: str) -> Callable[[Any], list[str] | None]:
    return lambda part: [kind] * (_number(part, "num_hidden_layers") or 0) or None


def _expert_size(part: Any) -> int | None:
    return (_number(part, "intermediate_size") or 0) // 4 or None


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
    "moe_intermediate_size": _expert_size,
    "deepstack_layer_map": lambda _: [],
    "vocabulary_map": lambda part: {"<image>": part.get_text_config().vocab_size - 1},
}


# What an attribute becomes that a model reads and its configuration does not have at all.
_ABSENT: dict[str, Callable[[Any], Any]] = {
    "rope_theta": lambda _: _ROPE["rope_theta"],
    "num_key_value_heads": lambda part: _number(part, "num_attention_heads"),
    "shared_expert_intermediate_size": lambda part: _number(part, "moe_intermediate_size"),
}


def _lists_for_tuples(part: Any) -> Settings:
    return {name: list(value) for name, value in vars(part).items() if isinstance(value, tuple)}


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


def _choose_experts(part: Any) -> Settings:
    name = "num_experts_per_tok"
    if name in vars(part) and vars(part)[name] is None and _number(part, "n_routed_experts"):
        return {name: _EXPERTS_PER_TOKEN}
    return {}


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


def _choose_language(part: Any) -> Settings:
    """The first language of a model with one adapter per language, where none is the default."""
    languages = _read(part, "languages")
    if languages and "default_language" in vars(part) and part.default_language is None:
        return {"default_language": languages[0]}
    return {}
