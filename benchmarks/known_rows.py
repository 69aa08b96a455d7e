"""List published step times with the recipe that each was measured with, and where it stands.

Every figure is quoted from its source; what a source leaves open is in the remark of its rows.
Where a source gives only floating-point operations a second, the step follows by its own count.
Left out: torchtitan's rows in float8 and with context parallelism; llm-foundry's with
transformer-engine's FP8.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from published.graphs import ModelSpec
from published.language_sources import LLAMA, bert, by_operator, llama, megatron_deepspeed, mpt
from published.machines import Setting
from published.scheduler_sources import RESNET50
from published.sources import layout_text

from estimator.units import GIB

# Half of the rows, drawn with this seed, are not asked while anything is being tuned.
SEED = 20261122


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """A published answer: seconds of a step, or only that it did not fit (None).

    `evaluations_per_step` are forward passes that the source's clock counts beside a step.
    """

    source: str
    spec: ModelSpec
    machine: str
    gpus: int
    batch_per_gpu: int
    step_time_s: float | None
    precision: str
    optimizer: str = "adamw"
    strategy: str = "ddp"
    layout: str | None = None
    accumulation_steps: int = 1
    setting: Setting | None = None
    scales_loss: bool = False
    clips_gradients: bool = False
    evaluations_per_step: float = 0.0
    remark: str = ""

    @property
    def id(self) -> str:
        compiled = ", compiled" if self.spec.compiled else ""
        where = f"{self.gpus} x {self.machine}, batch {self.batch_per_gpu}"
        layout = re.sub(r",cut=[^,]*", "", self.layout or "")
        where += f", {layout} x {self.accumulation_steps}" if layout else ""
        return f"{self.spec.name}{compiled}, {self.precision}, {where}"

    @property
    def allocation(self) -> str:
        """As the engine reads it: whole nodes, but for less than one."""
        per_node = 16 if self.machine == "dgx-2" else 8
        nodes = max(self.gpus // per_node, 1)
        return f"{nodes}x{self.gpus // nodes}:{self.machine}"


def known_rows() -> tuple[KnownRow, ...]:
    """All of them, in the order of their sources."""
    sources = (_karpathy, _raschka, _torchtitan, _fms_fsdp, _foundry, _bert, _resnet, _tinyllama)
    return tuple(row for source in sources for row in source())


def unseen(rows: tuple[KnownRow, ...]) -> frozenset[str]:
    """The ids of the half that is kept for the last run."""
    return frozenset(random.Random(SEED).sample(sorted(row.id for row in rows), k=len(rows) // 2))


def _gpt2(name: str, *, vocabulary: int = 50257, **settings: object) -> ModelSpec:
    return ModelSpec.of(
        f"GPT-2 124M {name}".strip(),
        "decoder",
        width=768,
        heads=12,
        layers=12,
        length=1024,
        hidden=3072,
        vocabulary=vocabulary,
        **settings,
    )


def _karpathy() -> Iterator[KnownRow]:
    """Karpathy, Let's reproduce GPT-2 (124M), 2024: the chapters of the lecture name the times."""
    row = partial(
        KnownRow,
        source="Karpathy, Let's reproduce GPT-2",
        machine="a100-sxm-80gb",
        gpus=1,
        batch_per_gpu=16,
        remark="batch of 16 as in the lecture; attention written out until 'flash attention'",
    )
    eager = _gpt2("eager", biased=True, fused=False, mask="copy")
    flash = replace(_gpt2("flash", biased=True), compiled=True)
    padded = replace(_gpt2("flash, padded", vocabulary=50304, biased=True), compiled=True)
    yield row(spec=eager, precision="fp32", step_time_s=1.000)
    yield row(spec=eager, precision="tf32", step_time_s=0.333)
    yield row(spec=eager, precision="bf16-amp", step_time_s=0.300)
    yield row(spec=replace(eager, compiled=True), precision="bf16-amp", step_time_s=0.130)
    yield row(spec=flash, precision="bf16-amp", step_time_s=0.096)
    yield row(spec=padded, precision="bf16-amp", step_time_s=0.093)


def _raschka() -> Iterator[KnownRow]:
    """rasbt/LLMs-from-scratch, ch05/10_llm-training-speed: tokens/s after each change, on A100."""
    row = partial(
        KnownRow,
        source="LLMs-from-scratch",
        precision="bf16",
        optimizer="adamw-fused",
        # Its clock is read every 15 steps, before two batches are evaluated.
        evaluations_per_step=2 / 15,
        remark="loaders that start anew for each evaluation are left out",
    )
    settings = {"tied": False, "drop": 0.1}
    eager = _gpt2("untied", fused=False, mask="in place", **settings)
    flash = _gpt2("untied, flash", **settings)
    padded = replace(_gpt2("untied, flash, padded", vocabulary=50304, **settings), compiled=True)
    for spec, gpus, batch, tokens_per_s in (
        (eager, 1, 8, 55256),
        (flash, 1, 8, 91901),
        (replace(flash, compiled=True), 1, 8, 112046),
        (padded, 1, 8, 127345),
        (padded, 1, 32, 142156),
        (padded, 4, 32, 419259),
    ):
        yield row(
            spec=spec,
            # Its prompt is that of Lambda's cloud, where one A100 is SXM, and four are on PCIe.
            machine="a100-sxm-40gb" if gpus == 1 else "a100-pcie-40gb",
            gpus=gpus,
            batch_per_gpu=batch,
            step_time_s=gpus * batch * 1024 / tokens_per_s,
        )


# "96GB HBM2e with 2.4 TB/sec", "the default 500W power limit", "400 Gb/s per GPU".
_GRAND_TETON = Setting(
    memory_bytes=96 * GIB,
    network="infiniband",
    network_bit_per_s=8 * 400e9,
    memory_bytes_per_s=2.4e12,
    power_w=500.0,
    source="benchmarks/llama3_h100_202412_torchtitan.md",
)


def _torchtitan() -> Iterator[KnownRow]:
    """pytorch/torchtitan: docs/performance.md of 2024, benchmarks/llama3_h100_202412."""
    row = partial(
        KnownRow,
        source="torchtitan",
        precision="bf16",
        strategy="fsdp:param=bf16,reduce=fp32",
        clips_gradients=True,
    )
    for name, length, recompute, batch, tokens_per_s in (
        ("llama-3-8b", 8192, "selective", 1, 2904),
        ("llama-3-70b", 8192, "full", 1, 331),
        ("llama-13b", 4096, "no", 2, 2162),
        ("llama-13b", 4096, "selective", 2, 1914),
        ("llama-70b", 4096, "full", 2, 353),
        # "The 70B training with local batch size 2 will cause an OOM error when selective".
        ("llama-70b", 4096, "selective", 2, None),
    ):
        yield row(
            spec=llama(name, length, recompute),
            machine="a100-sxm-80gb",
            gpus=64,
            batch_per_gpu=batch,
            step_time_s=tokens_per_s and batch * length / tokens_per_s,
        )
    # train_configs/llama3_8b.toml: selective_ac_option 'op'; blocks are compiled one by one.
    selective = by_operator(llama("llama-3-8b", 8192, "selective"))
    for gpus, compiled, tokens_per_s in (
        (8, False, 5762),
        (8, "blocks", 6667),
        (128, False, 5605),
        (128, "blocks", 6514),
    ):
        yield row(
            spec=replace(selective, compiled=compiled),
            machine="h100-sxm",
            gpus=gpus,
            batch_per_gpu=2,
            step_time_s=2 * 8192 / tokens_per_s,
            setting=_GRAND_TETON,
        )


def _fms_fsdp() -> Iterator[KnownRow]:
    """foundation-model-stack/fms-fsdp, README of early 2024: tokens/s of each of 128 A100."""
    for name, recompute, batch, tokens_per_s in (
        ("llama-7b", "no", 2, 3760),
        ("llama-13b", "no", 1, 1700),
        ("llama-34b", "full", 8, 772),
        ("llama-70b", "full", 6, 380),
    ):
        yield KnownRow(
            source="fms-fsdp",
            # Its loss takes logits in bf16 (fms_fsdp/utils/train_utils.py).
            spec=llama(name, 4096, recompute).with_settings(wide_loss=False),
            machine="a100-sxm-80gb",
            gpus=128,
            batch_per_gpu=batch,
            step_time_s=batch * 4096 / tokens_per_s,
            precision="bf16",
            strategy="fsdp:param=bf16,reduce=bf16",
            setting=Setting(
                network="infiniband", network_bit_per_s=400e9, source="later version of the README"
            ),
            clips_gradients=True,
            remark="hybrid sharding taken as full sharding",
        )


def _foundry() -> Iterator[KnownRow]:
    """mosaicml/llm-foundry, scripts/train/benchmarking: H100 80GB BF16, eight GPUs, tokens/s."""
    for size, length, batch, accumulation, recomputed, tokens_per_s in (
        ("30b", 2048, 3, 21, True, 16022),
        ("13b", 4096, 10, 3, True, 37740),
        ("13b", 2048, 2, 1, False, 38336),
        ("7b", 8192, 8, 2, True, 55481),
        ("7b", 4096, 16, 2, True, 68893),
        ("7b", 2048, 6, 1, False, 85144),
        ("3b", 4096, 5, 6, False, 167712),
        ("3b", 1024, 20, 6, False, 216369),
        ("3b", 512, 40, 6, False, 223721),
        ("1b", 4096, 7, 4, False, 308282),
        ("1b", 2048, 14, 1, False, 363645),
        ("1b", 1024, 18, 4, False, 391287),
        ("760m", 2048, 24, 2, False, 505177),
        ("760m", 1024, 48, 2, False, 628648),
    ):
        yield KnownRow(
            source="llm-foundry",
            spec=mpt(size, length, recomputed=recomputed),
            machine="h100-sxm",
            gpus=8,
            batch_per_gpu=batch,
            accumulation_steps=accumulation,
            step_time_s=8 * batch * accumulation * length / tokens_per_s,
            precision="bf16",
            # MP mode DEFAULT: fp32 shards, gathered in bf16, sums in fp32 (Composer's FSDP guide).
            strategy="fsdp:param=bf16,reduce=fp32",
            clips_gradients=True,
            remark="DecoupledAdamW taken as AdamW",
        )


def _bert() -> Iterator[KnownRow]:
    """NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, NGC 19.07: sequences/s."""
    pretrain, tune = partial(bert, "large", "PreTraining"), bert("large", "QuestionAnswering", 384)
    for machine, spec, gpus, batch, precision, sequences_per_s in (
        ("dgx-1", pretrain(128), 1, 16, "fp16", 125.44),
        ("dgx-1", pretrain(128), 8, 16, "fp16", 919.04),
        ("dgx-1", pretrain(512), 1, 4, "fp16", 26.64),
        ("dgx-1", pretrain(512), 8, 2, "fp32", 56.16),
        ("dgx-1", tune, 1, 10, "fp16", 45.2),
        ("dgx-1", tune, 8, 10, "fp16", 327.2),
        ("dgx-2", pretrain(128), 16, 64, "fp16", 2775.04),
        ("dgx-2", pretrain(512), 1, 4, "fp32", 9.0),
    ):
        yield KnownRow(
            source="DeepLearningExamples BERT",
            spec=spec,
            machine=machine,
            gpus=gpus,
            batch_per_gpu=batch,
            step_time_s=gpus * batch / sequences_per_s,
            precision=precision,
            optimizer="lamb" if spec is not tune else "adam",
            # apex O2: a model in half with fp32 master weights, and a scaled loss.
            strategy="ddp:master" if precision == "fp16" else "ddp",
            scales_loss=precision == "fp16",
            clips_gradients=spec is tune,
        )


def _resnet() -> Iterator[KnownRow]:
    """NVIDIA/DeepLearningExamples, resnet50v1.5, NGC 21.03: images/s at the batches of configs."""
    nhwc = replace(RESNET50, channels_last=True)
    for machine, spec, gpus, batch, precision, images_per_s in (
        ("dgx-a100-80gb", RESNET50, 1, 256, "tf32", 938),
        ("dgx-a100-80gb", nhwc, 1, 256, "fp16-amp", 2470),
        ("dgx-a100-80gb", RESNET50, 8, 256, "tf32", 7248),
        ("dgx-a100-80gb", nhwc, 8, 256, "fp16-amp", 16621),
        ("dgx-1", RESNET50, 1, 112, "fp32", 367),
        ("dgx-1", nhwc, 8, 256, "fp16-amp", 8322),
    ):
        yield KnownRow(
            source="DeepLearningExamples ResNet-50",
            spec=spec,
            machine=machine,
            gpus=gpus,
            batch_per_gpu=batch,
            step_time_s=gpus * batch / images_per_s,
            precision=precision,
            optimizer="sgd-momentum",
        )


def _tinyllama() -> Iterator[KnownRow]:
    """jzhang38/TinyLlama, README: 24k tokens/s of each of 16 A100-40G, 16k tokens on each."""
    spec = ModelSpec.of(
        "TinyLlama 1.1B 2048",
        "decoder",
        width=2048,
        heads=32,
        layers=22,
        length=2048,
        hidden=5632,
        key_heads=4,
        vocabulary=32000,
        tied=False,
        wide_loss=True,
    )
    yield KnownRow(
        source="TinyLlama",
        spec=replace(spec, compiled=True),
        machine="a100-sxm-40gb",
        gpus=16,
        batch_per_gpu=8,
        step_time_s=8 * 2048 / 24000,
        precision="bf16",
        strategy="fsdp:param=bf16,reduce=bf16",
        clips_gradients=True,
        remark="its fused kernels are taken as torch.compile fuses",
    )


_LENGTH, _VOCABULARY = 2048, 51200
# NVIDIA Selene: DGX A100 80GB, 8 InfiniBand HDR cards each.
_SELENE = "dgx-a100-80gb"


class _Gpt(NamedTuple):
    width: int
    layers: int
    heads: int

    def flops(self, samples: int) -> float:
        """Of a step in which every block is run again: equation 3 of Narayanan et al., 2021."""
        blocks = 96 * samples * _LENGTH * self.layers * self.width**2
        more = _LENGTH / (6 * self.width) + _VOCABULARY / (16 * self.layers * self.width)
        return blocks * (1 + more)


# Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC21), table 1.
_GPTS: Mapping[str, _Gpt] = {
    "1.7B": _Gpt(2304, 24, 24),
    "3.6B": _Gpt(3072, 30, 32),
    "7.5B": _Gpt(4096, 36, 32),
    "18.4B": _Gpt(6144, 40, 48),
    "22B": _Gpt(6144, 48, 64),
    "39.1B": _Gpt(8192, 48, 64),
    "76.1B": _Gpt(10240, 60, 80),
    "145.6B": _Gpt(12288, 80, 96),
    "175B": _Gpt(12288, 96, 96),
    "310.1B": _Gpt(16384, 96, 128),
    "529.6B": _Gpt(20480, 105, 128),
    "1008B": _Gpt(25600, 128, 160),
}


def known_layout_rows() -> tuple[KnownRow, ...]:
    """All of them, in the order of their sources."""
    sources = (_recomputation, _megatron, _ptd, _turing, _llama)
    return tuple(row for source in sources for row in source())


def _gpt(
    size: str, gpus: int, samples: int, micro_batch: int, tp: int, pp: int, *, virtual: int = 1,
    recomputes: str = "block", flags: str = "vocab",
) -> partial[KnownRow]:  # fmt: skip
    """A row of Megatron-LM on Selene but for its source and its seconds."""
    degrees = {"tp": tp, "pp": pp, "vp": virtual}
    return partial(
        KnownRow,
        spec=megatron_deepspeed(f"GPT {size}", *_GPTS[size], _LENGTH, recomputes=recomputes),
        machine=_SELENE,
        gpus=gpus,
        batch_per_gpu=micro_batch,
        accumulation_steps=samples * tp * pp // (gpus * micro_batch),
        precision="fp16",
        optimizer="adam-fused",
        strategy="ddp:bucket=1TB,view,master",
        layout=layout_text(degrees, flags=flags) or None,
        scales_loss=True,
        clips_gradients=True,
    )


def _recomputation() -> Iterator[KnownRow]:
    """Korthikanti et al., Reducing Activation Recomputation (2022), tables 3 and 5: seconds."""
    for size, gpus, micro_batch, pp, virtual, full_s, selective_s in (
        ("22B", 8, 4, 1, 1, 1.42, 1.10),
        ("175B", 64, 1, 8, 3, 18.13, 13.75),
        ("529.6B", 280, 1, 35, 3, 49.05, 37.83),
        ("1008B", 512, 1, 64, 1, 94.42, 71.49),
    ):
        samples = 4 if size == "22B" else gpus
        row = partial(_gpt, size, gpus, samples, micro_batch, 8, pp, virtual=virtual)
        source = "Reducing Activation Recomputation"
        yield row(flags="vocab,megatron")(source=source, step_time_s=full_s)
        yield row(recomputes="core", flags="sp,vocab,megatron")(
            source=source, step_time_s=selective_s
        )


def _megatron() -> Iterator[KnownRow]:
    """Its degrees; micro-batches and schedules as in the authors' examples/sc21/run_table_1.sh."""
    for size, tp, pp, virtual, micro_batch, gpus, samples, tera_per_s in (
        ("1.7B", 1, 1, 1, 16, 32, 512, 137),
        ("3.6B", 2, 1, 1, 16, 64, 512, 138),
        ("7.5B", 4, 1, 1, 16, 128, 512, 142),
        ("18.4B", 8, 1, 1, 8, 256, 1024, 135),
        ("39.1B", 8, 2, 1, 4, 512, 1536, 138),
        ("76.1B", 8, 4, 3, 2, 1024, 1792, 140),
        ("145.6B", 8, 8, 2, 2, 1536, 2304, 148),
        ("310.1B", 8, 16, 2, 1, 1920, 2160, 155),
        ("529.6B", 8, 35, 3, 1, 2520, 2520, 163),
        ("1008B", 8, 64, 1, 1, 3072, 3072, 163),
    ):
        yield _gpt(size, gpus, samples, micro_batch, tp, pp, virtual=virtual)(
            source="Megatron-LM SC21, table 1",
            step_time_s=_GPTS[size].flops(samples) / (gpus * tera_per_s * 1e12),
        )


def _ptd() -> Iterator[KnownRow]:
    """Table 2 of the same paper: tensor parallel in nodes of 8, micro-batches of 1."""
    for size, pp, gpus, samples, tera_per_s in (
        ("175B", 12, 384, 1536, 153),
        ("175B", 12, 768, 1536, 149),
        ("175B", 12, 1536, 1536, 141),
        ("529.6B", 35, 560, 2240, 171),
        ("529.6B", 35, 1120, 2240, 167),
        ("529.6B", 35, 2240, 2240, 159),
    ):
        yield _gpt(size, gpus, samples, 1, 8, pp)(
            source="Megatron-LM SC21, table 2",
            step_time_s=_GPTS[size].flops(samples) / (gpus * tera_per_s * 1e12),
        )


def _turing() -> Iterator[KnownRow]:
    """Smith et al., Megatron-Turing NLG 530B (2022), section 2.3: 280, 350 and 420 servers."""
    for nodes, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        yield _gpt("529.6B", 8 * nodes, 1920, 1, 8, 35)(
            source="Megatron-Turing NLG", step_time_s=seconds
        )


def _llama() -> Iterator[KnownRow]:
    """Llama Team, The Llama 3 Herd of Models (2024), table 4: BF16 TFLOPs of each H100."""
    sizes = LLAMA["llama-3-405b"]
    length, tokens = 8192, 2048 * 8192
    # Section 3.3.2: the first stage has the embedding alone, the last one the output and the loss.
    cut = "+".join([*(f"blocks.{block}" for block in range(sizes["layers"])), "norm"])
    layout = layout_text({"tp": 8, "pp": 16, "vp": 8}, flags="sp,vocab,megatron")
    flops = tokens * (6 * 405e9 + 6 * sizes["layers"] * sizes["width"] * length)
    for gpus, each, tera_per_s in ((8192, 32, 430), (16384, 16, 400)):
        yield KnownRow(
            source="The Llama 3 Herd of Models",
            spec=replace(llama("llama-3-405b", length, "no"), name="llama-3-405b 8192"),
            machine="h100-sxm",
            gpus=gpus,
            batch_per_gpu=1,
            accumulation_steps=each,
            step_time_s=flops / (gpus * tera_per_s * 1e12),
            precision="bf16",
            strategy="fsdp:reduce=fp32,no_reshard",
            layout=f"{layout},cut={cut}",
            setting=Setting(network="roce", network_bit_per_s=8 * 400e9, source="section 3.3.1"),
            remark="its overlaps are taken as Megatron-LM's, its operations as 6 a parameter and "
            "attention",
        )
