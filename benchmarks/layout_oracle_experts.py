"""Compare graphs of divided experts with transformers' modules, divided by their configs' plans.

``apply_expert_parallelism`` of transformers divides the experts of ``base_model_ep_plan`` on a fake
process group, and ``parallelize_module`` of torch the attention of ranks that share a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layout_models import BATCH, TOKENS, Case, expert_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.graph.ir.collectives import collectives_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.plan import Plan
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout

FORMS = {"all-to-all": "all_to_all", "all-reduce": "all_reduce"}
# Families whose configs have a plan for experts, and whose experts are grouped matmuls.
KINDS = ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3", "olmoe")
# Norms over all heads, and a key that all heads share: torch's styles, which give a rank its heads
# alone, do not divide these right.
_WHOLE_HEADS = ("olmoe", "deepseek_v3")
EXPERTS, CHOSEN, LAYERS = 8, 2, 2
_ATTENTION = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_GROUPED = "aten._grouped_mm.default"
_SENT = {
    "_c10d_functional.all_to_all_single": "all_to_all",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
}


class Exchanged(NamedTuple):
    """What a rank sends, (op, bytes) in order, multiplies, and the shapes of its experts."""

    collectives: tuple[tuple[str, int], ...]
    products: tuple[tuple[tuple[int, ...], ...], ...]
    experts: tuple[tuple[int, ...], ...]


class Watch(TorchDispatchMode):
    """Notes what goes out or comes in, whichever is more, and what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.products: list[tuple[tuple[int, ...], ...]] = []
        self.experts: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0].rstrip("_")
        if name in _SENT:
            self.collectives.append((_SENT[name], max(args[0].nbytes, found.nbytes)))
        elif name == "c10d.allreduce":
            self.collectives.append(("all_reduce", args[0][0].nbytes))
        elif str(func) == _GROUPED and args[1].dim() == 3:
            self.experts.append(tuple(args[1].shape))
        elif str(func) in _PRODUCTS and type(found) is Tensor:
            first = 1 if "addmm" in name else 0
            self.products.append(tuple(tuple(each.shape) for each in args[first : first + 2]))
        return found


@contextmanager
def _equal_counts(rows: int, form: str) -> Iterator[None]:
    """Every expert gets as many rows: ranks of a fake group tell each other nothing."""
    from transformers.distributed import expert_parallel

    original, told = expert_parallel.all_to_all_single, []

    def equal(received: Tensor, sent: Tensor, group: Any) -> None:
        told.append(sent.nbytes)
        received.fill_(rows // received.numel())

    expert_parallel.all_to_all_single = equal
    try:
        yield
    finally:
        expert_parallel.all_to_all_single = original
    assert bool(told) == (form == "all-to-all")


def by_transformers(case: Case, *, ep: int, tp: int, form: str) -> Exchanged:
    """A step of transformers' expert parallelism on one rank of a fake process group."""
    from transformers.distributed import expert_parallel

    model, batch = case.make()
    rows = BATCH * TOKENS * CHOSEN // tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ep)
    try:
        mesh = init_device_mesh("cpu", (ep // tp, tp), mesh_dim_names=("dp", "tp"))
        experts = init_device_mesh("cpu", (ep,), mesh_dim_names=("ep",))
        plan = {
            pattern.replace("*", str(layer)): style
            for layer in range(LAYERS)
            for pattern, style in model.config.base_model_ep_plan.items()
        }
        of = model.model, experts, mesh["tp"], plan, FORMS[form]
        expert_parallel.apply_expert_parallelism(*of)
        if tp > 1:
            torch_styles = {"column": ColwiseParallel, "row": RowwiseParallel}
            styles = {
                f"model.layers.*.self_attn.{name}": torch_styles[style]()
                for name, style in _ATTENTION.items()
            }
            parallelize_module(model, mesh["tp"], styles)
        watch = Watch()
        with watch, _equal_counts(rows, form):
            model(**batch).loss.backward()
    finally:
        dist.destroy_process_group()
    return Exchanged(tuple(watch.collectives), tuple(watch.products), tuple(watch.experts))


def by_split(graph: OpGraph, *, ep: int, tp: int, form: str) -> Exchanged:
    """What the split graph has it do; transformers sums no gradients of experts itself."""
    layout = Layout(tp=tp, ep=ep, sums_experts=form == "all-reduce")
    styles = tuple((f"layers.*.self_attn.{name}", style) for name, style in _ATTENTION.items())
    plan = Plan(styles) if tp > 1 else None  # type: ignore[arg-type]
    local = split_by_layout(graph, layout, plan)
    counts = EXPERTS * torch.int64.itemsize
    collectives = [
        (each.op, each.size_bytes)
        for each in collectives_of(local.at())
        if each.axis != "expert_dp"
        and (each.op, each.size_bytes) != ("all_to_all", counts)
        # Gradients of norms of divided heads: torch's styles leave them to the user.
        and not (each.axis == "tp" and len(local.ops[each.op_index].call.inputs[0].shape) == 1)
    ]
    products, experts = [], []
    for op in local.ops:
        shapes = tuple(spec.shape for spec in op.call.inputs)
        if op.call.target == _GROUPED and len(shapes[1]) == 3:
            experts.append(shapes[1])
        elif op.call.target in _PRODUCTS:
            products.append(shapes[1:] if "addmm" in op.call.target else shapes[:2])
    return Exchanged(tuple(collectives), tuple(products), tuple(experts))


class ComparedExperts(NamedTuple):
    """One model at one layout: where transformers and the split graph differ, if they do."""

    model: str
    ep: int
    tp: int
    form: str
    collectives: int
    products: int
    difference: str


def compared_experts(case: Case, graph: OpGraph, ep: int, tp: int, form: str) -> ComparedExperts:
    """Transformers beside the split graph."""
    ours = by_split(graph, ep=ep, tp=tp, form=form)
    theirs = by_transformers(case, ep=ep, tp=tp, form=form)
    counts = len(theirs.collectives), len(theirs.products) + len(theirs.experts)
    return ComparedExperts(case.name, ep, tp, form, *counts, _difference(ours, theirs))


def _difference(ours: Exchanged, theirs: Exchanged) -> str:
    for what in ("collectives", "products", "experts"):
        mine, other = Counter(getattr(ours, what)), Counter(getattr(theirs, what))
        if mine != other:
            extra, missing = (list(each.items())[:3] for each in (mine - other, other - mine))
            return f"{what}: not transformers' {extra}, lacking {missing}"
    return "" if ours.collectives == theirs.collectives else "order of collectives"


def degrees(case: Case) -> Iterator[tuple[int, int, str]]:
    """(ep, tp, form): ranks that share a batch are among those that share experts."""
    for ep in (2, 4, 8):
        for tp in (1,) if case.name in _WHOLE_HEADS else (1, 2, 4):
            if ep % tp == 0:
                yield ep, tp, "all-to-all"
            if ep == tp:
                yield ep, tp, "all-reduce"


def cases() -> list[Case]:
    """Small models of each family."""
    return [Case(kind, expert_model(kind, EXPERTS, CHOSEN)) for kind in KINDS]


def graph_of(case: Case) -> OpGraph:
    """A case's graph on one device."""
    model, batch = case.make()
    return trace_graph(model, batch)
