"""Check the operators whose results depend on values that a trace knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from estimator.errors import TraceError
from estimator.graph.trace.trace import trace_graph
from tests.synthetic import module


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
