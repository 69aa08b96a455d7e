"""A model that gathers its features itself is traced as one of the ranks; what it sends costs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import Tensor, nn

import estimator as est
from estimator.errors import ProfileError, WorkloadError
from estimator.graph.ir.collectives import collectives_of
from tests.conftest import Command, make_small_profile

How = Literal["nn", "list", "functional", "mean"]
WIDTH, BATCH = 128, 8
# A rank's features of one tower, fp32.
PART = BATCH * WIDTH * 4
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def gathered(features: Tensor, how: How) -> Tensor:
    """Those of all ranks, where there are several, as contrastive losses take them."""
    if not (dist.is_available() and dist.is_initialized()):
        return features
    if how == "nn":
        return torch.cat(torch.distributed.nn.all_gather(features))
    if how == "functional":
        return functional.all_gather_tensor(features, 0, dist.group.WORLD)
    if how == "mean":
        mean = features.detach().mean(0)
        dist.all_reduce(mean)
        return features - mean / dist.get_world_size()
    everyone = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, features.detach())
    everyone[dist.get_rank()] = features
    return torch.cat(everyone)


class Contrastive(nn.Module):
    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in range(2)]
        )

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        first, second = (
            gathered(nn.functional.normalize(tower(batch), dim=-1), self.how)
            for tower, batch in zip(self.towers, (images, texts), strict=True)
        )
        logits = first @ second.t()
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def traced(how: How, ranks: int | None, target: Literal["cuda", "cpu"] = "cuda") -> est.OpGraph:
    batch = (torch.randn(BATCH, 64), torch.randn(BATCH, 64))
    return est.trace_model(
        Contrastive(how), batch, loss=lambda loss, _: loss, target=target, ranks=ranks
    )


def exchanged(graph: est.OpGraph, batch: int | None = None) -> list[tuple[str, str, int]]:
    found = collectives_of(graph.at(batch))
    return [(each.op, each.phase, each.size_bytes) for each in found]


def test_gathered_features_are_collectives_of_all_ranks() -> None:
    graph = traced("nn", 4)
    # NCCL's gradient of a gather is a reduce-scatter of as much.
    sent = [("all_gather", "forward", 4 * PART)] * 2 + [
        ("reduce_scatter", "backward", 4 * PART)
    ] * 2
    assert exchanged(graph) == sent
    assert exchanged(graph, 2 * BATCH)[0] == ("all_gather", "forward", 8 * PART)
    assert not dist.is_initialized()


def test_over_gloo_the_gradients_of_a_gather_are_scattered_rank_by_rank() -> None:
    graph = traced("nn", 2, "cpu")
    assert [op for op, *_ in exchanged(graph)] == ["all_gather"] * 2
    # No profile has costs of a scatter: it is charged as a copy, which the estimate says.
    assert [op.call.target for op in graph.ops].count("c10d.scatter_.default") == 4
    with pytest.raises(ProfileError, match="no all-gather costs, which the model itself needs"):
        est.estimate(graph, "1x2:local", profile=make_small_profile())


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        ("list", [("all_gather", "forward", 2 * PART)] * 2),
        (
            "functional",
            [("all_gather", "forward", 2 * PART)] * 2
            + [("reduce_scatter", "backward", 2 * PART)] * 2,
        ),
        ("mean", [("all_reduce", "forward", WIDTH * 4)] * 2),
    ],
)
def test_each_form_of_a_collective_is_known(how: How, sent: list[tuple[str, str, int]]) -> None:
    assert exchanged(traced(how, 2)) == sent


def test_what_the_model_sends_stands_in_the_timeline_and_in_tables() -> None:
    graph = traced("nn", 4)
    answer = est.estimate(graph, "2x2:h100-sxm")
    spans = [span for span in answer.timeline.spans if span.rank == 0 and "all_gather" in span.name]
    assert len(spans) == 2
    sent_s = sum(span.duration_s for span in answer.timeline.spans if "c10d" in span.name)
    assert answer.breakdown.layer_communication_s == pytest.approx(sent_s)
    table = est.estimate_many(graph, ["2x2:h100-sxm", "1x4:h100-sxm"])
    assert table.step_time_s[0] == answer.step_time_s
    # A gather of more bytes over the same links takes longer.
    larger = est.estimate(graph, "2x2:h100-sxm", batch_per_gpu=4096).breakdown
    assert larger.layer_communication_s > 2 * answer.breakdown.layer_communication_s


def test_for_one_device_nothing_changes() -> None:
    assert traced("nn", 1).ops == traced("nn", None).ops
    assert exchanged(traced("nn", 1)) == []


def test_what_is_not_counted_is_said() -> None:
    unknown = "would exchange with others is not counted"
    assert any(unknown in text for text in traced("nn", None).assumptions)
    assert not any(unknown in text for text in traced("nn", 4).assumptions)
    answer = est.estimate(traced("nn", 4), "1x2:h100-sxm")
    assert any("among 4 ranks as it was traced" in text for text in answer.assumptions)
    with pytest.raises(WorkloadError, match="ranks must be at least 1, found 0"):
        traced("nn", 0)


def test_an_estimate_of_a_module_traces_it_for_its_ranks() -> None:
    batch = (torch.randn(BATCH, 64), torch.randn(BATCH, 64))
    answer = est.estimate(Contrastive("nn"), "2x2:h100-sxm", batch=batch)
    assert answer.breakdown.layer_communication_s > 0


def test_a_trace_on_the_command_line_is_told_its_ranks(tmp_path: Path, command: Command) -> None:
    model, graph = tmp_path / "contrastive.py", tmp_path / "contrastive.graph"
    model.write_text(
        "import torch\nfrom tests.graph.trace.test_own_collectives import Contrastive\n"
        "def model():\n    return Contrastive('nn'), (torch.randn(8, 64), torch.randn(8, 64))\n"
    )
    assert command("trace", f"{model}:model", "--ranks", "4", "-o", str(graph)).code == 0
    assert exchanged(est.OpGraph.load(graph))[0] == ("all_gather", "forward", 4 * PART)
