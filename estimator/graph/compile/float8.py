"""Turn the linear layers of a compiled step into float8 ones, as torchao converts them.

torchao.float8 (float8_linear.py, config.py): a linear layer's three products, forward and for both
gradients, take float8 factors that are cast just before. "tensorwise" scales by the largest of a
tensor, which is a pass of its own before the cast; "rowwise" by the largest of each row of a
factor, which one kernel finds and uses where rows lie together in memory, and a pass of its own
where they do not. Backward products must not accumulate in half of fp32, in which mode products
scaled by row are so slow that torchao scales their result in a kernel of its own (pytorch/ao,
issue 2184). Embeddings and the head stay as they are (torchtitan's filter_fqns), layers of
sizes that 16 does not divide too. Parameters are gathered as they are.
"""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import ModelError, quoted
from estimator.graph.ir.op_graph import GraphChanges, OpGraph, unit_path
from estimator.graph.ir.ops import Op, with_calls
from estimator.tensors import OpCall, TensorSpec

RECIPES = ("tensorwise", "rowwise")
FLOAT8 = "float8_e4m3fn"
FLOAT8_ASSUMPTION = (
    "linear layers of repeated blocks are in float8 ({recipe}); their casts are fused, parameters "
    "are gathered unchanged, and a product in float8 takes half the energy of one in bf16"
)
MULTIPLE = 16
# Where the factors of a product stand among its arguments.
FACTORS = {
    "aten.mm.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten._grouped_mm.default": (0, 1),
}


def with_float8(graph: OpGraph, recipe: str) -> OpGraph:
    """The compiled graph with float8 linear layers; raises ModelError."""
    if recipe not in RECIPES:
        raise ModelError(f"float8 {quoted(recipe)} is unknown; write {' or '.join(RECIPES)}")
    if graph.execution == "eager" or graph.target != "cuda" or not graph.precision.startswith("bf"):
        raise ModelError(
            f"float8 layers are compiled bf16 ones on GPUs, found {graph.execution} in "
            f"{graph.precision} for {graph.target}; write --precision bf16 with --compile or "
            "--compile-blocks"
        )
    changed = _Changed(graph, recipe)
    if not changed.instead:
        raise ModelError(
            f"{graph.name} has no linear layers in repeated blocks of sizes that 16 divides; leave "
            "out float8"
        )
    said = FLOAT8_ASSUMPTION.format(recipe=recipe)
    return changed.graph(float8=recipe, assumptions=(*graph.assumptions, said))


class _Changed(GraphChanges):
    """A graph with float8 products."""

    def __init__(self, graph: OpGraph, recipe: str) -> None:
        super().__init__(graph)
        self._recipe = recipe
        # (phase, tensor, how) → its cast, and its largest: the compiler makes nothing twice, by
        # whichever views two products read it.
        self._casts: dict[tuple[str, int, bool], int] = {}
        self._scales: set[tuple[str, int, bool]] = set()
        for index, op in enumerate(graph.ops):
            if _is_linear(op):
                self._product(index, op)

    def _product(self, index: int, op: Op) -> None:
        positions, kernels = FACTORS[op.call.target], self.before[index]
        # The inner dimension of the left factor is its last one, of the right one its first.
        cast = [
            self._cast(op, place, number == 1, kernels) for number, place in enumerate(positions)
        ]
        rest = [i for place, i in enumerate(op.inputs) if place not in positions]
        calls = [scaled(call, FLOAT8) for call in op.calls]
        product = with_calls(op, calls, inputs=(*cast, *rest))
        if self._recipe == "rowwise" and op.phase == "backward":
            # It writes another value, from which a pass makes its own by the scales.
            raw = self.add(self.values[op.outputs[0]].specs)
            kernels.append(replace(product, outputs=(raw,)))
            product = self.kernel(op, "aten.mul.Tensor", (raw,), op.outputs, holds=op.holds)
        self.instead[index] = product

    def _cast(self, op: Op, place: int, along_columns: bool, kernels: list[Op]) -> int:
        """The float8 value of a factor, cast before the product unless it is there already."""
        value = op.inputs[place]
        specs = [call.arguments[place] for call in op.calls]
        strides, base = specs[0].strides, self.values[value].base
        is_turned = strides is not None and strides[0] == 1 != strides[1]
        is_whole = base is not None and self.values[base].spec.numel == specs[0].numel
        tensor = base if base is not None and is_whole else value
        # Products read rows of the left factor and columns of the right one: others are written
        # anew, turned. One scale for all rows serves both directions.
        by_row = self._recipe == "rowwise"
        key = op.phase, tensor, along_columns != is_turned
        largest = op.phase, tensor, by_row and key[-1]
        if key not in self._casts:
            if largest not in self._scales and (not by_row or key[-1]):
                scales = self.add(TensorSpec(spec.shape[:1], "float32") for spec in specs)
                kernels.append(self.kernel(op, "aten.amax.default", (value,), (scales,)))
                self._scales.add(largest)
            self._casts[key] = self.add(replace(spec, dtype=FLOAT8) for spec in specs)
            made = (self._casts[key],)
            kernels.append(self.kernel(op, "aten._to_copy.default", (value,), made))
        return self._casts[key]


def scaled(call: OpCall, dtype: str, scaling: str = "") -> OpCall:
    """A product of factors of a narrow type, which come before its other arguments."""
    positions, kind = FACTORS[call.target], "grouped_mm" if "grouped" in call.target else "mm"
    rest = [each for place, each in enumerate(call.arguments) if place not in positions]
    narrow = [replace(call.arguments[place], dtype=dtype) for place in positions]
    overload = "mxfp8" if scaling == "mxfp8" else "default"
    return replace(call, target=f"aten._scaled_{kind}.{overload}", arguments=(*narrow, *rest))


def _is_linear(op: Op) -> bool:
    if op.call.name not in ("mm", "addmm") or not unit_path(op.module):
        return False
    factors = [op.call.arguments[place] for place in FACTORS[op.call.target]]
    return all(
        spec.dtype == "bfloat16" and not any(size % MULTIPLE for size in spec.shape)
        for spec in factors
    )
