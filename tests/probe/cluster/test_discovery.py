"""Launchers say which rank this is by environment variables, each in its own words."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from estimator.cli.main import commands
from estimator.errors import ProbeError
from estimator.probe.cluster.discovery import (
    VARIABLE,
    discover,
    interface_of,
    launch_text,
    own_address_towards,
)
from estimator.probe.devices.inventory import core_groups, read_cpu

SECRET = {VARIABLE: "0123456789abcdef" * 2}


def test_torchrun_says_where_its_own_store_is() -> None:
    place = discover(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "a1",
            "MASTER_PORT": "29400",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **SECRET,
        }
    )
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert (place.master_address, place.master_port) == ("a1", 29400)
    assert (place.attempt, place.has_store) == ("2", True)


def test_slurm_names_rank_0s_node_first_in_its_list() -> None:
    step = {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07,09-11],login1",
        # srun sets these too, for programs that speak PMI.
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        **SECRET,
    }
    place = discover(step)
    assert place is not None
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("slurm", 3, 4, 1)
    assert place.master_address == "gpu07"
    # 12,000 ports from 20,000 on: 123456 = 10 · 12000 + 3456.
    assert place.master_port == 23456


def test_sbatch_alone_is_no_launcher() -> None:
    # In the batch script there is a job and no step.
    assert discover({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_open_mpi_on_several_nodes_needs_the_masters_address() -> None:
    ranks = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    with pytest.raises(ProbeError, match="export MASTER_ADDR"):
        discover(ranks)
    place = discover({**ranks, "MASTER_ADDR": "n0", **SECRET})
    assert place is not None
    assert (place.launcher, place.rank, place.local_rank) == ("openmpi", 1, 0)
    # On one node there is nothing to say.
    alone = discover({**ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert alone is not None
    assert alone.master_address == "127.0.0.1"


def test_hydra_ranks_are_found_by_pmi() -> None:
    place = discover(
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "n0", **SECRET}
    )
    assert place is not None
    assert (place.launcher, place.rank, place.local_rank) == ("pmi", 2, 0)


TWO_HOSTS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}
SLURM_STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "a[1-2]",
}


@pytest.mark.parametrize("environment", [TWO_HOSTS, SLURM_STEP])
def test_ranks_on_several_hosts_are_refused_without_a_secret(environment: dict[str, str]) -> None:
    with pytest.raises(ProbeError, match=f"{VARIABLE} is not set; give all ranks one secret"):
        discover(environment)
    place = discover({**environment, **SECRET})
    assert place is not None
    assert (place.is_local, place.secret) == (False, SECRET[VARIABLE].encode())
    assert SECRET[VARIABLE] not in repr(place)


@pytest.mark.parametrize(
    "environment",
    [
        {**TWO_HOSTS, "MASTER_ADDR": "127.0.0.1"},
        {**TWO_HOSTS, "MASTER_ADDR": "localhost"},
        {**TWO_HOSTS, "MASTER_ADDR": "::1"},
        {**TWO_HOSTS, "LOCAL_WORLD_SIZE": "2"},
        {**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_ranks_on_one_host_need_no_secret_and_meet_on_the_loopback(
    environment: dict[str, str],
) -> None:
    place = discover(environment)
    assert place is not None
    assert place.is_local
    assert place.master_address in ("127.0.0.1", "localhost", "::1")


def test_without_a_launcher_there_is_no_place() -> None:
    assert discover({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_half_a_launcher_is_refused_in_one_sentence(environment: dict[str, str]) -> None:
    with pytest.raises(ProbeError) as caught:
        discover(environment)
    assert len(str(caught.value)) > 30


def test_the_loopback_interface_has_the_address_that_leads_to_it() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", None)  # None: this system does not tell
    assert interface_of("192.0.2.1") is None  # reserved for documentation, RFC 5737


def test_launch_texts_start_as_many_ranks_as_there_are_devices() -> None:
    def text(cluster: str, on_gpus: bool = True) -> str:
        options = ("--name", "my type", "--budget", "60")
        return launch_text(cluster, nodes=3, devices=4, on_gpus=on_gpus, options=options)  # type: ignore[arg-type]

    assert "--nodes=3 --ntasks-per-node=4 --gpus-per-node=4" in text("slurm")
    assert "gpus" not in text("slurm", on_gpus=False)
    assert "-np 12 " in text("mpi")
    assert "nvidia.com/gpu" not in text("k8s", on_gpus=False)
    assert all("--name 'my type'" in text(cluster) for cluster in ("slurm", "mpi", "k8s"))
    # Every rank gets the secret; no command line carries it, as all users of a host can read those.
    assert f'export {VARIABLE}="$(python -c ' in text("slurm")
    assert f"-x {VARIABLE} " in text("mpi")


def test_a_kubernetes_manifest_names_rank_0_by_its_headless_service() -> None:
    text = launch_text("k8s", nodes=3, devices=4, on_gpus=True, options=("--name", "h100"))
    service, job = yaml.safe_load_all(text)
    (variable,) = job["spec"]["template"]["spec"]["containers"][0]["env"]
    reference = {"name": "estimator-probe", "key": "secret"}
    assert variable == {"name": VARIABLE, "valueFrom": {"secretKeyRef": reference}}
    assert "kubectl create secret generic estimator-probe --from-file=secret=/dev/stdin" in text
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    # Pods that wait for each other are not ready, and must be found all the same.
    assert service["spec"]["publishNotReadyAddresses"] is True
    # The controller labels the pods of a job with its name.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    (command,) = container["args"]
    assert command.startswith("exec torchrun --nnodes 3 --node-rank $JOB_COMPLETION_INDEX --nproc")
    # A pod of an indexed job is called after its job and its index, in the service's domain.
    assert "--master-addr estimator-probe-0.estimator-probe " in command
    assert "-m estimator.probe --name h100 --json 2>" in command


def test_nodes_are_like_this_one_unless_devices_are_said() -> None:
    def printed(*options: str) -> str:
        arguments = ["probe", "--launch", "slurm", "--nodes", "4", "--name", "local-cpu", *options]
        done = CliRunner().invoke(commands, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "--ntasks-per-node=3 " in printed("--devices", "3")
    own = len(core_groups(read_cpu()))
    assert f"--nodes=4 --ntasks-per-node={own} --exclusive" in printed()
