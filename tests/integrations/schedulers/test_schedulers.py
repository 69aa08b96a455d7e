"""What schedulers and launchers are told, in their own formats and by their own parsers."""

from __future__ import annotations

import base64
import csv
import importlib.util
import inspect
import json
import math
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estimator.api import estimate
from estimator.errors import (
    AllocationError,
    GraphFileError,
    ImportedFileError,
    UnknownMachineError,
    WorkloadError,
)
from estimator.graph.ir.op_graph import OpGraph
from estimator.integrations.schedulers import kubernetes, launchers
from estimator.integrations.schedulers.launchers import nnodes, scaling_config, sizes, torchrun
from estimator.placement.topology import Cluster, Node, Switch
from tests.synthetic import perceptron


@pytest.fixture
def graph() -> OpGraph:
    return perceptron([2048, 2048, 2048], batch=64, target="cuda")


def graph_of(graph: OpGraph) -> Any:
    def found(name: str) -> OpGraph:
        if name != "net":
            raise GraphFileError(f"there is no graph {name}")
        return graph

    return found


def test_sizes_go_from_the_fewest_that_fit_to_the_most_that_are_used_well(graph: OpGraph) -> None:
    found = sizes(graph, "t4-g4dn", max_nodes=4, wanted_ratio=0.2)
    rates = [estimate(graph, f"{n}x4:t4-g4dn").samples_per_s or 0.0 for n in range(1, 5)]
    enough = [n for n in range(1, 5) if rates[n - 1] / n >= 0.2 * rates[0]]
    assert (found.least_nodes, found.most_nodes) == (1, max(enough))
    assert sizes(graph, "t4-g4dn", max_nodes=4, wanted_ratio=1.0).most_nodes == 1
    assert found.devices == 4


def test_what_fits_nowhere_is_refused(graph: OpGraph) -> None:
    with pytest.raises(WorkloadError, match="no machine profile is called 'no-such'"):
        sizes(graph, "no-such", devices=4, max_nodes=2)
    with pytest.raises(WorkloadError, match="fits on none of 1 to 2 nodes"):
        sizes(graph, "t4-g4dn", max_nodes=2, batch_per_gpu=10**6)


def test_torchrun_reads_the_range_of_nodes(graph: OpGraph) -> None:
    run = pytest.importorskip("torch.distributed.run")
    found = sizes(graph, "t4-g4dn", max_nodes=4, wanted_ratio=0.01)
    assert found.most_nodes == 4
    arguments = run.parse_args([*torchrun(found)[1:], "train.py"])
    assert run.parse_min_max_nnodes(arguments.nnodes) == (1, 4)
    assert arguments.nproc_per_node == "4"
    one = sizes(graph, "t4-g4dn", max_nodes=1)
    assert run.parse_min_max_nnodes(nnodes(one)) == (1, 1)


@pytest.mark.filterwarnings("ignore")
def test_ray_train_takes_the_scaling_config(graph: OpGraph) -> None:
    pytest.importorskip("ray.train", reason="ray[train] is not installed", exc_type=ImportError)
    found = sizes(graph, "t4-g4dn", max_nodes=2, wanted_ratio=0.01)
    config = scaling_config(found, placement_strategy="SPREAD")
    assert (config.num_workers, config.use_gpu) == (8, True)
    assert config.placement_strategy == "SPREAD"


def test_skypilot_is_told_seconds_of_training(graph: OpGraph) -> None:
    seconds = launchers.time_estimator(graph, samples=1e9, nodes=2)
    resources = SimpleNamespace(instance_type="g4dn.12xlarge", accelerators={"T4": 4})
    expected = estimate(graph, "2x4:t4-g4dn").duration_s(samples=1e9)
    assert seconds(resources) == round(expected)
    with pytest.raises(UnknownMachineError, match="no machine profile is known of"):
        seconds(SimpleNamespace(instance_type=None, accelerators={"TPU": 8}))
    # The cloud's own instance: 8 V100 are 16 GB ones at AWS, 4 that and 32 GB ones on InfiniBand at
    # Azure, where SkyPilot calls them so.
    for accelerator, cloud, machine in (
        ({"V100": 8}, "", "v100-p3"),
        ({"V100": 4}, "AWS", "v100-p3-8xlarge"),
        ({"V100-32GB": 8}, "Azure", "v100-nd-v2"),
        ({"A100": 8}, "GCP", "a100-a2"),
    ):
        assert launchers.machine_of(None, accelerator, cloud)[0] == machine


def test_skypilots_own_task_takes_the_function(graph: OpGraph) -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed", exc_type=ImportError)
    task = sky.Task(run="true")
    task.set_time_estimator(launchers.time_estimator(graph, samples=1e9))
    resources = sky.Resources(accelerators="T4:4")
    assert task.estimate_runtime(resources) > 0
    assert "resources" in inspect.signature(task.estimate_runtime).parameters


def node(name: str, machine: str | None) -> dict[str, Any]:
    labels = {} if machine is None else {kubernetes.MACHINE: machine}
    return {"metadata": {"name": name, "labels": labels}, "status": {}}


def call(*nodes: dict[str, Any], graph: str | None = "net", gpus: Any = "4") -> dict[str, Any]:
    """ExtenderArgs as Go writes them: its fields have no tags in some versions."""
    annotations = {} if graph is None else {kubernetes.GRAPH: graph}
    limits = {"nvidia.com/gpu": gpus}
    return {
        "Pod": {
            "metadata": {"name": "train", "annotations": annotations},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        },
        "Nodes": {"metadata": {}, "items": list(nodes)},
        "NodeNames": None,
    }


def test_nodes_on_which_a_pod_does_not_fit_are_filtered_out_with_reasons(graph: OpGraph) -> None:
    nodes = (node("a", "t4-g4dn"), node("b", None), node("c", "v100-p3-8xlarge"))
    found = kubernetes.filtered(call(*nodes), graph_of(graph))
    assert [each["metadata"]["name"] for each in found["nodes"]["items"]] == ["a", "c"]
    assert list(found["failedNodes"]) == ["b"]
    assert "no label throughput-estimator/machine" in found["failedNodes"]["b"]
    large = perceptron([40000, 40000, 40000, 40000], batch=64, target="cuda")
    found = kubernetes.filtered(call(node("a", "t4-g4dn")), graph_of(large))
    assert "does not fit into the memory of 1x4:t4-g4dn" in found["failedNodes"]["a"]


def test_the_fastest_node_has_the_highest_score(graph: OpGraph) -> None:
    nodes = (node("slow", "t4-g4dn"), node("fast", "a100-p4d"), node("unknown", "no-such"))
    found = {
        each["host"]: each["score"]
        for each in kubernetes.prioritized(call(*nodes), graph_of(graph))
    }
    slow, fast = (estimate(graph, f"1x4:{each}") for each in ("t4-g4dn", "a100-p4d"))
    expected = round(10 * fast.step_time_s / slow.step_time_s)
    assert found == {"slow": expected, "fast": 10, "unknown": 0}
    # Eight such pods train together over the network of the nodes.
    gang = call(*nodes)
    gang["Pod"]["metadata"]["annotations"][kubernetes.GANG] = "8"
    slow, fast = (estimate(graph, f"8x4:{each}") for each in ("t4-g4dn", "a100-p4d"))
    score = round(10 * fast.step_time_s / slow.step_time_s)
    assert kubernetes.prioritized(gang, graph_of(graph))[0] == {"host": "slow", "score": score}
    assert score != expected


RACKS = Cluster(
    nodes={
        name: Node(machine="a100-p4d", switch=name[0]) for name in ("a1", "a2", "b1", "b2", "b3")
    },
    switches={
        "spine": Switch(),
        "a": Switch(parent="spine", uplink_bytes_per_s=1.25e9),
        "b": Switch(parent="spine", uplink_bytes_per_s=1.25e9),
    },
)


def gang_scores(graph: OpGraph, names: str, members: str, placed: str = "") -> dict[str, int]:
    asked = call(*(node(name, "a100-p4d") for name in names.split()))
    annotations = asked["Pod"]["metadata"]["annotations"]
    annotations |= {kubernetes.GANG: members, kubernetes.PLACED: placed}
    found = kubernetes.prioritized(asked, graph_of(graph), RACKS)
    return {each["host"]: each["score"] for each in found}


def test_a_gang_is_kept_in_the_rack_of_its_placed_members(graph: OpGraph) -> None:
    apart = estimate(graph, "b1[0-3]+a1[0-3]", cluster=RACKS)
    together = estimate(graph, "b1[0-3]+b2[0-3]", cluster=RACKS)
    other = round(10 * together.step_time_s / apart.step_time_s)
    assert other < 10
    assert gang_scores(graph, "a1 b2 b3", "2", "b1") == {"a1": other, "b2": 10, "b3": 10}
    assert gang_scores(graph, "a2 b2", "2", "a1") == {"a2": 10, "b2": other}


def test_the_first_of_a_gang_goes_where_all_of_it_has_room(graph: OpGraph) -> None:
    # Three are never in rack a, of two nodes.
    found = gang_scores(graph, "a1 a2 b1 b2 b3", "3")
    assert found["b1"] == found["b2"] == found["b3"] == 10
    assert found["a1"] == found["a2"] < 10
    # Two may be in either.
    assert set(gang_scores(graph, "a1 a2 b1 b2 b3", "2").values()) == {10}


def test_members_on_one_node_are_more_devices_of_it(graph: OpGraph) -> None:
    pair = kubernetes._Gang(RACKS, ["a1"], ["a1"])
    assert pair.allocation("a1", 2, 4) == "a1[0-7]"
    assert pair.allocation("b1", 3, 4) == "a1[0-3]+a2[0-3]+b1[0-3]"
    assert pair.allocation("unknown", 2, 4) is None


def test_labels_of_nodes_describe_a_cluster() -> None:
    def labelled(name: str) -> dict[str, Any]:
        labels = {kubernetes.SWITCHES: f"spine/{name[0]}", kubernetes.UPLINK: "10 Gbit/s"}
        return {"metadata": {"name": name, "labels": {kubernetes.MACHINE: "a100-p4d"} | labels}}

    nodes = [labelled(name) for name in RACKS.nodes]
    assert kubernetes.cluster_of([*nodes, node("cpu", None)]) == RACKS
    nodes[0]["metadata"]["labels"][kubernetes.UPLINK] = "fast"
    with pytest.raises(WorkloadError, match="uplink"):
        kubernetes.cluster_of(nodes)


def test_volcano_says_itself_where_a_gang_is(graph: OpGraph) -> None:
    own = task()
    own["Pod"]["metadata"]["annotations"][kubernetes.GANG] = "2"
    nodes = [info(node(name, "a100-p4d")) for name in ("a1", "a2", "b1", "b2")]
    nodes[2]["Tasks"] = {"ns/train-0": {"Job": own["Job"]}}
    asked = {"task": own, "nodes": nodes}
    found = kubernetes.volcano_prioritized(asked, graph_of(graph), RACKS)["nodeScore"]
    assert max(found, key=found.__getitem__) in ("b1", "b2")
    assert found["a1"] < found["b2"]


def test_pods_of_others_keep_all_nodes(graph: OpGraph) -> None:
    nodes = (node("a", "t4-g4dn"), node("b", None))
    found = kubernetes.filtered(call(*nodes, graph=None), graph_of(graph))
    assert len(found["nodes"]["items"]) == 2
    scores = kubernetes.prioritized(call(*nodes, graph=None), graph_of(graph))
    assert {each["score"] for each in scores} == {0}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"graph": "other"}, "there is no graph other"),
        ({"gpus": "some"}, "are no whole numbers"),
        ({"gpus": 0}, "asks for no nvidia.com/gpu"),
        ({"gpus": 9}, "which has"),
    ],
)
def test_a_pod_that_cannot_be_estimated_fails_each_node(
    graph: OpGraph, asked: dict[str, Any], said: str
) -> None:
    found = kubernetes.filtered(call(node("a", "t4-g4dn"), **asked), graph_of(graph))
    assert said in found["failedNodes"]["a"]


def task(graph: str | None = "net") -> dict[str, Any]:
    """Volcano's TaskInfo as Go writes it: fields have no tags, the pod has Kubernetes' own."""
    pod = call(graph=graph)["Pod"]
    facts = {"UID": "t1", "Job": "ns/job", "Name": "train", "Namespace": "ns", "Resreq": {}}
    return facts | {"NodeName": "", "Status": 1, "Priority": 1, "Pod": pod}


def info(of: dict[str, Any]) -> dict[str, Any]:
    """Volcano's NodeInfo as Go writes it."""
    name = of["metadata"]["name"]
    return {"Name": name, "Node": of, "State": {"Phase": 1, "Reason": ""}, "Tasks": {}}


def test_volcano_is_told_why_a_node_does_not_do(graph: OpGraph) -> None:
    # As pkg/scheduler/plugins/extender/argument.go has it: no message is yes; `status` is the
    # message, before it was `errorMessage`; 3 is UnschedulableAndUnresolvable.
    asked = {"task": task(), "node": info(node("a", "t4-g4dn"))}
    found = kubernetes.predicate(asked, graph_of(graph))
    assert found == {"status": "", "errorMessage": "", "code": 0}
    refused = kubernetes.predicate(asked | {"node": info(node("b", None))}, graph_of(graph))
    assert "no label throughput-estimator/machine" in refused["status"]
    assert refused["errorMessage"] == refused["status"]
    assert refused["code"] == 3
    large = perceptron([40000, 40000, 40000, 40000], batch=64, target="cuda")
    refused = kubernetes.predicate(asked, graph_of(large))
    assert "does not fit into the memory of 1x4:t4-g4dn" in refused["status"]
    others = {"task": task(graph=None), "node": info(node("b", None))}
    assert kubernetes.predicate(others, graph_of(graph))["code"] == 0


def test_volcano_is_given_a_score_for_each_node(graph: OpGraph) -> None:
    nodes = [info(node("slow", "t4-g4dn")), info(node("fast", "a100-p4d")), info(node("x", None))]
    found = kubernetes.volcano_prioritized({"task": task(), "nodes": nodes}, graph_of(graph))
    slow, fast = (estimate(graph, f"1x4:{each}") for each in ("t4-g4dn", "a100-p4d"))
    expected = 100 * fast.step_time_s / slow.step_time_s
    assert found["errorMessage"] == ""
    assert found["nodeScore"] == {"slow": pytest.approx(expected), "fast": 100.0, "x": 0.0}


def review(annotations: dict[str, str], trainer: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = {"runtimeRef": {"name": "torch-distributed"}}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "operation": "CREATE",
            "object": {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": "job", "annotations": annotations},
                "spec": spec | ({} if trainer is None else {"trainer": trainer}),
            },
        },
    }


def test_a_train_job_is_given_the_nodes_that_it_uses_well(graph: OpGraph) -> None:
    annotations = {
        kubernetes.GRAPH: "net",
        kubernetes.MACHINE: "t4-g4dn",
        kubernetes.MOST_NODES: "4",
        kubernetes.WANTED: "0.01",
    }
    trainer = {"numNodes": 1, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}
    found = kubernetes.admitted(review(annotations, trainer), graph_of(graph))
    assert found["kind"] == "AdmissionReview"
    response = found["response"]
    assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    nodes, words = json.loads(base64.b64decode(response["patch"]))
    assert nodes == {"op": "add", "path": "/spec/trainer/numNodes", "value": 4}
    assert words["path"] == "/metadata/annotations/throughput-estimator~1estimate"
    assert "on 4x2:t4-g4dn" in words["value"]


def test_a_train_job_without_a_trainer_is_given_one(graph: OpGraph) -> None:
    annotations = {kubernetes.GRAPH: "net", kubernetes.MACHINE: "t4-g4dn"}
    found = kubernetes.admitted(review(annotations), graph_of(graph))
    patch = json.loads(base64.b64decode(found["response"]["patch"]))
    assert patch[0] == {"op": "add", "path": "/spec/trainer", "value": {}}


def test_jobs_of_others_pass_as_they_are(graph: OpGraph) -> None:
    response = kubernetes.admitted(review({}), graph_of(graph))["response"]
    assert response["allowed"] is True
    assert "patch" not in response


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({kubernetes.GRAPH: "other", kubernetes.MACHINE: "t4-g4dn"}, "there is no graph other"),
        ({kubernetes.GRAPH: "net"}, "no annotation throughput-estimator/machine"),
        (
            {kubernetes.GRAPH: "net", kubernetes.MACHINE: "t4-g4dn", kubernetes.MOST_NODES: "many"},
            "'many' is no whole number",
        ),
        (
            {kubernetes.GRAPH: "net", kubernetes.MACHINE: "t4-g4dn", kubernetes.WANTED: "2"},
            "a ratio above 0 and up to 1",
        ),
    ],
)
def test_a_train_job_that_cannot_be_estimated_is_refused_in_one_sentence(
    graph: OpGraph, annotations: dict[str, str], said: str
) -> None:
    response = kubernetes.admitted(review(annotations), graph_of(graph))["response"]
    assert response["allowed"] is False
    assert said in response["status"]["message"]


SINFO = "debug|30:00|2|gpu:t4:4\ncpu|infinite|64|(null)\nlong|7-00:00:00|16|gpu:t4:4(S:0-1)\n"


def test_partitions_are_read_as_sinfo_writes_them() -> None:
    debug, cpu, long = launchers.read_sinfo(SINFO)
    assert (debug.limit_s, debug.nodes, debug.gpu, debug.gpus) == (1800.0, 2, "t4", 4)
    assert (cpu.limit_s, cpu.gpus) == (math.inf, 0)
    assert (long.limit_s, long.gpus) == (7 * 86400.0, 4)
    with pytest.raises(ImportedFileError, match="no line of sinfo"):
        launchers.read_sinfo("PARTITION AVAIL TIMELIMIT")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpu --uid=0 --export=ALL,LD_PRELOAD=x|infinite|9|gpu:t4:4", "is no name of a partition"),
        ("-w|infinite|9|gpu:t4:4", "is no name of a partition"),
        ("\x1b[31mgpu|infinite|9|gpu:t4:4", "is no name of a partition"),
        ("|infinite|9|gpu:t4:4", "is no name of a partition"),
        ("gpu|infinite|²|gpu:t4:4", "'²' is no whole number"),
        ("gpu|infinite|" + "9" * 5000 + "|gpu:t4:4", "is not from 0 to 1e"),
        ("gpu|\x1b[2J|9|gpu:t4:4", "is no time limit of Slurm"),
    ],
)
def test_a_line_that_sinfo_cannot_have_written_is_refused(line: str, said: str) -> None:
    with pytest.raises(ImportedFileError, match=said) as refused:
        launchers.read_sinfo(line)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_the_first_partition_that_takes_a_job_is_taken() -> None:
    partitions = launchers.read_sinfo(SINFO)
    short = launchers.partition_for(partitions, nodes=2, gpus=4, time_s=1800)
    long = launchers.partition_for(partitions, nodes=2, gpus=4, time_s=1801)
    assert (short.name, long.name) == ("debug", "long")
    with pytest.raises(AllocationError) as refused:
        launchers.partition_for(partitions, nodes=17, gpus=1, time_s=60)
    assert "debug has 2 nodes; cpu has 0 GPUs a node; long has 16 nodes" in str(refused.value)


def test_names_cannot_leave_their_line_of_a_script(graph: OpGraph) -> None:
    hostile = replace(graph, name="net\n#SBATCH --uid=0\nrm -rf / #")
    script = launchers.job_script(
        estimate(hostile, "1x4:t4-g4dn"), time_s=60, command=["train.py", "a b; rm -rf /"]
    )
    lines = script.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --uid")] == []
    assert [line for line in lines if line.startswith("rm")] == []
    assert lines[-1].endswith("train.py 'a b; rm -rf /'")


def test_the_example_answers_schedulers_over_http(
    graph: OpGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    example = __import__("kubernetes_extender")
    graph.save(tmp_path / "net.graph")
    running = example.server(tmp_path, 0)
    threading.Thread(target=running.serve_forever, daemon=True).start()

    def ask(path: str, content: Any) -> Any:
        host, port = running.server_address
        request = urllib.request.Request(
            f"http://{host}:{port}{path}", data=json.dumps(content).encode()
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    try:
        asked = call(node("a", "t4-g4dn"))
        assert ask("/filter", asked) == kubernetes.filtered(asked, graph_of(graph))
        assert ask("/prioritize", asked) == [{"host": "a", "score": 10}]
        asked = {"task": task(), "node": info(node("a", "t4-g4dn"))}
        assert ask("/volcano/predicate", asked)["code"] == 0
        asked = {"task": task(), "nodes": [info(node("a", "t4-g4dn"))]}
        assert ask("/volcano/prioritize", asked)["nodeScore"] == {"a": 100.0}
        annotations = {kubernetes.GRAPH: "net", kubernetes.MACHINE: "t4-g4dn"}
        assert ask("/admit", review(annotations))["response"]["allowed"] is True
        outside = ask("/filter", call(node("a", "t4-g4dn"), graph="../net"))
        assert "letters, digits" in outside["failedNodes"]["a"]

        def status(length: str, content: bytes) -> int:
            with socket.create_connection(running.server_address, timeout=10) as line:
                head = f"POST /prioritize HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
                line.sendall(head.encode() + content)
                line.shutdown(socket.SHUT_WR)
                return int(line.makefile("rb").readline().split()[1])

        assert [status(text, b"") for text in ("many", "-1", "0", "9" * 5000)] == [411] * 3 + [413]
        deep = b"[" * 100_000
        for content in (
            deep,
            b"[]",
            b"7",
            b'{"nodes": 7}',
            b'{"pod": {}, "nodes": {"items": [7]}}',
        ):
            assert status(str(len(content)), content) == 400
        assert capfd.readouterr().err == "", "no traceback"
    finally:
        running.shutdown()
        running.server_close()


ROOT = Path(__file__).resolve().parents[3]
TYPES = {"g4dn.12xlarge", "p3.8xlarge", "p4d.24xlarge"}
# SkyPilot reads its home when it is imported, and asks clouds which of them it may use.
SCRIPT = """
import json, sys
from sky import check, clouds
from skypilot_task import choose
from estimator.graph.ir.op_graph import OpGraph

check.get_cached_enabled_clouds_or_refresh = lambda *words, **options: [clouds.AWS()]
graph = OpGraph.load(sys.argv[1])
chosen = {
    target: choose(graph, samples=1e9, nodes=2, target=target).instance_type
    for target in ("TIME", "COST")
}
print(json.dumps(chosen))
"""


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="skypilot is not installed")
def test_its_optimizer_takes_the_fastest_or_the_cheapest(tmp_path: Path) -> None:
    graph = perceptron([256, 256], batch=256, target="cuda")
    graph.save(tmp_path / "net.graph")
    catalogue = tmp_path / ".sky/catalogs/v8/aws/vms.csv"
    names = tmp_path / ".sky/catalogs/v8/common/accelerators.csv"
    for path in (catalogue, names):
        path.parent.mkdir(parents=True)
    names.write_text("AcceleratorName,Clouds\nT4,AWS\nV100,AWS\nA100,AWS\n")
    with (ROOT / "data/prices/instances.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["InstanceType"] in TYPES]
    usd = {row["InstanceType"]: float(row["Price"]) for row in rows}
    with catalogue.open("w") as file:
        columns = list(rows[0])[: list(rows[0]).index("Cloud")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "net.graph")],
        env=os.environ
        | {
            "HOME": str(tmp_path),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "ESTIMATOR_HOME": str(tmp_path / "store"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    time_s = {
        row["InstanceType"]: estimate(
            graph, f"2x{row['AcceleratorCount']}:{row['Machine']}"
        ).duration_s(samples=1e9)
        for row in rows
    }
    fastest = min(TYPES, key=lambda name: time_s[name])
    cheapest = min(TYPES, key=lambda name: time_s[name] * usd[name])
    assert fastest != cheapest, "otherwise one target would tell nothing of the other"
    assert json.loads(done.stdout.splitlines()[-1]) == {"TIME": fastest, "COST": cheapest}
