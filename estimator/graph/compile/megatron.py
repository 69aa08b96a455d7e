"""Turn the kernels of a compiled step into those of Megatron-Core and Transformer Engine.

Norms, rotary embeddings and activations are fused as a compiler fuses them, scaled rotary
embeddings are not. Attention is cuDNN's, which Transformer Engine prefers from Hopper on
(attention/dot_product_attention/utils.py). In FP8 a tensor is cast once, where it is first
multiplied, for both of the products that it is in: what the gradient of a weight needs is saved in
FP8. Weights are held in FP8 and cast in the optimizer's step (Megatron-Core, --fp8-param-gather),
so that no micro-batch casts them. How a cast is done:

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
from estimator.graph.ir.collectives import is_collective
from estimator.graph.ir.op_graph import GraphChanges, OpGraph, unit_path
from estimator.graph.ir.ops import GraphColumns, Op, with_calls
from estimator.graph.ir.structure import owners
from estimator.tensors import TensorSpec
from estimator.workload.recipe import Recipe

FLOAT4 = "float4_e2m1fn_x2"
QUANTIZE = "te.quantize"
# FusedAdam of Transformer Engine, or of Apex, makes no tensors of its own.
_FUSED_OPTIMIZERS = {"adam": "adam-fused", "adamw": "adamw-fused"}
_FUSED_ATTENTION = ("_flash_attention", "_efficient_attention", "_cudnn_attention")
# Scalings by which a kernel that fuses a norm writes FP8 itself.
_FUSED_NORMS = frozenset({"delayed"})
# Scalings that need the largest of a whole tensor before its cast.
_NEEDS_LARGEST = frozenset({"current", "nvfp4"})
_SAID = (
    "norms, rotary embeddings and activations are fused as Transformer Engine fuses them; "
    "attention is cuDNN's on Hopper and later"
)
_SAID_FP8 = "; linear layers of blocks are in FP8 ({}), their weights cast once a step"


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
    graph = replace(
        graph,
        ops=tuple([_exchanged(_by_cudnn(op, recipe), recipe) for op in graph.ops]),
        recipe=str(recipe),
        optimizer=_optimizer(graph.optimizer, recipe),
        assumptions=(*(a for a in graph.assumptions if a != COMPILED_ASSUMPTION), said),
    )
    return graph if recipe.fp8 is None else _Cast(graph, recipe).graph()


def _optimizer(name: str, recipe: Recipe) -> str:
    if name in _FUSED_OPTIMIZERS and recipe.precision_aware_optimizer:
        return "adamw-bf16"
    return _FUSED_OPTIMIZERS.get(name, name)


def _by_cudnn(op: Op, recipe: Recipe) -> Op:
    if not any(kind in op.call.target for kind in _FUSED_ATTENTION):
        return op
    variant = "fp8" * recipe.fp8_attention + "deterministic" * recipe.deterministic
    target = f"te.{op.call.target.split('.')[1]}.{variant or 'default'}"
    return with_calls(op, [replace(call, target=target) for call in op.calls])


def _exchanged(op: Op, recipe: Recipe) -> Op:
    """A tensor-parallel exchange in pieces beside products; FP8 is gathered as it is."""
    name = op.call.name
    is_ring = is_collective(op.call) and name in ("all_gather", "reduce_scatter")
    if not recipe.tp_overlap or not is_ring or op.call.arguments[1] != "tp":
        return op
    if not unit_path(op.module):
        return op
    narrow = recipe.fp8 not in (None, "nvfp4") and name == "all_gather"
    keywords = (("overlaps", "ring"), *((("share", 0.5),) if narrow else ()))
    return with_calls(op, [replace(call, keywords=keywords) for call in op.calls])


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
        # Root → its values in FP8, by rows and by columns.
        self._casts: dict[int, tuple[int, int]] = {}
        for index, op in enumerate(graph.ops):
            held = tuple([self._saved(value) for value in op.holds])
            if self._is_cast(op):
                self.instead[index] = self._product(replace(op, holds=held), self.before[index])
            elif held != op.holds:
                self.instead[index] = replace(op, holds=held)

    def _saved(self, value: int) -> int:
        """What is held for gradients instead of a tensor that was cast."""
        return self._casts.get(self._roots[value], (value, value))[1]

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
        calls = [scaled(call, self._narrow) for call in op.calls]
        return with_calls(op, calls, inputs=(*factors, *rest))

    def _factor(self, op: Op, place: int, kernels: list[Op], *, by_columns: bool) -> int:
        root = self._roots[op.inputs[place]]
        narrow = [replace(call.arguments[place], dtype=self._narrow) for call in op.calls]
        if self._graph.values[root].kind == "parameter":
            return self.add(narrow, base=root, kind="parameter")
        if root not in self._casts:
            self._casts[root] = self._cast(op, op.inputs[place], narrow, kernels)
        return self._casts[root][by_columns]

    def _cast(
        self, op: Op, value: int, narrow: list[TensorSpec], kernels: list[Op]
    ) -> tuple[int, int]:
        """A tensor by rows and by columns in FP8, after the kernels that make them."""
        maker = self._maker.get(self._roots[value])
        fused = maker.call.target.removeprefix(FUSED) if maker is not None else ""
        # Root mean squares that a model writes out are sums.
        is_norm = op.phase == "forward" and fused.startswith(("normalization", "reduction"))
        is_activation = fused.startswith("elementwise") and op.module in self._applying
        if self._scaling in _NEEDS_LARGEST and not (is_norm and self._scaling == "current"):
            largest = self.add([TensorSpec((1,), "float32")] * 2)
            kernels.append(self.kernel(op, "aten.amax.default", (value,), (largest,)))
        rows, columns = self.add(narrow), self.add(narrow)
        writes_itself = is_activation or (is_norm and self._scaling in _FUSED_NORMS)
        read = () if writes_itself else (value,)
        made = ((rows,), (columns,)) if self._scaling == "nvfp4" else ((rows, columns),)
        kernels += [self.kernel(op, f"{QUANTIZE}.default", read, some) for some in made]
        return rows, columns
