"""The network that a table states sets the prior of inter-node communication, if known."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration.machine_priors import priors_of

from estimator.calibrate.observation_files import MeasuredStep
from estimator.calibrate.performance_model import WEAK_PRIORS


@pytest.fixture(autouse=True)
def only_shipped_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))


def inter_node(gpu: str, interconnect: str, gpus_per_node: int | None = 8) -> float | None:
    """The median of the network's prior over that of the weak one; None where none is derived."""
    step = MeasuredStep(
        line=2,
        source="s",
        gpu=gpu,
        model="m",
        precision="fp32",
        strategy="ddp",
        variant=(),
        node_sizes=(1,),
        batch_per_gpu=8,
        accumulation_steps=1,
        step_time_s=1.0,
        gpus_per_node=gpus_per_node,
        interconnect=interconnect,
    )
    priors = priors_of(step)
    weak = WEAK_PRIORS.by_name["inter_node"]
    return priors and priors.by_name["inter_node"].median / weak.median


def test_the_weak_prior_is_that_of_t4_on_50_gbit_ethernet() -> None:
    # 8.1e12 operations over 0.75 of 6.25e9 B/s are 1,728 for each byte.
    assert inter_node("T4", "PCIe; 50GbE", 4) == pytest.approx(1728 / 1750)


def test_a_network_that_is_named_without_its_rate_is_that_of_the_gpus_machines() -> None:
    # DGX A100: 19.5e12 operations over 0.93 of 200e9 B/s.
    assert inter_node("A100-SXM4-40GB", "NVSwitch; IB") == pytest.approx(19.5e12 / 186e9 / 1750)
    assert inter_node("A100-SXM4-40GB", "NVSwitch; IB", 16) is None


def test_the_tables_own_rate_goes_before_the_profiles() -> None:
    # 15.7e12 over 0.93 of 12.5e9 B/s, where a DGX-1 has four such cards.
    assert inter_node("V100-SXM2-16GB", "NVLink; 1x 100Gb EDR IB per node") == pytest.approx(
        15.7e12 / (0.93 * 12.5e9) / 1750
    )
    assert inter_node("V100-SXM2-16GB", "4x 100Gb IB") == pytest.approx(
        15.7e12 / (0.93 * 50e9) / 1750
    )


@pytest.mark.parametrize(
    ("gpu", "interconnect"),
    [
        ("RTX 2080 Ti", "PCIe; network not stated"),
        ("H100", ""),
        ("no such GPU", "100Gb IB"),
        ("T4", "0GbE"),
    ],
)
def test_an_unknown_network_keeps_the_weak_prior(gpu: str, interconnect: str) -> None:
    assert inter_node(gpu, interconnect) is None


def test_a_damaged_profile_of_the_users_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "broken.json").write_text("{")
    # Written otherwise than above: what was found of a name is kept.
    assert inter_node("A100 SXM4 40GB", "IB", None) is not None
