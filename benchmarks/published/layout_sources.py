"""Describe the sources whose ranks share a language model by tensor and pipeline parallelism."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from estimator.workload.layouts import Layout
from published.language_sources import llama, llama_name, megatron_deepspeed
from published.layouts import COLUMN as LAYOUT
from published.layouts import with_layout
from published.machines import Setting
from published.rows import PublishedRow
from published.sources import Source, Workload

# Gradients are summed at the end of the step, all in one; the optimizer updates fp32 copies.
_DEEPSPEED = "ddp:bucket=1TB,master"
# Not padded; a rank has vocab_size // tensor_parallel_size of it: src/config.py and
# src/model/gpt_modeling.py of VIA-Research/vTrain.
_VTRAIN_VOCABULARY = 50257
# "inter_node_bandwidth ... 800 Gbps": src/config.py of VIA-Research/vTrain.
# Its GPUs wait for an EPYC Rome, as those of a DGX A100.
_VTRAIN = Setting(
    machine="dgx-a100-80gb",
    network="infiniband",
    network_bit_per_s=800e9,
    source="src/config.py of the simulator",
)


def _vtrain(row: PublishedRow) -> Workload:
    """Megatron-DeepSpeed's GPT, the vocabulary divided like its layers.

    Blocks are run again but for those of the last stage, which has their activations still (its
    simulator: src/predictor.py, create_layer_graph); stages have as many blocks each.
    """
    width, layers, heads = (int(row.notes[name]) for name in ("hidden", "layers", "heads"))
    layout = Layout.parse(row.text(LAYOUT) or "dp=*")
    each = max(layers // (layout.pp * layout.schedule.virtual), 1)
    starts = tuple(f"blocks.{start}" for start in range(each, layers, each))
    sizes = width, layers, heads, row.seq_len
    spec = megatron_deepspeed(row.step.model, *sizes, recomputes="block" if starts else "none")
    if starts:
        spec = replace(spec, name=f"{spec.name} but for {each}").with_settings(kept_blocks=each)
    spec = spec.with_settings(vocabulary=_VTRAIN_VOCABULARY // layout.tp * layout.tp)
    return Workload(
        spec=spec,
        precision="fp16",
        optimizer="adam-fused",
        strategy=_DEEPSPEED,
        layout=None if layout.is_data_parallel else str(replace(layout, cut=starts)),
        setting=_VTRAIN,
        remarks=("precision taken as fp16, GPUs as those of 80 GB",),
    )


def _sailor(row: PublishedRow) -> Workload:
    """OPT-350M as Megatron-DeepSpeed's GPT.

    The memory that it took is that of float32 with nothing run again; NGC's torch multiplies so in
    TF32, and Megatron's kernel for the softmax takes halves alone.
    """
    width, layers, heads = (int(size) for size in re.findall(r"[hLa](\d+)", row.step.model))
    sizes = width, layers, heads, row.seq_len
    spec = megatron_deepspeed(row.step.model, *sizes, recomputes="none")
    spec = replace(spec, name=f"{spec.name}, masked by torch", own_softmax=None)
    return Workload(
        spec=spec.with_settings(by_kernel=False),
        precision="tf32",
        optimizer="adam-fused",
        strategy="ddp:bucket=1TB",
        layout=row.text(LAYOUT) or None,
        setting=Setting(machine="gh200-alps"),
        remarks=("precision taken as TF32", "attention taken as written out"),
    )


def _dgxc(row: PublishedRow) -> Workload:
    """Llama 3.1 by NeMo, Megatron Core's layers: nothing run again, targets shifted by the loader.

    Megatron-Core and Transformer Engine fuse RoPE, SwiGLU, norms and residuals by hand, and have
    cuDNN's attention.
    """
    spec = llama(llama_name(row.step.model), row.seq_len or 8192, "no")
    spec = replace(spec, name=f"{spec.name}, shifted", compiled="blocks", attention="cudnn")
    return Workload(
        spec=spec.with_settings(shifted=True),
        precision="bf16",
        strategy="distributed-optimizer:reduce=fp32",
        layout=row.text(LAYOUT) or None,
        setting=Setting(machine="dgx-h100"),
        remarks=("kernels fused by hand are taken for those that a compiler makes of blocks",),
    )


SOURCES = (
    Source(pattern="vtrain", workload=_vtrain, complete=with_layout),
    Source(pattern="sailor", workload=_sailor, complete=with_layout),
    Source(
        pattern="dgxc", workload=_dgxc, complete=partial(with_layout, flags="sp,vocab,megatron")
    ),
)
