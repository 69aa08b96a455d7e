"""Compare split graphs with modules that torch parallelises: collectives, local products, order.

Every model is divided by ``parallelize_module`` (DTensor) on a fake process group, where one rank
runs a step and hallucinates its peers; what it sends and multiplies is the oracle of
`graph.partition`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layout_models import MODELS, Case, drawn
from layout_oracle_experts import cases as expert_cases
from layout_oracle_experts import compared_experts, degrees, graph_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.errors import EstimatorError
from estimator.graph.ir.collectives import collectives_of, is_collective
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan, found_plan
from estimator.graph.trace.trace import trace_graph

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
# What torch raises where a model asks for what its styles do not give.
_OF_TORCH = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, KeyError)
# torch's names of what ranks exchange.
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Seen(NamedTuple):
    """What one rank does in a step: (op, bytes) and shapes of products, each in order.

    Sums of the gradients of one-dimensional parameters, whose time is the optimizer's choice, are
    `small`.
    """

    collectives: tuple[tuple[str, int], ...]
    small: tuple[tuple[str, int], ...]
    products: tuple[tuple[tuple[int, ...], ...], ...]


class _Watch(TorchDispatchMode):
    """Notes collectives and products below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.small: list[tuple[str, int]] = []
        self.products: list[tuple[tuple[int, ...], ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # DTensor works first; its local operators come here then.
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        if isinstance(found, FakeTensor):
            # DTensor looks up whole shapes before it works on its part.
            return found
        name = str(func)
        if name.startswith("_c10d_functional."):
            kind = _KINDS.get(name.split(".")[1].rstrip("_"))
            if kind is not None:
                seen = self.collectives if args[0].dim() > 1 else self.small
                seen.append((kind, max(args[0].nbytes, found.nbytes)))
        elif name in _PRODUCTS:
            first = 1 if "addmm" in name else 0
            self.products.append(tuple(tuple(each.shape) for each in args[first : first + 2]))
        return found


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """One rank of a group whose others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def torch_styles(plan: Plan, model: nn.Module) -> dict[str, ParallelStyle]:
    """A plan in the styles of ``parallelize_module``; norms work on divided tokens."""
    tokens = Shard(1) if plan.sequence else Replicate()
    made: dict[str, Callable[[], ParallelStyle]] = {
        "column": lambda: ColwiseParallel(input_layouts=tokens),
        "gather": lambda: ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        "row": lambda: RowwiseParallel(output_layouts=tokens),
        "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
    }
    found = {name: made[style]() for name, style in plan.styles if style in made}
    if plan.sequence:
        norms = (nn.LayerNorm, nn.RMSNorm)
        found |= {
            name: SequenceParallel()
            for name, module in model.named_modules()
            if isinstance(module, norms)
        }
    return found


def by_torch(case: Case, plan: Plan, degree: int) -> Seen:
    """What torch has a rank do."""
    torch.manual_seed(0)
    model, batch = case.make()
    with fake_ranks(degree) as mesh:
        parallelize_module(model, mesh, torch_styles(plan, model))
        watch = _Watch()
        with watch:
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            loss = getattr(output, "loss", output)
            (loss if loss.numel() == 1 else loss.mean()).backward()
            # Gradients of what is whole are summed when they are used.
            for parameter in model.parameters():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad.redistribute(placements=parameter.placements)
    return Seen(tuple(watch.collectives), tuple(watch.small), tuple(watch.products))


def by_split(graph: OpGraph, plan: Plan, degree: int) -> Seen:
    """What the split graph has it do."""
    local = split(graph, plan, tp=degree)
    collectives: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
    for each in collectives_of(local.at()):
        (given,) = local.ops[each.op_index].call.inputs
        collectives[len(given.shape) > 1].append((each.op, each.size_bytes))
    products = []
    for op in local.ops:
        if op.call.target in _PRODUCTS and not is_collective(op.call):
            first = 1 if "addmm" in op.call.target else 0
            products.append(tuple(spec.shape for spec in op.call.inputs[first:]))
    # Without divided tokens torch's styles leave norms of divided heads to the user, whose
    # gradients transformers' plans sum ("replicated_with_grad_allreduce").
    small = tuple(collectives[False]) if plan.sequence else ()
    return Seen(tuple(collectives[True]), small, tuple(products))


def plan_of(graph: OpGraph, *, sequence: bool) -> Plan:
    """The plan found by rule; torch's plain styles reduce each module's gradient by itself."""
    found = found_plan(graph, sequence=sequence)
    styles = dict(found.styles)
    if sequence:
        # The last layer takes whole tokens, as torch's styles have it.
        last = [op.module for op in graph.ops if "log_softmax" in op.call.target]
        heads = [name for name in ("head", "lm_head") if any(op.module == name for op in graph.ops)]
        styles |= dict.fromkeys(heads if last else [], "gather")
    return Plan(tuple(styles.items()), sequence=sequence, reduces_once=False, source=found.source)


class Compared(NamedTuple):
    """One model at one degree: where torch and the split graph differ, if they do."""

    model: str
    tp: int
    sequence: bool
    collectives: int
    products: int
    difference: str


def compared(case: Case, degree: int, *, sequence: bool) -> Compared:
    """Torch beside the split graph."""
    model, batch = case.make()
    graph = trace_graph(model, batch, loss=case.loss)
    plan = plan_of(graph, sequence=sequence)
    try:
        ours = by_split(graph, plan, degree)
    except EstimatorError as error:
        return Compared(case.name, degree, sequence, 0, 0, f"refused: {error}")
    theirs = by_torch(case, plan, degree)
    count = len(theirs.collectives), len(theirs.products)
    return Compared(case.name, degree, sequence, *count, _difference(ours, theirs))


def _difference(ours: Seen, theirs: Seen) -> str:
    for what in ("collectives", "small", "products"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if sorted(mine) != sorted(other):
            extra, missing = (
                list((Counter(one) - Counter(two)).items())[:3]
                for one, two in ((mine, other), (other, mine))
            )
            return f"{what}: {len(mine)} for {len(other)}, not torch's {extra}, lacking {missing}"
    if ours.collectives != theirs.collectives:
        return "order of collectives"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="models, by name")
    parser.add_argument("--tp", type=int, action="append", default=[])
    parser.add_argument("--draw", type=int, default=0, help="how many models to draw by seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", action="store_true", help="models with experts, divided")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.experts:
        return _experts(options)
    cases = [case for case in MODELS if not options.only or case.name in options.only]
    cases += drawn(options.draw, random.Random(options.seed))
    rows = []
    for case in cases:
        for degree in options.tp or (2, 4, 8):
            for sequence in (False, True) if case.sequence else (False,):
                print(f"{case.name} tp={degree} sp={sequence}", file=sys.stderr)
                try:
                    rows.append(compared(case, degree, sequence=sequence))
                except _OF_TORCH as error:
                    said = f"torch: {type(error).__name__}: {error}"[:200]
                    rows.append(Compared(case.name, degree, sequence, 0, 0, said))
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        for row in rows:
            how = "sp" if row.sequence else "  "
            counts = f"{row.collectives:4} collectives {row.products:4} products"
            print(f"{row.model:24} tp={row.tp} {how} {counts}  {row.difference or 'alike'}")
        alike = sum(not row.difference for row in rows)
        print(f"{alike} of {len(rows)} alike, {len({row.model for row in rows})} models")
    return 0 if all(not row.difference for row in rows) else 1


def _experts(options: argparse.Namespace) -> int:
    """Models with experts, by `tp` and `ep`, in both forms."""
    rows = []
    for case in expert_cases():
        if options.only and case.name not in options.only:
            continue
        graph = graph_of(case)
        for ep, tp, form in degrees(case):
            if options.tp and tp not in options.tp:
                continue
            print(f"{case.name} tp={tp} ep={ep} {form}", file=sys.stderr)
            rows.append(compared_experts(case, graph, ep, tp, form))
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        for row in rows:
            counts = f"{row.collectives:4} collectives {row.products:4} products"
            how = f"tp={row.tp} ep={row.ep} {row.form:10}"
            print(f"{row.model:12} {how} {counts}  {row.difference or 'alike'}")
        alike = sum(not row.difference for row in rows)
        print(f"{alike} of {len(rows)} alike, {len({row.model for row in rows})} models")
    return 0 if all(not row.difference for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
