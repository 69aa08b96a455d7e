"""Which link holds a job back, and how fast it would have to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.advise.scaling import Scaling, scaling_of, sweep
from estimator.cli.request import Request
from estimator.coefficients import Coefficients
from tests.synthetic import Machine, perceptron, with_every_collective

GRAPH = perceptron([1000, 2048, 1000], batch=512)
MACHINE = Machine(devices=1, latency_s=1e-6, network_latency_s=1e-6, network_bytes_per_s=1e8)


def scaled(answer: est.Estimate) -> Scaling:
    found = scaling_of(answer)
    assert found is not None
    return found


def test_the_needed_bandwidth_gives_the_wanted_efficiency() -> None:
    answer = est.estimate(GRAPH, "4x1:m", profile=MACHINE.profile())
    found = scaled(answer)
    assert found.efficiency_ratio < 0.9
    assert found.link == "the network of 'synthetic'"
    assert found.link_bytes_per_s == 1e8
    assert found.needed_bytes_per_s is not None
    enough = replace(MACHINE, network_bytes_per_s=found.needed_bytes_per_s).profile()
    again = scaled(est.estimate(GRAPH, "4x1:m", profile=enough))
    assert again.efficiency_ratio == pytest.approx(0.9, rel=1e-3)


def test_where_latency_holds_a_job_back_no_bandwidth_is_named() -> None:
    slow = replace(MACHINE, network_latency_s=0.5).profile()
    found = scaled(est.estimate(GRAPH, "4x1:m", profile=slow))
    assert found.needed_bytes_per_s is None


def test_ranks_of_one_node_have_no_bottleneck_link() -> None:
    profile = Machine(devices=2).profile()
    found = scaled(est.estimate(GRAPH, "1x2:m", profile=profile))
    assert found.link == ""
    assert found.needed_bytes_per_s is None
    assert found.efficiency_ratio < 1


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_sharded_update_does_not_scale_better_than_linearly(strategy: str) -> None:
    alone_is_all = replace(MACHINE, network_latency_s=1e-9, network_bytes_per_s=1e14)
    profile = with_every_collective(alone_is_all.profile())
    graph = perceptron([1000, 2048, 1000], batch=4)
    asked: dict[str, Any] = {"profile": profile, "strategy": strategy}
    alone, four = (est.estimate(graph, text, **asked) for text in ("1x1:m", "4x1:m"))
    # The update, 12 ms of it a rank's share, is most of a device's step of 4 samples.
    assert alone.step_time_s > four.step_time_s
    # Launching takes 10 µs on every rank, the rest is divided by four.
    update_s = alone.breakdown.update_s
    linear_s = alone.step_time_s - update_s + 1e-5 + (update_s - 1e-5) / 4
    found = scaled(four)
    assert found.efficiency_ratio == pytest.approx(linear_s / four.step_time_s)
    assert 0.5 < found.efficiency_ratio < 1
    rows = sweep(("1x1:m", "4x1:m"), lambda text: est.estimate(graph, text, **asked))
    assert rows[0].efficiency_ratio == 1
    assert rows[1].efficiency_ratio == pytest.approx(found.efficiency_ratio)


def test_nested_groups_scale_against_a_device_that_shares_nothing() -> None:
    profile = with_every_collective(replace(MACHINE, devices=2).profile())
    found = est.estimate(GRAPH, "2x2:m", strategy="fsdp:shard=2", profile=profile)
    alone = est.estimate(GRAPH, "1x1:m", profile=profile).breakdown
    # Launching the update takes 10 µs on every rank, the rest is divided by two.
    linear_s = alone.total_s - alone.update_s + 1e-5 + (alone.update_s - 1e-5) / 2
    scaling = scaled(found)
    assert scaling.efficiency_ratio == pytest.approx(linear_s / found.step_time_s)
    # Ranks with the same shard form a ring each, so two share the network of a node.
    assert scaling.link == "1/2 of the network of 'synthetic'"
    assert scaling.link_bytes_per_s == 1e8 / 2


class TwiceAsSlow:
    """A calibration by which computing and updating take twice as long everywhere."""

    def coefficients_for(self, questions: Sequence[Any], *_: Any) -> list[Coefficients]:
        return [Coefficients(compute_ratio=2.0, update_ratio=2.0) for _ in questions]


def test_a_calibrated_answer_is_compared_with_a_calibrated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    MACHINE.profile().save(tmp_path / "machines" / "m.json")
    request = Request(model="m", calibration=TwiceAsSlow())
    alone, four = (request.estimate(GRAPH, text) for text in ("1x1:m", "4x1:m"))
    found = scaled(four)
    assert found.against == "1x1:m"
    assert found.efficiency_ratio == pytest.approx(alone.step_time_s / four.step_time_s)
    rows = sweep(("1x1:m", "4x1:m"), lambda text: request.estimate(GRAPH, text))
    assert rows[1].efficiency_ratio == pytest.approx(found.efficiency_ratio)
