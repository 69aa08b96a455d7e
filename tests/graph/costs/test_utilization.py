"""What MFU and HFU count: matmuls once and attention whole, or with what is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from estimator.api import estimate
from estimator.estimates.table import estimate_many
from estimator.graph.compile.fusion import compile_graph
from estimator.graph.costs.call_costs import step_flops
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph


class Blocks(nn.Module):
    """A matmul by 16 x 16, then three blocks of two by 16 x 64, perhaps behind checkpoints."""

    def __init__(self, use_reentrant: bool | None, width: int = 16) -> None:
        super().__init__()
        self.use_reentrant, self.first = use_reentrant, nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


# Of 32 samples by 16 x 64 numbers, a multiply-add as 2.
PRODUCT = 2 * 32 * 16 * 64


def blocks(use_reentrant: bool | None, target: Any = "cpu") -> OpGraph:
    return trace_graph(Blocks(use_reentrant), torch.randn(32, 16), target=target)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("use_reentrant", "again"),
    # Without reentrance a block stops once all that was saved is there: before its last matmul.
    [(None, 0), (False, 3), (True, 6)],
)
def test_checkpoints_add_flops_to_the_hardware_and_none_to_the_model(
    use_reentrant: bool | None, again: int, target: Any
) -> None:
    graph = blocks(use_reentrant, target)
    flops = step_flops(graph.at())
    # Three blocks of two matmuls forward, of each the gradients of both factors backward; the
    # first matmul is a quarter of the others, and nobody wants its input's gradient.
    once = 3 * 2 * 3 * PRODUCT + 2 * PRODUCT / 4
    assert flops.model == once
    assert flops.hardware == once + again * PRODUCT
    # A batch of half the size has half the work.
    assert step_flops(graph.at(16)).model == flops.model / 2


def test_compiling_changes_neither_count() -> None:
    for use_reentrant in (None, False):
        graph = blocks(use_reentrant, "cuda")
        assert step_flops(compile_graph(graph, "compiled").at()) == step_flops(graph.at())


class Attention(nn.Module):
    """Causal attention of 2 heads of 8 numbers each, by a kernel or written out."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.project, self.written_out = nn.Linear(16, 48, bias=False), written_out

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(3, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if not self.written_out:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_causal_attention_counts_whole_and_the_same_by_a_kernel_or_written_out(
    target: Any, precision: str
) -> None:
    kernel, written = (
        step_flops(
            trace_graph(
                Attention(written_out=written_out),
                torch.randn(3, 6, 16),
                target=target,
                precision=precision,
            ).at()
        )
        for written_out in (False, True)
    )
    # 18 tokens through a weight of 16 x 48, and its gradient; the input wants none.
    projection = 2 * 2 * 18 * 16 * 48
    # One product of 6 queries and 6 keys by 8 numbers in 2 heads of 3 samples: two forward, four
    # backward, and a fifth in the kernel, which computes the scores again.
    product = 2 * 3 * 2 * 6 * 6 * 8
    assert (written.model, written.hardware) == (projection + 6 * product,) * 2
    assert (kernel.model, kernel.hardware) == (projection + 6 * product, projection + 7 * product)


def test_mfu_is_proportional_to_the_rate_of_samples_and_hfu_tells_of_checkpoints() -> None:
    plain, again = (
        trace_graph(
            Blocks(use_reentrant, width=1024),
            torch.randn(512, 1024),
            target="cuda",
            precision="bf16",
        )
        for use_reentrant in (None, True)
    )
    one, two = (
        estimate(graph, "1x1:h100-sxm", batch_per_gpu=4096, accumulation_steps=3)
        for graph in (plain, again)
    )
    assert None not in (one.mfu_ratio, two.mfu_ratio, one.samples_per_s, two.samples_per_s)
    assert two.samples_per_s < one.samples_per_s
    assert two.mfu_ratio / one.mfu_ratio == pytest.approx(two.samples_per_s / one.samples_per_s)
    assert one.hfu_ratio == one.mfu_ratio
    # Three micro-batches of 4096 samples, through six weights of 4 x 1024 x 1024 three times and
    # through one of a quarter of them twice; 989.4 Tflop/s is the dense peak in bf16.
    product = 2 * 4096 * 4 * 1024 * 1024
    seconds = 3 * (6 * 3 + 2 / 4) * product / 989.4e12
    assert one.mfu_ratio == pytest.approx(seconds / one.step_time_s)
    assert two.hfu_ratio == pytest.approx(two.mfu_ratio * (18.5 + 6) / 18.5)
    table = estimate_many(again, ["1x1:h100-sxm"], batch_per_gpu=4096, accumulation_steps=3)
    assert table.mfu_ratio[0] == pytest.approx(two.mfu_ratio)
    assert table.hfu_ratio[0] == pytest.approx(two.hfu_ratio)


@pytest.mark.parametrize("batch", [512, (512, 512), (640, 128), (512, 511)])
@pytest.mark.parametrize("steps", [1, 3])
def test_mfu_is_all_flops_over_the_peaks_of_all_devices_whatever_the_batch(
    batch: int | tuple[int, int], steps: int
) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    graph = trace_graph(model, torch.randn(64, 1024), target="cuda", precision="bf16")
    asked = {"batch_per_gpu": batch, "accumulation_steps": steps}
    found = estimate(graph, "1x1:h100-sxm+1x3:a100-sxm-80gb", **asked)  # type: ignore[arg-type]
    first, others = (batch, batch) if isinstance(batch, int) else batch
    samples = steps * (first + 3 * others)
    # Through two weights forward, their gradients, and that of what lies between; dense peaks in
    # bf16 of the datasheets.
    flops = 5 * 2 * samples * 1024 * 1024
    seconds = flops / (989.4e12 + 3 * 312e12)
    assert found.mfu_ratio == pytest.approx(seconds / found.step_time_s)
    assert found.hfu_ratio == found.mfu_ratio
    if isinstance(batch, int):
        table = estimate_many(graph, [str(found.allocation)] * 2, **asked)  # type: ignore[arg-type]
        assert table.mfu_ratio == pytest.approx([found.mfu_ratio] * 2, rel=1e-9)


def test_mfu_of_a_pipeline_is_over_the_peaks_of_all_its_devices_too() -> None:
    layers = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    graph = trace_graph(model, torch.randn(64, 1024), target="cuda", precision="bf16")
    asked = {"layout": "pp=2", "batch_per_gpu": 64, "accumulation_steps": 4}
    found = estimate(graph, "1x1:h100-sxm+1x1:a100-sxm-80gb", **asked)  # type: ignore[arg-type]
    # All products but the gradient of the input.
    flops = 4 * 64 * (4 * 3 - 1) * 2 * 1024 * 1024
    seconds = flops / (989.4e12 + 312e12)
    assert found.mfu_ratio == pytest.approx(seconds / found.step_time_s)


def test_convolutions_of_an_fp32_model_are_held_against_the_peak_of_tf32() -> None:
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.Flatten(), nn.Linear(256 * 16, 10))
    graph = trace_graph(model, torch.randn(512, 64, 4, 4), target="cuda")
    flops = step_flops(graph.at(512))
    # Forward and the weight's gradient; what comes in has none.
    assert flops.tf32_by_default == 2 * (2 * 512 * 16 * 256 * 64 * 9)
    answer = estimate(graph, "1x1:a100-sxm-80gb")
    assert answer.mfu_ratio is not None
    # A100: 156 TFLOP/s in TF32, 19.5 in FP32.
    share = flops.tf32_by_default / flops.hardware
    at_peak_s = flops.model * (share / 156e12 + (1 - share) / 19.5e12)
    assert answer.mfu_ratio * answer.step_time_s == pytest.approx(at_peak_s)
