"""Describe the sources that published step times to judge cluster schedulers by."""

from __future__ import annotations

from dataclasses import replace

from published.graphs import ModelSpec
from published.language_sources import bert
from published.machines import Setting
from published.rows import NotMapped, PublishedRow
from published.sources import Mapper, Source, Workload, by_model, needs_pytorch

# (kernels for each gradient, bytes for each parameter) of what AdaptDL's jobs do from the backward
# pass to the next step. Its statistics of gradients (adaptdl/torch/gradient_noise_scale.py): in a
# hook, ahead of the device, the square, its sum and the sum of all (12 bytes), then two quotients
# and the same again, for which the host waits; of a single replica as much for the step before.
# Updates go tensor by tensor in torch 1.x, by 4 kernels of SGD or 9 of AdamW; clipping is 3.
_STATISTICS, _OF_THE_STEP_BEFORE = (5, 40.0), (9, 52.0)
_SGD, _ADAMW, _CLIPPING = (4, 0.0), (9, 0.0), (3, 12.0)
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
# Replicas are containers without common memory (Sia's rows take as long on one node as on two), and
# one TCP flow between containers gets some 10 Gbit/s: assumed after their rows had been seen.
_SIA_RTX = Setting(
    network="tcp",
    network_bit_per_s=10e9,
    network_ratio=1.0,
    in_containers=True,
    source="assumed: 10 Gbit/s for a TCP flow between containers, not stated",
)
# "2 DGX-A100 nodes, each with eight A100-40GB": Jayaram Subramanya et al.: Sia, SOSP 2023.
_SIA_A100 = Setting(machine="dgx-a100", source="Sia, SOSP 2023: its cluster of DGX A100")
_GAVEL = Setting(
    network="tcp", network_bit_per_s=32e9, source="assumed: 32 Gbit/s of a cloud's GPU instances"
)


def _adaptdl(row: PublishedRow) -> Workload:
    """The jobs of AdaptDL's benchmark (petuum/adaptdl, benchmark/models)."""
    model = row.step.model.lower()
    optimizer, work = "sgd-momentum", [_STATISTICS, _SGD]
    if "bert" in model:
        spec, optimizer = bert("base", "QuestionAnswering", row.seq_len or 384), "adamw"
        work = [_STATISTICS, _ADAMW, _CLIPPING]
    elif "resnet-18" in model:
        spec = ModelSpec.known("ResNet-18 CIFAR")
    elif "deepspeech2" in model:
        spec, work = ModelSpec.known("DeepSpeech2"), [*work, _CLIPPING]
    elif "resnet-50" in model:
        spec = ModelSpec.known("ResNet-50")
    else:
        raise NotMapped(f"no builder for the model {row.step.model}")
    # torch 1.7 to 1.11 multiplied matrices in TF32 by default.
    precision = "tf32" if "1.9" in row.text("framework_version") else "fp32"
    remarks = ("utterances taken as 5 s long",) if "deepspeech2" in model else ()
    if row.step.ranks == 1:
        work.append(_OF_THE_STEP_BEFORE)
    kernels, moved = (sum(each) for each in zip(*work, strict=True))
    setting = Setting(tensor_kernels=int(kernels), parameter_bytes=moved)
    return Workload(
        spec=spec, precision=precision, optimizer=optimizer, setting=setting, remarks=remarks
    )


def pollux(row: PublishedRow) -> Workload:
    return _in(_POLLUX, _adaptdl(row))


def sia(row: PublishedRow) -> Workload:
    workload = _adaptdl(row)
    if "network not stated" not in row.text("interconnect"):
        return _in(_SIA_A100, workload)
    remarks = (*workload.remarks, "network of 10 Gbit/s between containers assumed")
    return replace(_in(_SIA_RTX, workload), remarks=remarks)


def _in(network: Setting, workload: Workload) -> Workload:
    """The workload on a network, its work on gradients kept."""
    own = workload.setting
    assert own is not None
    setting = replace(
        network, tensor_kernels=own.tensor_kernels, parameter_bytes=own.parameter_bytes
    )
    return replace(workload, setting=setting)


def _job(model: str, optimizer: str = "sgd-momentum-loop") -> Mapper:
    """A job of Gavel's trace (stanford-futuredata/gavel, workloads/pytorch)."""

    def workload(row: PublishedRow) -> Workload:
        if model == "word_lstm":
            spec = ModelSpec.of("LSTM LM", model, length=row.seq_len or 35)
        else:
            spec = ModelSpec.known(model)
        return Workload(spec=spec, precision="fp32", optimizer=optimizer, setting=_GAVEL)

    return workload


_gavel = by_model(
    ("resnet-50", _job("ResNet-50")),
    ("resnet-18", _job("ResNet-18 CIFAR")),
    ("lstm", _job("word_lstm", "sgd-loop")),
    ("transformer", _job("Transformer Multi30k", "adam-loop")),
)
SOURCES = (
    Source(pattern="pollux", workload=pollux),
    Source(pattern=r"\bsia\b", workload=sia),
    Source(pattern="gavel", workload=_gavel, complete=needs_pytorch),
)
