"""Lifetimes and the peak of live memory, on graphs added up by hand and on a real step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from estimator.cache import Cache
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, Parameter, Value
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.peak import PeakMemory
from estimator.graph.memory.sizes import StepTensors, workspace_bytes
from estimator.graph.memory.step import MemoryOverStep, memory_alone
from estimator.graph.trace.trace import trace_graph
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.rank.rules import Bucket, StepShape
from estimator.timeline.strategies import rules_of
from estimator.workload.strategies import Strategy

KILO = 1024


def value(kind: str, kilobytes: int, base: int | None = None) -> Value:
    spec = TensorSpec((kilobytes * 256,))
    return Value(spec=spec, other_spec=spec, kind=kind, base=base)


def op(
    target: str, inputs: tuple[int, ...], outputs: tuple[int, ...], phase: str = "forward"
) -> Op:
    call = OpCall(target, ())
    return Op(
        name=target,
        call=call,
        other_call=call,
        phase=phase,
        module="",
        inputs=inputs,
        outputs=outputs,
        is_view="view" in target,
    )


def graph_of(values: list[Value], ops: list[Op], gradients: dict[int, int]) -> OpGraph:
    """A graph whose parameters (value -> value of the gradient) are ready when it is made."""
    parameters = tuple(
        Parameter(
            name=f"p{parameter}",
            spec=values[parameter].spec,
            gradient=gradient,
            ready_after=next(i for i, each in enumerate(ops) if gradient in each.outputs),
        )
        for parameter, gradient in gradients.items()
    )
    return OpGraph(
        name="hand-made",
        target="cpu",
        precision="fp32",
        optimizer="sgd",
        batch=1,
        other_batch=2,
        ops=tuple(ops),
        values=tuple(values),
        parameters=parameters,
    )


def two_layers() -> OpGraph:
    """w1 (0), w2 (1), x (2); h (3) = x w1, its view (4), y (5); backward: gy, gw2, gh, gw1."""
    values = [
        value("parameter", 1),
        value("parameter", 2),
        value("input", 4),
        value("activation", 8),
        value("activation", 8, base=3),
        value("activation", 16),
        value("activation", 16),
        value("activation", 2),
        value("activation", 8),
        value("activation", 1),
    ]
    ops = [
        op("aten.first", (2, 0), (3,)),
        op("aten.view", (3,), (4,)),
        op("aten.second", (4, 1), (5,)),
        op("aten.loss_backward", (5,), (6,), "backward"),
        op("aten.weight_2", (6, 4), (7,), "backward"),
        op("aten.input_2", (6, 1), (8,), "backward"),
        op("aten.weight_1", (8, 2), (9,), "backward"),
    ]
    return graph_of(values, ops, {1: 7, 0: 9})


def over_step(
    graph: OpGraph,
    text: str = "ddp",
    *,
    batch: int | None = None,
    merging: bool = True,
    buckets: Sequence[Bucket] | None = None,
    micro_batches: int = 1,
) -> MemoryOverStep:
    """What a rank holds over a step, with the strategy's buckets unless others are given."""
    rules = rules_of(graph, StepShape(Strategy.parse(text), micro_batches), Cache(0))
    if buckets is None:
        buckets = getattr(rules, "buckets", ())
    tensors = StepTensors(graph.at(batch), GraphStructure.of(graph))
    return MemoryOverStep(tensors, rules.holding(tensors, buckets, merging=merging))


def peak(graph: OpGraph, text: str | None = None, optimizer: str = "sgd") -> PeakMemory:
    """Of a rank alone, or under a strategy."""
    graph = replace(graph, optimizer=optimizer)
    found = over_step(graph, text) if text else memory_alone(graph.at())
    return found.peaks().peak(1)


class Storage(NamedTuple):
    values: tuple[int, ...]
    root: int
    born: int
    dies: int
    kind: str


def storages(graph: OpGraph) -> list[Storage]:
    known = GraphStructure.of(graph)
    columns = (known.roots, known.born, known.dies, known.kinds)
    return [
        Storage(tuple(np.flatnonzero(known.storage_of == number).tolist()), *row)
        for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))
    ]


def test_a_storage_lives_to_the_last_use_of_any_of_its_views() -> None:
    h = next(storage for storage in storages(two_layers()) if storage.root == 3)
    assert h.values == (3, 4)
    assert (h.born, h.dies, h.kind) == (0, 4, "activation")


def test_parameters_and_inputs_are_always_held_and_gradients_to_the_end() -> None:
    graph = two_layers()
    held = {storage.root: (storage.kind, storage.born, storage.dies) for storage in storages(graph)}
    end = len(graph.ops)
    assert held[0] == ("parameter", -1, end)
    assert held[2] == ("input", -1, end)
    assert held[7] == ("gradient", 4, end)
    assert held[9] == ("gradient", 6, end)
    # A result that nobody uses is freed at once.
    unused = replace(graph, ops=graph.ops[:3], parameters=())
    y = next(storage for storage in storages(unused) if storage.root == 5)
    assert (y.born, y.dies) == (2, 2)


def test_peak_is_the_most_held_at_one_time_and_less_than_the_sum_of_the_parts() -> None:
    found = peak(two_layers())
    # After the loss: h 8, y 16 and its gradient 16; one op later h 8, gy 16 and gw2 2.
    assert found.activations_bytes == (8 + 16 + 16) * KILO
    assert found.gradients_bytes == (2 + 1) * KILO
    standing = 1 + 2 + 4
    assert found.total_bytes == (standing + 8 + 16 + 16) * KILO
    assert found.peak_op == 3


def test_an_update_that_needs_more_than_the_graph_is_the_peak() -> None:
    graph = two_layers()
    small = replace(graph, ops=(graph.ops[4], graph.ops[6]))
    small = replace(
        small,
        values=tuple(
            replace(each, spec=TensorSpec(()))
            if each.kind == "activation" and i not in (7, 9)
            else each
            for i, each in enumerate(small.values)
        ),
    )
    found = peak(small, optimizer="adamw")
    # Adam on the CPU: the root and the quotient of w2, beside what is left of w1.
    assert found.update_bytes == (1 + 2 * 2) * KILO
    assert found.optimizer_state_bytes == 2 * 3 * KILO
    assert found.peak_op is None
    assert found.total_bytes == (1 + 2 + 4 + 6 + 3 + 5) * KILO


def test_ddp_adds_buckets_as_large_as_the_gradients() -> None:
    alone, two = peak(two_layers()), peak(two_layers(), "ddp")
    assert two.bucket_bytes == 3 * KILO
    assert two.total_bytes == alone.total_bytes + 3 * KILO


def test_gradients_that_live_in_buckets_are_held_once() -> None:
    copied = peak(two_layers(), "ddp")
    viewed = peak(two_layers(), "ddp:view")
    assert viewed.bucket_bytes == 0
    assert viewed.gradients_bytes == 3 * KILO
    # The peak is before the first gradient: buckets are held by then either way.
    assert viewed.total_bytes == copied.total_bytes


def test_autograd_adds_the_second_gradient_into_the_first() -> None:
    values = [value("input", 1), *(value("activation", 4) for _ in range(3))]
    ops = [
        op("aten.one", (0,), (1,), "backward"),
        op("aten.other", (0,), (2,), "backward"),
        op("aten.add.Tensor", (1, 2), (3,), "backward"),
    ]
    graph = graph_of(values, ops, {})
    assert {storage.values for storage in storages(graph)} == {(0,), (1, 3), (2,)}
    read_later = replace(graph, ops=(*ops, op("aten.more", (1,), (), "backward")))
    assert (1,) in {storage.values for storage in storages(read_later)}


def test_a_sum_of_gradients_is_fresh_where_the_first_is_a_view() -> None:
    values = [value("input", 1), value("activation", 4), value("activation", 4, base=1)]
    values += [value("activation", 4), value("activation", 4)]
    ops = [
        op("aten.one", (0,), (1,), "backward"),
        op("aten.t.default", (1,), (2,), "backward"),
        op("aten.other", (0,), (3,), "backward"),
        op("aten.add.Tensor", (2, 3), (4,), "backward"),
    ]
    found = {storage.values for storage in storages(graph_of(values, ops, {}))}
    assert found == {(0,), (1, 2), (3,), (4,)}
    ops[1] = op("aten._unsafe_view.default", (1,), (2,), "backward")
    found = {storage.values for storage in storages(graph_of(values, ops, {}))}
    assert found == {(0,), (1, 2, 4), (3,)}


@pytest.mark.parametrize("image", ["plain", "last", "other"])
@pytest.mark.parametrize("gradient", ["plain", "last"])
def test_pointwise_convolutions_copy_what_is_in_another_order(image: str, gradient: str) -> None:
    def laid_out(tensor: Tensor, order: str) -> Tensor:
        if order == "other":
            return tensor.transpose(2, 3).contiguous().transpose(2, 3)
        last = order == "last"
        return tensor.to(memory_format=torch.channels_last) if last else tensor

    layer = nn.Conv2d(8, 16, 1)
    tensors = (
        laid_out(torch.randn(2, 16, 12, 12), gradient),
        laid_out(torch.randn(2, 8, 12, 12), image),
        layer.weight.detach(),
    )
    rest = ((16,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, True))
    specs = [
        TensorSpec(tuple(each.shape), strides=None if each.is_contiguous() else each.stride())
        for each in tensors
    ]
    call = OpCall("aten.convolution_backward.default", (*specs, *rest), (), tuple(specs[1:]))

    def step() -> None:
        torch.ops.aten.convolution_backward(*tensors, *rest)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = live_peak_bytes(step, layer)
    torch.set_num_threads(threads)
    made = tensors[1].nbytes + tensors[2].nbytes + 16 * 4
    assert workspace_bytes(call) == measured - made


class Tied(nn.Module):
    """An embedding whose table is the head's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4000, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 4000)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens))).square().mean()


def test_the_peak_of_a_tied_table_is_the_one_measured() -> None:
    model, tokens = Tied(), torch.randint(0, 4000, (2, 4))
    graph = trace_graph(model, tokens, loss=lambda found, _batch: found)
    # The first step leaves what later ones have from the start.
    model(tokens).backward()
    measured = live_peak_bytes(lambda: model(tokens).backward(), model)
    # Two gradients of the table and their sum, 1 MB each.
    assert measured > 3 * 4000 * 64 * 4
    found = peak(graph)
    standing = found.parameters_bytes + found.inputs_bytes
    assert found.total_bytes - standing == pytest.approx(measured, rel=0.001)


def live_peak_bytes(step: Callable[[], None], model: nn.Module) -> int:
    """The most that torch's allocator holds during a step beyond what it held before."""
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def test_a_list_of_views_shares_the_storage_it_was_cut_from() -> None:
    values = [value("input", 1), value("activation", 6), *(value("activation", 3),) * 2]
    ops = [
        op("aten.make", (0,), (1,)),
        op("aten.unsafe_split.Tensor", (1,), (2, 3)),
        op("aten.use", (3,), ()),
    ]
    found = {storage.values: storage.dies for storage in storages(graph_of(values, ops, {}))}
    assert found == {(0,): 3, (1, 2, 3): 2}


def test_what_an_op_is_known_to_hold_lives_to_its_end() -> None:
    values = [value("input", 1), *(value("activation", 4) for _ in range(3))]
    ops = [
        op("aten.make", (0,), (1,)),
        op("aten.use", (1,), (2,)),
        replace(op("aten.other", (2,), (3,), "backward"), holds=(1,)),
    ]
    dies = {storage.root: storage.dies for storage in storages(graph_of(values, ops, {}))}
    assert dies[1] == 2


class Held(nn.Module):
    """What one step holds without touching it again, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, batch: Tensor, index: Tensor) -> Tensor:
        added = torch.zeros_like(batch).index_add(0, index, self.one(batch))
        return self.out(added) * self.two(batch)


def test_autograd_and_callers_hold_what_they_hold_of_real_tensors() -> None:
    batch = torch.randn(64, 16), torch.randint(0, 64, (64,))
    graph = trace_graph(Held(), batch, loss=lambda found, _batch: found.square().mean())
    place = {each.name: index for index, each in enumerate(graph.ops)}
    dies = {
        storage.root: graph.ops[storage.dies].name
        for storage in storages(graph)[:-1]
        if storage.dies < len(graph.ops)
    }
    # derivatives.yaml: the gradient of index_add expands to the shape of its source, and saves it.
    assert dies[graph.ops[place["index_add_1"]].inputs[-1]] == "expand_2"
    # Both factors go when the node of the product has run: after its second gradient.
    assert {dies[value] for value in graph.ops[place["mul_1"]].inputs} == {"mul_5"}


def test_the_output_of_a_model_is_held_until_its_loss_is_there() -> None:
    graph = trace_graph(
        nn.Linear(16, 4),
        torch.randn(8, 16),
        loss=lambda found, _batch: found.log_softmax(1).mean(),
    )
    output = next(each for each in graph.ops if each.name == "addmm_1").outputs[0]
    held = next(storage for storage in storages(graph) if storage.root == output)
    # The gradient of log_softmax reads its result alone.
    assert graph.ops[held.dies].name == "mean_1"


def test_lifetimes_follow_the_batch_size() -> None:
    graph = two_layers()
    values = list(graph.values)
    values[5] = replace(values[5], other_spec=TensorSpec((2 * 16 * 256,)))
    graph = replace(graph, values=tuple(values))
    structure = GraphStructure.of(graph)
    sizes = {batch: structure.storage_bytes(graph.at(batch)).tolist() for batch in (1, 3)}
    assert sum(sizes[3]) - sum(sizes[1]) == 2 * 16 * KILO


def test_a_gpu_gives_whole_blocks() -> None:
    values = [
        value("parameter", 1),
        Value(spec=TensorSpec(()), other_spec=TensorSpec(()), kind="input"),
    ]
    graph = replace(graph_of(values, [], {}), target="cuda")
    assert peak(graph).inputs_bytes == 512


def test_a_convolution_copies_its_tensors_into_blocks_of_channels() -> None:
    image = TensorSpec((6, 24, 80, 80))
    weight = TensorSpec((24, 24, 3, 3))
    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    filled_image, filled_weight = image.nbytes // 24 * 32, 32 * 32 * 9 * 4
    forward = OpCall("aten.convolution.default", (image, weight, None, *rest), (), (image,))
    assert workspace_bytes(forward) == 2 * filled_image + filled_weight - image.nbytes
    product = OpCall(
        "aten.convolution.default", (image, TensorSpec((24, 24, 1, 1)), None, *rest), (), (image,)
    )
    assert workspace_bytes(product) == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_the_gradient_of_a_strided_convolution_is_three_images(groups: int) -> None:
    # Read off the allocator (torch 2.13, oneDNN on AVX-512) at 1, 3, 4 and 9 groups of 24 to 64.
    image = TensorSpec((2, 72, 56, 56))
    gradient, weight = TensorSpec((2, 72, 28, 28)), TensorSpec((72, 72 // groups, 3, 3))
    sizes = (None, (2, 2), (1, 1), (1, 1), False, (0, 0), groups, (True, True, False))
    call = OpCall(
        "aten.convolution_backward.default", (gradient, image, weight, *sizes), (), (image, weight)
    )
    assert workspace_bytes(call) == 2 * image.nbytes - weight.nbytes


class Model(nn.Module):
    """Convolution, normalisation, a shared layer, a residual sum and a wide head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.shared = nn.Linear(64, 64)
        self.head = nn.Linear(2048, 512)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.convolution(image)))
        hidden = hidden.flatten(2)
        hidden = hidden + self.shared(nn.functional.gelu(self.shared(hidden)))
        return nn.functional.log_softmax(self.head(hidden.flatten(1)), dim=-1).square().mean()


@pytest.mark.parametrize("batch", [8, 24])
def test_the_peak_of_a_real_step_is_within_two_percent_of_what_the_allocator_counts(
    batch: int,
) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    # Traced at 8 alone: 24 is extrapolated.
    graph = trace_graph(model, torch.randn(8, 16, 8, 8), optimizer="sgd-momentum")
    predicted = memory_alone(graph.at(batch)).peaks()
    image = torch.randn(batch, 16, 8, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(image).backward()
        optimizer.step()

    step()
    standing = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), image))
    standing += sum(parameter.nbytes for parameter in model.parameters())
    measured = standing + live_peak_bytes(step, model)
    assert predicted.total_bytes(1) == pytest.approx(measured, rel=0.02)
