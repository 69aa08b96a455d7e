"""Describe the sources that published step times of language models."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from estimator.calibrate.observation_files import Row
from estimator.workload.layouts import Layout
from published.graphs import KNOWN, ModelSpec
from published.machines import Setting
from published.rows import NotMapped, PublishedRow
from published.sources import COLUMN as LAYOUT
from published.sources import Source, Workload, with_layout

LLAMA_2_VOCABULARY, LLAMA_3_VOCABULARY = 32000, 128256
# Every block, every other block, or none is run again in backward.
_RECOMPUTED = {"full": 1, "selective": 2, "no": 0}


def bert(size: str, head: str, length: int, **more: Any) -> ModelSpec:
    """BERT-base or -large under one of transformers' heads."""
    if length > 512:
        more["max_position_embeddings"] = length
    settings = {"kind": "bert", "head": head, "length": length, **more}
    return ModelSpec.sized(
        f"bert-{size} {head} {length}", "from_transformers", "bert", size, **settings
    )


def megatron_gpt(name: str, width: int, layers: int, heads: int, length: int | None) -> ModelSpec:
    """Megatron-LM's GPT, attention written out."""
    sizes = {"width": width, "heads": heads, "layers": layers, "length": length}
    how = {"biased": True, "wide_loss": True, "fused": False, "drop": 0.1}
    return ModelSpec.of(name, "decoder", **sizes, hidden=4 * width, vocabulary=50304, **how)


def megatron_deepspeed(
    name: str, width: int, layers: int, heads: int, length: int | None, *, recomputes: str
) -> ModelSpec:
    """GPT by Megatron-LM's own functions and kernels; its vocabulary is padded."""
    sizes = {"width": width, "heads": heads, "layers": layers, "length": length}
    name = f"{name} {length} {recomputes} recomputed"
    how = {"vocabulary": 51200, "recomputes": recomputes}
    spec = ModelSpec.of(name, "megatron_gpt", **sizes, **how)
    return replace(spec, own_softmax="softmax")


def _neusight(row: PublishedRow) -> Workload:
    """HF models at torch 2.1, before attention was fused there; forward alone unless `train`."""
    training = row.notes.get("mode") == "train"
    kind, length = row.step.model.lower(), row.seq_len or 0
    if "bert" in kind:
        # Its last node is a classifier of two classes.
        spec = bert("large" if "large" in kind else "base", "SequenceClassification", length)
    else:
        found = re.search(r"(gpt)-?([23]-?(?:medium|large|xl|2\.7b)?)|(opt)-?([\d.]+)b", kind)
        family, size = [each for each in found.groups() if each] if found else ("gpt", "")
        size = size.replace("-", " ").strip()
        if size not in KNOWN[family]:
            raise NotMapped(f"no builder for the model {row.step.model}")
        settings = {"head": "CausalLM", "length": length}
        settings |= {"kind": "gpt2", "n_positions": length} if family == "gpt" else {"kind": "opt"}
        name = f"{row.step.model} {length}"
        spec = ModelSpec.sized(name, "from_transformers", family, size, **settings)
    spec = replace(spec, compiled="torch.compile" in row.text("notes"))
    return Workload(
        spec=spec if training else spec.with_settings(training=False),
        precision="fp32",
        has_update=False,
    )


def mpt(size: str, length: int, *, recomputed: bool) -> ModelSpec:
    """MPT with learned positions and biases (as their parameter counts say).

    Its attention is FlashAttention in Triton: `attn_impl` of llm-foundry's yamls of 2023, and of
    scripts/train/benchmarking/submit_benchmarks.py.
    """
    name = f"mpt-{size} {length}" + (" recomputed" if recomputed else "")
    how = {"vocabulary": 50368, "biased": True, "recompute_every": int(recomputed)}
    spec = ModelSpec.sized(name, "decoder", "mpt", size, length=length, **how)
    return replace(spec, attention="triton")


def _llm_foundry(row: PublishedRow) -> Workload:
    """MPT, refused where activations are offloaded."""
    size = row.step.model.lower().removeprefix("mpt-")
    if size not in KNOWN["mpt"]:
        raise NotMapped(f"no builder for the model {row.step.model}")
    if row.notes.get("act_offload") == "True":
        raise NotMapped("its activations are offloaded to the CPU, which the engine does not model")
    spec = mpt(size, row.seq_len or 2048, recomputed=row.notes.get("act_ckpt") == "True")
    rate = re.search(r"with (\d+) ?Gbps.*?(RoCE|InfiniBand)?\)", row.text("notes"))
    setting = Setting(
        network="roce" if rate and rate[2] == "RoCE" else "infiniband",
        network_bit_per_s=float(rate[1]) * 1e9 if rate else None,
        source="section of the table",
    )
    # Both mixed-precision policies keep fp32 shards, gather and compute in bf16; DEFAULT sums
    # gradients in float32, PURE in bf16 (Composer's FSDP guide).
    reduced = "bf16" if "mp=PURE" in row.text("parallelism") else "fp32"
    strategy = f"fsdp:param=bf16,reduce={reduced}"
    return Workload(spec=spec, precision="bf16", strategy=strategy, setting=setting)


def llama(name: str, length: int, recompute: str) -> ModelSpec:
    """A Llama whose blocks are recomputed "full", "selective" (half of them) or "no"."""
    vocabulary = LLAMA_3_VOCABULARY if "llama-3" in name else LLAMA_2_VOCABULARY
    return ModelSpec.sized(
        f"{name} {length} {recompute} recomputation",
        "decoder",
        "llama",
        name,
        length=length,
        vocabulary=vocabulary,
        tied=False,
        wide_loss=True,
        recompute_every=_RECOMPUTED[recompute],
    )


def by_operator(spec: ModelSpec) -> ModelSpec:
    """Selective checkpoints as torchtitan's train_configs/llama3_8b.toml has them: 'op'."""
    return replace(spec.with_settings(recompute_every=0), checkpoint="selective:op")


def _recomputation(notes: str) -> str:
    if re.search(r"selective ac", notes, re.IGNORECASE):
        return "selective"
    return "full" if re.search(r"full ac", notes, re.IGNORECASE) else "no"


_SELECTIVE = "selective checkpointing is taken as recomputing every other block"


def _remarks(notes: str) -> tuple[str, ...]:
    return (_SELECTIVE,) if _recomputation(notes) == "selective" else ()


def _torchtitan_cells(cells: Row) -> Row:
    kind = re.match(r"fsdp|hsdp", cells.get("parallelism", ""))
    return with_layout(cells, flags="sp,vocab", data_parallel=kind[0] if kind else "dp")


def llama_name(model: str) -> str:
    found = re.search(r"llama(?:[- ](\d)(?:\.\d)?)?[- ](\d+)b", model, re.IGNORECASE)
    generation = "llama-3" if found and found[1] == "3" else "llama"
    name = f"{generation}-{found[2]}b" if found else ""
    if name not in KNOWN["llama"]:
        raise NotMapped(f"no builder for the model {model}")
    return name


def _torchtitan(row: PublishedRow) -> Workload:
    """Llama 3 by FSDP2: parameters gathered in bf16, gradients summed in float32."""
    notes = row.text("notes")
    recompute = _recomputation(notes)
    spec = llama(llama_name(row.step.model), row.seq_len or 8192, recompute)
    if recompute == "selective":
        spec = by_operator(spec)
    spec = replace(
        spec,
        compiled="blocks" if "compile" in notes else False,
        float8="tensorwise" if "float8" in row.step.precision else None,
    )
    odd = "2.4TB/s" in row.step.gpu
    setting = Setting(
        network="infiniband",
        network_bit_per_s=8 * 400e9,
        memory_bytes_per_s=2.4e12 if odd else None,
        power_w=500.0 if "500W" in row.step.gpu else None,
        source="columns gpu and interconnect",
    )
    return Workload(
        spec=spec,
        precision="bf16",
        strategy=_sharded(row, "param=bf16,reduce=fp32"),
        layout=row.text(LAYOUT) or None,
        setting=setting,
    )


def _sharded(row: PublishedRow, dtypes: str) -> str:
    sharded = re.match(r"fsdp|hsdp|zero[-_ ]?3", row.step.strategy)
    return f"fsdp:{dtypes}" if sharded else row.step.strategy


def _fms_fsdp(row: PublishedRow) -> Workload:
    notes = f"{row.text('notes')};{row.text('framework_version')}"
    spec = llama(llama_name(row.step.model), row.seq_len or 4096, _recomputation(notes))
    # Its loss takes logits in bf16 (fms_fsdp/utils/train_utils.py).
    spec = replace(spec, compiled="compile" in notes).with_settings(wide_loss=False)
    rate = re.search(r"(\d+) ?Gb/s per node", row.text("interconnect"))
    setting = Setting(
        network="infiniband",
        network_bit_per_s=float(rate[1]) * 1e9 if rate else None,
        source="column interconnect",
    )
    hybrid = ("hybrid sharding is taken as full sharding",) if "hsdp" in row.step.strategy else ()
    return Workload(
        spec=spec,
        precision="bf16",
        # Its policy "bfSixteen" casts float32 shards, and reduces in bf16 too.
        strategy="fsdp:param=bf16,reduce=bf16",
        setting=setting,
        remarks=(*_remarks(notes), *hybrid),
    )


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
    Source(pattern="neusight", workload=_neusight),
    Source(pattern="llm-foundry", workload=_llm_foundry),
    Source(pattern="torchtitan", workload=_torchtitan, complete=_torchtitan_cells),
    Source(pattern="fms-fsdp", workload=_fms_fsdp),
    Source(pattern="vtrain", workload=_vtrain, complete=with_layout),
    Source(pattern="sailor", workload=_sailor, complete=with_layout),
    Source(
        pattern="dgxc", workload=_dgxc, complete=partial(with_layout, flags="sp,vocab,megatron")
    ),
)
