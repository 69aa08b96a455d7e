"""Profiles: what is written can be read again, and impossible numbers are refused."""

from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from estimator.cli.console import rendered
from estimator.errors import PriceError, ProfileError, UnknownMachineError
from estimator.machines.catalogue import load_profile
from estimator.machines.comparison import (
    compare_profiles,
    compare_several,
    disturbed_groups,
    only_in,
)
from estimator.machines.prices import Price, PriceList
from estimator.machines.profile import (
    Interference,
    Link,
    LinkKind,
    MachineProfile,
    Provenance,
    UpdateCost,
    json_schema,
)
from estimator.report.profiles import comparison_section
from tests.conftest import Command

DATASHEET = Provenance(source="datasheet")


def test_a_saved_profile_reads_back_equal(small_profile: MachineProfile, tmp_path: Path) -> None:
    small_profile.save(tmp_path / "machine.json")
    assert load_profile(tmp_path / "machine.json") == small_profile


@pytest.mark.parametrize(
    ("asked", "close"),
    [
        ("v100-smx", "v100-sxm"),  # two letters swapped
        ("T4-G4DN", "t4-g4dn"),
        ("a100-sxm", "a100-sxm-40gb, a100-sxm-80gb"),
    ],
)
def test_an_unknown_machine_is_answered_with_close_names(
    store: Path, asked: str, close: str
) -> None:
    with pytest.raises(UnknownMachineError, match=f"names close to it: {close}") as found:
        load_profile(asked)
    named = str(found.value).split("names close to it: ")[1].split(";")[0].split(", ")
    assert len(named) <= 5
    assert "run 'estimator machines list'" in str(found.value)


def test_a_transfer_takes_latency_plus_size_over_bandwidth() -> None:
    link = Link(kind="pcie", latency_s=1e-5, bandwidth_bytes_per_s=1e9, provenance=DATASHEET)
    # 10 µs + 1 MB at 1 GB/s = 1 ms
    assert link.transfer_time_s(10**6) == pytest.approx(1.01e-3)


def test_an_update_costs_a_launch_and_its_tensors_and_parameters() -> None:
    update = UpdateCost(
        optimizer="adam",
        form="loop",
        device="cpu",
        launch_s=1.0,
        per_tensor_s=0.1,
        per_parameter_s=0.001,
        provenance=DATASHEET,
    )
    assert update.update_time_s(tensors=5, parameters=100) == pytest.approx(1 + 0.5 + 0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s must be positive"):
        Link(kind="pcie", latency_s=0.0, bandwidth_bytes_per_s=rate, provenance=DATASHEET)


def test_a_profile_of_another_schema_version_is_refused(small_profile: MachineProfile) -> None:
    for version in (1, 99):
        with pytest.raises(
            ProfileError, match=f"schema version {version}.*probe the machine again"
        ):
            MachineProfile.from_dict(small_profile.to_dict() | {"schema_version": version})


def test_what_is_not_known_of_a_profile_is_passed_over(small_profile: MachineProfile) -> None:
    other = json.loads(json.dumps(small_profile.to_dict()))
    other["collectives"][0] |= {"cpu_s": 1e-5, "cpu_s_per_byte": 5e-10}
    assert MachineProfile.from_dict(other) == small_profile


def test_a_contention_of_an_unknown_kind_is_refused(small_profile: MachineProfile) -> None:
    odd = json.loads(json.dumps(small_profile.to_dict()))
    odd["contentions"][0]["bound"] = "third_touch"
    with pytest.raises(ProfileError, match="contentions"):
        MachineProfile.from_dict(odd)


def test_a_profile_without_devices_is_refused(small_profile: MachineProfile) -> None:
    with pytest.raises(ValueError, match="at least one device"):
        replace(small_profile, devices=())


def test_the_schema_names_every_group_of_a_profile(small_profile: MachineProfile) -> None:
    assert set(json_schema()["properties"]) == set(small_profile.to_dict())


def test_a_profile_file_holds_base_units_as_plain_json(store: Path) -> None:
    content = json.loads((store / "machines" / "local.json").read_text())
    assert content["devices"][0]["memory_bytes"] == 8 * 2**30
    assert content["links"][0]["provenance"]["source"] == "measured"


def test_a_file_that_another_process_changes_is_read_again(
    small_profile: MachineProfile, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    small_profile.save(path)
    assert load_profile(path).name == small_profile.name
    changed = path.read_text().replace(f'"{small_profile.name}"', '"renamed"', 1)
    path.write_text(changed)
    time.sleep(0.03)
    assert load_profile(path).name == "renamed"


def test_a_ratio_is_the_second_over_the_first(small_profile: MachineProfile) -> None:
    link = replace(small_profile.links[0], bandwidth_bytes_per_s=2.5e9)
    rows = compare_profiles(small_profile, replace(small_profile, links=(link,)))
    changed = [row for row in rows if row.ratio != 1.0]
    assert [(row.group, row.ratio) for row in changed] == [("link", 0.25)]


def test_kernels_are_compared_call_by_call(small_profile: MachineProfile) -> None:
    matmul, addition = small_profile.kernels
    slow = replace(matmul.points[1], warm_s=3 * matmul.points[1].warm_s)
    other = replace(small_profile, kernels=(replace(matmul, points=(slow,)), addition))
    rows = [row for row in compare_profiles(small_profile, other) if "aten.mm" in row.group]
    assert [row.ratio for row in rows] == [pytest.approx(3.0)]


def test_what_only_one_profile_has_is_told_apart(small_profile: MachineProfile) -> None:
    other = replace(small_profile, host=None, updates=())
    rows = compare_profiles(small_profile, other)
    assert {row.group for row in rows}.isdisjoint({"host", "update"})
    assert {each.group for each in only_in(small_profile, other)} == {"host", "update"}
    assert only_in(other, small_profile) == ()


def test_unlike_kinds_of_links_compare_by_what_they_join(small_profile: MachineProfile) -> None:
    def joined_by(kind: LinkKind) -> MachineProfile:
        return replace(small_profile, links=(replace(small_profile.links[0], kind=kind),))

    rows = compare_profiles(joined_by("nvlink"), joined_by("pcie"))
    names = [row.name for row in rows if row.group == "link"]
    assert names == ["between devices, latency", "between devices, bandwidth"]


def test_a_comparison_shows_what_either_has_and_estimates_assume(
    small_profile: MachineProfile,
) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rendered([comparison_section(small_profile, load_profile("h100-sxm"))]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    # Its memory bandwidth is measured by neither; the datasheet tells one and a typical host cost.
    told = {line.split("  ")[1].strip(): line for line in lines if line.startswith("  ")}
    assert "–" in told["between nodes, bandwidth"]
    assert "400 GB/s" in told["between nodes, bandwidth"]
    assert "4.00 µs" in told["forward op"]
    assert any("host and updates of 'h100-sxm' are usual ones" in line for line in lines)


def test_links_for_unlike_numbers_of_devices_have_names_of_their_own() -> None:
    rows = only_in(load_profile("dgx-1"), load_profile("titan-rtx"))
    names = [row.name for row in rows if row.group == "link"]
    assert len(set(names)) == len(names)
    assert "between devices, rings of up to 2, bandwidth" in names


def slower(profile: MachineProfile, ratio: float) -> MachineProfile:
    """The machine with kernels that take so many times as long."""
    kernels = tuple(
        replace(each, points=tuple(replace(p, warm_s=ratio * p.warm_s) for p in each.points))
        for each in profile.kernels
    )
    return replace(profile, kernels=kernels)


def test_the_odd_one_of_several_nodes_is_found(small_profile: MachineProfile) -> None:
    ratios = {"a1": 1.0, "a2": 1.01, "a3": 1.18, "a4": 0.99}
    rows = compare_several({name: slower(small_profile, ratios[name]) for name in ratios})
    kernels = {row.machine: row.ratio for row in rows if row.group == "kernels"}
    # Of four machines the usual one is halfway between the two in the middle.
    assert kernels == {name: pytest.approx(ratios[name] / 1.005) for name in ratios}
    assert [(row.machine, row.group) for row in rows if row.is_odd] == [("a3", "kernels")]


def test_of_nodes_that_all_differ_none_is_odd(small_profile: MachineProfile) -> None:
    ratios = {"a1": 0.8, "a2": 0.9, "a3": 1.0, "a4": 1.1, "a5": 1.2}
    rows = compare_several({name: slower(small_profile, ratios[name]) for name in ratios})
    assert not any(row.is_odd for row in rows)


def test_a_rate_that_is_half_takes_twice_as_long(small_profile: MachineProfile) -> None:
    link = small_profile.links[0]
    halved = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2, latency_s=2e-6)
    odd = replace(small_profile, links=(halved,))
    rows = compare_several({"a": small_profile, "b": odd, "c": small_profile})
    assert {(r.machine, r.ratio) for r in rows if r.group == "link"} == {
        ("a", 1.0),
        ("b", 2.0),
        ("c", 1.0),
    }


BUSY = Interference(others_ratio=0.5)


def test_a_comparison_says_which_profile_was_disturbed_and_what_that_touches(
    small_profile: MachineProfile,
) -> None:
    told = replace(small_profile.links[0], provenance=Provenance(source="datasheet", at="2026"))
    one, other = replace(small_profile, name="a", interference=BUSY, links=(told,)), small_profile
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(rendered([comparison_section(one, replace(other, name="b"))]))
    lines = console.export_text().splitlines()
    (said,) = [line for line in lines if "other programs used 50 % of the cores" in line]
    # What shares a core for half of the time takes twice as long.
    assert "'a' was measured while" in said
    assert "may be off by 2.00 times" in said
    # A rate of a datasheet and the size of the memory were not measured then.
    groups = ("device", "host", "memory", "collective", "update", "kernels")
    assert disturbed_groups(one) == groups
    assert ", ".join(groups) in said


def test_profiles_that_were_measured_in_quiet_are_not_spoken_of(
    small_profile: MachineProfile,
) -> None:
    assert disturbed_groups(small_profile) == ()
    assert disturbed_groups(replace(small_profile, interference=Interference())) == ()


def test_the_exit_code_of_a_comparison_tells_whether_a_node_is_odd(
    small_profile: MachineProfile, tmp_path: Path, command: Command
) -> None:
    paths = [str(tmp_path / f"a{number}.json") for number in range(4)]
    for path in paths[:3]:
        small_profile.save(Path(path))
    busy = replace(slower(small_profile, 2.0), interference=BUSY)
    busy.save(Path(paths[3]))
    even = command("machines", "compare", *paths[:3])
    assert (even.code, "none is odd" in even.out) == (0, True)
    odd = command("machines", "compare", *paths)
    assert (odd.code, "is odd: kernels" in odd.out) == (1, True)
    assert "other programs used 50 % of the cores" in " ".join(odd.out.split())
    as_json = command("machines", "compare", *paths, "--json")
    assert as_json.code == 1
    disturbed = {row["machine"] for row in json.loads(as_json.out) if row["is_disturbed"]}
    assert disturbed == {paths[3]}
    two = command("machines", "compare", paths[0], paths[3], "--json")
    assert two.code == 0, "of two none is the odd one"
    (told,) = json.loads(two.out)["disturbed"]
    assert told["relative_error"] == pytest.approx(math.log(2))
    assert "kernels" in told["groups"]


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
