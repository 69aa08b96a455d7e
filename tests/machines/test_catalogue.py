"""The shipped machines: complete, each number with a source, and consistent in themselves.

Limits of power and clock: how they are written, what they change, which are refused.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import estimator as est
from estimator.cli.console import rendered
from estimator.errors import AllocationError, ProfileError, UnknownMachineError
from estimator.kernels.datasheet_model import (
    assumed_of,
    chip_of,
    load_kernel_model,
    matmul_seconds,
    sustained_ratio,
)
from estimator.machines.catalogue import load_profile, with_limit
from estimator.machines.profile import Device, Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import (
    FRAGMENTATION_RATIO,
    DeviceMemory,
    achieved_bytes_per_s,
    architectures,
    device_memory,
    is_known_by_datasheet,
    read_architectures,
    with_typical_costs,
)
from estimator.placement.allocation import Allocation
from estimator.placement.placement import nic_of
from estimator.report.profiles import machines_sections
from estimator.timeline.collectives.algorithms import widest_link
from tests.synthetic import Machine, perceptron

DATA = Path(__file__).resolve().parents[2] / "data"
NAMES = sorted(path.stem for path in (DATA / "machines").glob("*.json"))
PROFILES = {name: load_profile(DATA / "machines" / f"{name}.json") for name in NAMES}
DEVICES = {profile.devices[0].name: profile.devices[0] for profile in PROFILES.values()}

# What the catalogue holds at the least.
WANTED = """
k80 p100-pcie p100-sxm v100-pcie v100-sxm v100-sxm-32gb t4 rtx-2080-ti rtx-3090 rtx-4090 a10 a40
rtx-a6000 a100-pcie-40gb a100-pcie-80gb a100-sxm-40gb a100-sxm-80gb l4 l40s h100-pcie h100-sxm
h100-nvl h200 gh200 gh200-alps b200 gb200 mi100 mi210 mi250x mi300x k80-p2 v100-p3 v100-p3dn
a100-p4d
a100-p4de h100-p5 t4-g4dn a10g-g5 l4-g6 a100-a2 h100-a3 a100-nd-v4 h100-nd-v5 dgx-1 dgx-2 dgx-a100
dgx-h100 gtx-1080-roce h200-p5e h200-a3-ultra h200-nd-v5 h20 b300 gb300 gb300-nvl72 mi325x mi355x
"""

# 16 lanes of 8, 16 and 32 GT/s at 128 bits in 130.
PCIE_BYTES_PER_S = [16 * rate * 1e9 * 128 / 130 / 8 for rate in (8, 16, 32)]


def number(device: Device, name: str) -> float:
    value = device.details[name]
    assert isinstance(value, int | float)
    return float(value)


def test_every_machine_asked_for_is_there() -> None:
    assert set(WANTED.split()) <= set(NAMES)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_a_machine_says_where_each_of_its_numbers_comes_from(profile: MachineProfile) -> None:
    links = (*profile.links, *profile.network)
    for provenance in (profile.provenance, *(link.provenance for link in links)):
        assert provenance.source == "datasheet"
        assert re.fullmatch(r"20\d\d", provenance.at)
        assert len(provenance.note) > 10
    assert all(re.search(r"20\d\d", str(d.details["source"])) for d in profile.devices)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_devices_of_a_machine_are_alike_and_as_in_every_other_machine(
    profile: MachineProfile,
) -> None:
    for index, device in enumerate(profile.devices):
        assert device == replace(DEVICES[device.name], index=index)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_memory_bandwidth_is_bus_width_times_data_rate(device: Device) -> None:
    expected = number(device, "memory_bus_bits") * number(device, "memory_pin_bit_per_s") / 8
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_peaks_are_multiprocessors_times_their_dense_work_times_clock(device: Device) -> None:
    per_clock = architectures()[str(device.details["architecture"])].flops_per_clock
    assert device.peak_flops_per_s.keys() == per_clock.keys()
    for dtype, flops in per_clock.items():
        clock = "boost_clock_hz"
        if dtype != "float32" and "tensor_clock_hz" in device.details:
            clock = "tensor_clock_hz"
        expected = number(device, "sm_count") * flops * number(device, clock)
        assert device.peak_flops_per_s[dtype] == pytest.approx(expected, rel=0.05), dtype


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_memory_is_whole_gibibytes_of_which_error_correction_takes_a_sixteenth(
    device: Device,
) -> None:
    kept = 15 / 16 if device.details["memory_ecc_in_band"] else 1.0
    carried = device.memory_bytes / kept / 2**30
    assert carried == round(carried)
    # Where the name says how much it is, that is it.
    assert str(round(carried)) in re.findall(r"(\d+)GB", device.name) or "GB" not in device.name


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_links_are_one_way_rates_of_their_generation(profile: MachineProfile) -> None:
    architecture = architectures()[str(profile.devices[0].details["architecture"])]
    for link in profile.links:
        rate = link.bandwidth_bytes_per_s
        if link.kind == "nvlink":
            assert (rate / architecture.nvlink_bytes_per_s).is_integer()
            assert rate <= architecture.nvlinks * architecture.nvlink_bytes_per_s
        elif link.kind == "pcie" and link.achieved_ratio is None:
            assert any(rate == pytest.approx(known, rel=1e-3) for known in PCIE_BYTES_PER_S)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_every_number_of_devices_reaches_each_other_somehow(profile: MachineProfile) -> None:
    inner = [link for link in profile.links if link.kind not in ("h2d", "d2h")]
    count = len(profile.devices)
    joined = [link.ring_devices or count for link in inner]
    assert max(joined, default=1) == count
    # One link for each number of devices, so that none stands twice.
    assert len(set(joined)) == len(joined)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_over_pcie_more_devices_are_never_faster(profile: MachineProfile) -> None:
    count = len(profile.devices)
    known = [widest_link(profile, devices) for devices in range(2, count + 1)]
    rates = [achieved_bytes_per_s(link) for link in known if link and link.kind == "pcie"]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=NAMES)
def test_a_network_is_its_cards_times_their_rate(profile: MachineProfile) -> None:
    for link in profile.network:
        count, rate = profile.hardware["nic_count"], profile.hardware["nic_bit_per_s"]
        assert isinstance(count, int)
        assert isinstance(rate, int)
        assert link.bandwidth_bytes_per_s == count * rate / 8
    assert bool(profile.network) == ("nic_count" in profile.hardware)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_every_machine_answers_and_says_that_nothing_was_measured(
    name: str, precision: str
) -> None:
    step = replace(perceptron([512, 512, 512], target="cuda"), precision=precision)
    answer = est.estimate(step, f"1x{len(PROFILES[name].devices)}:{name}")
    sources = {source for _, source, _, _ in answer.provenance}
    assert sources == {"datasheet"}
    assert any("known by its datasheet only" in text for text in answer.assumptions)
    # Nobody who has measured nothing knows a step within 15 %.
    assert answer.high_s > 1.15 * answer.step_time_s


def test_the_list_of_machines_names_each_once_on_eighty_columns() -> None:
    machines = {name: (DATA / "machines" / f"{name}.json", PROFILES[name]) for name in NAMES}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rendered(machines_sections(machines, store=Path("nowhere"))))
    lines = console.export_text().splitlines()
    named = [line.split()[0] for line in lines if line.split() and line.split()[0] in NAMES]
    assert sorted(named) == NAMES
    assert max(map(len, lines)) <= 80
    titles = [line.strip() for line in lines if line.startswith(("chips", "machines", "rented"))]
    assert titles == [
        "chips, in a server of the usual size",
        "machines sold whole",
        "rented machines",
    ]


def prices() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for path in sorted((DATA / "prices").glob("*.csv")):
        rows += csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return rows


def test_a_grace_processor_issues_operators_as_slowly_as_it_was_timed() -> None:
    linear_us = 33.17
    grace, usual = (with_typical_costs(load_profile(n)).host for n in ("gh200-alps", "dgx-h100"))
    # nn.Linear in bf16, on a DGX H100 13.48 us: NVIDIA/TransformerEngine, issue 2053.
    for item in ("forward_op_s", "forward_view_s", "bare_op_s", "module_call_s"):
        ratio = getattr(grace, item) / getattr(usual, item)
        assert ratio == pytest.approx(linear_us / 13.48, rel=0.01)


@pytest.mark.parametrize("row", prices(), ids=lambda row: row["InstanceType"])
def test_a_price_is_of_a_known_machine_and_dated(row: dict[str, str]) -> None:
    assert float(row["Price"]) > 0
    assert re.match(r"20\d\d", row["At"])
    assert row["Source"]
    assert row["Confirmed"] in ("yes", "no")
    if row["Machine"]:
        machine = PROFILES[row["Machine"]]
        assert int(row["AcceleratorCount"]) == len(machine.devices)
        # A machine that stands for any box of a GPU is no instance: the box has that GPU.
        instance = machine.hardware.get("instance_type")
        named = row["AcceleratorName"].lower() if instance is None else row["InstanceType"]
        assert named == (machine.name if instance is None else instance)


def test_the_measured_h100_says_what_was_measured_and_is_near_its_datasheet() -> None:
    measured, promised = (
        load_profile(name) for name in (DATA / "measured" / "h100-80gb.json", "h100-sxm")
    )
    assert measured.provenance.source == "measured"
    for dtype, rate in promised.devices[0].peak_flops_per_s.items():
        best = measured.devices[0].peak_flops_per_s.get(dtype, rate)
        assert 0.6 * rate < best <= rate, dtype
    bandwidth = promised.devices[0].memory_bandwidth_bytes_per_s
    assert 0.8 * bandwidth < measured.devices[0].memory_bandwidth_bytes_per_s < bandwidth


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


# TFLOP/s of cuBLAS: at 500 W, and the least at the 1400 W that it is rated at
# (facebookexperimental/triton, pull request 2023).
@pytest.mark.parametrize(("name", "published"), [("gb300@500W", 617), ("gb300", 1600)])
def test_at_a_power_limit_a_card_is_no_slower_for_a_higher_clock(
    name: str, published: float
) -> None:
    def teraflops(device: Device) -> float:
        chip, size = chip_of(device, "bfloat16"), 8192
        (seconds,) = matmul_seconds(
            load_kernel_model().matmuls.sustained,
            chip,
            batch=1,
            rows=size,
            columns=size,
            inner=size,
            moved_bytes=6 * size**2,
        )
        return 2 * size**3 / float(seconds) / 1e12

    device = load_profile(name).devices[0]
    slower = load_profile(name.replace("gb300", "b300")).devices[0]
    assert teraflops(device) == pytest.approx(published, rel=0.03)
    assert teraflops(device) >= 0.999 * teraflops(slower)


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


DATASHEET = Provenance(source="datasheet")


def unknown_gpu(**details: Any) -> Device:
    return Device(
        kind="cuda",
        index=0,
        name="a GPU",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13, "bfloat16": 1e14},
        details=details,
    )


def machine() -> MachineProfile:
    """A GPU of 1 TB/s and 100 TFLOP/s of which nothing was measured."""
    return MachineProfile(name="card", devices=(unknown_gpu(),), provenance=DATASHEET)


def link(kind: LinkKind, provenance: Provenance) -> Link:
    return Link(kind=kind, latency_s=1e-6, bandwidth_bytes_per_s=1e10, provenance=provenance)


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        # nccl-tests on 8 A100: 235 of 300 GB/s each way.
        ("nvlink", 0.78),
        ("infinity_fabric", 0.70),
        # Peer copies of 12 to 13 GB/s over the 15.75 of PCIe 3.0 x16.
        ("pcie", 0.76),
        ("infiniband", 0.93),
        ("roce", 0.90),
        ("efa", 0.80),
        ("tcp", 0.75),
    ],
)
def test_a_line_rate_gives_its_usual_share_and_a_measured_rate_all_of_it(
    kind: LinkKind, ratio: float
) -> None:
    assert achieved_bytes_per_s(link(kind, DATASHEET)) == ratio * 1e10
    assert achieved_bytes_per_s(link(kind, Provenance(source="measured"))) == 1e10


def test_a_nodes_network_by_its_datasheet_is_less_than_its_line_rate() -> None:
    found = nic_of(replace(machine(), network=(link("infiniband", DATASHEET),)), 1)
    assert found == 0.93e10


@pytest.mark.parametrize(
    ("optimizer", "moved_bytes", "per_tensor_s"),
    [
        # Bytes of each kernel of the foreach form (torch/optim/adam.py, sgd.py).
        ("adamw", 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16, 1e-5),
        ("adam", 12 + 8 + 12 + 8 + 8 + 8 + 16, 1e-5),
        ("sgd-momentum", 8 + 12 + 12, 3e-6),
        ("sgd", 12, 1e-6),
    ],
)
def test_an_update_moves_the_bytes_of_its_foreach_kernels(
    optimizer: str, moved_bytes: int, per_tensor_s: float
) -> None:
    known = with_typical_costs(machine()).updates
    (cost,) = [u for u in known if (u.optimizer, u.form) == (optimizer, "foreach")]
    # 0.8 of 1 TB/s
    assert cost.per_parameter_s == pytest.approx(moved_bytes / 0.8e12)
    assert (cost.per_tensor_s, cost.launch_s) == (per_tensor_s, 5e-5)
    assert cost.provenance.source == "datasheet"


def test_a_host_typically_issues_60_000_operators_a_second_from_python() -> None:
    host = with_typical_costs(machine()).host
    # An operator, the view before it and what its module's call takes: 8.5, 5 and 3 µs.
    assert host.forward_op_s + host.forward_view_s + host.module_call_s == pytest.approx(1.65e-5)
    assert (host.backward_op_s, host.bare_op_s) == (4.5e-6, 7.5e-6)


def test_the_host_of_a_box_that_is_not_named_is_less_sure_and_its_gpu_says_nothing_of_it() -> None:
    named, bare = load_profile("h100-p5"), load_profile("a100-sxm-80gb")
    assert bare.host is None
    errors = [with_typical_costs(each).host.provenance.relative_error for each in (named, bare)]  # type: ignore[union-attr]
    assert errors == [0.4, 0.6]
    assert with_typical_costs(bare).host.forward_op_s == with_typical_costs(named).host.forward_op_s  # type: ignore[union-attr]


def test_hosts_of_later_pcie_stage_a_larger_share_of_it() -> None:
    # nccl-tests, bus bandwidth of large all-reduces over 8: TITAN RTX 5.3 GB/s, RTX 4090 15.0.
    for rate, measured in ((15.754e9, 5.3e9), (31.508e9, 15.0e9)):
        staged = replace(link("pcie", DATASHEET), bandwidth_bytes_per_s=rate, peer_to_peer=False)
        assert achieved_bytes_per_s(staged) == pytest.approx(measured, rel=0.1)


def test_a_measured_machine_is_left_as_it_is(small_profile: MachineProfile) -> None:
    assert not is_known_by_datasheet(small_profile)
    assert with_typical_costs(small_profile) is small_profile


def test_measured_host_costs_stay_where_only_kernels_are_missing(
    small_profile: MachineProfile,
) -> None:
    found = with_typical_costs(replace(machine(), host=small_profile.host))
    assert found.host is small_profile.host
    assert found.updates


ROW: dict[str, Any] = {
    "process_nm": 2,
    "tensor_cores": "asynchronous",
    "flops_per_clock": {"float32": 256},
    "source": "a whitepaper, 2027",
}


def test_every_architecture_names_its_source() -> None:
    assert all(re.search(r"20\d\d", each.source) for each in architectures().values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"process_nm": 0}, "process_nm must be positive, found 0"),
        ({"tensor_cores": "many"}, "tensor_cores is 'many'"),
        ({"flops_per_clock": {"float32": -1}}, r"flops_per_clock\[float32\] must be positive"),
        ({"nvlinks": 4}, "go together"),
        ({"source": ""}, "source is empty"),
        ({"tensor_core": "none"}, "tensor_core"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused_by_name(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "architectures.json"
    path.write_text(json.dumps({"good": ROW, "bad": ROW | wrong}), encoding="utf-8")
    with pytest.raises(ProfileError, match=f"bad: .*{said}"):
        read_architectures(path)


def test_what_a_chip_does_not_say_is_taken_of_v100_and_listed() -> None:
    device = unknown_gpu()
    assert assumed_of(device) == [
        "80 multiprocessors",
        "a power limit of 300 W",
        "a boost clock of 1.5 GHz",
        "a process of 5 nm and today's tensor cores",
    ]
    chip = chip_of(device, "bfloat16")
    assert chip.multiprocessors == 80
    # 300 W over 100 TFLOP/s are 3 pJ a flop, at 1.5 GHz.
    assert chip.headroom == pytest.approx(3.0 / 1.5)
    assert chip.process_ratio == pytest.approx(5 / 12)
    assert chip.is_tensor
    assert not chip.is_early_tensor


def test_a_device_that_says_all_has_nothing_assumed() -> None:
    device = unknown_gpu(
        architecture="gp100", sm_count=56, power_w=300, boost_clock_hz=1_480_000_000
    )
    assert assumed_of(device) == []
    assert chip_of(device, "float32").process_ratio == pytest.approx(16 / 12)


def test_a_device_without_memory_bandwidth_is_refused() -> None:
    device = replace(unknown_gpu(), memory_bandwidth_bytes_per_s=None)
    with pytest.raises(ProfileError, match="'a GPU' has no memory_bandwidth_bytes_per_s"):
        chip_of(device, "float32")


def test_an_estimate_lists_what_it_assumed_of_a_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    profile = replace(load_profile("t4"), name="riddle", devices=(unknown_gpu(sm_count=40),))
    profile.save(tmp_path / "machines" / "riddle.json")
    graph = perceptron([64, 64], target="cuda")
    (text,) = (
        each for each in est.estimate(graph, "1x1:riddle").assumptions if "asks of a chip" in each
    )
    assert text == (
        "'riddle' does not say all that the kernel model asks of a chip: a power limit of 300 W, a "
        "boost clock of 1.5 GHz, a process of 5 nm and today's tensor cores assumed"
    )


GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    [("a100-sxm-80gb", 79.25), ("a100-sxm-40gb", 39.5), ("rtx-3090", 23.7), ("rtx-2080-ti", 10.76)],
)
def test_torch_sees_less_than_the_box_says(name: str, seen_gib: float) -> None:
    # "total capacity" of CUDA's out-of-memory messages; sources in the module.
    capacity = device_memory(load_profile(name), 0).capacity_bytes / GIB
    assert capacity == pytest.approx(seen_gib, rel=0.01)


def test_tensors_share_with_all_that_is_kept() -> None:
    kept = DeviceMemory(
        capacity_bytes=1000,
        context_bytes=100,
        communicators_bytes=150,
        workspaces_bytes=50,
        fragmentation_ratio=0.25,
    )
    assert kept.usable_bytes == 560  # (1000 − 300) / 1.25


def test_every_communicator_keeps_its_buffers_and_pcie_keeps_fewer() -> None:
    nvlink, pcie = load_profile("a100-sxm-80gb"), load_profile("l40s")
    one, two = device_memory(nvlink, 1), device_memory(nvlink, 2)
    assert one.communicators_bytes == 688 * 10**6  # NVIDIA/nccl, issue 964
    assert two.communicators_bytes == 2 * one.communicators_bytes
    assert device_memory(nvlink, 0).communicators_bytes == 0
    assert 0 < device_memory(pcie, 1).communicators_bytes < one.communicators_bytes


def test_a_core_group_keeps_nothing(small_profile: MachineProfile) -> None:
    found = device_memory(small_profile, 1)
    assert found.usable_bytes == small_profile.devices[0].memory_bytes


def test_a_measured_device_has_what_was_measured() -> None:
    profile = load_profile("a100-sxm-80gb")
    probed = replace(profile, provenance=replace(profile.provenance, source="measured"))
    assert device_memory(probed, 0).capacity_bytes == profile.devices[0].memory_bytes


def test_an_estimate_says_by_how_much_it_fits() -> None:
    graph = perceptron([512, 512, 512], target="cuda")
    answer = est.estimate(graph, "1x8:a100-sxm-80gb")
    device = answer.device_memory
    assert device.communicators_bytes > 0
    assert answer.spare_memory_bytes == device.usable_bytes - answer.peak_memory_bytes
    alone = est.estimate(graph, "1x1:a100-sxm-80gb")
    assert alone.device_memory.communicators_bytes == 0
    assert answer.to_dict()["device_memory"]["fragmentation_ratio"] == FRAGMENTATION_RATIO
