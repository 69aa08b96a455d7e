"""The CNNs of Stash are the published ones, and the K80s hold them back as measured there."""

from __future__ import annotations

import pytest
from stall_headlines import HEADLINES, Case, cases_of
from zoo.vision import MODELS, classifier

from estimator.machines.catalogue import load_profile
from estimator.machines.typical import achieved_bytes_per_s
from estimator.timeline.collectives.algorithms import widest_link

# Parameters of torchvision's models without weights, as its documentation lists them.
PARAMETERS = {
    "alexnet": 61_100_840,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet-v2": 3_504_872,
    "vgg11": 132_863_336,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    model, _, _ = classifier(name, 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_four_k80s_share_a_port_through_host_memory() -> None:
    profile = load_profile("k80-p2")
    links = [widest_link(profile, devices) for devices in (2, 8, 16)]
    rates = [achieved_bytes_per_s(link) for link in links if link is not None]
    # 16 lanes of 8 GT/s, 128 bits in 130: 15.75 GB/s, of which NCCL gets 12, halved on a board.
    port = 16 * 8e9 * 128 / 130 / 8 * 0.76
    assert rates == pytest.approx([port / 2, port / 4, port / 4], rel=1e-3)


def test_alexnet_on_sixteen_k80s_waits_for_most_of_its_step() -> None:
    low, high = HEADLINES["interconnect_ratio"]
    first = cases_of("alexnet")[0]
    assert low <= first.interconnect_ratio <= high
    # 244 MB at 1.25 GB/s take 195 ms: no exchange over that network is within six steps.
    assert first.least_slowdown > HEADLINES["slowdown"][1]


def test_copies_of_both_steps_make_the_slow_down_less() -> None:
    case = Case(
        model="m",
        batch_per_gpu=100,
        node_s=0.030,
        nodes_s=0.330,
        interconnect_ratio=0.0,
        slowdown=11.0,
        least_slowdown=6.0,
    )
    # 100 images of 602,112 bytes at 6.02112 GB/s take 10 ms more of each.
    assert case.slowdown_with_copies(6.02112e9) == pytest.approx(0.340 / 0.040)
