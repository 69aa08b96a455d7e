"""A model, its batch and its loss in the forms that people have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from estimator.api import trace_model
from estimator.errors import ModelError, TraceError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph

X, Y = torch.randn(6, 4), torch.randint(0, 3, (6,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale  # type: ignore[no-any-return]


class Strict(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x)  # type: ignore[no-any-return]


class Two(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x * mask)  # type: ignore[no-any-return]


class OfMapping(Net):
    def forward(self, parts: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.layer(parts["x"])  # type: ignore[no-any-return]


class OfNames(Net):
    def forward(self, **parts: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(parts["x"])  # type: ignore[no-any-return]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OfPair(Net):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return cross_entropy(self.layer(pair.x), pair.y)


class OfList(Net):
    def forward(self, parts: list[Tensor]) -> Tensor:  # type: ignore[override]
        return self.layer(parts[0] * parts[1])  # type: ignore[no-any-return]


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


def called(graph: OpGraph) -> list[str]:
    return [op.call.target.split(".")[1] for op in graph.ops]


# What all of these are: a linear layer, log-softmax and the negative log-likelihood.
WANTED = called(trace_graph(Strict(), X, loss=lambda output, _: cross_entropy(output, Y)))


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (Strict(), (X, Y), nn.CrossEntropyLoss()),
        (Strict(), [X, Y], cross_entropy),
        (Strict(), ((X,), Y), nn.CrossEntropyLoss()),
        (Strict(), ({"x": X}, Y), nn.CrossEntropyLoss()),
        (Strict(), {"x": X, "labels": Y}, nn.CrossEntropyLoss()),
        (Strict(), (X, Y), lambda output, targets: cross_entropy(output, targets)),
        (Strict(), DataLoader(TensorDataset(X, Y), batch_size=6), nn.CrossEntropyLoss()),
        (Strict(), TensorDataset(X, Y), nn.CrossEntropyLoss()),
    ],
)
def test_targets_go_to_the_loss(model: nn.Module, batch: Any, loss: Any) -> None:
    graph = trace_graph(model, batch, loss=loss)
    assert called(graph) == WANTED
    assert graph.batch == 6
    assert graph.other_batch == 12


def test_a_loss_of_torch_has_targets_where_the_model_would_take_them_too() -> None:
    # forward(x, scale) would multiply by the targets.
    assert "mul" in called(trace_graph(Net(), (X, 2.0)))
    graph = trace_graph(Net(), (X, Y), loss=nn.CrossEntropyLoss())
    assert not any(len(op.call.inputs) > 1 and "mul.Tensor" in op.call.target for op in graph.ops)


def test_a_list_that_is_one_argument_stays_one() -> None:
    graph = trace_graph(OfList(), ([X, X], Y), loss=nn.CrossEntropyLoss())
    assert called(graph) == ["mul", *WANTED]
    graph = trace_graph(Two(), ([X, X], Y), loss=nn.CrossEntropyLoss())
    assert called(graph) == ["mul", *WANTED]


def test_a_function_of_the_whole_batch_still_gets_it() -> None:
    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output.sum() - batch[1].sum()).square()

    graph = trace_graph(Two(), (X, torch.ones(6, 4)), loss=loss)
    assert [each.name for each in graph.inputs] == ["0", "1"]


def test_targets_of_a_mapping_that_a_loss_of_torch_cannot_take_are_named() -> None:
    batch = {"x": X, "labels": Y, "weights": torch.ones(6)}
    with pytest.raises(TraceError, match="forward\\(\\) takes none of 'labels', 'weights'"):
        trace_graph(Strict(), batch, loss=nn.CrossEntropyLoss())


def test_several_targets_of_a_mapping_go_to_the_loss_by_name() -> None:
    def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        assert list(targets) == ["labels", "weights"]
        found = nn.functional.cross_entropy(output, targets["labels"], reduction="none")
        return (found * targets["weights"]).mean()

    graph = trace_graph(Strict(), {"x": X, "labels": Y, "weights": torch.ones(6)}, loss=loss)
    assert graph.batch == 6


@pytest.mark.parametrize(
    "batch", [({"x": X}, Y), {"x": X, "labels": Y}, {"x": X, "y": Y}], ids=["pair", "labels", "y"]
)
@pytest.mark.parametrize("model", [OfMapping(), OfNames()], ids=["one argument", "any names"])
def test_a_forward_of_one_mapping_gets_it(model: nn.Module, batch: Any) -> None:
    graph = trace_graph(model, batch, loss=nn.CrossEntropyLoss())
    assert called(graph) == WANTED
    assert graph.other_batch == 12


def test_a_forward_of_one_batch_gets_all_of_it() -> None:
    class Unpacking(Net):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
            x, y = batch
            return cross_entropy(self.layer(x), y)

    graph = trace_graph(Unpacking(), (X, Y))
    assert called(graph)[:4] == WANTED[:4]


def test_a_loss_may_take_the_output_alone() -> None:
    graph = trace_graph(Strict(), X, loss=lambda output: cross_entropy(output, Y))
    assert called(graph) == WANTED
    graph = trace_graph(Two(), (X, X), loss=lambda logits: cross_entropy(logits, Y))
    assert called(graph) == ["mul", *WANTED]


def compute_loss(
    model: nn.Module, inputs: tuple[Tensor, Tensor], return_outputs: bool = False
) -> Any:
    """As a Trainer of transformers has it."""
    x, y = inputs
    output = model(x)
    loss = cross_entropy(output, y)
    return (loss, output) if return_outputs else loss


@pytest.mark.parametrize(
    "step",
    [
        compute_loss,
        lambda model, batch: compute_loss(model, batch, True),
        lambda net, batch: {"loss": compute_loss(net, batch)},
    ],
    ids=["loss", "loss and outputs", "mapping"],
)
def test_a_step_of_one_model_calls_it_itself(step: Any) -> None:
    graph = trace_graph(Strict(), (X, Y), loss=step)
    assert called(graph) == WANTED
    assert graph.parameter_count == 4 * 3 + 3


def test_a_function_that_calls_the_model_under_another_name_says_how_to_name_it() -> None:
    with pytest.raises(TraceError, match=r"that calls the model itself names it: step\(model, ba"):
        trace_graph(Strict(), X, loss=lambda mine, batch: mine.forward(batch).sum())


def test_a_named_tuple_stays_one_with_twice_as_many_samples() -> None:
    graph = trace_graph(OfPair(), Pair(X, Y))
    assert called(graph)[:4] == WANTED[:4]
    assert (graph.batch, graph.other_batch) == (6, 12)


def test_a_training_step_gives_the_loss() -> None:
    class Module(Strict):
        def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            return {"loss": cross_entropy(self(x), y)}

    graph = trace_graph(Module(), (X, Y))
    assert called(graph) == WANTED
    assert graph.name == "Module"


def test_where_the_batch_came_from_is_told() -> None:
    graph = trace_graph(Strict(), TensorDataset(X, Y), loss=nn.CrossEntropyLoss())
    assert any("the dataset's first samples, 8 at most" in each for each in graph.assumptions)


class Broken(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise OSError("no such shard")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (DataLoader(TensorDataset(X[:0])), "the loader is empty; give a batch"),
        (Broken(), "no batch could be drawn from the dataset .OSError: no such shard"),
    ],
)
def test_what_gives_no_batch_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        trace_graph(Strict(), batch, loss=nn.CrossEntropyLoss())


def test_a_missing_loss_says_what_to_return() -> None:
    with pytest.raises(
        Exception, match=r"give the loss that gets its targets, as in \(model, \(inputs"
    ) as caught:
        trace_graph(Strict(), (X, Y))
    assert "forward() has no place for 2 inputs and got them as one" in str(caught.value)


def test_a_class_given_as_the_loss_says_what_is_missing() -> None:
    with pytest.raises(
        ModelError, match=r"the class CrossEntropyLoss, not .* CrossEntropyLoss\(\)"
    ):
        trace_graph(Strict(), (X, Y), loss=nn.CrossEntropyLoss)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.layer(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def compiled_blocks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.compile()
    return model


def wrapped_blocks() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList([torch.compile(each) for each in model.blocks])  # type: ignore[misc]
    return model


def compiled_in_place() -> nn.Module:
    model = Stack()
    model.compile()
    return model


def compiled_head() -> nn.Module:
    model = Stack()
    model.head.compile()
    return model


def one_block() -> nn.Module:
    model = Stack()
    model.blocks[0].compile()
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("made", "execution", "said"),
    [
        (compiled_in_place, "compiled", None),
        (compiled_blocks, "compiled-blocks", None),
        (wrapped_blocks, "compiled-blocks", None),
        (compiled_head, "eager", "torch.compile of 'head' alone is not modelled"),
        (one_block, "eager", "torch.compile of 'blocks.0' alone is not modelled"),
    ],
)
def test_what_of_a_model_is_compiled_is_seen(
    made: Callable[[], nn.Module], execution: str, said: str | None
) -> None:
    graph = trace_model(made(), X)
    assert graph.execution == execution
    found = [each for each in graph.assumptions if "alone is not modelled" in each]
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)


# torch imports deprecated parts of itself for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_is_looked_at_as_compiled() -> None:
    model = Strict()
    compiled = trace_model(torch.compile(model), X)  # type: ignore[arg-type]
    assert compiled.execution == "compiled"
    names = {each.name for each in compiled.parameters}
    assert names == {"layer.weight", "layer.bias"}, "as in the model, without _orig_mod"
    assert trace_model(torch.compile(model), X, compiled=False).execution == "eager"  # type: ignore[arg-type]


class WithLoss(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "loss", "is_assumed"),
    [(Net(), None, True), (Net(), lambda output: output.sum(), False), (WithLoss(), None, False)],
)
def test_the_loss_that_is_assumed_of_a_model_without_one_is_said(
    model: nn.Module, loss: Any, is_assumed: bool
) -> None:
    words = "no loss was given: the mean of the model's floating outputs is taken for it"
    assert (words in trace_model(model, X, loss).assumptions) == is_assumed
