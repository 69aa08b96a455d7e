"""Published rows as the engine is asked about them, and known answers in their own recipes."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_accuracy import cases_of, teaches
from collective_systems import TIMES_CALLS, Asked, Group, asked_of, cases_of_systems, read_groups
from known_answers import is_right_of_memory, memory_figures
from known_rows import KnownRow, known_layout_rows, known_rows, unseen
from published import mapping, sources
from published.graphs import GraphStore, ModelSpec, forward_only
from published.machines import Setting, machine_name, variant
from published.mapping import Verdict, source_of, verdicts
from published.methods import calibrated_cases, cold_cases, naive_cases
from published.own_kernels import with_cudnn_attention, with_own_kernels, with_triton_attention
from published.rows import NotMapped, NotQualified, parsed
from published.sources import Source, Workload
from published_accuracy import counted, summaries
from summary import constant_score_ratio
from torch import nn
from zoo.convolutional import resnet
from zoo.language import decoder
from zoo.megatron import megatron_gpt

import estimator as est
from estimator.errors import StrategyError
from estimator.graph.costs.call_costs import FusedKernel, features_of, op_cost, step_flops
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.partition.layout import split_by_layout
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import found_plan
from estimator.kernels.roofline import Roofline
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import CollectiveName
from estimator.workload.layouts import Layout
from estimator.workload.strategies import DDP

ROW = {
    "source": "Lambda deeplearning-benchmark",
    "model": "ResNet-50 v1.5",
    "gpu": "V100-16GB",
    "nodes": "1",
    "gpus": "1",
    "precision": "amp fp16",
    "local_batch": "64",
    "grad_accum": "1",
    "parallelism": "single",
    "framework_version": "NGC PyTorch 20.10",
    "step_time_s": "0.1",
    "notes": "",
}


def outcome(cells: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Verdict:
    """What becomes of one row; its graph is not asked for."""
    table = tmp_path / "table.csv"
    with table.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ROW)
        writer.writeheader()
        writer.writerow({**ROW, **cells})
    monkeypatch.setattr(GraphStore, "graph", lambda *_: None)
    (verdict,) = verdicts(tmp_path, GraphStore(tmp_path))
    return verdict


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("A100-PCIe-80GB", "a100-pcie-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("V100-16GB(AWS p3.8xlarge)", "v100-p3"),
        ("H100-SXM-96GB-HBM2e (500W, 2.4TB/s)", "h100-sxm"),
        ("RTX 2080 Ti", "rtx-2080-ti"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
    ],
)
def test_a_gpu_is_found_in_the_catalogue_by_its_name(gpu: str, machine: str) -> None:
    assert machine_name(gpu) == machine


def test_a_gpu_that_the_catalogue_lacks_is_not_guessed() -> None:
    with pytest.raises(NotMapped, match="no machine of the catalogue is called GTX 580"):
        machine_name("GTX 580")


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"parallelism": "tp2/dp4/pp1"}, "not data parallel alone but tp2"),
        ({"notes": "suspect=copy error"}, "notes call it suspect"),
        ({"source": "OneFlow DLPerf", "framework_version": "MxNet"}, "measured with MxNet"),
    ],
)
def test_a_row_that_is_no_data_parallel_pytorch_training_does_not_qualify(
    cells: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = outcome(cells, monkeypatch, tmp_path)
    assert verdict.outcome == "not_qualified"
    assert reason in verdict.reason


MEGATRON = {
    "source": "vTrain MICRO24",
    "model": "GPT h64 L20 a4",
    "gpu": "A100",
    "nodes": "4",
    "gpus": "32",
    "notes": "hidden=64;layers=20;heads=4",
}


@pytest.mark.parametrize(
    ("parallelism", "layout"),
    [
        ("tp1/dp32/pp1", None),
        ("tp8/dp4/pp1", "tp=8,vocab,dp=*"),
        (
            "tp4/dp2/pp4",
            "tp=4,pp=4,schedule=1f1b,cut=blocks.5+blocks.10+blocks.15,vocab,dp=*",
        ),
        (
            "TP=2, PP=2, VP=2, MBS=1, GA=64",
            "tp=2,pp=2,schedule=interleaved:2,cut=blocks.5+blocks.10+blocks.15,vocab,dp=*",
        ),
    ],
)
def test_ranks_that_share_a_model_are_asked_as_a_layout_on_any_number_of_nodes(
    parallelism: str, layout: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = outcome({**MEGATRON, "parallelism": parallelism}, monkeypatch, tmp_path)
    assert verdict.outcome == "mapped", verdict.reason
    assert verdict.question is not None
    assert verdict.question.workload.layout == layout
    assert verdict.question.allocation == "4x8:dgx-a100-80gb"


@pytest.mark.parametrize(("parallelism", "run_again"), [("dp32", 0), ("tp4/dp2/pp4", 15)])
def test_the_last_stage_runs_nothing_again(
    parallelism: str, run_again: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    question = outcome({**MEGATRON, "parallelism": parallelism}, monkeypatch, tmp_path).question
    assert question is not None
    settings = dict(question.workload.spec.settings)
    settings.pop("length")
    model, *_ = megatron_gpt(2, length=8, **settings)
    assert model.run_again == run_again


def test_a_layout_that_the_engine_has_not_counts_against_the_share_mapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources.Layout, "parse", Refusing.parse)
    verdict = outcome({**MEGATRON, "parallelism": "tp2/cp2/dp8"}, monkeypatch, tmp_path)
    assert verdict.outcome == "unmapped"
    assert verdict.reason == "tp=2,vocab,cp=2,dp=* is none"


class Refusing:
    @staticmethod
    def parse(text: str) -> None:
        raise StrategyError(f"{text} is none")


def test_a_kernel_of_ones_own_makes_one_pass_and_is_divided_like_its_scores() -> None:
    model, batch, loss = megatron_gpt(
        2, width=16, heads=4, layers=1, length=8, vocabulary=32, recomputes="none"
    )
    traced = est.trace_model(model, batch, loss=loss, target="cuda")
    graph = with_own_kernels(traced, "softmax")
    rank = split(graph, found_plan(graph, vocabulary=True), tp=2)

    def kernels(graph: est.OpGraph) -> list[FusedKernel]:
        calls = [op.call for op in graph.ops if op.call.target == "fused.softmax.default"]
        return [FusedKernel.of(call) for call in calls]

    # Scores of 2 samples, 4 heads, 8 x 8 tokens in float32: read once forward, with gradients
    # once backward. Of two ranks each has two heads.
    assert [each.read_bytes for each in kernels(graph)] == [2048, 4096]
    assert [each.rows for each in kernels(graph)] == [64, 64]
    assert [each.read_bytes for each in kernels(rank)] == [1024, 2048]
    assert [each.rows for each in kernels(rank)] == [32, 32]
    assert not any("want of a rule" in each for each in rank.assumptions)
    # Four layers, each with a region, three norms, softmax and GELU.
    assert graph.function_calls == 13


def test_cudnn_s_attention_is_the_same_work_without_the_wait_on_hopper() -> None:
    model, batch, loss = decoder(
        2, width=512, heads=4, layers=1, length=4096, vocabulary=32, hidden=512, key_heads=4
    )
    traced = est.trace_model(model, batch, loss=loss, precision="bf16", target="cuda")
    by_cudnn = with_cudnn_attention(traced)
    roofline = Roofline(load_profile("h100-sxm"), precision="bf16")
    pairs = [
        (one.call, two.call)
        for one, two in zip(traced.ops, by_cudnn.ops, strict=True)
        if "attention" in one.call.target
    ]
    assert len(pairs) == 2
    for one, two in pairs:
        assert "cudnn" in two.target
        assert one.inputs == two.inputs
        assert features_of(one).dims == features_of(two).dims
        assert op_cost(one) == op_cost(two)
        assert roofline.predict(two).warm_s < roofline.predict(one).warm_s


def test_attention_in_triton_reaches_the_share_of_an_a100_that_its_own_test_says() -> None:
    model, batch, loss = decoder(
        4, width=48 * 64, heads=48, layers=1, length=4096, vocabulary=32, hidden=512
    )
    traced = est.trace_model(model, batch, loss=loss, precision="bf16", target="cuda")
    by_triton = with_triton_attention(traced)
    roofline = Roofline(load_profile("a100-sxm-40gb"), precision="bf16")
    calls = [op.call for op in by_triton.ops if "attn" in op.call.target]
    # Half of the products are masked; backward computes the scores again. The test's shares are of
    # the peak at the clock of the moment, 1,350 MHz; at work an A100 keeps 0.9 of its peak.
    product_s = 2 * 4 * 48 * 4096 * 4096 * 64 / 2 / (0.9 * 312e12)
    shares = [
        products * product_s / roofline.predict(call).warm_s
        for call, products in zip(calls, (2, 5), strict=True)
    ]
    assert shares == pytest.approx([0.37, 0.25], rel=0.05)
    # The model needs as many operations as before.
    by_torch, found = (step_flops(graph.at()) for graph in (traced, by_triton))
    assert found == by_torch


@pytest.mark.parametrize("cells", [{"model": "Parrot-9000"}, {"source": "a blog"}])
def test_a_row_that_qualifies_but_has_no_builder_counts_against_the_share_mapped(
    cells: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert outcome(cells, monkeypatch, tmp_path).outcome == "unmapped"


def test_uneven_placements_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = {**ROW, "source": "Pollux OSDI21 artifact", "model": "ResNet-18", "gpu": "T4"}
    row = parsed("t", 2, {**cells, "placement": "1+3+3", "gpus": "7", "nodes": "3"})
    monkeypatch.setattr(GraphStore, "graph", lambda *_: None)
    question = mapping._question(row, source_of(row.cells), GraphStore(tmp_path))
    assert question.allocation == "1x1:t4-g4dn+2x3:t4-g4dn"


def test_throughput_in_tokens_is_turned_into_the_time_of_an_accumulated_step() -> None:
    cells = {
        **{key: value for key, value in ROW.items() if key != "step_time_s"},
        "source": "NVIDIA DeepLearningExamples",
        "model": "PyTorch/LanguageModeling/Transformer-XL",
        "gpus": "8",
        "parallelism": "ddp",
        "local_batch": "4",
        "throughput": "49152",
        "throughput_unit": "tokens/s",
        "notes": "table=Large model",
    }
    row = parsed("t", 2, source_of(cells).complete(cells))
    # wt103_large.yaml: 128 samples of 384 tokens a step, so 4 micro-batches of 4 on each of 8 GPUs.
    assert row.step.accumulation_steps == 4
    assert row.step.step_time_s == pytest.approx(128 * 384 / 49152)


def test_models_have_as_many_parameters_as_was_published() -> None:
    # torchvision's resnet50; params= of llm-foundry's row MPT-125m, sequence 2048.
    image_model, _, _ = resnet(2, blocks=(3, 4, 6, 3))
    assert sum(p.numel() for p in image_model.parameters()) == 25_557_032
    settings = {"width": 768, "heads": 12, "layers": 12, "hidden": 3072, "biased": True}
    model, _, _ = decoder(1, length=2048, vocabulary=50368, **settings)
    assert sum(p.numel() for p in model.parameters()) == 125_311_488


def test_the_forward_part_of_a_graph_has_nothing_of_the_backward_pass() -> None:
    import torch

    graph = est.trace_model(nn.Linear(64, 32), torch.randn(8, 64), target="cuda")
    part = forward_only(graph)
    assert 0 < len(part.ops) < len(graph.ops)
    answer = est.estimate(part, "1x1:v100-sxm")
    assert answer.breakdown.forward_s > 0
    assert answer.breakdown.backward_s == 0


def small_model(batch: int, width: int) -> tuple[nn.Module, Any, None]:
    import torch

    return nn.Linear(width, 1024), torch.randn(batch, width), None


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[mapping.Question]:
    """Twelve rows of a small model, each measured at twice what the engine says."""
    monkeypatch.setattr("published.graphs.BUILDERS", {"small_model": __name__})
    spec = ModelSpec.of("small", "small_model", width=4096)
    source = Source(pattern="", workload=lambda row: Workload(spec=spec, precision="fp32"))
    monkeypatch.setattr(mapping, "SOURCES", (source,))
    graphs, found = GraphStore(tmp_path), []
    for line, batch in enumerate(range(1024, 1024 * 13, 1024), start=2):
        cells = {**ROW, "local_batch": str(batch)}
        answer = est.estimate(
            graphs.graph(spec, "fp32", "adamw"), "1x1:v100-sxm", batch_per_gpu=batch
        )
        row = parsed("t", line, {**cells, "step_time_s": str(2 * answer.step_time_s)})
        found.append(mapping._question(row, source, graphs))
    return found


def test_cold_cases_stand_beside_what_was_measured(questions: list[mapping.Question]) -> None:
    cases = list(cold_cases(questions))
    assert [case["status"] for case in cases] == ["ok"] * 12
    assert [case["measured_s"] / case["predicted_s"] for case in cases] == pytest.approx([2] * 12)


def test_calibrated_cases_are_those_not_observed_and_learn_from_the_others(
    questions: list[mapping.Question],
) -> None:
    cases = list(calibrated_cases(questions, draws=2))
    # 12 rows less 8 observed, twice.
    assert len(cases) == 8
    for draw in range(2):
        assert len({case["id"] for case in cases if case["draw"] == draw}) == 4
    assert all(abs(case["predicted_s"] / case["measured_s"] - 1) < 0.1 for case in cases)


def test_too_few_rows_give_no_calibrated_case(questions: list[mapping.Question]) -> None:
    assert list(calibrated_cases(questions[:8])) == []


def test_the_naive_line_is_three_forward_passes_at_a_share_of_the_peak(
    questions: list[mapping.Question],
) -> None:
    case = next(naive_cases(questions))
    # 1024 rows by 4096 by 1024, two operations each; the peak of V100 in fp32 is 15.7 TFLOP/s.
    flops = 3 * 2 * 1024 * 4096 * 1024
    assert case["predicted_s"] == pytest.approx(flops / (0.4 * 15.7e12), rel=0.02)


def test_the_constant_width_covers_eight_in_ten() -> None:
    # Off by factors e^0.1 … e^1.0: the 80 % quantile of 0.1 … 1.0 is 0.82.
    cases = [
        {"predicted_s": 1.0, "measured_s": math.exp(k / 10), "low_s": 1.0, "high_s": 1.0}
        for k in range(1, 11)
    ]
    width = math.exp(0.82)
    expected = [
        (width - 1 / width + 10 * max(math.exp(k / 10) - width, 0)) / math.exp(k / 10)
        for k in range(1, 11)
    ]
    assert constant_score_ratio(cases) == pytest.approx(sum(expected) / 10)


def test_a_source_says_which_of_its_rows_do_not_qualify_before_they_are_parsed() -> None:
    cells = {**ROW, "source": "NVIDIA DeepLearningExamples", "model": "efficientnet-quant-b0"}
    with pytest.raises(NotQualified, match="simulated quantisation"):
        source_of(cells).complete(cells)


def judged_case(line: int, measured_s: float, method: str = "cold") -> dict[str, Any]:
    """A row of llm-foundry on 8 GPUs, predicted at 1 s, between 0.8 and 1.25."""
    return {
        "id": f"llm_foundry:{line}/{method}",
        "source": "MosaicML llm-foundry",
        "method": method,
        "nodes": 1,
        "ranks": 8,
        "predicted_s": 1.0,
        "low_s": 0.8,
        "high_s": 1.25,
        "measured_s": measured_s,
        "global_batch": 8,
    }


def test_sources_are_summed_up_by_method_then_cold_by_place() -> None:
    # |1 / 1.25 − 1| = 20 %.
    whole, naive, place = summaries([judged_case(7, 1.25), judged_case(7, 1.0, "naive")])
    assert whole.group == {"source": "MosaicML llm-foundry", "method": "cold"}
    assert whole.median_ratio == pytest.approx(0.2)
    assert naive.median_ratio == 0.0
    assert place.group["place"] == "one node"


def test_rows_are_counted_by_what_became_of_them() -> None:
    found = [
        Verdict(table="t", source="S", line=2, outcome="mapped"),
        Verdict(table="t", source="S", line=3, outcome="unmapped", reason="it is old"),
        Verdict(table="t", source="S", line=4, outcome="not_qualified", reason="it is old"),
    ]
    assert counted(found) == [["S", "t", "3", "2", "1 (50 %)", "it is old"]]


KNOWN = KnownRow(
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
        known, bound = GraphStructure.of(rank), rank.at()
        begin = sum(op.phase == "forward" for op in rank.ops)
        ranks = np.array([len(bound.specs[root].shape) for root in known.roots])
        of_blocks = (known.kinds == "activation") & (ranks >= 2)
        of_blocks &= (known.born < begin) & (known.dies >= begin)
        return int(known.storage_bytes(bound)[of_blocks].sum())

    assert kept(3) - kept(2) == pytest.approx(34 * length * batch * width / tp, rel=0.03)


def test_an_allocation_is_of_whole_nodes() -> None:
    assert KNOWN.allocation == "3x8:dgx-1"
    assert replace(KNOWN, gpus=4).allocation == "1x4:dgx-1"
    assert replace(KNOWN, machine="dgx-2", gpus=16).allocation == "1x16:dgx-2"


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


GIB = 1 << 30
GROUP = Group("s", "cluster", "all_reduce", "fp16", 2, 4, {GIB: 0.1, 2 * GIB: 0.2, 4 * GIB: 0.4})


def test_the_names_of_one_cluster_are_joined(tmp_path: Path) -> None:
    header = "source,system,collective,dtype,nodes,ranks,size_bytes,time_us"
    rows = [
        "e,1 node x 2 GPU Perlmutter,all_reduce,fp16,1,2,1024,10",
        "e,8 node x 1 GPU Perlmutter,all_reduce,fp16,8,8,1024,50",
        "e,2 node x 1 GPU Perlmutter,send_recv,fp16,2,2,1024,50",
    ]
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([header, *rows]))
    groups = read_groups(path)
    assert {group.system for group in groups} == {"Perlmutter"}
    assert [group.points for group in groups] == [
        {1024: pytest.approx(10e-6)},
        {1024: pytest.approx(50e-6)},
    ]


def test_sizes_are_predicted_from_every_other_size() -> None:
    (case,) = cases_of("sizes", [GROUP])
    assert case["size_bytes"] == 2 * GIB
    # A line through what was kept: 2 × 0.1 s; what NCCL takes to start is nothing beside that.
    assert case["predicted_s"] == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize(
    ("split", "nodes", "ranks", "allowed"),
    [
        ("devices", 2, 2, True),
        ("devices", 2, 4, False),
        ("devices", 1, 1, False),
        ("nodes", 2, 4, False),
        ("nodes", 1, 2, False),
    ],
)
def test_a_split_learns_from_smaller_groups_only(
    split: str, nodes: int, ranks: int, allowed: bool
) -> None:
    assert teaches(split, replace(GROUP, nodes=nodes, ranks=ranks), GROUP) is allowed


def test_more_nodes_are_predicted_from_fewer_that_crossed_the_network() -> None:
    assert teaches("nodes", GROUP, replace(GROUP, nodes=4, ranks=8))
    assert not teaches("nodes", replace(GROUP, dtype="fp32"), replace(GROUP, nodes=4, ranks=8))


def test_a_system_is_judged_by_a_fit_to_the_others() -> None:
    # Two systems whose times are what the formula says with k = 1 and with k = 2.
    shape = ("vTrain", "1x 8-GPU A100 node"), ("aiconfigurator", "a100_sxm")
    sizes = (1 << 20, 1 << 24, 1 << 26)
    groups = []
    for (source, system), pipelining in zip(shape, (1.0, 2.0), strict=True):
        blank = Group(source, system, "all_reduce", "fp16", 1, 8, dict.fromkeys(sizes, 1.0))
        (asked,) = asked_of([blank])
        times = asked.seconds(pipelining).tolist()
        groups.append(replace(blank, points=dict(zip(sizes, times, strict=True))))
    found = {case["system"]: case["pipelining"] for case in cases_of_systems(groups)}
    assert found == {"1x 8-GPU A100 node": pytest.approx(2.0), "a100_sxm": pytest.approx(1.0)}


def asked_a2(op: CollectiveName, *known: Group) -> Asked:
    """16 MiB over four A100 of the profiler that times calls, beside what else is known."""
    target = Group(TIMES_CALLS, "GCP a2 (A100-40GB)", op, "fp16", 1, 4, {16 << 20: 1e-3})
    (asked,) = asked_of([target, *known])
    return asked


def test_a_timed_call_has_the_hosts_work_as_another_system_shows_it() -> None:
    # Two other devices take 100 µs and 1 µs per MB. A start is 7.9 µs, a hop 1.05: two and one.
    points = {size: 100e-6 + size * 1e-12 for size in (1 << 20, 4 << 20, 16 << 20)}
    kernels_us: dict[CollectiveName, float] = {"all_reduce": 10.0, "all_gather": 8.95}
    for op, kernel_us in kernels_us.items():
        other = Group(TIMES_CALLS, "other", op, "fp16", 1, 2, points)
        assert asked_a2(op, other).call_s * 1e6 == pytest.approx(100 - kernel_us)
        assert asked_a2(op).call_s == 0.0


def test_a_timed_call_copies_its_lists() -> None:
    # Read and written at 0.8 of 1555 GB/s.
    gathered = asked_a2("all_gather")
    kernel_s = float(replace(gathered, copy_s_per_byte=0.0).seconds(1.0)[0])
    assert float(gathered.seconds(1.0)[0]) - kernel_s == pytest.approx(2 * (16 << 20) / 1244e9)
    assert asked_a2("all_reduce").copy_s_per_byte == 0.0
