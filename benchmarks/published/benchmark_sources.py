"""Describe the sources that published step times of reference implementations on servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from estimator.calibrate.observation_files import Row
from published.graphs import KNOWN, ModelSpec
from published.language_sources import bert, megatron_gpt
from published.machines import Setting
from published.rows import NotMapped, NotQualified, PublishedRow
from published.sources import Mapper, Source, Workload, by_model, needs_pytorch

# Tokens of a sentence of WMT English-German. Batches given in tokens follow from it.
_SENTENCE: int = KNOWN["specs"]["GNMT v2"]["length"]
_TRANSFORMER_XL = KNOWN["transformer_xl"]
_TRANSFORMER_XL_BATCH = {"Base": 256, "Large": 128}
# What MLPerf's BERT computes of its 512 tokens where padding is left out: assumed. Not in v0.7,
# assumed too, after its two rows were seen to take twice what half of the tokens would.
_UNPADDED_RATIO = 0.5


def precision_of(text: str, *, narrow: str = "fp16-amp") -> str:
    """The engine's name of a precision; `narrow` is what the source means by half precision."""
    plain = text.lower()
    if "bf16" in plain:
        return "bf16-amp"
    if "16" in plain:
        return narrow
    # NGC's builds of torch multiply matrices in TF32 where the GPU has it; where it has not, the
    # engine computes TF32 at the rate of float32.
    return "tf32"


def _trained(
    model: str | Callable[[PublishedRow], ModelSpec],
    *remarks: str,
    optimizer: str = "adam",
    narrow: str = "fp16-amp",
    masters: bool = False,
    setting: Callable[[PublishedRow], Setting | None] = lambda row: None,
) -> Mapper:
    """What maps a row to a model; `masters` are fp32 weights beside those in half precision."""

    def workload(row: PublishedRow) -> Workload:
        precision = precision_of(row.step.precision, narrow=narrow)
        return Workload(
            spec=ModelSpec.known(model) if isinstance(model, str) else model(row),
            precision=precision,
            optimizer=optimizer,
            strategy="ddp:master" if masters and precision == "fp16" else "ddp",
            setting=setting(row),
            remarks=remarks,
        )

    return workload


def _bert(head: str, size: str | None = None, length: int = 384) -> Callable[..., ModelSpec]:
    """BERT of a size, by default that of the row's model, under a head."""

    def spec(row: PublishedRow) -> ModelSpec:
        named = "large" if "large" in row.step.model.lower() else "base"
        return bert(size or named, head, row.seq_len or length)

    return spec


# Batches where the table has none, by half precision and float32. ResNets: those for DGX1V in
# PyTorch/Classification/ConvNets/configs.yml of NVIDIA/DeepLearningExamples (other machines there
# have others). EfficientNets, which that file lacks: assumed, half of it on 16 GB.
_BATCHES: Mapping[str, tuple[int, int]] = {
    "resnet50": (256, 112),
    "se-resnext101-32x4d": (112, 64),
    "resnext101-32x4d": (128, 64),
    "efficientnet-widese-b0": (256, 128),
    "efficientnet-widese-b4": (64, 32),
    "efficientnet-b0": (256, 128),
    "efficientnet-b4": (64, 32),
}


def _dle_cells(cells: Row) -> Row:
    """Batches of convolutional networks, and what the throughput of other models counts."""
    model, precision = cells.get("model", ""), cells.get("precision", "")
    if "quant" in model:
        raise NotQualified("it trains with simulated quantisation")
    if "mel-scale" in cells.get("throughput_unit", ""):
        raise NotMapped(f"no builder for the model {model}")
    if "Transformer-XL" in model:
        return _transformer_xl_cells(cells)
    if "GNMT" in model:
        # Tokens of both languages are counted.
        return {**cells, "seq_len": str(2 * _SENTENCE)}
    if "Jasper" in model:
        return {**cells, "throughput_unit": "samples/s"}
    if "Translation/Transformer" in model:
        return _token_batch(cells, re.search(r"batch_cell=(\d+)/(\d+)", cells.get("notes", "")))
    if "local_batch" in cells or "global_batch" in cells:
        return cells
    for name, (narrow, wide) in _BATCHES.items():
        if name in model:
            batch = narrow if "16" in precision else wide
            if "V100-16GB" in cells.get("gpu", "") and "efficientnet" in name:
                batch //= 2
            return {**cells, "local_batch": str(batch)}
    raise NotMapped("its batch size is not known")


def _transformer_xl_cells(cells: Row) -> Row:
    """Gradients are accumulated up to the batch of the launch configuration."""
    size = "Base" if "Base" in cells.get("notes", "") else "Large"
    gpus, local_batch = int(cells["gpus"]), int(cells["local_batch"])
    full = 512 if "8x NVIDIA" in cells.get("notes", "") else _TRANSFORMER_XL_BATCH[size]
    steps = max(full // (gpus * local_batch), 1)
    return {
        **cells,
        "seq_len": str(_TRANSFORMER_XL[size]["length"]),
        "grad_accum": str(steps),
        "global_batch": str(gpus * local_batch * steps),
    }


def _token_batch(cells: Row, batches: re.Match[str] | None) -> Row:
    """A batch given in tokens, as sentences; of two the larger is that of half precision."""
    text = cells.get("local_batch")
    if batches is not None:
        text = batches[1] if "16" in cells.get("precision", "") else batches[2]
    if text is None:
        raise NotMapped("its batch size is not known")
    sentences = round(float(text) / _SENTENCE)
    filled = {key: value for key, value in cells.items() if key != "global_batch"}
    return {**filled, "local_batch": str(sentences), "seq_len": str(_SENTENCE)}


def _dle_machine(row: PublishedRow) -> Setting:
    """DGX-1 and DGX-2 by the size of the node, DGX A100 by its memory."""
    gpu, size = row.step.gpu, row.text("gpus_per_node")
    if "V100" in gpu:
        if size == "16":
            return Setting(machine="dgx-2")
        return Setting(machine="dgx-1-32gb" if "32" in gpu else "dgx-1")
    if "A100" in gpu:
        return Setting(machine="dgx-a100-80gb" if "80" in gpu else "dgx-a100")
    return Setting()


_dle_model = partial(_trained, setting=_dle_machine)


def _dle_bert(row: PublishedRow) -> Workload:
    """apex O2 in half precision: fp32 master weights; pre-training updates by LAMB."""
    pretrained = "Pre-training" in row.text("notes")
    spec = _bert("PreTraining" if pretrained else "QuestionAnswering", "large")
    optimizer = "lamb" if pretrained else "adam"
    return _dle_model(spec, optimizer=optimizer, narrow="fp16", masters=True)(row)


def _dle_convolutions(model: str) -> Mapper:
    assumed = "EfficientNet" in model
    source = "assumed" if assumed else "of NVIDIA's launch configuration for DGX-1"

    def workload(row: PublishedRow) -> Workload:
        found = _dle_model(model, optimizer="sgd-momentum")(row)
        return replace(
            found,
            # In half precision that configuration asks for memory_format: nhwc.
            spec=replace(found.spec, channels_last=found.precision == "fp16-amp"),
            # A row without a batch has no step time of its own either.
            remarks=() if "step_time_s" in row.cells else (f"batch {source}",),
        )

    return workload


def _transformer_xl(row: PublishedRow) -> ModelSpec:
    size = "Base" if "Base" in row.text("notes") else "Large"
    more = {"vocabulary": 267735, "head": 20000, "tail_ratio": 0.05, "head_dim": 64}
    name = f"Transformer-XL {size.lower()}"
    return ModelSpec.of(name, "transformer_xl", **more, **_TRANSFORMER_XL[size])


def _unet(row: PublishedRow) -> ModelSpec:
    if row.notes.get("Dimension") == "2":
        return ModelSpec.of("nnU-Net 2D", "unet", patch=(192, 160), most_channels=512)
    return ModelSpec.of("nnU-Net 3D", "unet", patch=(128, 128, 128), most_channels=320)


_PADDED = "utterances taken as 13 s long"
_SENTENCES = f"sentences taken as {_SENTENCE} tokens long"
_dle = by_model(
    ("se-resnext101", _dle_convolutions("SE-ResNeXt-101")),
    ("resnext101", _dle_convolutions("ResNeXt-101")),
    ("resnet50", _dle_convolutions("ResNet-50")),
    ("efficientnet-b0$", _dle_convolutions("EfficientNet-B0")),
    ("efficientnet-b4$", _dle_convolutions("EfficientNet-B4")),
    ("efficientnet-widese-b0$", _dle_convolutions("EfficientNet-WideSE-B0")),
    ("efficientnet-widese-b4$", _dle_convolutions("EfficientNet-WideSE-B4")),
    ("LanguageModeling/BERT", _dle_bert),
    ("Transformer-XL", _dle_model(_transformer_xl, "5 % of the words taken as rare")),
    ("Jasper", _dle_model("Jasper 10x5", _PADDED)),
    ("QuartzNet", _dle_model("QuartzNet 15x5", _PADDED)),
    ("NCF", _dle_model("NCF")),
    ("GNMT", _dle_model("GNMT v2", _SENTENCES)),
    ("Translation/Transformer", _dle_model("Transformer big", _SENTENCES)),
    ("nnUNet", _dle_model(_unet)),
    ("Detection/SSD", _dle_model("SSD300 ResNet-50", optimizer="sgd-momentum")),
)


def _infiniband(rate: re.Match[str] | None) -> Setting:
    """A network of some cards, each of some Gbit/s, where a row says so."""
    if rate is None:
        return Setting()
    bits_per_s = float(rate[1]) * float(rate[2]) * 1e9
    source = "column interconnect"
    return Setting(network="infiniband", network_bit_per_s=bits_per_s, source=source)


def _network(interconnect: str) -> Setting:
    """The network for computing in MLPerf's descriptions: cards times rate, where it says so."""
    described = interconnect.partition("net:")[2]
    compute = re.search(r"Compute:(.*)", described)
    text = compute[1] if compute else described
    return _infiniband(re.search(r"(\d+) ?x .*?(?:HDR|EDR|NDR)\d* ?(\d+) ?Gb", text))


_BY_HAND = "kernels fused by hand are taken as torch.compile fuses them"


def _mlperf(row: PublishedRow) -> Workload:
    """Submissions, whose kernels are the fastest of their day; ResNet-50 is MXNet's but for two."""
    model, framework = row.step.model.lower(), row.text("framework_version").lower()
    setting = _network(row.text("interconnect"))
    if "resnet-50" in model:
        if "pytorch v" not in framework:
            raise NotQualified("it was measured with MXNet, whose kernels are its own")
        return Workload(
            spec=ModelSpec.known("ResNet-50"),
            precision="fp16-amp",
            optimizer="sgd-momentum",
            setting=setting,
        )
    if "bert" in model:
        length, remarks = row.seq_len or 512, (_BY_HAND,)
        if "v0." not in row.step.source:
            length = round(length * _UNPADDED_RATIO)
            remarks = (_BY_HAND, "half of the 512 tokens taken as padding that is left out")
        spec = bert("large", "PreTraining", length, attention="sdpa")
        return Workload(
            spec=replace(spec, compiled=True),
            precision="fp16",
            optimizer="adam",
            setting=setting,
            remarks=remarks,
        )
    if "retinanet" in model:
        return Workload(
            spec=replace(ModelSpec.known("RetinaNet ResNeXt50"), compiled=True, channels_last=True),
            precision="fp16-amp",
            optimizer="adam",
            setting=setting,
            remarks=(_BY_HAND,),
        )
    raise NotMapped(f"no builder for the model {row.step.model}")


def _megatron(row: PublishedRow) -> ModelSpec:
    sizes = map(int, re.findall(r"[hla](\d+)", row.step.model.lower()))
    return megatron_gpt(row.step.model, *sizes, row.seq_len)


def _stated_network(row: PublishedRow) -> Setting:
    return _infiniband(re.search(r"(\d+)x (\d+)Gb", row.text("interconnect")))


# OneFlow's and Paddle's tables of NVIDIA's reference code.
_reference = partial(_trained, setting=_stated_network)
_oneflow = by_model(
    ("resnet.*50", _reference("ResNet-50", optimizer="sgd-momentum")),
    ("^transformer$", _reference("Transformer big", _SENTENCES)),
    (r"^gpt h\d+ l\d+ a\d+", _reference(_megatron, narrow="fp16")),
    ("bert", _reference(_bert("PreTraining", "base", 128), narrow="fp16")),
)
# NVIDIA's examples on single servers; BERT in half precision as `_dle_bert` has it.
_lambda = by_model(
    ("resnet-50", _trained("ResNet-50", optimizer="sgd-momentum")),
    ("bert", _trained(_bert("QuestionAnswering"), narrow="fp16", masters=True)),
)


def _token_cells(cells: Row) -> Row:
    """Paddle's Transformer is given tokens where other models are given samples."""
    if cells.get("model") == "Transformer" and cells.get("throughput_unit") == "tokens/s":
        return _token_batch(needs_pytorch(cells), None)
    return needs_pytorch(cells)


SOURCES = (
    Source(pattern="lambda", workload=_lambda),
    Source(pattern="NVIDIA DeepLearningExamples", workload=_dle, complete=_dle_cells),
    Source(pattern="mlperf", workload=_mlperf),
    Source(pattern="dlperf", workload=_oneflow, complete=needs_pytorch),
    Source(pattern="paddle", workload=_oneflow, complete=_token_cells),
    Source(pattern="alpa", workload=by_model(), complete=needs_pytorch),
    Source(pattern="cm-dare", workload=by_model(), complete=needs_pytorch),
    Source(pattern="sailor|dgxc", workload=by_model()),
)
