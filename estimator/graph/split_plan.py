"""Say which modules are divided over tensor-parallel ranks, and how: the plans that people have.

A plan names a style for patterns of module names, as ``parallelize_module`` of torch and
``base_model_tp_plan`` of transformers do; where there is none, one is found from the graph.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from estimator.errors import StrategyError, cause, quoted
from estimator.files import parse_json, read_text
from estimator.units import MIB

# "column" divides the output features of a linear layer or an embedding, "row" its input features;
# "vocabulary" divides the rows of an embedding, "sequence" the tokens that a module works on;
# "gather" is a column whose output every rank gets whole, "replicate" a module that is not divided.
Style = Literal["column", "gather", "row", "vocabulary", "sequence", "replicate"]
_STYLES: tuple[Style, ...] = get_args(Style)

# What torch and transformers call them.
_KNOWN: dict[str, Style] = {
    "colwise": "column",
    "colwiseparallel": "column",
    "packed_colwise": "column",
    "local_colwise": "column",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "rowwise": "row",
    "rowwiseparallel": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
    "local_rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "sequenceparallel": "sequence",
    "sequence_parallel": "sequence",
    "all_reduce": "replicate",
    "local": "replicate",
}
# A norm between a column and a row works on the rank's own heads: nothing is gathered for it, and
# its gradient is summed, as that of every whole weight is (transformers, tensor_parallel.py).
_ON_PARTS = "replicated_with_grad_allreduce"
# A module that sends tokens to its experts (transformers, distributed/expert_parallel.py).
_DISPATCHES = "ep_dispatch_experts"


@dataclass(frozen=True, slots=True)
class Plan:
    """Styles by pattern of module name, in which ``*`` stands for one part of the name or a number.

    With `sequence` tokens are divided wherever a module is not: sequence parallelism. What several
    modules take is gathered, and its gradients summed, once for all of them (`reduces_once`, as
    torch's ``PrepareModuleInput`` does), or for each of them, as torch's other styles do.

    >>> Plan((("layers.*.up", "column"), ("layers.*.down", "row"))).style_of("layers.3.down")
    'row'
    """

    styles: tuple[tuple[str, Style], ...]
    sequence: bool = False
    reduces_once: bool = False
    source: str = "the plan given"

    def style_of(self, module: str) -> Style | None:
        """The style of a module; names may begin anywhere after a dot, as in a base model."""
        return self.styles_of((module,))[module]

    def styles_of(self, modules: Iterable[str]) -> dict[str, Style | None]:
        """The style of each module: that of the first pattern that names it."""
        plain: dict[str, int] = {}
        patterns: list[tuple[int, re.Pattern[str]]] = []
        for place, (pattern, _) in enumerate(self.styles):
            if "*" in pattern:
                patterns.append((place, _matcher(pattern)))
            else:
                plain.setdefault(pattern, place)
        found: dict[str, Style | None] = {}
        for module in modules:
            ends = [module[dot + 1 :] for dot, each in enumerate(module) if each == "."]
            places = [plain[end] for end in (module, *ends) if end in plain]
            places += [place for place, matcher in patterns if matcher.fullmatch(module)]
            found[module] = self.styles[min(places)][1] if places else None
        return found

    def check(self, modules: Iterable[str]) -> None:
        """Raise StrategyError for a plan that names none of some modules."""
        modules = tuple(modules)
        if any(style is not None for style in self.styles_of(modules).values()):
            return
        patterns = ", ".join(repr(pattern) for pattern, _ in self.styles[:3]) or "no pattern"
        some = ", ".join(repr(name) for name in list(dict.fromkeys(modules))[:3] if name)
        raise StrategyError(
            f"the tensor-parallel plan names no module of the model: it has {patterns}, the model "
            f"{some or 'no named module'}; write its names with * for numbers"
        )

    @classmethod
    def of(cls, styles: Mapping[str, Any], *, source: str = "the plan given") -> Plan:
        """A plan from styles by module name: names of styles, or torch's ``ParallelStyle``.

        Raises StrategyError.

        >>> Plan.of({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}).styles[1]
        ('layers.*.o_proj', 'row')
        """
        if not isinstance(styles, Mapping) or not styles:
            raise StrategyError(
                f"a tensor-parallel plan maps module names to styles, found {quoted(styles)}; "
                'write {"layers.*.q_proj": "colwise"}'
            )
        read = {
            str(name): _style(str(name), style)
            for name, style in styles.items()
            if style != _ON_PARTS
        }
        known = tuple((name, style) for name, style in read.items() if style is not None)
        return cls(
            known,
            sequence=any(style == "sequence" for _, style in known),
            reduces_once=len(known) < len(read),
            source=source,
        )


def styles_of_config(model: Any) -> tuple[tuple[str, str], ...]:
    """What transformers says of a model: `base_model_tp_plan` of its config, and of its head."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(base, Mapping):
        return ()
    head = getattr(model, "_tp_plan", None)
    styles = {**base, **(head if isinstance(head, Mapping) else {})}
    return tuple((str(name), str(style)) for name, style in styles.items())


def expert_styles_of_config(model: Any) -> tuple[tuple[str, str], ...]:
    """What transformers says of a model's experts: `base_model_ep_plan` of its config."""
    found = getattr(getattr(model, "config", None), "base_model_ep_plan", None)
    if not isinstance(found, Mapping):
        return ()
    return tuple((str(name), str(style)) for name, style in found.items())


def divided_experts(
    styles: Iterable[tuple[str, str]], modules: Iterable[str]
) -> frozenset[str] | None:
    """Those of some modules whose experts a config's plan divides; None where it names none."""
    matchers = [_matcher(name) for name, style in styles if style == _DISPATCHES]
    found = {each for each in modules if any(matcher.fullmatch(each) for matcher in matchers)}
    return frozenset(found) or None


def plan_of_config(styles: Iterable[tuple[str, str]], modules: Iterable[str]) -> Plan | None:
    """The plan of a model's config, None where it names no module to be divided.

    What it says of experts is left out: they are whole on every tensor-parallel rank.
    """
    known = {name: style for name, style in styles if style in _KNOWN}
    if not known:
        return None
    plan = Plan.of(known, source="base_model_tp_plan of its config")
    return plan if any(plan.style_of(module) for module in modules) else None


def read_plan(given: Mapping[str, Any] | str | os.PathLike[str]) -> Plan:
    """A plan from styles by module name, or from a JSON file of them; raises StrategyError."""
    if isinstance(given, Mapping):
        return Plan.of(given)
    path = Path(given)
    try:
        styles = parse_json(read_text(path, most_bytes=MIB))
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"tensor-parallel plan {quoted(str(path))} cannot be read ({cause(error)}); give a "
            'JSON file such as {"layers.*.q_proj": "colwise"}'
        ) from None
    return Plan.of(styles, source=f"the plan of {path.name}")


def _style(name: str, style: Any) -> Style | None:
    text = style if isinstance(style, str) else type(style).__name__
    plain = text.strip().lower()
    if plain.startswith("preparemodule"):
        return None
    found = plain if plain in _STYLES else _KNOWN.get(plain)
    if found is None:
        raise StrategyError(
            f"style {quoted(text)} of '{name}' is unknown; use one of colwise, rowwise, "
            "colwise_gather_output, embedding_rowwise, sequence_parallel, replicate"
        )
    # torch's RowwiseParallel of an embedding divides its vocabulary: told by the module's operator.
    return found


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"(?:.*\.)?" + r"\.".join(parts))
