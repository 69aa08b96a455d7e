"""Profiles of one machine type are put together; the better source wins, then the newer one."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator.errors import ImportedFileError, ProfileError
from estimator.machines.catalogue import load_profile
from estimator.machines.merging import merge_profiles
from estimator.machines.profile import (
    CollectiveCost,
    Device,
    KernelPoint,
    Link,
    MachineProfile,
    Provenance,
    Source,
)
from estimator.placement.topology import Cluster, Node, Switch, cluster_toml
from estimator.probe.imports.findings import (
    Imported,
    add_imports,
    profile_of_imports,
)

SAMPLES = Path(__file__).parents[1] / "imports" / "samples"


def link(gigabytes: float, source: Source = "measured", at: str = "2026-01-01", **of: Any) -> Link:
    return Link(
        kind=of.get("kind", "h2d"),
        latency_s=0.0,
        bandwidth_bytes_per_s=gigabytes * 1e9,
        provenance=Provenance(source=source, at=at),
    )


def machine(name: str = "m", devices: int = 2, **parts: Any) -> MachineProfile:
    gpus = tuple(
        Device(kind="cuda", index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
        for i in range(devices)
    )
    fields = {"name": name, "devices": gpus, "provenance": Provenance(source="measured")}
    return MachineProfile(**(fields | parts))


def rates(profile: MachineProfile) -> dict[str, float]:
    return {link.kind: link.bandwidth_bytes_per_s / 1e9 for link in profile.links}


def test_later_profiles_add_what_earlier_ones_lack() -> None:
    first = machine(links=(link(50),), software={"torch": "2.10"}, missing=("updates",))
    second = machine(links=(link(60, kind="d2h"),), software={"torch": "2.9", "nccl": "2.27"})
    merged = merge_profiles([first, second])
    assert rates(merged) == {"h2d": 50, "d2h": 60}
    assert merged.software == {"torch": "2.10", "nccl": "2.27"}
    assert merged.missing == ("updates",)


def test_a_better_source_wins_over_a_newer_one() -> None:
    order: tuple[Source, ...] = ("measured", "imported", "fitted", "datasheet")
    for better, worse in itertools.pairwise(order):
        first = machine(links=(link(1, worse, "2026-12-31"),))
        second = machine(links=(link(2, better, "2025-01-01"),))
        assert rates(merge_profiles([first, second])) == {"h2d": 2}
        assert rates(merge_profiles([second, first])) == {"h2d": 2}


def test_of_two_measurements_the_newer_wins() -> None:
    old, new = machine(links=(link(1),)), machine(links=(link(2, at="2026-02-01"),))
    assert rates(merge_profiles([old, new])) == rates(merge_profiles([new, old])) == {"h2d": 2}


def test_calls_that_only_one_profile_timed_are_kept(small_profile: MachineProfile) -> None:
    kernel = small_profile.kernels[0]
    fewer = replace(kernel, points=kernel.points[:1])
    slower = replace(kernel, points=(KernelPoint(call=kernel.points[0].call, warm_s=1.0),))
    first = replace(small_profile, kernels=(fewer,))
    assert merge_profiles([first, replace(small_profile, kernels=(kernel,))]).kernels == (kernel,)
    # Equal sources and times: what the earlier file says of a call stays.
    merged = merge_profiles(
        [replace(small_profile, kernels=(kernel,)), replace(first, kernels=(slower,))]
    )
    assert merged.kernels == (kernel,)


def test_unlike_devices_are_not_merged() -> None:
    with pytest.raises(ProfileError, match=r"'m' has 2 × .* and 'n' 4 × .*; merge"):
        merge_profiles([machine(), machine("n", devices=4)])


def test_imports_fill_a_profile_and_never_replace_what_it_measured() -> None:
    found = Imported(
        formats=("nvbandwidth",),
        device_names={0: "NVIDIA H100 80GB HBM3"},
        links=(link(1, "imported", "2030-01-01"), link(60, "imported", kind="d2h")),
    )
    profile = add_imports(machine(links=(link(50),)), found)
    assert rates(profile) == {"h2d": 50, "d2h": 60}


@pytest.mark.parametrize(
    ("names", "words"),
    [({0: "NVIDIA A100"}, "device 0 is 'NVIDIA A100'"), ({5: "NVIDIA H100"}, "lists device 5")],
)
def test_imports_of_another_machine_are_refused(names: dict[int, str], words: str) -> None:
    with pytest.raises(ImportedFileError, match=words):
        add_imports(machine(), Imported(formats=("nccl-tests",), device_names=names))


# What `nvidia-smi -L` calls them, and the catalogue's machine with that chip.
DRIVERS_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA GH200 480GB": "gh200",
    "Tesla V100-SXM2-16GB": "v100-sxm",
    "Tesla T4": "t4",
}


@pytest.mark.parametrize("machine", DRIVERS_NAMES.values())
def test_the_drivers_name_fits_one_chip_of_the_catalogue(machine: str) -> None:
    profile = load_profile(machine)
    for name, its_machine in DRIVERS_NAMES.items():
        found = Imported(formats=("nccl-tests",), device_names={0: name})
        if machine == its_machine:
            assert add_imports(profile, found) == profile
        else:
            with pytest.raises(ImportedFileError, match="choose the profile"):
                add_imports(profile, found)


def test_a_machine_of_the_catalogue_with_imports_says_so(store: Path, command: Any) -> None:
    log = SAMPLES / "nccl_tests_2x8_h100.txt"
    assert command("machines", "import", log, "--into", "h100-sxm").code == 0
    listed = " ".join(command("machines", "list").out.split())
    assert "in your store" in listed
    assert "catalogue with imported measurements" in listed
    shown = command("machines", "show", "h100-sxm").out
    assert "catalogue with imported measurements" in shown


def test_a_profile_of_imports_takes_the_memory_from_the_devices_name() -> None:
    found = Imported(formats=("nccl-tests",), device_names={0: "NVIDIA H100 80GB HBM3"})
    assert profile_of_imports(found, name="h100").devices[0].memory_bytes == 80 << 30
    # A Grace Hopper's driver gives the memory of its CPU.
    for silent in ("NVIDIA GeForce RTX 5090", "NVIDIA GH200 480GB"):
        with pytest.raises(ImportedFileError, match="how much memory"):
            profile_of_imports(replace(found, device_names={0: silent}), name="x")


def test_import_writes_a_machine_that_merge_takes(
    store: Path, tmp_path: Path, command: Any
) -> None:
    log = SAMPLES / "nccl_tests_2x8_h100.txt"
    assert command("machines", "import", log, "--name", "h100").code == 0
    imported = load_profile("h100")
    assert [type(cost) for cost in imported.collectives] == [CollectiveCost]
    machine(devices=8, links=(link(50),)).save(tmp_path / "probed.json")
    merged = command(
        "machines", "merge", tmp_path / "probed.json", store / "machines" / "h100.json",
        "--out", tmp_path / "both.json",
    )  # fmt: skip
    assert merged.code == 0
    both = load_profile(tmp_path / "both.json")
    assert (rates(both), both.collectives) == ({"h2d": 50}, imported.collectives)


def test_a_damaged_file_changes_nothing(store: Path, tmp_path: Path, command: Any) -> None:
    before = (store / "machines" / "local.json").read_bytes()
    (tmp_path / "cut.txt").write_text("# nThread 1 nGpus 8\n#  Rank  0")
    answer = command("machines", "import", tmp_path / "cut.txt", "--into", "local")
    assert answer.code == 2
    assert answer.err.startswith(f"estimator: {tmp_path / 'cut.txt'}: ")
    assert (store / "machines" / "local.json").read_bytes() == before


def test_a_slurm_topology_becomes_a_cluster_file(tmp_path: Path, command: Any) -> None:
    path = tmp_path / "cluster.toml"
    answer = command(
        "machines", "import", SAMPLES / "topology.conf", "--name", "h100", "--out", path
    )
    assert answer.code == 0
    cluster = Cluster.load(path)
    assert cluster.hosts_of("h100")[:2] == ("dev0", "dev1")
    assert cluster.switches_above("dev17") == ("s2", "s3")
    assert '[nodes."dev[0-5]"]' in path.read_text()


names = some.from_regex(r"[a-c][0-9]{1,3}", fullmatch=True)
uplinks = some.none() | some.floats(1e6, 1e12)
nodes = some.builds(
    Node,
    machine=some.sampled_from(["h100", "t4"]),
    switch=some.sampled_from([None, "s0", "s1"]),
    uplink_bytes_per_s=some.none() | some.sampled_from([1.25e9, 125e6 / 3]),
    slowdown_ratio=some.sampled_from([1.0, 1.2]),
)


@given(some.dictionaries(names, nodes, min_size=1, max_size=12), uplinks)
def test_a_cluster_survives_its_file(described: dict[str, Node], uplink: float | None) -> None:
    switches = {"s0": Switch(), "s1": Switch(parent="s0", uplink_bytes_per_s=uplink)}
    cluster = Cluster(nodes=described, switches=switches, transport="roce")
    read = Cluster.from_dict(tomllib.loads(cluster_toml(cluster)))
    assert list(read.nodes) == list(cluster.nodes)
    for ours, theirs in zip(
        (*cluster.nodes.values(), *cluster.switches.values()),
        (*read.nodes.values(), *read.switches.values()),
        strict=True,
    ):
        assert theirs.uplink_bytes_per_s == pytest.approx(ours.uplink_bytes_per_s)
        assert replace(theirs, uplink_bytes_per_s=None) == replace(ours, uplink_bytes_per_s=None)
