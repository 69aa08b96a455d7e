"""Prices are read from the shipped rows and a user's own, and time is billed as it is sold."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import PriceError, UnknownMachineError
from estimator.machines.prices import Price, PriceList

SHIPPED = PriceList.load()


def written(folder: Path, *lines: str) -> PriceList:
    path = folder / "prices.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return PriceList.load(path)


def test_shipped_prices_are_found_by_machine() -> None:
    price = SHIPPED.price("a100-p4d", 8)
    assert (price.instance_type, price.devices) == ("p4d.24xlarge", 8)
    assert price.source
    assert price.at
    # p4d.24xlarge at 21.957642 USD an hour, by the second.
    assert price.usd(1800.4) == pytest.approx(21.957642 * 1801 / 3600)
    assert price.usd(1800.4, spot=True) < price.usd(1800.4)


def test_a_machine_without_a_price_and_one_that_does_not_exist_are_told_apart() -> None:
    # Eight of each, as SkyPilot's catalogue lists them at Nebius and at OCI.
    for machine, usd in (("h200", 28.0), ("b200", 44.0), ("mi300x", 48.0)):
        assert SHIPPED.price(machine, 8).usd_per_hour == usd
    with pytest.raises(PriceError, match="no price of 'dgx-1' is known; give one"):
        SHIPPED.price("dgx-1")
    with pytest.raises(UnknownMachineError, match="no machine profile is called 'h2000'"):
        SHIPPED.price("h2000")


def test_a_limited_machine_costs_what_the_machine_does() -> None:
    assert SHIPPED.price("h100-p5@500W", 8) == SHIPPED.price("h100-p5", 8)


@pytest.mark.parametrize(
    ("duration_s", "usd"), [(1, 3.0), (3600, 3.0), (3601, 6.0), (7200, 6.0), (7200.5, 9.0)]
)
def test_a_started_hour_is_charged_whole(duration_s: float, usd: float) -> None:
    hourly = Price(machine="m", instance_type="i", devices=1, usd_per_hour=3.0, billed_s=3600)
    assert hourly.usd(duration_s) == pytest.approx(usd)


def test_the_least_that_is_charged() -> None:
    by_second = Price(
        machine="m", instance_type="i", devices=1, usd_per_hour=36.0, least_billed_s=60
    )
    assert by_second.usd(2) == pytest.approx(0.6)
    assert by_second.usd(90) == pytest.approx(0.9)


def test_own_prices_stand_for_the_shipped_ones(tmp_path: Path) -> None:
    own = written(
        tmp_path,
        "Machine,AcceleratorCount,Price,SpotPrice",
        "t4-g4dn,1,0.5,",
        "t4-g4dn,4,1.6,0.4",
    )
    # The cheapest with devices enough.
    assert own.price("t4-g4dn", 1).usd(3600) == pytest.approx(0.5)
    assert own.price("t4-g4dn", 2).usd(3600) == pytest.approx(1.6)
    assert own.price("t4-g4dn", 1, spot=True).devices == 4
    assert own.price("a100-p4d") == SHIPPED.price("a100-p4d")
    with pytest.raises(PriceError, match="no price of 't4-g4dn' is known"):
        own.price("t4-g4dn", 8)


def test_a_file_of_skypilot_names_machines_by_their_instances(tmp_path: Path) -> None:
    own = written(
        tmp_path,
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,"
        "Region,AvailabilityZone",
        "p4d.24xlarge,A100,8.0,96.0,1152.0,\"{'Gpus': [{'Name': 'A100'}]}\",30.0,9.0,a,a1",
        "p4d.24xlarge,A100,8.0,96.0,1152.0,,20.0,10.0,b,b1",
        "m7g.large,,,2.0,8.0,,0.1,0.02,a,a1",
    )
    assert own.price("a100-p4d").usd_per_hour == 20.0
    assert own.price("a100-p4d", spot=True).spot_usd_per_hour == 9.0


def test_spot_without_a_spot_price_is_refused_in_a_sentence() -> None:
    assert SHIPPED.price("k80-p2").usd_per_hour
    with pytest.raises(PriceError, match=r"no spot price of 'k80-p2' is known; leave out --spot"):
        SHIPPED.price("k80-p2", spot=True)


@pytest.mark.parametrize(
    ("machine", "usd_per_hour"),
    [
        ("a100-a2", 2.958 + 11.4728),  # the machine, and its eight GPUs
        ("a100-a2-ultra", 2.49544 + 10.6848),
        ("h100-a3", 8 * (0.26996 + 2.2356)),
        ("v100-nd-v2", 2.42352),
    ],
)
def test_spot_prices_are_those_of_their_source(machine: str, usd_per_hour: float) -> None:
    assert SHIPPED.price(machine, 8, spot=True).spot_usd_per_hour == pytest.approx(usd_per_hour)


def test_every_shipped_spot_price_is_dated_sourced_and_below_the_other() -> None:
    spot = [p for each in SHIPPED.machines for p in SHIPPED._of[each] if p.spot_usd_per_hour]
    assert len(spot) >= 14
    for price in spot:
        assert price.at, price
        assert price.source, price
        assert 0 < price.spot_usd_per_hour < price.usd_per_hour, price


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("a,b", "1,2"), "has no prices of machines; begin it with the columns"),
        (("Machine,Price", "t4-g4dn,cheap"), "line 2: Price is 'cheap'; write a number from 0"),
        (("Machine,Price", "t4-g4dn,-1"), "line 2: Price is '-1'"),
        (("Machine,Price", "t4-g4dn,nan"), "line 2: Price is 'nan'"),
        (("Machine,AcceleratorCount,Price", "t4-g4dn,1e9,2"), "AcceleratorCount is '1e9'"),
        (("Machine,AcceleratorCount,Price", "t4-g4dn,0,2"), "line 2: AcceleratorCount is 0;"),
        (("Machine,AcceleratorCount,Price", "t4-g4dn,1.5,2"), "AcceleratorCount is 1.5;"),
        # A decimal comma would be a price of 3 USD.
        (("Machine,Price", "t4-g4dn,3,50"), "line 2 has other cells than the 2 columns"),
        (("Machine,AcceleratorCount,Price", "t4-g4dn,4"), "line 2 has other cells than the 3"),
        # The shipped price would be taken instead.
        (("Machine,Price", "t4-g4dm,3"), "no machine profile is called 't4-g4dm'"),
        (("Machine,Price",), "has no price of a machine that is known"),
        (("InstanceType,Price", "m5.large,3"), "has no price of a machine that is known"),
    ],
)
def test_a_wrong_price_file_is_refused_in_a_sentence(
    tmp_path: Path, lines: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PriceError, match=said):
        written(tmp_path, *lines)


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(PriceError, match="cannot read prices nowhere"):
        PriceList.load("nowhere.csv")
