"""Compare what a rank of a split graph does with modules that torch and transformers divide.

Models are divided by ``parallelize_module`` (DTensor), those with experts by transformers'
``apply_expert_parallelism``, on a fake process group, where one rank runs a step and hallucinates
its peers; what it sends and multiplies is the oracle of `graph.partition`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from layout_models import BATCH, CHOSEN, EXPERT_CASES, EXPERTS, MODELS, TOKENS, Case
from options import Options
from records import Record, say
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
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
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan, found_plan
from estimator.graph.trace.trace import trace_graph
from estimator.workload.layouts import Layout

Shapes = tuple[tuple[int, ...], ...]
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_GROUPED = "aten._grouped_mm.default"
# torch's names of what ranks exchange.
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
# Norms over all heads, and a key that all heads share: torch's styles, which give a rank its heads
# alone, do not divide these right.
_WHOLE_HEADS = ("olmoe", "deepseek_v3")
FORMS = {"all-to-all": "all_to_all", "all-reduce": "all_reduce"}
_ATTENTION = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}


class Seen(NamedTuple):
    """What one rank does in a step, each in order: (op, bytes) that it sends, shapes of products.

    Sums of the gradients of one-dimensional parameters, whose time is the optimizer's choice, are
    `small`; `experts` are the shapes of grouped weights.
    """

    collectives: tuple[tuple[str, int], ...]
    small: tuple[tuple[str, int], ...] = ()
    products: tuple[Shapes, ...] = ()
    experts: Shapes = ()


class _Watch(TorchDispatchMode):
    """Notes below DTensor what goes out or comes in, whichever is more, and what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        # With the dimensions of what is sent.
        self.collectives: list[tuple[str, int, int]] = []
        self.products: list[Shapes] = []
        self.experts: list[tuple[int, ...]] = []

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
        library, operator = name.split(".")[:2]
        if library == "_c10d_functional":
            kind = _KINDS.get(operator.rstrip("_"))
            if kind is not None:
                size = max(args[0].nbytes, found.nbytes)
                self.collectives.append((kind, size, args[0].dim()))
        elif name.startswith("c10d.allreduce_"):
            (sent,) = args[0]
            self.collectives.append(("all_reduce", sent.nbytes, sent.dim()))
        elif name == _GROUPED and args[1].dim() == 3:
            self.experts.append(tuple(args[1].shape))
        elif name in _PRODUCTS:
            self.products.append(tuple(tuple(each.shape) for each in _factors(name, args)))
        return found


def _factors(name: str, given: Sequence[Any]) -> Sequence[Any]:
    """The two that a product multiplies."""
    return given[1:3] if "addmm" in name else given[:2]


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """One rank of a group whose others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
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


def by_torch(case: Case, plan: Plan, degree: int) -> Seen:
    """What torch has a rank do."""
    torch.manual_seed(0)
    model, batch = case.make()
    with _fake_ranks(degree):
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
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
    large, small = (
        tuple((op, size) for op, size, dim in watch.collectives if (dim > 1) is is_large)
        for is_large in (True, False)
    )
    return Seen(large, small, tuple(watch.products))


def by_split(graph: OpGraph, plan: Plan, degree: int) -> Seen:
    """What the split graph has it do."""
    local = split(graph, plan, tp=degree)
    collectives: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
    for each in collectives_of(local.at()):
        (given,) = local.ops[each.op_index].call.inputs
        collectives[len(given.shape) > 1].append((each.op, each.size_bytes))
    # Without divided tokens torch's styles leave norms of divided heads to the user, whose
    # gradients transformers' plans sum ("replicated_with_grad_allreduce").
    small = tuple(collectives[False]) if plan.sequence else ()
    return Seen(tuple(collectives[True]), small, *_multiplied(local))


def _multiplied(local: OpGraph) -> tuple[tuple[Shapes, ...], Shapes]:
    """The products of a split graph and the weights of its grouped ones."""
    products, experts = [], []
    for op in local.ops:
        shapes = tuple(spec.shape for spec in op.call.inputs)
        if op.call.target in _PRODUCTS and not is_collective(op.call):
            products.append(tuple(_factors(op.call.target, shapes)))
        elif op.call.target == _GROUPED and len(shapes[1]) == 3:
            experts.append(shapes[1])
    return tuple(products), tuple(experts)


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


def expert_plan(model: Any) -> dict[str, str]:
    """What transformers does to each module of a model whose experts are divided."""
    return {
        pattern.replace("*", str(layer)): style
        for layer in range(model.config.num_hidden_layers)
        for pattern, style in model.config.base_model_ep_plan.items()
    }


def by_transformers(case: Case, *, ep: int, tp: int, form: str) -> Seen:
    """A step of transformers' expert parallelism on one rank of a fake process group."""
    from transformers.distributed import expert_parallel

    model, batch = case.make()
    with _fake_ranks(ep):
        mesh = init_device_mesh("cpu", (ep // tp, tp), mesh_dim_names=("dp", "tp"))
        experts = init_device_mesh("cpu", (ep,), mesh_dim_names=("ep",))
        of = model.model, experts, mesh["tp"], expert_plan(model), FORMS[form]
        expert_parallel.apply_expert_parallelism(*of)
        if tp > 1:
            styles = {"column": ColwiseParallel, "row": RowwiseParallel}
            attention = {
                f"model.layers.*.self_attn.{name}": styles[style]()
                for name, style in _ATTENTION.items()
            }
            parallelize_module(model, mesh["tp"], attention)
        watch = _Watch()
        with watch, _equal_counts(BATCH * TOKENS * CHOSEN // tp, form):
            model(**batch).loss.backward()
    sent = tuple((op, size) for op, size, _ in watch.collectives)
    return Seen(sent, (), tuple(watch.products), tuple(watch.experts))


def by_split_experts(graph: OpGraph, *, ep: int, tp: int, form: str) -> Seen:
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
    return Seen(tuple(collectives), (), *_multiplied(local))


class Compared(NamedTuple):
    """One model under one layout: where the oracle and the split graph differ, if they do."""

    model: str
    layout: str
    collectives: int
    products: int
    difference: str


def compared(case: Case, degree: int, *, sequence: bool) -> Compared:
    """Torch beside the split graph."""
    model, batch = case.make()
    graph = trace_graph(model, batch, loss=case.loss)
    plan = plan_of(graph, sequence=sequence)
    layout = f"tp={degree}" + ",sp" * sequence
    try:
        ours = by_split(graph, plan, degree)
    except EstimatorError as error:
        return Compared(case.name, layout, 0, 0, f"refused: {error}")
    return _compared(case, layout, ours, by_torch(case, plan, degree))


def compared_experts(case: Case, graph: OpGraph, ep: int, tp: int, form: str) -> Compared:
    """Transformers beside the split graph."""
    ours = by_split_experts(graph, ep=ep, tp=tp, form=form)
    theirs = by_transformers(case, ep=ep, tp=tp, form=form)
    return _compared(case, f"tp={tp},ep={ep},{form}", ours, theirs)


def _compared(case: Case, layout: str, ours: Seen, theirs: Seen) -> Compared:
    products = len(theirs.products) + len(theirs.experts)
    return Compared(case.name, layout, len(theirs.collectives), products, _difference(ours, theirs))


def _difference(ours: Seen, theirs: Seen) -> str:
    for what in Seen._fields:
        mine, other = Counter(getattr(ours, what)), Counter(getattr(theirs, what))
        if mine != other:
            extra, missing = (list(each.items())[:3] for each in (mine - other, other - mine))
            return f"{what}: {mine.total()} for {other.total()}, not {extra}, lacking {missing}"
    return "" if ours.collectives == theirs.collectives else "order of collectives"


def expert_degrees(case: Case) -> Iterator[tuple[int, int, str]]:
    """(ep, tp, form): ranks that share a batch are among those that share experts."""
    for ep in (2, 4, 8):
        for tp in (1,) if case.name in _WHOLE_HEADS else (1, 2, 4):
            if ep % tp == 0:
                yield ep, tp, "all-to-all"
            if ep == tp:
                yield ep, tp, "all-reduce"


def run(options: Options) -> Iterator[Record]:
    """Whether each model does alike under each layout; a quick run takes two models."""
    warnings.filterwarnings("ignore")
    for rows in (_dense(options), _experts(options)):
        for row in rows:
            say(f"{row.model}, {row.layout}: {row.difference or 'alike'}")
            differs = {"value": int(bool(row.difference)), "bound": 0}
            yield {"id": f"{row.model}, {row.layout}: differs", **differs, **row._asdict()}


def _dense(options: Options) -> Iterator[Compared]:
    cases = [case for case in MODELS if options.takes(case.name)]
    for case in cases[:1] if options.quick else cases:
        for degree in (2, 4, 8):
            for sequence in (False, True) if case.sequence else (False,):
                yield compared(case, degree, sequence=sequence)


def _experts(options: Options) -> Iterator[Compared]:
    cases = [case for case in EXPERT_CASES if options.takes(case.name)]
    for case in cases[:1] if options.quick else cases:
        model, batch = case.make()
        graph = trace_graph(model, batch)
        for degrees in expert_degrees(case):
            yield compared_experts(case, graph, *degrees)
