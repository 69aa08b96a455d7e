"""Stalls beside what was put in, and those of published networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import Record, Records
from stall_accuracy import Case, _measured, _some_of
from stall_headlines import HEADLINES, MODELS, cases_of, classifier
from stall_headlines import Case as HeadlineCase

from estimator.machines.catalogue import load_profile
from estimator.machines.typical import achieved_bytes_per_s
from estimator.timeline.collectives.algorithms import widest_link


def found(measured_s: float) -> Record:
    bounds = {"of_value": 0.10, "of_step": 0.02, "step_s": 1.0}
    return {"predicted_s": 0.5, "measured_s": measured_s, **bounds}


@pytest.mark.parametrize(("measured_s", "met"), [(0.549, True), (0.551, False), (0.449, False)])
def test_a_case_is_met_within_a_tenth_of_what_was_expected(
    tmp_path: Path, measured_s: float, met: bool
) -> None:
    records = Records(tmp_path / "records")
    assert _measured(records, "injected", Case("a", lambda: found(measured_s)))["met"] is met


def test_a_case_that_was_found_is_not_measured_again(tmp_path: Path) -> None:
    first = _measured(Records(tmp_path / "records"), "injected", Case("a", lambda: found(0.5)))
    again = Records(tmp_path / "records")
    assert _measured(again, "injected", Case("a", lambda: found(0.9))) == first


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.35, 7), (0.65, 13), (1.0, 20)])
def test_a_share_of_the_files_is_spread_over_them(ratio: float, count: int) -> None:
    files = [Path(str(number)) for number in range(20)]
    chosen = _some_of(files, ratio)
    assert len(chosen) == count
    halves = [sum(int(path.name) // 10 == half for path in chosen) for half in (0, 1)]
    assert abs(halves[0] - halves[1]) <= 1


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
    case = HeadlineCase(
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
