"""Check that a traced graph is what eager training runs, at every batch size."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.errors import ModelError, TraceError, WorkloadError
from estimator.graph.costs.call_costs import features_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.step import memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.graph.trace.training_call import loss_of
from tests.graph.costs.test_costs import Blocks
from tests.synthetic import module

SEEN_BY_MODES_ALONE = {"aten.detach.default", "aten.lift_fresh.default"}


class EagerOps(TorchDispatchMode):
    """What a real step dispatches on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) not in SEEN_BY_MODES_ALONE:
            results = result if isinstance(result, (tuple, list)) else (result,)
            shapes = tuple(tuple(r.shape) for r in results if isinstance(r, Tensor))
            self.seen.append((str(func), shapes))
        return result


def eager_ops(model: nn.Module, batch: Any) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    with EagerOps() as recorder:
        loss_of(model(batch)).backward()
    return recorder.seen


def graph_ops(graph: OpGraph) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return [(op.call.target, tuple(s.shape for s in op.call.outputs)) for op in graph.ops]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Experts(nn.Module):
    """Top-2 routing over 4 experts with a Python loop, as older mixtures are written."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel():
                result.index_add_(0, row, expert(tokens[row]) * weights[row, place, None])
        return result


def small_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


KINDS = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)),
        torch.randn(4, 6),
    ),
    "convnet": lambda: (small_convnet(), torch.randn(4, 3, 8, 8)),
    "transformer": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        torch.randn(4, 6, 16),
    ),
    "recurrent": lambda: (Recurrent(), torch.randint(0, 50, (4, 7))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_has_the_operators_that_eager_training_dispatches(kind: str) -> None:
    model, batch = KINDS[kind]()
    graph = trace_graph(model, batch)
    assert graph_ops(graph) == eager_ops(model, batch)
    assert (graph.batch, graph.other_batch) == (4, 8)


# oneDNN rounds the workspace of a recurrent layer up to pages, which no line follows.
@pytest.mark.parametrize("kind", ["mlp", "convnet", "transformer"])
def test_a_graph_at_another_batch_size_equals_a_trace_at_that_size(kind: str) -> None:
    model, batch = KINDS[kind]()
    six = torch.cat((batch, batch[:2]))
    moved, traced = trace_graph(model, batch).at(6), trace_graph(model, six).at()
    assert [call.target for call in moved.calls] == [call.target for call in traced.calls]
    assert [call.outputs for call in moved.calls] == [call.outputs for call in traced.calls]
    assert [call.inputs for call in moved.calls] == [call.inputs for call in traced.calls]


def test_inputs_name_the_tensors_of_the_call_in_order() -> None:
    model, batch = KINDS["convnet"]()
    graph = trace_graph(model, batch)
    for op in graph.ops:
        assert tuple(graph.values[index].spec for index in op.inputs) == op.call.inputs
        assert tuple(graph.values[index].spec for index in op.outputs) == op.call.outputs


def test_modules_and_phases_follow_the_forward_call() -> None:
    graph = trace_graph(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3))
    where = {(op.call.target, op.phase): op.module for op in graph.ops}
    assert where["aten.addmm.default", "forward"] == "0"
    assert where["aten.relu.default", "forward"] == "1"
    assert where["aten.threshold_backward.default", "backward"] == "1"
    assert where["aten.mm.default", "backward"] == "0"
    assert graph.module_calls == 3


def test_views_and_in_place_results_share_the_storage_of_their_base() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x).relu_().t()

    model = module(forward, linear=nn.Linear(4, 4))
    graph = trace_graph(model, torch.randn(2, 4))
    by_target = {op.call.target: op for op in graph.ops if op.phase == "forward"}
    product = by_target["aten.addmm.default"].outputs[0]
    relu, view = by_target["aten.relu_.default"], graph.ops[3]
    assert graph.values[relu.outputs[0]].base == product
    assert not relu.is_view
    assert view.call.target == "aten.t.default"
    assert view.is_view
    assert graph.values[view.outputs[0]].base == product


def test_parameters_stand_in_the_order_in_which_ddp_sees_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LayerNorm(2))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    batch = torch.randn(5, 3)
    graph = trace_graph(model, batch)
    assert seen == []
    model(batch).mean().backward()
    assert [parameter.name for parameter in graph.parameters] == seen
    readiness = [parameter.ready_after for parameter in graph.parameters]
    assert readiness == sorted(readiness)


def test_tied_parameters_count_once_and_frozen_ones_apart() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(3))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.frozen(self.embed(tokens)))

    graph = trace_graph(Tied(), torch.randint(0, 10, (2, 3)))
    (only,) = graph.parameters
    assert only.name == "embed.weight"
    assert graph.parameter_bytes == 10 * 4 * 4
    assert graph.frozen_parameter_bytes == (4 * 4 + 4) * 4
    assert (graph.buffers, graph.buffer_bytes) == (1, 12)
    # Both uses add up before the gradient is complete.
    last = graph.ops[only.ready_after or 0]
    assert last.call.target == "aten.add.Tensor"


def test_integer_inputs_keep_their_range_and_length() -> None:
    tokens = torch.tensor([[3, 9, 4], [5, 6, 7]])
    graph = trace_graph(nn.Embedding(10, 4), tokens)
    (given,) = graph.inputs
    assert (given.low, given.high) == (3, 9)
    assert graph.tokens_per_sample == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.linear(x))
            self.history.append(y)
            self.last = y
            if fails:
                raise KeyError("no such thing")
            return y * torch.rand(3)

    model = Counting()
    model.linear.weight.grad = torch.ones(3, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight, grad = model.linear.weight, model.linear.weight.grad
    random_state = torch.random.get_rng_state()
    if fails:
        with pytest.raises(TraceError, match="KeyError: 'no such thing'"):
            trace_graph(model, torch.randn(4, 3, generator=torch.Generator()))
    else:
        trace_graph(model, torch.randn(4, 3, generator=torch.Generator()))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert model.linear.weight is weight
    assert model.linear.weight.grad is grad
    assert model.history == []
    assert not hasattr(model, "last")
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_expert_loops_are_routed_evenly_and_say_so() -> None:
    graph = trace_graph(Experts(), torch.randn(8, 8))
    rows = [
        op.call.outputs[0].shape[0]
        for op in graph.ops
        if op.phase == "forward" and op.module.startswith("experts.") and not op.is_view
    ]
    # 8 tokens, 2 of 4 experts each: 4 tokens for every expert.
    assert rows == [4, 4, 4, 4]
    assert any("balanced" in assumption for assumption in graph.assumptions)
    assert (graph.batch, graph.other_batch) == (8, 16)


def test_branches_on_values_of_the_batch_are_taken_as_eager_training_takes_them() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        return y if mask.all() else y[mask.nonzero().squeeze(-1)]

    model = module(forward, linear=nn.Linear(2, 2))
    full = trace_graph(model, (torch.randn(3, 2), torch.ones(3, dtype=torch.bool)))
    part = trace_graph(model, (torch.randn(3, 2), torch.tensor([True, False, True])))
    assert "aten.nonzero.default" not in {op.call.target for op in full.ops}
    nonzero = next(op for op in part.ops if op.call.target == "aten.nonzero.default")
    assert nonzero.call.outputs[0].shape == (2, 1)


def test_shapes_that_depend_on_weights_are_refused_with_operator_and_module() -> None:
    def selecting(self: Any, x: Tensor) -> Tensor:
        return self.choose(self.inner(x))

    class Choose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: int(x.sum())]

    model = module(selecting, inner=nn.Linear(2, 2), choose=Choose())
    found = r"aten\._local_scalar_dense\.default in module 'choose'"
    with pytest.raises(TraceError, match=found):
        trace_graph(model, torch.randn(3, 2))


def test_a_model_that_hard_codes_its_batch_is_traced_with_a_fixed_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x).view(4, 2).sum(0)

    model = module(forward, linear=nn.Linear(3, 2))
    graph = trace_graph(model, torch.randn(4, 3))
    assert (graph.batch, graph.other_batch) == (4, None)
    assert any("fixed as traced" in assumption for assumption in graph.assumptions)


def test_a_batch_of_1_is_named_as_what_may_have_fixed_the_batch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.sum() if len(y) == 1 else y.mean()

    model = module(forward, linear=nn.Linear(3, 2))
    graph = trace_graph(model, torch.randn(1, 3))
    with pytest.raises(WorkloadError, match=r"perhaps because that was 1; .* 2 or more"):
        graph.at(4)
    with pytest.raises(WorkloadError, match="with the batch you want"):
        replace(graph, batch=2).at(4)


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        ("hf:gpt2", None, {}, "found 'hf:gpt2'; names of models are for the command"),
        (nn.Linear(2, 2), torch.randn(2, 2), {"target": "gpu"}, "'gpu' is no kind of device .*cpu"),
        (nn.ReLU(), torch.randn(2, 2), {}, "no trainable parameter"),
        (nn.Linear(2, 2), torch.randn(2, 5), {}, "cannot run on this batch"),
        # What torch.from_numpy gives, and what a tokenizer does.
        (nn.Linear(2, 2), torch.randn(2, 2).double(), {}, "one dtype, found float32, float64"),
        (nn.Linear(2, 2, bias=False), torch.ones(2, 2).long(), {}, "one dtype, found int64, fl"),
        (nn.Linear(2, 2), torch.randn(2, 2), {"loss": lambda out, _: out}, "must be one number"),
        (nn.Linear(2, 2), torch.randn(2, 2), {"loss": lambda out, x: x.sum()}, "does not depend"),
        (nn.Linear(2, 2), torch.randn(2, 2), {"loss": lambda *_: F.relu("x")}, "cannot run"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_sentence(
    model: Any, batch: Any, options: dict[str, Any], message: str
) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises((ModelError, TraceError), match=message) as caught:
            trace_graph(model, batch, **options)
    finally:
        logger.removeHandler(handler)
    assert "\n" not in str(caught.value)
    assert logged == []


def test_channels_last_without_convolutions_is_said_to_change_nothing() -> None:
    said = "channels last changes nothing: the model has no convolution"
    flat = trace_graph(nn.Linear(3, 2), torch.randn(4, 3), channels_last=True)
    image = trace_graph(nn.Conv2d(3, 2, 1), torch.randn(4, 3, 5, 5), channels_last=True)
    assert said in flat.assumptions
    assert said not in image.assumptions


@pytest.mark.parametrize(
    ("precision", "dtype", "parameters"),
    [
        ("fp32", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        ("bf16-amp", "bfloat16", "float32"),
        ("fp16-amp", "float16", "float32"),
    ],
)
def test_precision_sets_the_dtype_of_products_and_parameters(
    precision: str, dtype: str, parameters: str
) -> None:
    graph = trace_graph(nn.Linear(3, 2), torch.randn(4, 3), precision=precision)
    product = next(op for op in graph.ops if op.call.target == "aten.addmm.default")
    assert product.call.dtype == dtype
    assert {parameter.spec.dtype for parameter in graph.parameters} == {parameters}


def test_a_meta_model_is_traced_without_any_weights() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    graph = trace_graph(model, torch.empty(2, 1 << 20, device="meta"))
    assert graph.parameter_count == (1 << 40) + (1 << 20)


def test_a_label_list_has_one_entry_per_sample() -> None:
    def forward(self: Any, x: Tensor, boxes: list[Tensor]) -> Tensor:
        found = self.linear(x)
        return sum((row - box).abs().mean() for row, box in zip(found, boxes, strict=True))

    model = module(forward, linear=nn.Linear(3, 2))
    graph = trace_graph(model, (torch.randn(4, 3), [torch.randn(6, 2) for _ in range(4)]))
    assert graph.batch == 4
    # One loss per sample: twice the samples are more operators, so the batch is fixed.
    assert graph.other_batch is None


def test_rms_norm_is_one_kernel_each_way_on_cuda_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    kernels = {"aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"}
    found = {
        target: trace_graph(model, torch.randn(4, 8), target=target) for target in ("cpu", "cuda")
    }
    assert not kernels & {op.call.target for op in found["cpu"].ops}
    assert kernels <= {op.call.target for op in found["cuda"].ops}
    # It keeps one number for each row, and gives gradients of its input and its weight.
    forward, backward = (
        next(op.call for op in found["cuda"].ops if op.call.target == name)
        for name in sorted(kernels)
    )
    assert [spec.shape for spec in forward.outputs] == [(4, 8), (4, 1)]
    assert [spec.shape for spec in backward.outputs] == [(4, 8), (8,)]


def test_the_graph_for_cuda_has_cudnn_layers_flash_attention_and_fused_dropout() -> None:
    recurrent = trace_graph(Recurrent(), torch.randint(0, 50, (4, 7)), target="cuda")
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    attention = trace_graph(layer, torch.randn(4, 6, 16), target="cuda", precision="bf16-amp")
    convnet = trace_graph(small_convnet(), torch.randn(4, 3, 8, 8), target="cuda")
    counts = Counter(op.call.target.split(".")[1] for op in recurrent.ops)
    assert (counts["_cudnn_rnn"], counts["_cudnn_rnn_backward"]) == (1, 1)
    targets = {op.call.target.split(".")[1] for op in attention.ops}
    assert {"_scaled_dot_product_flash_attention", "native_dropout"} <= targets
    assert "bernoulli_" not in targets
    assert "cudnn_batch_norm" in {op.call.target.split(".")[1] for op in convnet.ops}
    # _select_batch_norm_backend: bfloat16 is torch's own, whose weights stay in float32.
    half = trace_graph(
        small_convnet(), torch.randn(4, 3, 8, 8), target="cuda", precision="bf16-amp"
    )
    (norm,) = (op.call for op in half.ops if op.phase == "forward" and "norm" in op.call.target)
    assert "cudnn" not in norm.target
    assert [spec.dtype for spec in norm.arguments[:2]] == ["bfloat16", "float32"]
    assert any("traced without one" in assumption for assumption in recurrent.assumptions)


def test_a_bias_of_attention_is_cast_and_its_rows_are_padded_to_sixteen_bytes() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)

    model = module(forward, bias=nn.Parameter(torch.zeros(1, 2, 49, 49)), project=nn.Linear(8, 8))
    for precision, dtype in (("fp32", "float32"), ("bf16-amp", "bfloat16")):
        batch = torch.randn(3, 2, 49, 8)
        graph = trace_graph(model, batch, target="cuda", precision=precision)  # type: ignore[arg-type]
        (call,) = (
            op.call
            for op in graph.ops
            if op.call.target == "aten._scaled_dot_product_efficient_attention.default"
        )
        bias = call.arguments[3]
        # pad_bias of attention.cpp: 49 columns in rows of 56; one bias for all of the batch.
        assert (bias.dtype, bias.shape) == (dtype, (3, 2, 49, 49))
        assert bias.strides == (0, 49 * 56, 56, 1)


def test_under_autocast_cuda_normalises_in_float32_and_the_cpu_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1))
    batch = torch.randn(2, 4)

    def dtypes(target: Any) -> dict[str, str]:
        graph = trace_graph(model, batch, target=target, precision="bf16-amp")
        return {op.call.target.split(".")[1]: op.call.outputs[0].dtype for op in graph.ops}

    on_cpu, on_cuda = dtypes("cpu"), dtypes("cuda")
    assert (on_cpu["addmm"], on_cuda["addmm"]) == ("bfloat16", "bfloat16")
    assert (on_cpu["native_layer_norm"], on_cuda["native_layer_norm"]) == ("bfloat16", "float32")
    assert on_cuda["_softmax"] == "float32"


def test_the_pieces_of_a_split_are_views_of_what_was_split() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layer(x).split(4, dim=-1)
        return left * right

    model = module(forward, layer=nn.Linear(4, 8))
    graph = trace_graph(model, torch.randn(3, 4))
    split = next(op for op in graph.ops if op.call.target == "aten.split.Tensor")
    assert split.is_view
    assert [graph.values[value].base for value in split.outputs] == [split.inputs[0]] * 2


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_run_again_in_backward_and_hold_less(
    use_reentrant: bool, target: Any
) -> None:
    batch = torch.randn(32, 16, requires_grad=True)
    plain = trace_graph(Blocks(None, blocks=4), batch, target=target)
    again = trace_graph(Blocks(use_reentrant, blocks=4), batch, target=target)

    def forward_targets(graph: OpGraph, phase: str) -> Counter[str]:
        found = (op.call.target for op in graph.ops if op.phase == phase)
        return Counter(t for t in found if t.split(".")[1] in ("addmm", "gelu", "native_dropout"))

    def activations_bytes(graph: OpGraph) -> int:
        found = memory_alone(graph.at()).peaks().peak(1)
        return found.activations_bytes

    once = forward_targets(plain, "forward")
    assert forward_targets(plain, "backward") == Counter()
    assert forward_targets(again, "forward") == once
    # The first product is in no block. Without reentrance a block stops once everything saved is
    # there: before its last product.
    only_once = Counter({"aten.addmm.default": 1 if use_reentrant else 1 + 4})
    assert forward_targets(again, "backward") == once - only_once
    assert activations_bytes(again) < 0.5 * activations_bytes(plain)
    assert [p.name for p in again.parameters if p.gradient is None] == []


def test_channels_last_lays_images_and_filters_out_as_moving_the_model_would() -> None:
    model, images = small_convnet(), torch.randn(4, 3, 8, 8)
    asked = trace_graph(model, images, target="cuda", channels_last=True)
    assert model[0].weight.is_contiguous()
    moved_model = model.to(memory_format=torch.channels_last)
    moved = trace_graph(moved_model, images.to(memory_format=torch.channels_last), target="cuda")
    assert asked.channels_last
    assert [op.call for op in asked.ops] == [op.call for op in moved.ops]
    innermost = {
        op.call.target.split(".")[1]: op.call.outputs[0].strides[1] == 1  # type: ignore[index]
        for op in asked.ops
        if (op.phase == "forward" and "norm" in op.call.target) or "pool" in op.call.target
    }
    assert innermost == {
        "cudnn_batch_norm": True,
        "max_pool2d_with_indices": True,
        "max_pool2d_with_indices_backward": True,
    }
    layouts = {
        features_of(op.call).layout  # type: ignore[union-attr]
        for op in asked.ops
        if op.call.target.startswith("aten.convolution")
    }
    assert layouts == {"channels last"}


@pytest.mark.parametrize(
    ("precision", "mask", "head", "kernel"),
    [
        # sdp_utils.cpp: half precision without a mask, heads up to 256.
        ("bf16", False, 64, "_scaled_dot_product_flash_attention"),
        ("bf16-amp", False, 64, "_scaled_dot_product_flash_attention"),
        ("bf16", False, 100, "_scaled_dot_product_flash_attention"),
        ("bf16", False, 264, "_scaled_dot_product_efficient_attention"),
        ("bf16", True, 64, "_scaled_dot_product_efficient_attention"),
        ("fp32", False, 64, "_scaled_dot_product_efficient_attention"),
        ("fp32", True, 100, "_scaled_dot_product_efficient_attention"),
        # 100 halves are no whole number of 16 bytes.
        ("bf16", True, 100, "_safe_softmax"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(
    precision: str, mask: bool, head: int, kernel: str
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        projected = self.project(x).view(*x.shape[:2], 3, 2, head)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if mask else None
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    model = module(forward, project=nn.Linear(8, 3 * 2 * head))
    graph = trace_graph(model, torch.randn(2, 6, 8), target="cuda", precision=precision)
    found = {op.call.target.split(".")[1] for op in graph.ops if op.phase == "forward"}
    kernels = {name for name in found if "attention" in name or "softmax" in name}
    assert kernels == {kernel}


def test_values_narrower_than_queries_give_outputs_as_wide_as_values() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        keys = self.keys(x).view(*x.shape[:2], 2, 24).transpose(1, 2)
        values = self.values(x).view(*x.shape[:2], 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(keys, keys, values, is_causal=True)

    model = module(forward, keys=nn.Linear(8, 2 * 24), values=nn.Linear(8, 2 * 16))
    graph = trace_graph(model, torch.randn(2, 6, 8), target="cuda", precision="bf16")
    (attention,) = (op for op in graph.ops if op.phase == "forward" and "attention" in op.name)
    assert "efficient" in attention.name
    assert attention.call.outputs[0].shape == (2, 2, 6, 16)
