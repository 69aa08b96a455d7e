"""What an allocation waits for its devices and its nodes, predicted without a run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import estimator as est
from estimator.cli.console import rendered
from estimator.errors import StrategyError
from estimator.estimates.request import EstimateRequest
from estimator.machines.profile import MachineProfile
from estimator.report.plans import predicted_sections
from estimator.report.sections import Section
from estimator.units import format_ratio
from estimator.waits.predicted import PredictedStalls, predict_stalls
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([512, 1024, 512], batch=64)
PLAIN = Machine(devices=4, rank_jitter_ratio=0.0)


def predicted(
    text: str, profile: MachineProfile, *, against: str | None = None, strategy: str = "ddp"
) -> PredictedStalls:
    request = EstimateRequest.of(GRAPH, text, strategy=strategy, profile=profile)
    return predict_stalls(request, against=against)


def printed(sections: list[Section]) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(rendered(sections))
    return console.export_text()


def step_s(text: str, profile: MachineProfile) -> float:
    return est.estimate(GRAPH, text, profile=profile).step_time_s


def test_stalls_are_differences_of_steps_over_the_step_of_a_node() -> None:
    profile = PLAIN.profile()
    found = predicted("3x2:m", profile)
    device_s, node_s, all_s = (step_s(text, profile) for text in ("1x1:m", "1x2:m", "3x2:m"))
    assert (found.one_device, found.one_node) == ("1x1:m", "1x2:m")
    assert found.interconnect.stall_s == pytest.approx(node_s - device_s)
    assert found.interconnect.ratio == pytest.approx((node_s - device_s) / node_s)
    assert found.network.stall_s == pytest.approx(all_s - node_s)
    # Six times as long is a stall of 500 %.
    assert found.network.ratio == pytest.approx(all_s / node_s - 1)
    assert found.network.low_s < found.network.stall_s < found.network.high_s


def test_a_step_may_wait_for_nothing_but_not_for_less() -> None:
    # The links of a node are the slow ones: of 1.75 sizes of the gradients that eight ranks wait
    # for (2 (n - 1) / n), 1.5 are those of four, and their error is larger than the rest.
    slow = replace(PLAIN, bandwidth_bytes_per_s=1e8, latency_s=2e-4, network_bytes_per_s=1e9)
    network = predicted("2x4:m", slow.profile()).network
    assert network.low_s == 0.0
    assert network.high_s > 2 * network.stall_s > 0.0


def test_the_host_stall_is_what_one_device_waits_for_its_host() -> None:
    host = predicted("3x2:m", PLAIN.profile()).host
    alone = est.estimate(GRAPH, "1x1:m", profile=PLAIN.profile())
    assert host.stall_s == alone.breakdown.host_exposed_s
    assert host.ratio == pytest.approx(host.stall_s / alone.step_time_s)


def test_a_delay_of_every_byte_on_the_network_is_the_stall() -> None:
    # Where computing cannot go on beside a collective, all of it is waited for: over two nodes of
    # one device a ring sends each byte once, so that 1 ns a byte more is 1 ns a byte of gradients.
    gradient_bytes = sum(parameter.spec.nbytes for parameter in GRAPH.parameters)
    found = []
    for rate in (1e8, 1 / (1 / 1e8 + 1e-9)):
        machine = replace(PLAIN, exposed_ratio=1.0, slowdown_ratio=1.0, network_bytes_per_s=rate)
        network = predicted("2x1:m", machine.profile()).network
        found.append(network.stall_s)
    assert found[1] - found[0] == pytest.approx(gradient_bytes * 1e-9, rel=1e-6)


def test_one_device_waits_for_none_and_one_node_for_no_other() -> None:
    alone = predicted("1x1:m", PLAIN.profile())
    assert (alone.interconnect, alone.network) == (None, None)
    node = predicted("1x4:m", PLAIN.profile())
    assert node.interconnect is not None
    assert node.network is None
    assert node.node_s == node.step_s


def test_two_small_nodes_are_measured_against_one_large_one() -> None:
    profile = PLAIN.profile()
    found = predicted("2x2:m", profile, against="1x4:m")
    assert found.one_node == "1x4:m"
    assert found.network.stall_s == pytest.approx(
        step_s("2x2:m", profile) - step_s("1x4:m", profile)
    )


def test_shares_of_stalls_are_of_the_step_they_lengthen_and_beside_it_of_the_step_of_a_node() -> (
    None
):
    profile = PLAIN.profile()
    lines = printed(predicted_sections(predicted("3x2:m", profile))).splitlines()
    device_s, node_s, all_s = (step_s(text, profile) for text in ("1x1:m", "1x2:m", "3x2:m"))
    inside, across = (node_s - device_s) / node_s, (all_s - node_s) / node_s
    shares = {line.split()[1]: re.findall(r"[-0-9.]+ %", line) for line in lines if ":m  " in line}
    assert len(shares["host"]) == 1, "a node's step is not what one device waits in"
    assert shares["interconnect"] == [format_ratio(inside)] * 2
    assert shares["network"] == [format_ratio((all_s - node_s) / all_s), format_ratio(across)]
    assert any("of its step" in line and "of a node's step" in line for line in lines)


def test_a_strategy_that_a_node_cannot_divide_is_refused() -> None:
    with pytest.raises(StrategyError, match="shards over 4 ranks"):
        predicted("2x2:m", PLAIN.profile(), strategy="fsdp:shard=4")


SMALL = """
import torch

def mlp(batch=4):
    return torch.nn.Linear(512, 512), torch.randn(batch, 512)
"""


def test_the_command_prints_stalls_and_gives_them_as_json(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    (tmp_path / "models.py").write_text(SMALL)
    asked = ("stalls", f"{tmp_path}/models.py:mlp", "--on", "2x4:v100-p3-8xlarge")
    answer = command(*asked)
    assert (answer.code, answer.err) == (0, "")
    for word in ("interconnect", "network", "1x4:v100-p3-8xlarge", "times as long"):
        assert word in answer.out
    found = json.loads(command(*asked, "--json", "--strategy", "fsdp").out)
    assert found["step_s"] == pytest.approx(found["node_s"] + found["network"]["stall_s"])
    assert found["one_device"] == "1x1:v100-p3-8xlarge"
