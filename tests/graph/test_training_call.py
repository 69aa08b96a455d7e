"""A model, its batch and its loss in the forms that people have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from estimator.api import trace_model
from estimator.errors import ModelError, TraceError
from estimator.graph.op_graph import OpGraph
from estimator.graph.trace import trace_graph

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
    assert "takes 2 positional arguments but 3 were given" in str(caught.value)


# torch imports deprecated parts of itself for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_is_looked_at_as_compiled() -> None:
    model = Strict()
    compiled = trace_model(torch.compile(model), X)  # type: ignore[arg-type]
    assert compiled.execution == "compiled"
    names = {each.name for each in compiled.parameters}
    assert names == {"layer.weight", "layer.bias"}, "as in the model, without _orig_mod"
    assert trace_model(torch.compile(model), X, compiled=False).execution == "eager"  # type: ignore[arg-type]
