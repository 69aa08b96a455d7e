"""The graph of one expert-parallel rank: by hand, and as transformers' all-to-all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.errors import StrategyError
from estimator.graph.ir.collectives import collectives_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.structure import value_roots
from estimator.graph.partition.context import split_context
from estimator.graph.partition.experts import slice_expert_tokens, split_experts, sum_experts
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import found_plan
from estimator.graph.trace.trace import trace_graph
from tests.synthetic import fake_ranks

transformers = pytest.importorskip("transformers")
BATCH, TOKENS, WIDTH, INNER, EXPERTS, CHOSEN, LAYERS = 4, 8, 16, 24, 8, 2, 2
ROWS = BATCH * TOKENS * CHOSEN
ROW_BYTES = ROWS * WIDTH * 4
COUNTS = ("forward", "all_to_all", EXPERTS * 8)


def moe(kind: str = "qwen3_moe") -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.AutoConfig.for_model(
        kind,
        use_cache=False,
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    ids = torch.randint(3, 60, (BATCH, TOKENS))
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"input_ids": ids, "labels": ids}


def graph_of(kind: str = "qwen3_moe") -> OpGraph:
    model, batch = moe(kind)
    return trace_graph(model, batch)


GRAPH = graph_of()


def exchanged(graph: OpGraph, axis: str, batch: int | None = None) -> list[tuple[str, str, int]]:
    found = collectives_of(graph.at(batch))
    return [(each.phase, each.op, each.size_bytes) for each in found if each.axis == axis]


def grouped(graph: OpGraph) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of every grouped matmul: left, right."""
    return [
        tuple(spec.shape for spec in op.call.inputs[:2])
        for op in graph.ops
        if op.call.target == "aten._grouped_mm.default"
    ]


def test_tokens_go_to_their_experts_and_back_twice_a_step() -> None:
    there, back = ("forward", "all_to_all", ROW_BYTES), ("backward", "all_to_all", ROW_BYTES)
    assert exchanged(split_experts(GRAPH, ep=4), "ep") == [
        *[COUNTS, there, there] * LAYERS,
        *[back, back] * LAYERS,
    ]


def test_experts_go_with_megatrons_layers() -> None:
    sliced = slice_expert_tokens(split_experts(GRAPH, ep=4), tp=2)
    local = split(sliced, found_plan(sliced, sequence=False), tp=2, megatron=True)
    # Each of the two ranks that share tokens sends half of them.
    half = ROW_BYTES // 2
    assert [size for _, _, size in exchanged(local, "ep") if size > COUNTS[2]] == [
        half
    ] * 4 * LAYERS


def test_a_rank_multiplies_as_many_rows_by_its_part_of_the_experts() -> None:
    own = EXPERTS // 4
    forward = [
        ((ROWS, WIDTH), (own, WIDTH, 2 * INNER)),
        ((ROWS, INNER), (own, INNER, WIDTH)),
    ]
    backward = [
        ((WIDTH, ROWS), (ROWS, INNER)),
        ((ROWS, WIDTH), (own, WIDTH, INNER)),
        ((2 * INNER, ROWS), (ROWS, WIDTH)),
        ((ROWS, 2 * INNER), (own, 2 * INNER, WIDTH)),
    ]
    assert grouped(split_experts(GRAPH, ep=4)) == forward * LAYERS + backward * LAYERS


def test_the_busiest_rank_has_more_rows_everywhere_between() -> None:
    local = split_experts(GRAPH, ep=2, imbalance=1.5)
    more = ROWS * 3 // 2
    assert grouped(local)[0] == ((more, WIDTH), (EXPERTS // 2, WIDTH, 2 * INNER))
    sizes = {size for _, _, size in exchanged(local, "ep")}
    assert sizes == {EXPERTS * 8, ROW_BYTES * 3 // 2}


def test_gradients_of_experts_are_reduced_among_the_ranks_that_have_the_same() -> None:
    local = split_experts(GRAPH, ep=4)
    part = EXPERTS // 4
    down, up = part * INNER * WIDTH * 4, part * WIDTH * 2 * INNER * 4
    reduced = exchanged(local, "expert_dp")
    assert reduced == [("backward", "all_reduce", size) for size in (down, up)] * LAYERS
    experts = {p.name: p.spec.shape for p in local.parameters if p.is_expert}
    assert set(experts) == {p.name for p in GRAPH.parameters if "experts" in p.name}
    assert {shape[0] for shape in experts.values()} == {part}
    others = [(p.name, p.spec) for p in local.parameters if not p.is_expert]
    assert others == [(p.name, p.spec) for p in GRAPH.parameters if "experts" not in p.name]


def test_bytes_follow_the_batch() -> None:
    local = split_experts(GRAPH, ep=2)
    assert exchanged(local, "ep", 3 * BATCH)[1] == ("forward", "all_to_all", 3 * ROW_BYTES)


def test_every_rank_routes_its_own_tokens() -> None:
    local = split_context(split_experts(GRAPH, ep=2), cp=2)
    there = ("all_to_all", ROW_BYTES // 2)
    rows = [each[1:] for each in exchanged(local, "ep") if each != COUNTS]
    assert rows == [there] * 4 * LAYERS
    # Nothing but keys and values goes between ranks that share samples.
    width = {each.size_bytes for each in collectives_of(local.at()) if each.axis == "cp"}
    assert width == {2 * BATCH * TOKENS * WIDTH * 4}
    assert grouped(local)[0] == ((ROWS // 2, WIDTH), (EXPERTS // 2, WIDTH, 2 * INNER))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_tokens_are_kept_where_their_experts_are_alone(kind: str) -> None:
    local = split_experts(graph_of(kind), ep=2)
    sent = {op.inputs[0] for op in local.ops if "all_to_all" in op.name and op.inputs}
    rows = {v for v in sent if local.values[v].spec.shape == (ROWS, WIDTH)}
    made = [op for op in local.ops if op.phase == "forward" and not rows.isdisjoint(op.outputs)]
    assert len(made) >= LAYERS
    first = {value for op in made if "index" in op.name for value in op.outputs}
    roots = value_roots(local)
    read = {roots[v] for op in local.ops if op.phase == "backward" for v in (*op.inputs, *op.holds)}
    assert not first & read


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(StrategyError, match="ep=3 does not divide the 8 experts of module"):
        split_experts(GRAPH, ep=3)


def test_a_model_without_experts_is_refused() -> None:
    graph = trace_graph(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(StrategyError, match="Linear has none; leave ep out"):
        split_experts(graph, ep=2)


def test_the_plan_of_the_config_says_which_experts_are_divided() -> None:
    assert ("layers.*.mlp.experts", "ep_dispatch_experts") in GRAPH.ep_plan
    assert "by base_model_ep_plan of its config" in split_experts(GRAPH, ep=2).assumptions[-1]
    one = replace(GRAPH, ep_plan=(("layers.1.mlp.experts", "ep_dispatch_experts"),))
    local = split_experts(one, ep=2)
    there, back = ("forward", "all_to_all", ROW_BYTES), ("backward", "all_to_all", ROW_BYTES)
    assert exchanged(local, "ep") == [COUNTS, there, there, back, back]
    divided = {p.name for p in local.parameters if p.is_expert}
    assert divided == {p.name for p in GRAPH.parameters if "layers.1.mlp.experts" in p.name}
    tokens = ROW_BYTES // CHOSEN
    summed = [each[1:] for each in exchanged(sum_experts(one, ep=2), "ep")]
    assert summed.count(("all_reduce", tokens)) == 2


def test_a_plan_that_names_no_module_of_the_model_is_not_followed() -> None:
    other = replace(GRAPH, ep_plan=(("blocks.*.experts", "ep_dispatch_experts"),))
    assert exchanged(split_experts(other, ep=2), "ep") == exchanged(
        split_experts(GRAPH, ep=2), "ep"
    )


class _Watch(TorchDispatchMode):
    """Notes what goes out or comes in, whichever is a whole batch, and the experts' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.others: list[tuple[str, int]] = []
        self.weights: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("_c10d_functional.all_to_all_single"):
            self.sent.append(max(args[0].nbytes, found.nbytes))
        elif name.startswith(("_c10d_functional.all_reduce", "_c10d_functional.all_gather_into")):
            op = "all_reduce" if "reduce" in name else "all_gather"
            self.others.append((op, max(args[0].nbytes, found.nbytes)))
        elif name.startswith("c10d.allreduce_"):
            self.others.append(("all_reduce", args[0][0].nbytes))
        elif name == "aten._grouped_mm.default" and args[1].dim() == 3:
            self.weights.append(tuple(args[1].shape))
        return found


def by_transformers(
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tp: int = 1,
    form: str = "all_to_all",
    kind: str = "qwen3_moe",
) -> _Watch:
    """A step of transformers' expert parallelism on one rank of a fake process group."""
    from transformers.distributed import expert_parallel

    model, batch = moe(kind)
    sizes: list[int] = []

    def equal_counts(received: Tensor, sent: Tensor, group: Any) -> None:
        sizes.append(sent.nbytes)
        received.fill_(ROWS // tp // received.numel())

    monkeypatch.setattr(expert_parallel, "all_to_all_single", equal_counts)
    with fake_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        experts = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        plan = {
            pattern.replace("*", str(layer)): style
            for layer in range(LAYERS)
            for pattern, style in model.config.base_model_ep_plan.items()
        }
        expert_parallel.apply_expert_parallelism(model.model, experts, mesh["tp"], plan, form)
        with _Watch() as watch:
            model(**batch).loss.backward()
    assert sizes == ([EXPERTS * 8] * LAYERS if form == "all_to_all" else [])
    return watch


@pytest.mark.parametrize(
    ("kind", "ranks"), [("qwen3_moe", 2), ("qwen3_moe", 4), ("gpt_oss", 2), ("gpt_oss", 4)]
)
def test_bytes_and_experts_are_those_of_transformers(
    kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = split_experts(graph_of(kind), ep=ranks)
    theirs = by_transformers(ranks, monkeypatch, kind=kind)
    ours = [size for _, _, size in exchanged(local, "ep") if size != EXPERTS * 8]
    # With equal counts both sides of every exchange have as many rows.
    assert ours == theirs.sent
    weights = [right for _, right in grouped(local) if len(right) == 3]
    assert weights == theirs.weights
    # Biases of experts are divided as their weights are.
    experts = [p.spec.shape[0] for p in local.parameters if "experts" in p.name]
    assert set(experts) == {EXPERTS // ranks}


@pytest.mark.parametrize(
    ("kind", "ranks", "tp"),
    [
        ("qwen3_moe", 2, 2),
        ("qwen3_moe", 4, 2),
        ("qwen3_moe", 8, 4),
        ("mixtral", 4, 2),
        ("olmoe", 8, 2),
    ],
)
def test_ranks_that_share_a_batch_send_slices_of_it_as_those_of_transformers(
    kind: str, ranks: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = slice_expert_tokens(split_experts(graph_of(kind), ep=ranks), tp=tp)
    theirs = by_transformers(ranks, monkeypatch, tp=tp, kind=kind)
    ours = [size for _, _, size in exchanged(local, "ep") if size != EXPERTS * 8]
    assert ours == theirs.sent == [ROW_BYTES // tp] * 4 * LAYERS
    # Gathered are tokens after their experts, their gradients and those of what routes them.
    tokens, routes = ROW_BYTES // CHOSEN, BATCH * TOKENS * CHOSEN * 4
    gathered = [(op, size) for _, op, size in exchanged(local, "tp")]
    assert gathered[:LAYERS] == [("all_gather", tokens)] * LAYERS
    assert sorted(gathered) == sorted(theirs.others)
    assert sorted(gathered[LAYERS:]) == sorted(
        [("all_gather", tokens), ("all_gather", routes)] * LAYERS
    )
    assert grouped(local)[0] == ((ROWS // tp, WIDTH), (EXPERTS // ranks, WIDTH, 2 * INNER))
    assert {p.expert_parts for p in local.parameters if p.is_expert} == {ranks // tp}


@pytest.mark.parametrize(
    ("kind", "ranks"), [("qwen3_moe", 2), ("qwen3_moe", 4), ("mixtral", 4), ("olmoe", 8)]
)
def test_results_of_experts_are_summed_as_those_of_transformers(
    kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = sum_experts(graph_of(kind), ep=ranks)
    theirs = by_transformers(ranks, monkeypatch, tp=ranks, form="all_reduce", kind=kind)
    tokens, routes = ROW_BYTES // CHOSEN, BATCH * TOKENS * CHOSEN * 4
    forward = [each[1:] for each in exchanged(local, "ep") if each[0] == "forward"]
    backward = [each[1:] for each in exchanged(local, "ep") if each[0] == "backward"]
    assert forward == [("all_reduce", tokens)] * LAYERS
    assert sorted(backward) == sorted([("all_reduce", tokens), ("all_reduce", routes)] * LAYERS)
    assert sorted(forward + backward) == sorted(theirs.others)
    assert theirs.sent == []
    weights = [right for _, right in grouped(local) if len(right) == 3]
    assert weights == theirs.weights
    # Of all tokens' rows a rank multiplies those of its experts.
    assert {left[0] for left, right in grouped(local) if len(right) == 3} == {ROWS // ranks}
    assert {p.spec.shape[0] for p in local.parameters if p.is_expert} == {EXPERTS // ranks}
