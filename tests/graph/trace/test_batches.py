"""Check how a batch is doubled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from estimator.graph.trace.fake_tensors import with_samples
from estimator.graph.trace.trace import trace_graph
from tests.synthetic import module


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
