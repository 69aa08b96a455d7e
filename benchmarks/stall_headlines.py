"""Predict the communication stalls that Stash measured on AWS, from datasheets alone.

Five of its CNNs on 224-pixel images, fp16-amp with a
gradient scaler, SGD with momentum, one overlapped all-reduce per tensor (Sharma et al., Stash,
ICDCS 2023: "up to 90 %" of a step on 16 K80 of one node, "up to 5x" on two p3.8xlarge against one
p3.16xlarge). Beside them the batches of Stash's released script for two p3.8xlarge, with its copies
of every batch from pageable memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from options import Options
from records import say
from torch import nn
from zoo.convolutional import Labelled, mobilenet_layers, residual_layers, vgg_layers
from zoo.inputs import Built, labelled_images

import estimator as est
from estimator.estimates.request import EstimateRequest
from estimator.waits.predicted import PredictedStalls, predict_stalls

BATCHES = (32, 64, 128)
STRATEGY = "ddp:unbucketed"
# github.com/aakash-sharma/DS-Analyzer, scripts/run_p3.8x_dist.sh and tool/synthetic_data.py; a core
# fills the pinned buffers of a pageable copy at 3 to 6 GB/s (5.4 GB/s: Harris, "How to Optimize
# Data Transfers in CUDA C/C++", NVIDIA 2012).
RELEASED = {"alexnet": 256, "resnet18": 128}
IMAGE_BYTES, PAGEABLE_BYTES_PER_S = 4 * 3 * 224 * 224, (6e9, 3e9)
NODE, NODES, ONE_NODE = "1x16:k80-p2", "2x4:v100-p3-8xlarge", "1x8:v100-p3"


def alexnet_layers() -> list[nn.Module]:
    """AlexNet on one tower (Krizhevsky 2014), as torchvision publishes it."""
    layers: list[nn.Module] = []
    channels = 3
    for width, size, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(channels, width, size, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
        channels = width
    layers.append(nn.Flatten())
    for inputs in (256 * 6 * 6, 4096):
        layers += [nn.Dropout(), nn.Linear(inputs, 4096), nn.ReLU(inplace=True)]
    return [*layers, nn.Linear(4096, 1000)]


_MOBILENET_V2 = 32, (16, 24, 32, 64, 96, 160, 320), 1280
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "alexnet": alexnet_layers,
    "resnet18": lambda: residual_layers((2, 2, 2, 2), classes=1000, basic=True),
    "resnet50": lambda: residual_layers((3, 4, 6, 3), classes=1000),
    "mobilenet-v2": lambda: mobilenet_layers(*_MOBILENET_V2, classes=1000),
    "vgg11": lambda: vgg_layers((1, 1, 2, 2, 2)),
}


def classifier(name: str, batch: int) -> Built:
    """One of `MODELS` with its loss on 224-pixel images, no weights allocated."""
    with torch.device("meta"):
        model = Labelled(nn.Sequential(*MODELS[name]())).train()
    return model, labelled_images(224, 1000, "images")(batch), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model at one batch: its interconnect stall on the K80s, its slow-down on two nodes.

    `least_slowdown` is what the network's line rate alone allows: each of two nodes receives all
    gradients of the other once, beside compute or after it.
    """

    model: str
    batch_per_gpu: int
    node_s: float
    nodes_s: float
    interconnect_ratio: float
    slowdown: float
    least_slowdown: float

    def slowdown_with_copies(self, bytes_per_s: float) -> float:
        """The slow-down where each batch is first copied at a rate, beside nothing else."""
        copy_s = self.batch_per_gpu * IMAGE_BYTES / bytes_per_s
        return (self.nodes_s + copy_s) / (self.node_s + copy_s)


HEADLINES = {"interconnect_ratio": (0.70, 0.95), "slowdown": (3.0, 6.0)}


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Stalls and slow-downs of every model, then the worst of each beside its headline."""
    every = [case for name in MODELS if options.takes(name) for case in cases_of(name)]
    cases = [case for case in every if case.batch_per_gpu in BATCHES]
    for case in cases:
        name = f"{case.model}, batch {case.batch_per_gpu}"
        yield {"id": f"{name}: stall on 16 K80", "value": case.interconnect_ratio}
        yield {"id": f"{name}: slower on two nodes", "value": case.slowdown, **asdict(case)}
    for name, (low, high) in HEADLINES.items():
        worst = max(getattr(case, name) for case in cases)
        yield {"id": f"worst {name}", "value": worst, "least": low, "bound": high}
    for case in every:
        if RELEASED.get(case.model) == case.batch_per_gpu:
            for rate in PAGEABLE_BYTES_PER_S:
                name = f"{case.model}, released script, copies at {rate / 1e9:g} GB/s"
                yield {"id": f"{name}: slower", "value": case.slowdown_with_copies(rate)}


def cases_of(name: str) -> list[Case]:
    """The cases of one model, traced once."""
    say(f"{name}: tracing")
    model, batch, loss = classifier(name, BATCHES[0])
    graph = est.trace_model(
        model,
        batch,
        loss=loss,
        optimizer="sgd-momentum",
        precision="fp16-amp",
        target="cuda",
        grad_scaler=True,
        name=name,
    )
    gradient_bytes = sum(parameter.spec.nbytes for parameter in graph.parameters)
    sizes = dict.fromkeys((*BATCHES, RELEASED.get(name, BATCHES[-1])))
    return [_case(graph, gradient_bytes, size) for size in sizes]


def _case(graph: est.OpGraph, gradient_bytes: int, size: int) -> Case:
    request = EstimateRequest.of(graph, NODE, batch_per_gpu=size, strategy=STRATEGY)
    node: PredictedStalls = predict_stalls(request)
    nodes = predict_stalls(request.changed(allocation=NODES), against=ONE_NODE)
    assert node.interconnect is not None
    (network,) = est.load_profile("v100-p3-8xlarge").network
    return Case(
        model=graph.name,
        batch_per_gpu=size,
        node_s=nodes.node_s,
        nodes_s=nodes.step_s,
        interconnect_ratio=node.interconnect.ratio,
        slowdown=nodes.step_s / nodes.node_s,
        least_slowdown=gradient_bytes / network.bandwidth_bytes_per_s / nodes.node_s,
    )
