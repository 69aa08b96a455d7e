"""Tokens to experts and back in Megatron's kernels, and what ranks exchange of them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

import estimator as est
from estimator.api import with_recipe
from estimator.graph.compile.expert_tokens import PERMUTE, UNPERMUTE
from estimator.graph.compile.unfused_kernels import with_unfused_rotary
from estimator.graph.costs.call_costs import op_cost
from estimator.graph.ir.collectives import Collective, collectives_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import GraphStructure, value_roots
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.models import load_model
from estimator.graph.partition.layout import split_by_layout
from estimator.kernels.host import awaited_ops, compiled_host_seconds
from estimator.machines.catalogue import load_profile
from estimator.machines.typical import with_typical_costs
from estimator.workload.layouts import Layout
from tests.graph.partition.test_split_experts import (
    BATCH,
    CHOSEN,
    EXPERTS,
    INNER,
    LAYERS,
    ROWS,
    TOKENS,
    WIDTH,
    moe,
)

ROW_BYTES = ROWS * WIDTH * 2


def traced(kind: str = "qwen3_moe") -> OpGraph:
    module, batch = moe(kind)
    return est.trace_model(module, batch, target="cuda", precision="bf16", recipe="megatron")


GRAPH = traced()


def of_rank(recipe: str, layout: str = "ep=4") -> OpGraph:
    return split_by_layout(with_recipe(GRAPH, recipe=recipe), Layout.parse(layout))


def of_first(graph: OpGraph, phase: str, *targets: str) -> list[Op]:
    return [
        op
        for op in graph.ops
        if op.phase == phase and op.call.target in targets and "layers.0." in op.module
    ]


def exchanges(graph: OpGraph) -> list[Collective]:
    found = [each for each in collectives_of(graph.at(None)) if each.op == "all_to_all"]
    return [each for each in found if each.size_bytes == ROW_BYTES]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_kernel_copies_tokens_and_one_adds_them_up(phase: str) -> None:
    copied, added = of_first(GRAPH, phase, PERMUTE, UNPERMUTE)
    assert copied.call.outputs[0].shape == (ROWS, WIDTH)
    assert added.call.outputs[0].shape == (BATCH * TOKENS, WIDTH)
    # Nothing else puts rows where they belong, or saves what experts give.
    rows = of_first(GRAPH, phase, "aten.index_put.default")
    assert all(len(op.call.outputs[0].shape) == 1 for op in rows)
    assert added.call.inputs[0].dtype == "bfloat16"


def test_results_of_experts_are_not_saved() -> None:
    last = of_first(GRAPH, "forward", "aten._grouped_mm.default")[-1]
    readers = [op for op in GRAPH.ops if set(last.outputs) & {*op.inputs, *op.holds}]
    assert [op.phase for op in readers] == ["forward"]


def test_an_all_to_all_sends_a_copy_for_each_expert() -> None:
    found = exchanges(of_rank("megatron"))
    # To experts and back, forward and backward.
    assert len(found) == 4 * LAYERS
    assert not any(each.copies or each.beside_passes for each in found)
    # Rows come rank by rank, are put in the order of experts, and back again.
    assert len(of_first(of_rank("megatron"), "forward", PERMUTE)) == 3


def test_a_dispatcher_copies_on_the_way() -> None:
    graph = of_rank("megatron:dispatch=hybridep,expert-overlap")
    found = exchanges(graph)
    assert [each.copies for each in found] == [CHOSEN] * 4 * LAYERS
    assert all(each.beside_passes for each in found)
    assert not of_first(graph, "forward", UNPERMUTE)
    # From what came to the order of experts, and back.
    assert len(of_first(graph, "forward", PERMUTE)) == 2
    sent = next(op for op in graph.ops if "all_to_all" in op.call.target and op.inputs)
    assert sent.call.inputs[0].shape == (BATCH * TOKENS, WIDTH)


@cache
def latent() -> OpGraph:
    """DeepSeek-V3 with few layers and heads of its own sizes."""
    small = "hidden_size=64,intermediate_size=64,moe_intermediate_size=32,num_hidden_layers=2"
    small += ",num_attention_heads=4,num_key_value_heads=4,n_routed_experts=8,n_group=2"
    small += ",topk_group=1,num_experts_per_tok=2,first_k_dense_replace=0,vocab_size=64"
    module, batch, loss, _ = load_model(
        f"hf:deepseek_v3,{small}", batch=2, seq_len=32, weights=False
    )
    return est.trace_model(
        module, batch, loss, target="cuda", precision="bf16", recipe="megatron:fp8=mxfp8"
    )


def test_latent_attention_gives_heads_as_wide_as_values() -> None:
    calls = [op.call for op in latent().ops if "attention.default" in op.call.target]
    widths = [[spec.shape[-1] for spec in (*c.inputs[:3], c.outputs[0])] for c in calls]
    # Queries and keys 128 + 64 wide, values 128.
    assert widths == 2 * [[192, 192, 128, 128]]


def test_products_of_experts_are_in_fp8() -> None:
    targets = Counter(op.call.target for op in latent().ops if "grouped_mm" in op.call.target)
    # Two products forward, two gradients of each, in both layers.
    assert targets == {"aten._scaled_grouped_mm.mxfp8": 2 * 6}


def test_routers_multiply_bf16() -> None:
    graph = latent()
    products = [op for op in graph.ops if op.module.endswith(".gate") and ".mm." in op.call.target]
    assert len(products) == 3 * 2
    factors = [each.dtype for op in products for each in op.call.inputs]
    # Scores are summed in fp32, and so is their gradient.
    assert factors.count("bfloat16") == len(factors)
    assert {op.call.outputs[0].dtype for op in products if op.phase == "forward"} == {"float32"}
    # No copy of tokens in fp32 is made for them.
    made = [s for op in graph.ops if op.module.endswith(".gate") for s in op.call.outputs]
    assert not any(s.dtype == "float32" and s.shape == (64, 64) for s in made)


@pytest.mark.parametrize(("where", "batches"), [("1x8:gb300-nvl72", 4), ("1x8:b200", 64)])
def test_exchanges_beside_another_micro_batch_are_hidden_but_at_the_ends(
    where: str, batches: int
) -> None:
    seconds = []
    for recipe in ("megatron:dispatch=hybridep", "megatron:dispatch=hybridep,expert-overlap"):
        graph = with_recipe(GRAPH, recipe=recipe)
        found = est.estimate(
            graph, where, batch_per_gpu=4096, layout="ep=8,dp=*", accumulation_steps=batches
        )
        seconds.append(found.breakdown.layer_communication_s)
    # A pass of the first and one of the last micro-batch have none beside them.
    assert 1 / batches < seconds[1] / seconds[0] < 1.0


HOST = with_typical_costs(load_profile("h100-sxm")).host
CALL_S = HOST.bare_op_s
# 2.7 times a linear layer of torch.
MODULE_S = 2.7 * (HOST.forward_op_s + HOST.module_call_s + CALL_S)


def host_seconds(graph: OpGraph, phase: str, target: str) -> list[float]:
    """What the host takes for such operators of experts in the first layer."""
    seconds = compiled_host_seconds(graph, HOST)
    own = [op for op in graph.ops if op.phase == phase and op.call.target.startswith(target)]
    places = [graph.ops.index(op) for op in own if op.module == "model.layers.0.mlp.experts"]
    return [float(seconds[place]) for place in places]


def test_the_host_reads_token_counts_before_experts() -> None:
    modules = [GRAPH.ops[index].module for index in awaited_ops(GraphStructure.of(GRAPH))]
    experts = [f"model.layers.{number}.mlp.experts" for number in range(LAYERS)]
    assert [module for module in modules if "layers" in module] == experts
    replayed = with_recipe(GRAPH, recipe="megatron:graphs=iteration")
    assert len(awaited_ops(GraphStructure.of(replayed))) == len(modules) - LAYERS


def test_the_host_launches_products_of_experts_one_by_one() -> None:
    # A launch, what is listed for each of 8 experts and 1.5 calls for its product.
    first, second = host_seconds(GRAPH, "forward", "aten._grouped_mm")
    each_s = 1.5 * CALL_S + MODULE_S + 8 * (0.6 + 1.5) * CALL_S
    assert second == pytest.approx(each_s)
    # Half of what a mixture does besides comes when its tokens are counted.
    assert first == pytest.approx(each_s + 220 * CALL_S)
    # A backward pass has two products, each half of the module's; of a layer's weights autograd
    # hands over a gradient for each expert.
    products = host_seconds(GRAPH, "backward", "aten._grouped_mm")
    each_s = 1.5 * CALL_S + MODULE_S / 2 + 8 * (0.55 + 1.5) * CALL_S
    handed_s = 2 * 8 * (HOST.backward_op_s + HOST.module_call_s)
    assert len(products) == 4
    assert sum(products) == pytest.approx(4 * each_s + handed_s + 180 * CALL_S)


def test_graphs_leave_the_host_less_to_do_for_experts() -> None:
    before_s = 220 * CALL_S
    seconds = [
        compiled_host_seconds(with_recipe(GRAPH, recipe=f"megatron{graphs}"), HOST)
        for graphs in ("", ":graphs=layers", ":graphs=iteration")
    ]
    first = next(i for i, op in enumerate(GRAPH.ops) if op.module.endswith("0.mlp.experts"))
    assert seconds[0][first] - seconds[1][first] == pytest.approx(before_s)
    assert seconds[2][first] == 0.0
    fused = with_recipe(GRAPH, recipe="megatron:fused-grouped-mlp")
    _, second = host_seconds(fused, "forward", "aten._grouped_mm")
    # All experts' products at once.
    assert second == pytest.approx(1.5 * CALL_S + MODULE_S + 8 * 0.6 * CALL_S)


def test_each_expert_has_its_own_casts() -> None:
    casts = host_seconds(latent(), "forward", "te.quantize")
    # Tokens and what the activation gives, for 8 experts.
    assert casts == pytest.approx(2 * [8 * 1.5 * CALL_S])


def test_a_layer_of_few_tokens_takes_as_long_as_measured() -> None:
    # 128 experts of 8 ranks, DeepEP, bf16, 8 H100: 9.0 to 12.4 ms forward and backward of the
    # mixture alone, whatever its width (marin-community/marin, issue 3666).
    steps = []
    for layers in (1, 2):
        small = "hidden_size=256,moe_intermediate_size=96,num_experts=128,num_experts_per_tok=8"
        small += ",num_attention_heads=4,num_key_value_heads=4,vocab_size=512,head_dim=64"
        small += f",num_hidden_layers={layers}"
        module, batch, loss, _ = load_model(
            f"hf:qwen3_moe,{small}", batch=2, seq_len=1024, weights=False
        )
        graph = est.trace_model(
            module, batch, loss, target="cuda", precision="bf16", recipe="megatron:dispatch=deepep"
        )
        step = est.estimate(graph, "1x8:dgx-h100", batch_per_gpu=2, layout="ep=8,dp=*")
        steps.append(step.step_time_s)
    assert 9.0e-3 < steps[1] - steps[0] < 12.4e-3


BIASED = traced("gpt_oss")


def unfused_bytes(graph: OpGraph, phase: str, *kernels: str, module: str = "experts") -> float:
    """What kernels of a module of the first layer that nothing fuses read and write."""
    targets = [f"eager.{kernel}.default" for kernel in kernels]
    own = [op for op in of_first(graph, phase, *targets) if op.module.endswith(module)]
    costs = [op_cost(op.call) for op in own]
    return sum(cost.read_bytes + cost.written_bytes for cost in costs if cost is not None)


ALL = ("add", "cat", "clamp", "clamp_backward", "copy", "mul", "sum")
# The halves of the first product and the result of the second one, elements; biases, bytes.
HALVES, RESULTS, BIASES = ROWS * 2 * INNER, ROWS * WIDTH, EXPERTS * WIDTH * 2


def test_clamps_and_the_second_bias_read_and_write_whole_tensors() -> None:
    graph = with_recipe(BIASED, recipe="megatron:dispatch=hybridep")
    # Clamped 2 + 2, put together 2 + 2; a bias times fp32 weights 4, added 2 + 4 + 4, put together
    # 4 + 4, cast 4 + 2.
    forward = 8 * HALVES + 28 * RESULTS + BIASES
    assert unfused_bytes(graph, "forward", *ALL) == forward
    # Gradients of clamps 2 + 2 + 2, put together 2 + 2; cast 2 + 4, back 4 + 2, put together 2 + 2,
    # two products 4 + 4 and sums of them 4, to a number for each row and to the biases.
    backward = 10 * HALVES + 40 * RESULTS + 4 * ROWS + BIASES
    assert unfused_bytes(graph, "backward", *ALL) == backward


def test_weights_of_routing_in_bf16_halve_what_the_second_bias_moves() -> None:
    # Times weights 2, added 2 + 2 + 2, put together 2 + 2.
    assert unfused_bytes(BIASED, "forward", *ALL) == 8 * HALVES + 12 * RESULTS + BIASES
    # Put together 2 + 2, two products 2 + 2 and sums of them 2.
    backward = 10 * HALVES + 16 * RESULTS + 2 * ROWS + BIASES
    assert unfused_bytes(BIASED, "backward", *ALL) == backward


def test_recomputed_activations_clamp_again() -> None:
    graph = with_recipe(BIASED, recipe="megatron:recompute=moe_act")
    assert unfused_bytes(graph, "backward", "clamp") == 4 * HALVES
    # What the clamps give, for the activation's gradient, and gradients of clamps.
    assert unfused_bytes(graph, "backward", "cat") == (4 + 4) * HALVES + 4 * RESULTS


def test_recomputed_activations_are_not_saved() -> None:
    graph = with_recipe(BIASED, recipe="megatron:recompute=moe_act")
    roots = value_roots(graph)
    forward = {v for op in graph.ops if op.phase == "forward" for v in op.outputs}
    later = (op for op in graph.ops if op.phase == "backward")
    saved = forward & {roots[v] for op in later for v in (*op.inputs, *op.holds)}
    rows = [graph.values[v].spec.shape for v in saved if graph.values[v].spec.shape[:1] == (ROWS,)]
    # Of each layer tokens in the order of experts, both halves of the first product, and indices.
    assert sorted(shape for shape in rows if len(shape) == 2) == LAYERS * [(ROWS, WIDTH)] + (
        LAYERS * [(ROWS, 2 * INNER)]
    )


def test_a_product_adds_its_bias_and_a_fused_one_does_all() -> None:
    fused = with_recipe(BIASED, recipe="megatron:fused-grouped-mlp")
    assert unfused_bytes(fused, "forward", *ALL) == unfused_bytes(fused, "backward", *ALL) == 0
    for graph, biases in ((BIASED, 1), (fused, 2)):
        assert len(of_first(graph, "backward", "te.bias_gradient.default")) == biases
        # Nothing takes the bias of each row's expert, and no kernel adds up rows to a bias.
        summed = [op.call.outputs[0].shape for op in of_first(graph, "backward", UNPERMUTE)]
        assert summed == [(BATCH * TOKENS, WIDTH)]


def test_experts_of_ranks_have_their_own_biases() -> None:
    graph = split_by_layout(
        with_recipe(BIASED, recipe="megatron:dispatch=hybridep"), Layout.parse("ep=4")
    )
    forward = 8 * HALVES + 28 * RESULTS + BIASES / 4
    assert unfused_bytes(graph, "forward", *ALL) == forward
    gradients = {p.name: p.gradient for p in graph.parameters if p.name.endswith("proj_bias")}
    made = {value for op in graph.ops for value in op.outputs}
    assert len(gradients) == 2 * LAYERS
    assert made.issuperset(g for g in gradients.values() if g is not None)
    assert None not in gradients.values()


def test_the_host_launches_a_bias_for_each_expert() -> None:
    seconds = compiled_host_seconds(BIASED, HOST)
    for phase, own_s in (("forward", HOST.forward_op_s), ("backward", HOST.backward_op_s)):
        products = of_first(BIASED, phase, "eager.mul.default")
        first = next(op for op in products if op.module.endswith("experts"))
        one_s = own_s + CALL_S
        assert seconds[BIASED.ops.index(first)] == pytest.approx(EXPERTS * one_s)


def test_scaled_rotary_embeddings_turn_in_kernels_of_their_own() -> None:
    # GPT-OSS scales by 0.1 ln(32) + 1. Queries have 4 heads of 4 and keys as many.
    elements = 2 * BATCH * TOKENS * 4 * 4
    names = ("add", "cat", "copy", "fill", "mul", "neg")
    moved = {
        phase: unfused_bytes(BIASED, phase, *names, module="attn")
        for phase in ("forward", "backward")
    }
    # A half negated 2, halves together 4, cosines 4, sines 4, added 6, beside an empty rest 4.
    assert moved["forward"] == 24 * elements
    # Cosines 4, sines 4, negated 2, together 4, added 6; zeros 2 and a copy 4, zeros 2, added 6.
    assert moved["backward"] == 34 * elements
    # Qwen's is not scaled: one kernel turns queries, one keys.
    assert not [op for op in GRAPH.ops if op.call.target.startswith("eager.")]


def test_attention_has_tokens_before_heads_as_all_else_has_in_megatron() -> None:
    eager = BIASED.eager
    shape = (BATCH, TOKENS, 4, 4)
    copies = [op.call.target == "aten.clone.default" and not op.is_view for op in eager.ops]
    ordered = [op for op, is_copy in zip(eager.ops, copies, strict=True) if is_copy]
    ordered = [op for op in ordered if op.call.outputs[0].shape == shape]
    # Attention's result, and gradients of queries, keys and values.
    assert len(ordered) >= LAYERS
    views = {op.outputs: op for op in with_unfused_rotary(eager).ops if op.is_view}
    assert all(op.outputs in views for op in ordered)


def test_graphs_of_an_iteration_have_room_for_more_tokens_of_experts() -> None:
    sizes = []
    for recipe in ("megatron:dispatch=hybridep", "megatron:dispatch=hybridep,graphs=iteration"):
        bound = with_recipe(GRAPH, recipe=recipe).at(BATCH * 64)
        structure = GraphStructure.of(bound.graph)
        found = StepTensors(bound, structure).size_bytes
        first, last = (
            op.outputs[0] for op in of_first(bound.graph, "forward", "aten._grouped_mm.default")
        )
        sizes.append([int(found[structure.storage_of[value]]) for value in (first, last)])
    # The first product is saved for gradients, on pages with a fifth to spare; the second is not.
    (saved, passing), roomy = sizes
    assert (saved, passing) == (64 * ROWS * 2 * INNER * 2, 64 * ROW_BYTES)
    assert roomy == [-(-saved * 12 // 10 // 512) * 512, passing * 3 // 2]
