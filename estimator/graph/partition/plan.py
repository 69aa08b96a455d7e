"""Say which modules are divided over tensor-parallel ranks: by a plan, or found by rule.

A plan names a style for patterns of module names, as ``parallelize_module`` of torch and
``base_model_tp_plan`` of transformers do; where there is none, one is found from the graph.

A linear layer is divided by columns where everything that is made of its output reaches only
inputs of other linear layers without any exchange between ranks; those are divided by rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from estimator.errors import StrategyError, cause, quoted
from estimator.files import parse_json, read_text
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op
from estimator.graph.partition.rules import PARTIAL, Given, Placed, Placement, Shard, placed
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
        styles: dict[str, Style | None] = {}
        for module in modules:
            ends = [module[dot + 1 :] for dot, letter in enumerate(module) if letter == "."]
            places = [plain[end] for end in (module, *ends) if end in plain]
            places += [place for place, matcher in patterns if matcher.fullmatch(module)]
            styles[module] = self.styles[min(places)][1] if places else None
        return styles

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
    base = _styles(getattr(model, "config", None), "base_model_tp_plan")
    return tuple(dict((*base, *_styles(model, "_tp_plan"))).items()) if base else ()


def expert_styles_of_config(model: Any) -> tuple[tuple[str, str], ...]:
    """What transformers says of a model's experts: `base_model_ep_plan` of its config."""
    return _styles(getattr(model, "config", None), "base_model_ep_plan")


def _styles(owner: Any, name: str) -> tuple[tuple[str, str], ...]:
    plan = getattr(owner, name, None)
    if not isinstance(plan, Mapping):
        return ()
    return tuple((str(module), str(style)) for module, style in plan.items())


def divided_experts(
    styles: Iterable[tuple[str, str]], modules: Iterable[str]
) -> frozenset[str] | None:
    """Those of some modules whose experts a config's plan divides; None where it names none."""
    matchers = [_matcher(name) for name, style in styles if style == _DISPATCHES]
    experts = {
        module for module in modules if any(matcher.fullmatch(module) for matcher in matchers)
    }
    return frozenset(experts) or None


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
    known = plain if plain in _STYLES else _KNOWN.get(plain)
    if known is None:
        raise StrategyError(
            f"style {quoted(text)} of '{name}' is unknown; use one of colwise, rowwise, "
            "colwise_gather_output, embedding_rowwise, sequence_parallel, replicate"
        )
    # torch's RowwiseParallel of an embedding divides its vocabulary: told by the module's operator.
    return known


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"(?:.*\.)?" + r"\.".join(parts))


# What is made of one weight alone, and what multiplies with one.
_REMAKES = ("t", "transpose", "_to_copy")
_PRODUCTS = ("mm", "addmm", "embedding", "convolution", "_grouped_mm", "bmm", "baddbmm")
_DIVIDING = ("column", "gather", "row", "vocabulary")


def forward_ops(graph: OpGraph) -> Iterator[Op]:
    """The ops before the first backward pass."""
    return takewhile(lambda op: op.phase == "forward", graph.ops)


def weights_of(graph: OpGraph) -> dict[int, tuple[int, bool]]:
    """The parameter that a value is made of alone, and whether its two dimensions are swapped."""
    values = enumerate(graph.values)
    weights = {index: (index, False) for index, value in values if value.kind == "parameter"}
    for op in forward_ops(graph):
        if op.call.name in _REMAKES and op.inputs[0] in weights:
            weight, swapped = weights[op.inputs[0]]
            weights[op.outputs[0]] = weight, swapped != (op.call.name != "_to_copy")
    return weights


def divided_weights(
    graph: OpGraph, styles: dict[str, Style | None], axis: str, degree: int
) -> dict[int, Shard]:
    """The shards of weights, by value; modules with weights and no style become "replicate".

    Raises StrategyError where the degree does not divide the features of a module.
    """
    shards: dict[int, Shard] = {}
    weights = weights_of(graph)
    for op in forward_ops(graph):
        if op.call.name in _PRODUCTS and any(value in weights for value in op.inputs):
            style = styles[op.module] = styles[op.module] or "replicate"
            if style not in _DIVIDING:
                continue
            for weight, dim in _divided(op, style, weights):
                spec = graph.values[weight].spec
                # Words are divided unevenly where they must be: the first rank has the most.
                if spec.shape[dim] % degree and style != "vocabulary":
                    raise StrategyError(
                        f"{axis}={degree} does not divide the {spec.shape[dim]} features of module "
                        f"'{op.module}'; choose a divisor"
                    )
                shards[weight] = Shard.along(spec, dim)
    return shards


def dtensor_modules(graph: OpGraph, styles: dict[str, Style | None], *, sequence: bool) -> set[str]:
    """The modules that torch runs by DTensor: divided ones, and norms where tokens are divided."""
    modules = {module for module, style in styles.items() if style in (*_DIVIDING, "sequence")}
    for op in graph.ops if sequence else ():
        own = [graph.values[value] for value in op.inputs]
        if any(value.kind == "parameter" and len(value.spec.shape) == 1 for value in own):
            modules.add(op.module)
    return modules


def _divided(op: Op, style: Style, weights: dict[int, tuple[int, bool]]) -> list[tuple[int, int]]:
    """(weight, dimension that is divided) of the weight and the bias of an operator."""
    by_output = style in ("column", "gather")
    if op.call.name == "embedding":
        # torch's RowwiseParallel and transformers' embedding_rowwise divide the vocabulary.
        return [(weights[op.inputs[0]][0], int(by_output))]
    if op.inputs[-1] not in weights:
        return []
    weight, swapped = weights[op.inputs[-1]]
    divided = [(weight, int(by_output != swapped))]
    if op.call.name == "addmm" and by_output and op.inputs[0] in weights:
        divided.append((weights[op.inputs[0]][0], 0))
    return divided


_LINEAR = ("mm", "addmm")


def found_plan(graph: OpGraph, *, sequence: bool = False, vocabulary: bool = False) -> Plan:
    """The plan that a graph's own dataflow gives; raises StrategyError where there is none.

    With `sequence` tokens are divided between divided layers, and the vocabulary of the embedding
    of inputs; with `vocabulary` that of the last layer and its loss as well.
    """
    search = _StyleSearch(graph)
    styles: dict[str, Style] = {}
    by_module = {graph.ops[index].module: index for index in search.linears}

    def ends_in_rows(module: str) -> bool:
        """Whether a layer's columns, as those of an adapter, meet what is divided by rows."""
        after = search.rows_after(by_module[module])
        return bool(after) and all(styles.get(row) == "row" for row in after)

    for index in search.linears:
        module = graph.ops[index].module
        if module in styles:
            continue
        reached = search.rows_after(index)
        if reached and not any(
            styles.get(row, "row") != "row" or (row not in styles and ends_in_rows(row))
            for row in reached
        ):
            styles[module] = "column"
            styles.update(dict.fromkeys(reached, "row"))
    if not styles:
        raise StrategyError(
            f"no pair of linear layers of {graph.name} can be divided by columns, then rows; "
            "give a plan with --tp-plan FILE, or leave tp out"
        )
    if sequence or vocabulary:
        styles.update(dict.fromkeys(search.embeddings(), "vocabulary"))
    if vocabulary:
        styles.update(dict.fromkeys(search.heads(styles), "column"))
    source = "columns, then rows, found from its dataflow"
    return Plan(tuple(styles.items()), sequence=sequence, reduces_once=sequence, source=source)


class _StyleSearch:
    """Who consumes each value of the forward pass, and which operators are linear layers."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.consumers: dict[int, list[int]] = {}
        self.linears: dict[int, int] = {}
        # By identity of the call, which the graph keeps.
        self._found: dict[tuple[int, tuple[Placement, ...]], Placed] = {}
        weights = weights_of(graph)
        for index, op in enumerate(forward_ops(graph)):
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(index)
            if op.call.name in _LINEAR and op.inputs[-1] in weights:
                self.linears[index] = op.inputs[-2]

    def rows_after(self, start: int) -> set[str]:
        """The linear layers that take what a layer's divided columns become; empty if others do."""
        at: dict[int, Placement] = {}
        waiting: list[int] = []
        seen: set[int] = set()

        def mark(value: int, placement: Placement) -> None:
            at[value] = placement
            for index in self.consumers.get(value, ()):
                if index not in seen:
                    seen.add(index)
                    heappush(waiting, index)

        (output,) = self.graph.ops[start].outputs
        mark(output, Shard.along(self.graph.values[output].spec, -1))
        reached: set[str] = set()
        while waiting:
            index = heappop(waiting)
            op = self.graph.ops[index]
            if index in self.linears:
                if at.get(self.linears[index]) != Shard.along(op.call.inputs[-2], -1):
                    return set()
                reached.add(op.module)
                continue
            rows = self._outputs(op, at)
            if rows is None:
                return set()
            for value, placement in zip(op.outputs, rows, strict=True):
                if placement is not None:
                    mark(value, placement)
        return reached

    def _outputs(self, op: Op, at: Mapping[int, Placement]) -> tuple[Placement, ...] | None:
        """Where an operator's results are, None if it needs an exchange; any degree will do."""
        given = tuple([at.get(value) for value in op.inputs])
        key = id(op.call), given
        shards = self._found.get(key)
        if shards is None:
            shards = self._found[key] = placed(Given(op.call, given, 1, op.module, ""))
        gathers = any(
            have is not None and want is None
            for have, want in zip(given, shards.wants, strict=True)
        )
        if gathers or not shards.is_known or PARTIAL in shards.outputs or shards.reduced:
            return None
        return shards.outputs

    def embeddings(self) -> list[str]:
        """The largest embedding of each integer input."""
        lookups: dict[int, tuple[int, str]] = {}
        for op in self.graph.ops:
            if op.phase == "forward" and op.call.name == "embedding":
                rows = op.call.inputs[0].shape[0]
                value = op.inputs[1]
                if self.graph.values[value].kind == "input":
                    lookups[value] = max(lookups.get(value, (0, "")), (rows, op.module))
        return [module for _, module in lookups.values()]

    def heads(self, styles: Mapping[str, Style]) -> list[str]:
        """The last linear layer before a loss over classes."""
        losses = [
            index
            for index, op in enumerate(self.graph.ops)
            if op.phase == "forward" and op.call.name == "_log_softmax"
        ]
        before = [index for index in self.linears if losses and index < losses[-1]]
        last = self.graph.ops[before[-1]].module if before else ""
        return [last] if last and last not in styles else []
