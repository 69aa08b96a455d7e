"""Set-ups that people have: several models in a step, frozen parts, packed sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from estimator.api import estimate, trace_model
from estimator.errors import ModelError, TraceError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.fake_tensors import with_samples
from estimator.graph.trace.trace import trace_graph
from estimator.graph.trace.training_call import PADDED_ASSUMPTION as PADDED
from estimator.graph.trace.training_call import SUMMED
from tests.synthetic import Machine, module

PROFILE = Machine(devices=2).profile()


def matmuls(graph: OpGraph) -> list[str]:
    targets = [op.call.target for op in graph.ops]
    return [target for target in targets if target in ("aten.mm.default", "aten.addmm.default")]


def adversarial(models: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The step of a GAN with one layer each."""
    generator, discriminator = models
    fake = generator(torch.randn(len(batch), 4))
    real, false = discriminator(batch).mean(), discriminator(fake.detach()).mean()
    return false - real, -discriminator(fake).mean()


def test_a_step_of_several_models_has_all_their_passes_and_parameters() -> None:
    models = [nn.Linear(4, 16, bias=False), nn.Linear(16, 1, bias=False)]
    graph = trace_model(models, torch.randn(8, 16), loss=adversarial)  # type: ignore[arg-type]
    assert graph.parameter_count == 4 * 16 + 16
    assert {parameter.name for parameter in graph.parameters} == {
        "models.0.weight",
        "models.1.weight",
    }
    # Forward the generator once and the discriminator thrice; backward a product for the weight of
    # each of these four, and one for the input of the discriminator that leads to the generator.
    assert len(matmuls(graph)) == 4 + 4 + 1
    assert SUMMED in graph.assumptions
    assert estimate(graph, "1x2:m", profile=PROFILE).step_time_s > 0


def test_models_of_a_mapping_are_called_by_their_names() -> None:
    models = {"one": nn.Linear(4, 3), "two": nn.Linear(3, 1)}
    graph = trace_model(
        models,  # type: ignore[arg-type]
        torch.randn(8, 4),
        loss=lambda parts, batch: parts["two"](parts["one"](batch)),
    )
    assert graph.parameters[0].name.startswith("models.")


def test_several_models_need_a_step_that_returns_losses() -> None:
    models: Any = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ModelError, match=r"return \(models, batch, step\)"):
        trace_model(models, torch.randn(8, 4))
    with pytest.raises((ModelError, TraceError), match="return its loss, or one for each phase"):
        trace_model(models, torch.randn(8, 4), loss=lambda models, batch: None)  # type: ignore[arg-type, return-value]


class Tagger(nn.Module):
    """Packs its sequences, or not."""

    def __init__(self, cell: type[nn.RNNBase], *, packs: bool, batch_first: bool) -> None:
        super().__init__()
        self.cell = cell(16, 32, 2, batch_first=batch_first, bidirectional=True)  # type: ignore[call-arg]
        self.packs, self.batch_first = packs, batch_first
        self.head = nn.Linear(64, 5)

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            packed = rnn.pack_padded_sequence(
                source, lengths, batch_first=self.batch_first, enforce_sorted=False
            )
            found, _ = rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        else:
            found = self.cell(source)[0]
        result: Tensor = self.head(found)
        return result


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_packed_sequences_run_at_the_length_that_they_are_padded_to(
    cell: type[nn.RNNBase], target: Any
) -> None:
    graphs = []
    for packs in (False, True):
        model = Tagger(cell, packs=packs, batch_first=True)
        batch = torch.randn(6, 10, 16), torch.randint(1, 10, (6,))
        graphs.append(trace_model(model, batch, target=target))
    dense, packed = graphs
    assert packed.batch == dense.batch == 6
    assert PADDED in packed.assumptions
    assert PADDED not in dense.assumptions
    counts = [Counter(op.call.target for op in graph.ops) for graph in graphs]
    # Packing and unpacking move data; the cells and all that computes are the same. The head's
    # three products have another name over a batch in another order.
    for part in ("rnn", "mm"):
        one, other = (sum(n for name, n in each.items() if part in name) for each in counts)
        assert one == other, part


def test_nothing_of_torch_stays_replaced_after_a_trace() -> None:
    model, lengths = Tagger(nn.LSTM, packs=True, batch_first=True), torch.tensor([3, 2])
    source = torch.randn(2, 3, 16)
    before = model(source, lengths)
    trace_model(model, (source, lengths))
    torch.testing.assert_close(model(source, lengths), before)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it (LoRA, Hu et al. 2021, section 4.1)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, source: Tensor) -> Tensor:
        result: Tensor = self.frozen(source) + self.up(self.down(source))
        return result


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state_nor_update() -> None:
    width, rank, layers = 512, 4, 3
    body = nn.Sequential(*(Adapted(width, rank) for _ in range(layers)))
    graph = trace_model(
        body, torch.randn(8, width), loss=lambda output, _: functional.relu(output).mean()
    )
    trained, frozen = layers * 2 * width * rank, layers * width * width
    assert graph.parameter_count == trained
    assert graph.frozen_parameter_bytes == 4 * frozen
    # Forward three products a layer. Backward two for the weights of each adapter, and of all
    # layers but the first three for what comes in.
    assert len(matmuls(graph)) == 3 * layers + 2 * layers + layers + 2 * (layers - 1)
    answer = estimate(graph, "1x2:m", profile=PROFILE)
    memory = answer.memory
    assert memory.gradients_bytes < 0.1 * 4 * frozen
    assert memory.optimizer_state_bytes < 0.1 * 4 * frozen
    whole = trace_model(body.requires_grad_(), torch.randn(8, width))
    assert (
        estimate(whole, "1x2:m", profile=PROFILE).breakdown.update_s
        > 10 * answer.breakdown.update_s
    )


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_rows_that_several_make_a_sample_are_doubled_only_in_a_packed_batch() -> None:
    batch = {"ids": torch.zeros(2, 3), "patches": torch.zeros(8, 5), "table": torch.zeros(7)}
    plain, packed = with_samples(batch, 0, 2), with_samples(batch, 0, 2, packed=True)
    assert [item.shape[0] for item in plain.values()] == [4, 8, 7]
    assert [item.shape[0] for item in packed.values()] == [4, 16, 7]


def test_a_model_of_patches_in_one_list_is_traced_at_every_batch_size() -> None:
    def forward(self: Any, ids: Tensor, same: Tensor, patches: Tensor) -> Tensor:
        return ids + same + self.linear(patches).view(ids.shape[0], 4, 3).mean(1)

    model = module(forward, linear=nn.Linear(5, 3))
    batch = {"ids": torch.zeros(2, 3), "same": torch.zeros(2, 3), "patches": torch.zeros(8, 5)}
    graph = trace_graph(model, batch)
    assert (graph.batch, graph.other_batch) == (2, 4)


def test_named_tuples_keep_their_kind_wherever_they_stand() -> None:
    pair = Pair(torch.zeros(2, 3), torch.zeros(2))
    for doubled in (
        with_samples(pair, 0, 2),
        with_samples((pair, torch.zeros(2)), 0, 2)[0],
        with_samples({"pair": pair}, 0, 2)["pair"],
    ):
        assert type(doubled) is Pair
        assert [len(each) for each in doubled] == [4, 4]


def shapes_of(model: nn.Module, batch: Any, target: str) -> list[tuple[int, ...]]:
    graph = trace_graph(model, batch)
    return [op.call.outputs[-1].shape for op in graph.ops if op.call.target == target]


def test_a_known_mask_selects_from_activations_as_many_as_it_holds() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).masked_select(mask)

    model = module(forward, linear=nn.Linear(3, 4))
    # Three of four columns in each of five rows.
    mask = torch.tensor([True, True, False, True])
    batch = (torch.randn(5, 3), mask)
    assert shapes_of(model, batch, "aten.masked_select.default") == [(15,)]


def test_a_ctc_loss_keeps_a_lattice_of_labels_with_blanks_between() -> None:
    def forward(self: Any, frames: Tensor, labels: Tensor) -> Tensor:
        scores = self.linear(frames).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((frames.shape[0],), frames.shape[1])
        kept = (labels > 0).sum(-1)
        return F.ctc_loss(scores, labels[labels > 0], lengths, kept)

    model = module(forward, linear=nn.Linear(3, 5))
    labels = torch.tensor([[1, 2, 3, 0], [4, 1, 0, 0]])
    # At most three labels: 2 * 3 + 1 states, at each of seven steps, of two samples.
    lattice = shapes_of(model, (torch.randn(2, 7, 3), labels), "aten._ctc_loss.Tensor")
    assert lattice == [(2, 7, 7)]


def test_a_module_is_found_by_the_value_of_a_known_index() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = torch.tensor([1])
        return self.experts[f"expert_{chosen[0]}"](x)

    model = module(
        forward, experts=nn.ModuleDict({"expert_0": nn.Linear(3, 2), "expert_1": nn.Linear(3, 4)})
    )
    assert shapes_of(model, torch.randn(5, 3), "aten.addmm.default") == [(5, 4)]


def test_a_tensor_made_from_known_scalars_is_known() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        longest = torch.tensor([lengths.max(), lengths.min()])
        return self.linear(x[:, : int(longest[0])])

    model = module(forward, linear=nn.Linear(3, 2))
    batch = (torch.randn(2, 9, 3), torch.tensor([4, 6]))
    assert shapes_of(model, batch, "aten.slice.Tensor")[0] == (2, 6, 3)


def test_a_mask_of_activations_selects_every_second_element_and_says_so() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.linear(x)
        chosen = scores > 0
        return scores[chosen], scores[~chosen]

    model = module(forward, linear=nn.Linear(3, 4))
    graph = trace_graph(model, torch.randn(5, 3))
    # Ten of 5 * 4 scores, and by the same mask the other ten.
    taken = [op for op in graph.ops if op.call.target == "aten.index.Tensor"]
    assert [op.call.outputs[0].shape for op in taken] == [(10,), (10,)]
    assert any("every second element" in text for text in graph.assumptions)


def test_unlike_activations_are_unequal_and_the_same_equal() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one, other = self.linear(x), self.linear(x)
        assert torch.equal(one.view(-1), one.view(-1))
        return one if torch.equal(one, other) else one @ other.T

    model = module(forward, linear=nn.Linear(3, 4))
    # Unequal: the five rows of one meet the five of the other.
    products = shapes_of(model, torch.randn(5, 3), "aten.mm.default")
    assert (5, 5) in products


def test_distributions_of_activations_are_taken_to_be_valid_and_it_is_said() -> None:
    def forward(self: Any, x: Tensor, actions: Tensor) -> Tensor:
        mean, scale = self.mean(x), self.scale(x).exp()
        # The default, which torch.compile turns off for the whole process.
        law = torch.distributions.Normal(mean, scale, validate_args=True)
        return -law.log_prob(actions).mean()

    net = module(forward, mean=nn.Linear(4, 2), scale=nn.Linear(4, 2))
    graph = trace_graph(net, (torch.randn(6, 4), torch.randn(6, 2)))
    wanted = "checks that the model makes on its activations pass"
    assert wanted in graph.assumptions


def test_a_value_that_is_read_for_a_log_is_named_as_what_to_leave_out() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).sum()
        self.last = loss.item()
        return loss

    model = module(forward, linear=nn.Linear(4, 2))
    with pytest.raises(TraceError, match=r"leave out what reads it, such as .item\(\)"):
        trace_graph(model, torch.randn(6, 4))


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


class OfPair(Net):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return cross_entropy(self.layer(pair.x), pair.y)


class OfList(Net):
    def forward(self, parts: list[Tensor]) -> Tensor:  # type: ignore[override]
        return self.layer(parts[0] * parts[1])  # type: ignore[no-any-return]


class Unpacking(Net):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        x, y = batch
        return cross_entropy(self.layer(x), y)


class WithStep(Strict):
    def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": cross_entropy(self(x), y)}


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


def compute_loss(
    model: nn.Module, inputs: tuple[Tensor, Tensor], return_outputs: bool = False
) -> Any:
    """As a Trainer of transformers has it."""
    x, y = inputs
    output = model(x)
    loss = cross_entropy(output, y)
    return (loss, output) if return_outputs else loss


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
        # A forward of one mapping gets it, and one that takes any names their tensors.
        *(
            (model, batch, nn.CrossEntropyLoss())
            for model in (OfMapping(), OfNames())
            for batch in (({"x": X}, Y), {"x": X, "labels": Y}, {"x": X, "y": Y})
        ),
        # A step of one model calls it itself, and may return more than its loss.
        (Strict(), (X, Y), compute_loss),
        (Strict(), (X, Y), lambda model, batch: compute_loss(model, batch, True)),
        (Strict(), (X, Y), lambda net, batch: {"loss": compute_loss(net, batch)}),
        (WithStep(), (X, Y), None),
    ],
)
def test_targets_go_to_the_loss(model: nn.Module, batch: Any, loss: Any) -> None:
    graph = trace_graph(model, batch, loss=loss)
    assert called(graph) == WANTED
    assert (graph.batch, graph.other_batch) == (6, 12)
    assert (graph.name, graph.parameter_count) == (type(model).__name__, 4 * 3 + 3)


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


def test_several_targets_of_a_mapping_go_to_the_loss_by_name() -> None:
    def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        assert list(targets) == ["labels", "weights"]
        found = nn.functional.cross_entropy(output, targets["labels"], reduction="none")
        return (found * targets["weights"]).mean()

    graph = trace_graph(Strict(), {"x": X, "labels": Y, "weights": torch.ones(6)}, loss=loss)
    assert graph.batch == 6


@pytest.mark.parametrize(
    ("model", "batch"), [(OfPair(), Pair(X, Y)), (Unpacking(), (X, Y))], ids=["named", "plain"]
)
def test_a_forward_of_one_batch_gets_all_of_it_of_its_kind(model: nn.Module, batch: Any) -> None:
    graph = trace_graph(model, batch)
    assert called(graph)[:4] == WANTED[:4]
    assert (graph.batch, graph.other_batch) == (6, 12)


def test_a_loss_may_take_the_output_alone() -> None:
    graph = trace_graph(Strict(), X, loss=lambda output: cross_entropy(output, Y))
    assert called(graph) == WANTED
    graph = trace_graph(Two(), (X, X), loss=lambda logits: cross_entropy(logits, Y))
    assert called(graph) == ["mul", *WANTED]


def test_where_the_batch_came_from_is_told() -> None:
    graph = trace_graph(Strict(), TensorDataset(X, Y), loss=nn.CrossEntropyLoss())
    assert any("the dataset's first samples, 8 at most" in each for each in graph.assumptions)


class Broken(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise OSError("no such shard")


MANY_TARGETS = {"x": X, "labels": Y, "weights": torch.ones(6)}


@pytest.mark.parametrize(
    ("batch", "loss", "said"),
    [
        (MANY_TARGETS, nn.CrossEntropyLoss(), r"of 'labels', 'weights', which forward\(\) do"),
        (
            {"x": X, "labels": Y},
            lambda output, batch: output[batch["labels"]],
            r"the loss cannot run on the output and 'labels' alone, which forward\(\) does not t",
        ),
        (
            X,
            lambda mine, batch: mine.forward(batch).sum(),
            r"that calls the model itself names it: step\(model, ba",
        ),
        (
            (X, Y),
            None,
            r"forward\(\) has no place for 2 inputs and got them as one.*"
            r"give the loss that gets its targets, as in \(model, \(inputs",
        ),
        (
            (X, Y),
            nn.CrossEntropyLoss,
            r"the class CrossEntropyLoss, not .* CrossEntropyLoss\(\)",
        ),
        (
            DataLoader(TensorDataset(X[:0])),
            nn.CrossEntropyLoss(),
            "the loader is empty; give a batch",
        ),
        (
            Broken(),
            nn.CrossEntropyLoss(),
            "no batch could be drawn from the dataset .OSError: no such shard",
        ),
    ],
)
def test_a_batch_and_a_loss_that_do_not_fit_are_refused(batch: Any, loss: Any, said: str) -> None:
    with pytest.raises((ModelError, TraceError), match=said):
        trace_graph(Strict(), batch, loss=loss)


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


def stack_with(*compiled: Callable[[Stack], nn.Module]) -> nn.Module:
    """A stack of which these parts are compiled where they stand."""
    model = Stack()
    for part in compiled:
        part(model).compile()
    return model


def wrapped_blocks() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList([torch.compile(each) for each in model.blocks])  # type: ignore[misc]
    return model


def block(number: int) -> Callable[[Stack], nn.Module]:
    return lambda model: model.blocks[number]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("made", "execution", "said"),
    [
        (lambda: stack_with(lambda model: model), "compiled", []),
        (lambda: stack_with(block(0), block(1)), "compiled-blocks", []),
        (wrapped_blocks, "compiled-blocks", []),
        (lambda: stack_with(lambda model: model.head), "eager", ["torch.compile of 'head' alone"]),
        (lambda: stack_with(block(0)), "eager", ["torch.compile of 'blocks.0' alone"]),
    ],
)
def test_what_of_a_model_is_compiled_is_seen(
    made: Callable[[], nn.Module], execution: str, said: list[str]
) -> None:
    graph = trace_model(made(), X)
    assert graph.execution == execution
    found = [each for each in graph.assumptions if "alone is not modelled" in each]
    assert [each.partition(" is not modelled")[0] for each in found] == said


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
