"""Outputs of other tools become values of a profile or a cluster; cut-off ones are refused.

The samples are excerpts of outputs published by others; each test names where.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from estimator.errors import ImportedFileError
from estimator.machines.catalogue import load_profile
from estimator.probe.imports.files import recognise
from estimator.probe.imports.findings import Imported, Route, add_imports, join, rings_of

SAMPLES = Path(__file__).parent / "samples"
AT = "2026-01-01T00:00:00Z"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def imported(name: str) -> Imported:
    return recognise(sample(name), at=AT, machine="a100")


def test_nvbandwidth_gives_host_links_one_by_one_and_all_at_once() -> None:
    # github.com/wubh576/nvbandwidth_5090, myresults/result.json (nvbandwidth 0.8, 4 RTX 5090)
    found = imported("nvbandwidth_rtx5090.json")
    assert found.device_names[3] == "NVIDIA GeForce RTX 5090"
    links = {(link.kind, link.flows): link for link in found.links}
    # Medians of the four columns, in GB/s.
    assert links["h2d", 1].bandwidth_bytes_per_s == pytest.approx((56.3829 + 56.3944) / 2 * 1e9)
    assert links["d2h", 4].bandwidth_bytes_per_s == pytest.approx((37.9928 + 38.4018) / 2 * 1e9)
    assert links["h2d", 1].latency_s == pytest.approx((574.737 + 582.744) / 2 * 1e-9)
    # Copies between devices were waived on that machine.
    assert set(links) == {("h2d", 1), ("d2h", 1), ("d2h", 4)}
    assert all(link.pinned and link.provenance.source == "imported" for link in found.links)


def test_nvbandwidth_between_devices_leaves_out_each_device_with_itself() -> None:
    # The first two rows and columns of the 8 x H100 matrix in NVIDIA/nvbandwidth's README.
    case = {
        "name": "device_to_device_memcpy_write_ce",
        "status": "Passed",
        "bandwidth_matrix": [["N/A", "276.07"], ["276.19", "0.00"]],
    }
    found = recognise(json.dumps({"nvbandwidth": {"testcases": [case]}}), at=AT)
    assert found.links[0].kind == "d2d"
    assert found.links[0].bandwidth_bytes_per_s == pytest.approx((276.07 + 276.19) / 2 * 1e9)


def test_nccl_tests_table_gives_one_collective_with_its_hosts() -> None:
    # github.com/lessizzmore/create-a3mega-ztan-fork, ztan-NCCL-test-result (2 nodes of 8 H100)
    found = imported("nccl_tests_2x8_h100.txt")
    (cost,) = found.collectives
    assert (cost.op, cost.backend, cost.group_size, cost.nodes) == ("all_reduce", "nccl", 16, 2)
    assert cost.hosts == ("ztan-mig-235z",) * 8 + ("ztan-mig-gq73",) * 8
    assert found.device_names == dict.fromkeys(range(8), "NVIDIA H100 80GB HBM3")
    # Out of place, µs; and the table's own bus bandwidth of the largest size says the same.
    assert cost.points[0] == (8, pytest.approx(135.8e-6))
    size, seconds = cost.points[-1]
    assert size / seconds * 2 * 15 / 16 == pytest.approx(338.82e9, rel=1e-4)


def test_nccl_tests_without_its_command_line_is_refused() -> None:
    text = sample("nccl_tests_2x8_h100.txt")
    with pytest.raises(ImportedFileError, match="keep the command line, such as all_reduce_perf"):
        recognise(text[text.index("# nThread") :], at=AT)


def test_several_runs_of_nccl_tests_in_one_file_are_all_read() -> None:
    text = sample("nccl_tests_2x8_h100.txt")
    twice = text + text.replace("all_reduce_perf", "all_gather_perf")
    assert [cost.op for cost in recognise(twice, at=AT).collectives] == ["all_reduce", "all_gather"]


def nccl_report(**changes: object) -> str:
    """The layout that nccl-tests writes (src/util.cu, file version 2), numbers of the table."""
    devices = [
        {"rank": 0, "hostname": host, "device": 0, "device_info": "NVIDIA H100 80GB HBM3"}
        for host in ("ztan-mig-235z", "ztan-mig-gq73")
    ]
    timed = {"time": 47743.0, "alg_bw": 179.92, "bus_bw": 337.35, "nwrong": None}
    result = {"size": 8589934592, "count": 2147483648, "type": "float", "redop": "sum"}
    report = {
        "version": 2,
        "start_time": "2025-09-01 10:00:00",
        "args": ["/opt/src/nccl-tests/build/all_reduce_perf", "-g", "8"],
        "config": {"nthreads": 1, "ngpus": 8, "devices": devices},
        "results": [result | {"out_of_place": None, "in_place": timed}],
        "out_of_bounds": {"count": 0, "okay": "true"},
    }
    return json.dumps(report | changes)


def test_nccl_tests_json_counts_every_device_of_every_process() -> None:
    (cost,) = recognise(nccl_report(), at=AT).collectives
    # 2 processes with 8 GPUs each, of which the report lists the first.
    assert (cost.op, cost.group_size, cost.nodes) == ("all_reduce", 16, 2)
    assert cost.points == ((8589934592, pytest.approx(47743e-6)),)
    assert cost.provenance.at == "2025-09-01 10:00:00"


def test_perftest_megabytes_are_binary() -> None:
    # github.com/alogfans/RDMA101 (400 Gbit/s RoCE)
    (link,) = imported("ib_write_bw.txt").network
    assert link.kind == "roce"
    # 0.708426 million messages of 64 KiB per second, by the last column of the same row.
    assert link.bandwidth_bytes_per_s == pytest.approx(0.708426e6 * 65536, rel=1e-5)


def test_perftest_gigabits_are_decimal() -> None:
    text = sample("ib_write_bw.txt").replace("MB/sec", "Gb/sec")
    (link,) = recognise(text, at=AT).network
    assert link.bandwidth_bytes_per_s == pytest.approx(44276.64e9 / 8)


def test_a_latency_test_completes_the_bandwidth_test_of_the_same_link() -> None:
    # github.com/spidernet-io/spiderpool, docs/usage/install/underlay/get-started-sriov-zh_CN.md
    latency = imported("ib_read_lat.txt")
    (link,) = join([imported("ib_write_bw.txt"), latency]).network
    # A read of 6.74 µs goes there and back.
    assert link.latency_s == pytest.approx(6.74e-6 / 2)
    with pytest.raises(ImportedFileError, match="without its bandwidth"):
        join([latency])


def test_the_nccl_topology_gives_nvlinks_nics_and_sockets() -> None:
    # github.com/trimagiccube/my_nccl, my_nccl_test/all_reduce_2proc/logs/aig-a100-topo.xml
    found = imported("nccl_topology_2x_a100.xml")
    assert found.routes[0] == {1: Route("nvlink", "device_switch", 12)}
    # NCCL counts 20 GB/s for one NVLink of this generation (src/graph/topo.h).
    assert found.links[0].bandwidth_bytes_per_s == 12 * 20e9
    # 2500 Mbit/s on an Ethernet controller with a hardware address, less its headers: RoCE v2
    # carries 4096 bytes in 4168.
    (nic,) = found.network
    assert nic.kind == "roce"
    assert nic.bandwidth_bytes_per_s == pytest.approx(2.5e9 / 8 * 4096 / 4168)
    assert nic.provenance.source == "datasheet"


def test_the_nccl_topology_joins_bridged_pairs_by_pcie() -> None:
    # github.com/Azure/azhpc-images, customizations/ncv4.sh: 4 A100 PCIe, bridges between two each.
    found = imported("nccl_topology_2x2_a100_pcie.xml")
    bridge, pcie = found.links
    assert (bridge.kind, bridge.ring_devices) == ("nvlink", 2)
    assert bridge.bandwidth_bytes_per_s == 12 * 20e9
    # Each on a NUMA node of its own; the virtual machine hides the speed, and NCCL takes 3.0 x16.
    assert (pcie.kind, pcie.locality, pcie.ring_devices) == ("pcie", "node", None)
    assert pcie.bandwidth_bytes_per_s == pytest.approx(8e9 * 16 * 128 / 130 / 8)


def test_without_nvlink_the_nccl_topology_gives_the_pcie_of_its_devices() -> None:
    text = re.sub("<nvlink .*/>", "", sample("nccl_topology_2x_a100.xml"))
    (pcie,) = recognise(text, at=AT).links
    # PCIe 4.0 x16, both behind one switch.
    assert (pcie.kind, pcie.locality) == ("pcie", "device_switch")
    assert pcie.bandwidth_bytes_per_s == pytest.approx(16e9 * 16 * 128 / 130 / 8)


def test_devices_that_are_joined_to_each_other_fill_their_nvlinks() -> None:
    # 4 A100, 4 NVLinks from each to each of the others, as on Perlmutter.
    busids = [f"0000:{number}1:00.0" for number in range(4)]
    gpus = "".join(
        f'<pci busid="{own}"><gpu dev="{number}" sm="80">'
        + "".join(f'<nvlink target="{to}" count="4"/>' for to in busids if to != own)
        + "</gpu></pci>"
        for number, own in enumerate(busids)
    )
    found = recognise(f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>', at=AT)
    # Two of them have 4 links to each other, three 8 each, all 12.
    rates = [(link.ring_devices, link.bandwidth_bytes_per_s) for link in found.links]
    assert rates == [(2, 4 * 20e9), (3, 8 * 20e9), (None, 12 * 20e9)]


def test_the_matrix_of_nvidia_smi_gives_paths_of_devices() -> None:
    # PLEIADES, University of Wuppertal, "Slurm: Using GPUs" (HGX A100)
    found = imported("topo_m_8x_a100.txt")
    others = [index for index in range(8) if index != 2]
    assert found.routes[2] == dict.fromkeys(others, Route("nvlink", "device_switch", 12))


def test_the_matrix_of_nvidia_smi_may_have_tabs_and_no_nvlink() -> None:
    # github.com/noonghunna/club-3090/issues/1229 (2 RTX 5090)
    found = imported("topo_m_2x_phb.txt")
    assert found.routes == {0: {1: Route("pcie", "socket")}, 1: {0: Route("pcie", "socket")}}


def test_a_topology_conf_is_a_tree_of_switches() -> None:
    # The first example of Slurm's topology.conf(5).
    cluster = imported("topology.conf").cluster
    assert cluster is not None
    assert len(cluster.nodes) == 18
    assert cluster.nodes["dev7"].machine == "a100"
    assert cluster.switches_above("dev7") == ("s1", "s3")


def test_blocks_of_a_topology_conf_are_switches_of_their_own() -> None:
    # The second example of Slurm's topology.conf(5).
    lines = ("BlockName=block1 Nodes=node[1-32]", "BlockName=block2 Nodes=node[33-64]")
    text = "\n".join((*lines, "BlockSizes=30,120"))
    cluster = recognise(text, at=AT).cluster
    assert cluster is not None
    assert cluster.switches_above("node33") == ("block2",)


def test_a_topology_yaml_gives_its_default_topology() -> None:
    # AWS, SageMaker HyperPod developer guide, "Tree topology"
    cluster = imported("topology.yaml").cluster
    assert cluster is not None
    assert list(cluster.nodes) == ["compute-1", "compute-2", "compute-3", "compute-4"]
    assert cluster.switches_above("compute-3") == ("leaf-1", "root")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvbandwidth_rtx5090.json", "all_to_host"),
        ("nccl_tests_2x8_h100.txt", "# Out of bounds"),
        ("nccl_tests_2x8_h100.txt", "158.86"),
        ("nccl_topology_2x_a100.xml", "</system>"),
        ("ib_write_bw.txt", "44276"),
        ("ib_read_lat.txt", "6.74"),
        ("topo_m_2x_phb.txt", "GPU1\tPHB"),
        ("topo_m_8x_a100.txt", "GPU7    NV12"),
        ("topology.conf", "Switches="),
        ("topology.yaml", "- switch: leaf-1"),
    ],
)
def test_a_file_cut_off_before_its_end_is_refused(name: str, words: str) -> None:
    text = sample(name)
    with pytest.raises(ImportedFileError, match=r"; \w"):
        recognise(text[: text.index(words)], at=AT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "format is not known"),
        ('{"results": 3, "args": []}', "damaged"),
        (nccl_report(out_of_bounds={"count": 4, "okay": "false"}), r"\(4 values out of bounds\)"),
        (nccl_report(args=["build/sendrecv_perf"]), "no collective of a profile"),
        ('{"nvbandwidth": {"error": "no device", "testcases": []}}', "no device"),
        ("<system><cpu/></system>", "no GPU"),
        ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n2", "'n2' hangs on both"),
        ("SwitchName=a Switches=b", "'b' is used and not described"),
        ("- topology: t\n  flat: true", "neither a tree nor blocks"),
        ("RingName=r Nodes=n[1-2]", "ring"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ImportedFileError, match=words) as refusal:
        recognise(text, at=AT)
    assert "\n" not in str(refusal.value)


def test_a_matrix_keeps_its_meaning_in_a_terminals_colours() -> None:
    # What `nvidia-smi topo -m` writes: its header is underlined, and begins with a tab.
    plain = sample("topo_m_2x_phb.txt")
    header, rest = plain.split("\n", 1)
    coloured = f"\t\x1b[4m{header.strip()}\x1b[0m\n{rest}"
    found = recognise(coloured, at=AT)
    assert found == imported("topo_m_2x_phb.txt")


@pytest.mark.parametrize("label", ["{task}: ", "[1,{task}]<stdout>:", "[1,{task}]<stdout>: "])
def test_nccl_tests_are_read_as_launchers_label_their_lines(label: str) -> None:
    plain = sample("nccl_tests_2x8_h100.txt")
    launcher, table = plain.split("# nThread", 1)
    lines = [label.format(task=0) + line for line in ("# nThread" + table).splitlines()]
    # Other tasks speak between.
    lines[5:5] = [label.format(task=3) + "NCCL version 2.21.5+cuda12.4"]
    lines[20:20] = [label.format(task=11) + "  1048576  262144  float  sum  -1  1.0  1 1 0 1 1 1 0"]
    found = recognise(launcher + "\n".join(lines), at=AT)
    assert found == imported("nccl_tests_2x8_h100.txt")


def test_of_matrices_of_several_tasks_the_first_is_read() -> None:
    plain = sample("topo_m_2x_phb.txt")
    tasks = [
        "\n".join(f"{task}: {line}" for line in text.splitlines())
        for task, text in ((0, plain), (1, plain.replace("PHB", "SYS")))
    ]
    assert recognise("\n".join(tasks), at=AT) == imported("topo_m_2x_phb.txt")


def test_a_run_with_wrong_results_is_refused() -> None:
    plain = sample("nccl_tests_2x8_h100.txt")
    row = "338.82      0    47743"
    with pytest.raises(ImportedFileError, match=r"wrong results \(12 of 8589934592 bytes\)"):
        recognise(plain.replace(row, "338.82     12    47743"), at=AT)
    counted = plain.replace("Out of bounds values : 0 OK", "Out of bounds values : 7 FAILED")
    assert counted != plain
    with pytest.raises(ImportedFileError, match=r"wrong results \(7 values out of bounds\)"):
        recognise(counted, at=AT)
    unchecked = recognise(plain.replace(row, "338.82    N/A    47743"), at=AT)
    assert unchecked == imported("nccl_tests_2x8_h100.txt")


# DGX-1's matrix of 8 V100 (NVIDIA DGX-1 whitepaper, 2017): 6 NVLinks each, 4 of them in its half.
_DGX_1 = """
NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 SYS SYS SYS NV1
NV2 SYS SYS SYS NV1 NV1 NV2
SYS NV2 SYS SYS NV1 NV2 NV1
SYS SYS NV1 SYS NV1 NV2 NV2
SYS SYS SYS NV1 NV2 NV1 NV2
"""


def matrix(cells: str) -> str:
    rows = [line.split() for line in cells.split("\n") if line]
    names = [f"GPU{number}" for number in range(len(rows))]
    for number, row in enumerate(rows):
        row.insert(number, "X")
    lines = (" ".join((name, *row)) for name, row in zip(names, rows, strict=True))
    return "\n".join((" ".join(("       ", *names)), *lines)) + "\n"


def device_links(machine: str, cells: str) -> list[tuple[str, int | None, float]]:
    """(kind, ring_devices, GB/s) between devices of a machine after a matrix is imported."""
    found = add_imports(load_profile(machine), recognise(matrix(cells), at=AT))
    return [
        (link.kind, link.ring_devices, link.bandwidth_bytes_per_s / 1e9)
        for link in found.links
        if link.kind in ("nvlink", "pcie")
    ]


def test_a_matrix_of_bridged_pairs_gives_their_bridge_and_pcie_beyond() -> None:
    pairs = "\n".join(
        " ".join("NV4" if other == number ^ 1 else "SYS" for other in range(8) if other != number)
        for number in range(8)
    )
    # 4 NVLinks of 14.0625 GB/s (GA102 whitepaper); PCIe 4.0 x16 as the machine has it.
    assert device_links("rtx-3090", pairs) == [("nvlink", 2, 56.25), ("pcie", None, 31.508)]
    # The catalogue's own bridged machine says so already, with its latencies.
    bridged = load_profile("rtx-3090-nvlink")
    assert add_imports(bridged, recognise(matrix(pairs), at=AT)).links == bridged.links


def test_a_matrix_without_nvlink_takes_it_from_the_machine() -> None:
    halves = "\n".join(
        " ".join(
            "NODE" if other // 4 == number // 4 else "SYS" for other in range(8) if other != number
        )
        for number in range(8)
    )
    links = device_links("rtx-3090-nvlink", halves)
    assert links == [("pcie", 4, 31.508), ("pcie", None, 31.508)]


def test_rings_through_a_mesh_fill_the_nvlinks_that_every_device_has() -> None:
    # 1 between the first two, 2 among three, 4 in a half, 6 among all.
    found = rings_of(recognise(matrix(_DGX_1), at=AT).routes, links_to_switch=False)
    assert [ring.route.links for ring in found if ring.devices in (2, 3, 4, None)] == [1, 2, 4, 6]
