"""Known answers: every row quotes a source, half are kept back, and memory is judged both ways."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from known_answers import is_right_of_memory, memory_figures
from known_layouts import known_layout_rows
from known_rows import KnownRow, known_rows, unseen
from published.graphs import ModelSpec
from published.machines import Setting, variant
from zoo.megatron import megatron_gpt

import estimator as est
from estimator.graph.ir.structure import storages
from estimator.graph.partition.layout import split_by_layout
from estimator.workload import DDP
from estimator.workload.layouts import Layout

ROW = KnownRow(
    source="a page",
    spec=ModelSpec.of("model", "decoder"),
    machine="dgx-1",
    gpus=24,
    batch_per_gpu=2,
    step_time_s=1.0,
    precision="fp16",
)


def case(
    *, half: str = "seen", predicted_s: float = 1.0, fits: str = "yes", ran: bool = True
) -> dict[str, object]:
    return {
        "source": "a page",
        "id": "a row",
        "model": "model",
        "method": "cold",
        "half": half,
        "measured_s": 1.0 if ran else None,
        "predicted_s": predicted_s,
        "fits": fits,
        "known_to_fit": ran,
    }


def test_there_are_forty_rows_and_more_each_once_and_half_of_them_are_kept_back() -> None:
    rows = known_rows()
    assert len(rows) >= 40
    assert len({row.id for row in rows}) == len(rows)
    hidden = unseen(rows)
    assert len(hidden) == len(rows) // 2
    # The draw is of the ids and the committed seed alone.
    assert unseen(tuple(reversed(rows))) == hidden


def test_layouts_are_of_ten_published_pipelines_and_more_each_once() -> None:
    rows = known_layout_rows()
    assert len({row.id for row in rows}) == len(rows)
    assert sum("pp=" in (row.layout or "") for row in rows) >= 10
    assert sum("tp=" in (row.layout or "") for row in rows) >= 10
    for row in rows:
        made = Layout.parse(row.layout or "dp=*")
        assert math.prod(made.data_axes(row.gpus, DDP())) * made.tp * made.pp == row.gpus


def test_a_step_follows_from_operations_as_its_source_counts_them() -> None:
    """Table 1 of the SC21 paper: 1.7B on 32 GPUs at 137 TFLOP/s each, 4.4 PFLOP/s in all."""
    (row,) = (row for row in known_layout_rows() if "GPT 1.7B" in row.id)
    assert row.step_time_s is not None
    # 96 x 512 x 2048 x 24 x 2304² x (1 + 2048 / 13824 + 51200 / 884736) = 1.547e16.
    assert row.step_time_s == pytest.approx(1.547e16 / (32 * 137e12), rel=1e-3)


def test_a_layer_of_megatron_keeps_what_its_paper_says() -> None:
    """Korthikanti et al., 2022, table 2: 34 s b h / t with sequence parallelism and selective
    recomputation, in bytes of activations of 2 and masks of 1."""
    batch, length, width, tp = 2, 16, 64, 2

    def kept(layers: int) -> int:
        model, tokens, loss = megatron_gpt(
            batch, width=width, heads=4, layers=layers, length=length, vocabulary=32,
            recomputes="core",
        )  # fmt: skip
        whole = est.trace_model(model, tokens, loss=loss, target="cuda", precision="fp16")
        rank = split_by_layout(whole, Layout.parse(f"tp={tp},sp,vocab,megatron,dp=*"))
        found = storages(rank)
        bound = rank.at()
        begin = sum(op.phase == "forward" for op in rank.ops)
        of_blocks = (
            each
            for each in found
            if each.kind == "activation"
            and each.born < begin <= each.dies
            and len(bound.specs[each.root].shape) >= 2
        )
        return sum(max(bound.specs[value].nbytes for value in each.values) for each in of_blocks)

    assert kept(3) - kept(2) == pytest.approx(34 * length * batch * width / tp, rel=0.03)


def test_an_allocation_is_of_whole_nodes() -> None:
    assert ROW.allocation == "3x8:dgx-1"
    assert replace(ROW, gpus=4).allocation == "1x4:dgx-1"
    assert replace(ROW, machine="dgx-2", gpus=16).allocation == "1x16:dgx-2"


@pytest.mark.parametrize(
    ("fits", "ran", "right"),
    [("yes", True, True), ("no", True, False), ("no", False, True), ("uncertain", False, False)],
)
def test_memory_is_right_where_what_ran_is_not_refused(fits: str, ran: bool, right: bool) -> None:
    assert is_right_of_memory(case(fits=fits, ran=ran)) == right


def test_halves_are_judged_apart_by_whether_rows_fit() -> None:
    cases = [
        case(predicted_s=1.04),
        case(half="unseen", predicted_s=1.3),
        case(fits="no", ran=False),
    ]
    figures = {figure["id"]: figure["value"] for figure in memory_figures(cases)}
    assert figures == {
        "seen: wrong of whether it fits": 0,
        "unseen: wrong of whether it fits": 0,
    }
    (wrong,) = memory_figures([case(fits="no", ran=True), case(fits="yes", ran=True)])
    assert (wrong["value"], wrong["bound"]) == (1, 0)


def test_a_power_limit_of_a_source_is_that_of_its_devices() -> None:
    capped = variant("h100-sxm", Setting(power_w=500.0))
    assert {device.details["power_w"] for device in capped.devices} == {500.0}
    assert variant("h100-sxm", None).devices[0].details["power_w"] == 700
