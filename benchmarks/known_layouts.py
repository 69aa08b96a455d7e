"""List published step times of models that ranks share by tensor and pipeline parallelism.

Every figure is quoted from its source; where that gives only floating-point operations a second,
the step follows by the source's own count of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from known_rows import KnownRow
from published.language_sources import LLAMA, llama, megatron_deepspeed
from published.layouts import layout_text
from published.machines import Setting

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
