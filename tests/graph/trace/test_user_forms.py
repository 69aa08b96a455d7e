"""Set-ups that people have: several models in a step, frozen parts, packed sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from estimator.api import estimate, trace_model
from estimator.errors import ModelError, TraceError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.training_call import PADDED_ASSUMPTION as PADDED
from estimator.graph.trace.training_call import SUMMED
from tests.synthetic import Machine

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
