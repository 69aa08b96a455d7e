"""Limits of power and clock: how they are written, what they change, which are refused."""

from __future__ import annotations

import pytest

from estimator.errors import AllocationError, ProfileError, UnknownMachineError
from estimator.kernels.datasheet_model import chip_of, load_kernel_model, sustained_ratio
from estimator.machines.catalogue import load_profile, with_limit
from estimator.placement.allocation import Allocation
from tests.synthetic import Machine


def test_a_limit_is_written_behind_the_machine_and_read_wherever_one_is_named() -> None:
    assert str(Allocation.parse("2x8:h100-sxm@500W")) == "2x8:h100-sxm@500W"
    profile = load_profile("h100-sxm@500W")
    assert profile.name == "h100-sxm@500W"
    assert {device.details["power_w"] for device in profile.devices} == {500.0}
    assert load_profile("h100-sxm@500W") is profile
    assert load_profile("h100-sxm").devices[0].details["power_w"] == 700


def test_a_power_limit_lowers_what_busy_units_hold_and_leaves_the_memory() -> None:
    whole, capped = (load_profile(name).devices[0] for name in ("h100-sxm", "h100-sxm@500W"))
    assert capped.memory_bandwidth_bytes_per_s == whole.memory_bandwidth_bytes_per_s
    kernel_model = load_kernel_model().matmuls.sustained
    full, less = (
        float(sustained_ratio(kernel_model, chip_of(device, "bfloat16")))
        for device in (whole, capped)
    )
    # Where power alone limits, the clock falls as the limit does: 500 / 700; never by more.
    assert 500 / 700 <= less / full < 0.85


def test_a_clock_scales_the_peaks() -> None:
    device = load_profile("h100-sxm@915MHz").devices[0]
    # Tensor cores are quoted at 1830 MHz, the other units at 1980.
    assert device.peak_flops_per_s["bfloat16"] == pytest.approx(989.4e12 / 2)
    assert device.peak_flops_per_s["float32"] == pytest.approx(66.9e12 * 915 / 1980)
    # Above the tensor cores' own clock they lose nothing.
    device = load_profile("h100-sxm@1900MHz").devices[0]
    assert device.peak_flops_per_s["bfloat16"] == pytest.approx(989.4e12)


@pytest.mark.parametrize("limit", ["800W", "2.5GHz", "0W", "W", "1981MHz", ""])
def test_other_limits_are_refused(limit: str) -> None:
    with pytest.raises(ProfileError, match=r"such as 500W or 1410MHz|choose a lower limit"):
        load_profile(f"h100-sxm@{limit}")


def test_a_measured_machine_is_measured_again_under_its_limit() -> None:
    with pytest.raises(ProfileError, match="set the limit there and run 'estimator probe' again"):
        with_limit(Machine().profile(), "100W")


def test_a_limit_of_no_machine_is_refused() -> None:
    with pytest.raises(UnknownMachineError, match="no machine profile is called 'h1000'"):
        load_profile("h1000@500W")
    with pytest.raises(AllocationError):
        Allocation.parse("1x8:@500W")
