"""Describe the sources that published step times to judge cluster schedulers by."""

from __future__ import annotations

from dataclasses import replace

from published.graphs import ModelSpec
from published.language_sources import bert
from published.machines import Setting
from published.rows import NotMapped, PublishedRow
from published.sources import Source, Workload, needs_pytorch

RESNET18_CIFAR = ModelSpec.of("ResNet-18 CIFAR", "cifar_resnet18")
RESNET50 = ModelSpec.of("ResNet-50", "resnet", blocks=(3, 4, 6, 3))
DEEPSPEECH2 = ModelSpec.of("DeepSpeech2", "deepspeech2", frames=500, characters=60)
# jadore801120/attention-is-all-you-need-pytorch: its defaults; sentences of Multi30k have some 15
# words, a batch is padded to its longest.
MULTI30K = ModelSpec.of(
    "Transformer Multi30k",
    "translator",
    width=512,
    heads=8,
    hidden=2048,
    layers=6,
    length=25,
    vocabulary=9500,
    shared=True,
)
# Networks that the sources do not state in their tables.
# Of the 50 Gbit/s one TCP flow gets 5 between instances outside a placement group (Amazon EC2 User
# Guide, "EC2 instance network bandwidth"). That these jobs were bound by one flow is not stated: it
# was assumed after their rows had shown links far below 50 Gbit/s.
_POLLUX = Setting(
    machine="t4-g4dn",
    network="tcp",
    network_bit_per_s=5e9,
    # The limit is one of bytes, headers included: 8,949 of 9,015 at the jumbo frames of EC2.
    network_ratio=0.99,
    source="Amazon EC2 user guide, instance network bandwidth: 5 Gbit/s for one flow",
)
_SIA_RTX = Setting(
    network="tcp", network_bit_per_s=50e9, source="assumed: 50 Gbit/s Ethernet, not stated"
)
_GAVEL = Setting(
    network="tcp", network_bit_per_s=32e9, source="assumed: 32 Gbit/s of a cloud's GPU instances"
)


def adaptdl(row: PublishedRow) -> Workload:
    """The jobs of AdaptDL's benchmark (petuum/adaptdl, benchmark/models)."""
    model = row.step.model.lower()
    if "bert" in model:
        spec, optimizer = bert("base", "QuestionAnswering", row.seq_len or 384), "adamw"
    elif "resnet-18" in model:
        spec, optimizer = RESNET18_CIFAR, "sgd-momentum"
    elif "deepspeech2" in model:
        spec, optimizer = DEEPSPEECH2, "sgd-momentum"
    elif "resnet-50" in model:
        spec, optimizer = RESNET50, "sgd-momentum"
    else:
        raise NotMapped(f"no builder for the model {row.step.model}")
    # torch 1.7 to 1.11 multiplied matrices in TF32 by default.
    precision = "tf32" if "1.9" in row.text("framework_version") else "fp32"
    remarks = ("utterances taken as 5 s long",) if spec is DEEPSPEECH2 else ()
    return Workload(spec=spec, precision=precision, optimizer=optimizer, remarks=remarks)


def _pollux(row: PublishedRow) -> Workload:
    return replace(adaptdl(row), setting=_POLLUX)


def _sia(row: PublishedRow) -> Workload:
    workload = adaptdl(row)
    if "network not stated" not in row.text("interconnect"):
        return workload
    return replace(
        workload, setting=_SIA_RTX, remarks=(*workload.remarks, "network of 50 Gbit/s assumed")
    )


def _gavel(row: PublishedRow) -> Workload:
    """The jobs of Gavel's trace (stanford-futuredata/gavel, workloads/pytorch)."""
    model = row.step.model.lower()
    if "resnet-50" in model:
        spec, optimizer = RESNET50, "sgd-momentum"
    elif "resnet-18" in model:
        spec, optimizer = RESNET18_CIFAR, "sgd-momentum"
    elif "lstm" in model:
        spec, optimizer = ModelSpec.of("LSTM LM", "word_lstm", length=row.seq_len or 35), "sgd"
    elif "transformer" in model:
        spec, optimizer = MULTI30K, "adam"
    else:
        raise NotMapped(f"no builder for the model {row.step.model}")
    return Workload(spec=spec, precision="fp32", optimizer=optimizer, setting=_GAVEL)


SOURCES = (
    Source(pattern="pollux", workload=_pollux),
    Source(pattern=r"\bsia\b", workload=_sia),
    Source(pattern="gavel", workload=_gavel, complete=needs_pytorch),
)
