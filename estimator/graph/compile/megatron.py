"""Turn the kernels of a compiled step into those of Megatron-Core and Transformer Engine.

Norms, rotary embeddings and activations are fused as a compiler fuses them, scaled rotary
embeddings are not. Attention is cuDNN's, which Transformer Engine prefers from Hopper on
(attention/dot_product_attention/utils.py). In FP8 a tensor is cast once, where it is first
multiplied, for both of the products that it is in: what the gradient of a weight needs is saved in
FP8. Weights are held in FP8 and cast in the optimizer's step (Megatron-Core, --fp8-param-gather),
so that no micro-batch casts them. Of tokens that tensor-parallel ranks divide, each rank casts its
own, and FP8 is gathered, what was kept of the forward pass for a gradient too (distributed.py of
Transformer Engine, gather_along_first_dim). How a cast is done:

- current scaling: norms give the largest of a tensor with their result, of any other one more
  pass finds it; a kernel casts and transposes (normalization.cpp of Transformer Engine).
- delayed scaling: the scale is known, and norms write FP8 themselves.
- MXFP8: a kernel quantizes both orientations of blocks of 32.
- block scaling: a kernel quantizes blocks of 128, both orientations.
- NVFP4: a pass finds the largest, a kernel quantizes rows, a second one columns, after a Hadamard
  transform.

Activations are torch's compiler's (Megatron-Core, transformer/mlp.py, fusions/fused_bias_swiglu.py)
and write bf16, but where experts' products do all (fused_grouped_mlp): they write FP8.
"""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import ModelError
from estimator.graph.compile.added_checkpoints import (
    checkpointed,
    with_offloaded,
    with_recomputed,
)
from estimator.graph.compile.expert_tokens import with_expert_tokens
from estimator.graph.compile.float8 import FACTORS, FLOAT8, MULTIPLE, scaled, with_float8
from estimator.graph.compile.fusion import COMPILED_ASSUMPTION, compile_graph
from estimator.graph.compile.unfused_kernels import with_unfused_rotary
from estimator.graph.costs.call_costs import FUSED
from estimator.graph.costs.matmuls import WINDOWS, attention_arguments
from estimator.graph.ir.collectives import collective_call, is_collective
from estimator.graph.ir.op_graph import GraphChanges, OpGraph, unit_path
from estimator.graph.ir.ops import GraphColumns, Op, with_calls
from estimator.graph.ir.structure import owners
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.recipe import Recipe

FLOAT4 = "float4_e2m1fn_x2"
QUANTIZE = "te.quantize"
# FusedAdam of Transformer Engine, or of Apex, makes no tensors of its own.
_FUSED_OPTIMIZERS = {"adam": "adam-fused", "adamw": "adamw-fused"}
_FUSED_ATTENTION = ("_flash_attention", "_efficient_attention", "_cudnn_attention")
_GATHER = "_c10d_functional.all_gather.default"
# Scalings of a tensor by one number, whose rows and columns are the same numbers.
_BY_TENSOR = frozenset({"current", "delayed"})
# Scalings by which a kernel that fuses a norm writes FP8 itself.
_FUSED_NORMS = frozenset({"delayed"})
# Scalings that need the largest of a whole tensor before its cast.
_NEEDS_LARGEST = frozenset({"current", "nvfp4"})
_SAID = (
    "norms, rotary embeddings and activations are fused as Transformer Engine fuses them; "
    "attention is cuDNN's on Hopper and later"
)
_SAID_FP8 = "; linear layers of blocks are in FP8 ({}), their weights cast once a step"
_SAID_EXPERTS = (
    "; experts are launched one by one, and mixtures take the host as long as measured with "
    "DeepEP on servers with H100 (9 ms a layer of 16 experts, forward and backward)"
)


def compiled_like(eager: OpGraph, graph: OpGraph) -> OpGraph:
    """What a compiler, or the framework of its recipe, makes of an eager graph, as of another."""
    if graph.recipe is not None:
        recipe = Recipe.parse(graph.recipe)
        eager = with_unfused_rotary(with_expert_tokens(eager, recipe))
        eager = with_recomputed(eager, recipe.recompute, recipe.recompute_layers)
        made = as_megatron(compile_graph(eager, graph.execution), recipe)
        return with_offloaded(made, recipe.offload_layers) if recipe.offload_layers else made
    made = compile_graph(eager, graph.execution)
    return made if graph.float8 is None else with_float8(made, graph.float8)


def with_checkpoints(graph: OpGraph) -> OpGraph | None:
    """The graph as if it had been traced with checkpoint "full"; None where that is not known.

    One that was compiled needs its eager one.
    """
    if graph.execution == "eager":
        return checkpointed(graph)
    eager = None if graph.eager is None else checkpointed(graph.eager)
    if eager is None:
        return None
    eager = replace(eager, name=graph.name, optimizer=graph.optimizer)
    return replace(compiled_like(eager, graph), eager=eager)


def as_megatron(graph: OpGraph, recipe: Recipe) -> OpGraph:
    """The compiled graph with the framework's kernels; raises ModelError."""
    if graph.target != "cuda" or not graph.precision.startswith("bf"):
        raise ModelError(
            f"Transformer Engine trains bf16 models on GPUs, found {graph.precision} for "
            f"{graph.target}; write --precision bf16"
        )
    said = _SAID + (_SAID_FP8.format(recipe.fp8) if recipe.fp8 else "")
    if recipe.graphs != "iteration" and any("_grouped_mm" in op.call.target for op in graph.ops):
        said += _SAID_EXPERTS
    tokens = graph.tokens_per_sample
    graph = replace(
        graph,
        ops=tuple([_exchanged(_by_cudnn(op, recipe, tokens), recipe) for op in graph.ops]),
        recipe=str(recipe),
        optimizer=_optimizer(graph.optimizer, recipe),
        assumptions=(*(a for a in graph.assumptions if a != COMPILED_ASSUMPTION), said),
    )
    return graph if recipe.fp8 is None else _Cast(graph, recipe).graph()


def _optimizer(name: str, recipe: Recipe) -> str:
    if name in _FUSED_OPTIMIZERS and recipe.precision_aware_optimizer:
        return "adamw-bf16"
    return _FUSED_OPTIMIZERS.get(name, name)


def _by_cudnn(op: Op, recipe: Recipe, tokens: int | None) -> Op:
    if not any(kind in op.call.target for kind in _FUSED_ATTENTION):
        return op
    variant = "fp8" * recipe.fp8_attention + "deterministic" * recipe.deterministic
    # In FP8 it matters what a window is cut from.
    windows = [_windows(call, tokens) if recipe.fp8_attention else 1 for call in op.calls]
    variant += "window" * (min(windows) > 1)
    target = f"te.{op.call.target.split('.')[1]}.{variant or 'default'}"
    calls = [
        replace(call, target=target, keywords=(*call.keywords, (WINDOWS, count)))
        if min(windows) > 1
        else replace(call, target=target)
        for call, count in zip(op.calls, windows, strict=True)
    ]
    return with_calls(op, calls)


def _windows(call: OpCall, tokens: int | None) -> int:
    """Of how many windows of each sample the queries of a call of attention are."""
    start, _, _ = attention_arguments(call)
    query, key = call.arguments[start : start + 2]
    size = query.shape[-2]
    count = (tokens or size) // size
    is_cut = size == key.shape[-2] and count * size == tokens and not query.shape[0] % count
    return count if count > 1 and is_cut else 1


def _exchanged(op: Op, recipe: Recipe) -> Op:
    """A tensor-parallel exchange in pieces beside products."""
    name = op.call.name
    is_ring = is_collective(op.call) and name in ("all_gather", "reduce_scatter")
    if not recipe.tp_overlap or not is_ring or op.call.arguments[1] != "tp":
        return op
    if not unit_path(op.module):
        return op
    return with_calls(op, [replace(call, keywords=(("overlaps", "ring"),)) for call in op.calls])


def _is_view(op: Op) -> bool:
    """Whether an operator gives what it reads in another shape, and no other rank's."""
    return op.is_view and not is_collective(op.call)


class _Cast(GraphChanges):
    """A graph with FP8 products."""

    def __init__(self, graph: OpGraph, recipe: Recipe) -> None:
        super().__init__(graph)
        self._scaling = recipe.fp8
        self._narrow = FLOAT4 if recipe.fp8 == "nvfp4" else FLOAT8
        grouped = {op.module for op in graph.ops if "grouped" in op.call.target}
        # Modules whose products apply activations.
        self._applying = grouped if recipe.fused_grouped_mlp else set[str]()
        self._roots = owners(GraphColumns.of(graph).base).tolist()
        self._maker = {self._roots[v]: op for op in reversed(graph.ops) for v in op.outputs}
        # Root and whether by columns → its value in FP8.
        self._casts: dict[tuple[int, bool], int] = {}
        self._gathers = self._of_products()
        self._views: dict[int, list[int]] = {root: [] for root in self._gathers}
        for value, root in enumerate(self._roots):
            if root in self._views:
                self._views[root].append(value)
        for index, op in enumerate(graph.ops):
            held = tuple([self._saved(value) for value in op.holds])
            if self._is_cast(op):
                self.instead[index] = self._product(replace(op, holds=held), self.before[index])
            elif held != op.holds:
                self.instead[index] = replace(op, holds=held)

    def _of_products(self) -> dict[int, list[int]]:
        """Root → its gather by tensor-parallel ranks and views of that, where products alone read.

        They are the operators' numbers.
        """
        gathers: dict[int, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            if op.call.target == _GATHER and op.call.arguments[1] == "tp":
                gathers[self._roots[op.outputs[0]]] = [index]
            elif _is_view(op):
                gathers.get(self._roots[op.inputs[0]] if op.inputs else -1, []).append(index)
            elif not self._is_cast(op):
                for value in op.inputs:
                    gathers.pop(self._roots[value], None)
        return gathers

    def _saved(self, value: int) -> int:
        """What is held for gradients instead of a tensor that was cast."""
        return self._casts.get((self._roots[value], True), value)

    def _is_cast(self, op: Op) -> bool:
        if op.call.target not in FACTORS or not unit_path(op.module) or op.is_view:
            return False
        factors = [op.call.arguments[place] for place in FACTORS[op.call.target]]
        # Routers stay as they are: their columns are few.
        return all(
            spec.dtype == "bfloat16"
            and not any(size % MULTIPLE for size in spec.shape[-1:])
            and min(spec.shape) > 0
            for spec in factors
        ) and not op.module.endswith((".router", ".gate"))

    def _product(self, op: Op, kernels: list[Op]) -> Op:
        places = FACTORS[op.call.target]
        roots = (self._roots[op.inputs[place]] for place in places)
        has_weight = any(self._graph.values[root].kind == "parameter" for root in roots)
        by_columns = op.phase == "backward" and not has_weight
        factors = [self._factor(op, place, kernels, by_columns=by_columns) for place in places]
        rest = [value for place, value in enumerate(op.inputs) if place not in places]
        calls = [scaled(call, self._narrow, self._scaling or "") for call in op.calls]
        return with_calls(op, calls, inputs=(*factors, *rest))

    def _factor(self, op: Op, place: int, kernels: list[Op], *, by_columns: bool) -> int:
        value = op.inputs[place]
        root = self._roots[value]
        narrow = [replace(call.arguments[place], dtype=self._narrow) for call in op.calls]
        if self._graph.values[root].kind == "parameter":
            return self.add(narrow, base=root, kind="parameter")
        if (root, by_columns) not in self._casts:
            if root in self._gathers:
                self._gather(op, value, narrow, kernels, by_columns=by_columns)
            else:
                self._cast(op, value, narrow, kernels)
        return self._casts[root, by_columns]

    def _gather(
        self, op: Op, value: int, narrow: list[TensorSpec], kernels: list[Op], *, by_columns: bool
    ) -> None:
        """Cast each rank's part of a factor and gather that.

        With one scale for a tensor what was gathered by rows is turned, else columns are gathered.
        """
        root, turns = self._roots[value], self._scaling in _BY_TENSOR
        index = self._gathers[root][0]
        gather = self._graph.ops[index]
        part = self._roots[gather.inputs[0]], by_columns and not turns
        if part not in self._casts:
            own = [replace(call.arguments[0], dtype=self._narrow) for call in gather.calls]
            self._cast(gather, gather.inputs[0], own, self.before[index], is_part=True)
        if (root, not by_columns) not in self._casts:
            self._narrow_down(root, self._casts[part])
            self._casts[root, part[1]] = value
        elif not turns:
            self._casts[root, by_columns] = self.add(narrow)
            made = (self._casts[root, by_columns],)
            calls = zip(gather.calls, self.values[self._casts[part]].specs, narrow, strict=True)
            again = [
                replace(call, arguments=(given, *call.arguments[1:]), outputs=(spec,))
                for call, given, spec in calls
            ]
            kernels.append(with_calls(gather, again, inputs=(self._casts[part],), outputs=made))
        if turns and by_columns:
            self._casts[root, True] = self.add(narrow)
            made = (self._casts[root, True],)
            kernels.append(self.kernel(op, f"{QUANTIZE}.turn", (self._casts[root, False],), made))

    def _narrow_down(self, root: int, given: int) -> None:
        """Let a gather be of another value, in FP8, with all views of what it gives."""
        for value in self._views[root]:
            known = self._graph.values[value]
            one, two = (replace(spec, dtype=self._narrow) for spec in known.specs)
            self.values[value] = replace(known, spec=one, other_spec=two)
        for index in self._gathers[root]:
            op = self._graph.ops[index]
            calls = [
                replace(
                    call,
                    arguments=tuple(
                        replace(each, dtype=self._narrow) if isinstance(each, TensorSpec) else each
                        for each in call.arguments
                    ),
                    outputs=tuple(replace(spec, dtype=self._narrow) for spec in call.outputs),
                )
                for call in op.calls
            ]
            inputs = op.inputs if _is_view(op) else (given,)
            self.instead[index] = with_calls(op, calls, inputs=inputs)

    def _cast(
        self,
        op: Op,
        value: int,
        narrow: list[TensorSpec],
        kernels: list[Op],
        *,
        is_part: bool = False,
    ) -> None:
        """A tensor, or a part of one, by rows and by columns in FP8, after what makes them."""
        root = self._roots[value]
        maker = self._maker.get(root)
        fused = maker.call.target.removeprefix(FUSED) if maker is not None else ""
        # Root mean squares that a model writes out are sums.
        is_norm = op.phase == "forward" and fused.startswith(("normalization", "reduction"))
        is_activation = fused.startswith("elementwise") and op.module in self._applying
        if self._scaling in _NEEDS_LARGEST:
            largest = value
            if not (is_norm and self._scaling == "current"):
                largest = self.add([TensorSpec((1,), "float32")] * 2)
                kernels.append(self.kernel(op, "aten.amax.default", (value,), (largest,)))
            if is_part:
                kernels.append(self._largest_of_all(op, largest))
        rows = self.add(narrow)
        # What is turned when it has been gathered is cast by rows alone.
        columns = rows if is_part and self._scaling in _BY_TENSOR else self.add(narrow)
        writes_itself = is_activation or (is_norm and self._scaling in _FUSED_NORMS)
        read = () if writes_itself else (value,)
        made = (
            ((rows,), (columns,))
            if self._scaling == "nvfp4"
            else (tuple(dict.fromkeys((rows, columns))),)
        )
        how = "nvfp4" if self._scaling == "nvfp4" else "default"
        if columns != rows and self._scaling in _BY_TENSOR:
            how = "turned"
        kernels += [self.kernel(op, f"{QUANTIZE}.{how}", read, some) for some in made]
        self._casts |= {(root, False): rows, (root, True): columns}

    def _largest_of_all(self, op: Op, largest: int) -> Op:
        """Among ranks, by which each casts its part; a norm gives it with its result."""
        number = TensorSpec((1,), "float32")
        call = collective_call("all_reduce", "tp", number, number)
        made = (self.add((number, number)),)
        return with_calls(
            op, (call, call), inputs=(largest,), outputs=made, holds=(), is_view=False
        )
