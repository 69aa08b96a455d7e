"""A probe of several nodes measures what it can reach, and loses no more than what is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
import testbed.network as cables
from testbed.description import TestbedDescription
from testbed.launch import place

from estimator.cli.main import main
from estimator.errors import ProbeError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, MachineProfile
from estimator.probe.cluster.cluster_probe import ClusterRequest, Silence, members_of
from estimator.probe.cluster.discovery import VARIABLE
from estimator.probe.cluster.findings import Member, World, other_machines, unequal_versions
from estimator.probe.cluster.rank import Heartbeat
from tests.conftest import free_port

# A rank as the command line starts it, but with the host name and the versions given, and told to
# stop once it has come to the last of the steps that are looked at. It measures as long as with a
# budget of 20 s and has ten times as long for it: other work of this machine ends nothing early.
RANK = """
import sys, os, socket, threading
from estimator.probe.cluster import rank, steps
from estimator.probe.cluster.cluster_probe import ClusterRequest, probe_cluster
from estimator.probe.cluster.discovery import discover
from estimator.machines.catalogue import load_profile
from estimator.probe.machine import probe_machine

steps.MEASURING_RATIO /= 10
host, version, base, out = sys.argv[1:]
stop = threading.Event()

def report(part, done):
    print(part, flush=True)
    if part == "other collectives":
        stop.set()

place = discover(os.environ)
socket.gethostname = lambda: host
rank.versions = lambda: {"estimator": version, "torch": "2." + str(place.rank)}
if place.rank:
    print(rank.take_part(place), file=sys.stderr)
else:
    profile = probe_cluster(
        place,
        ClusterRequest(name="pair", budget_s=200.0, base=load_profile(base)),
        probe_machine=probe_machine,
        report=report,
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
        is_called_off=stop.is_set,
    )
    profile.save(out)
    sys.stdout.flush()
    os._exit(0)
"""


@contextmanager
def started(
    *commands: tuple[list[str], Mapping[str, str]],
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in sessions of their own, gone after the block."""
    with ExitStack() as stack:
        processes = []
        for command, environment in commands:
            process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def local_rank(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        VARIABLE: "0123456789abcdef" * 2,
    }


@dataclass(frozen=True)
class Ended:
    """A probe that is over: exit codes, what rank 0 wrote, and what each rank said."""

    codes: list[int]
    profile: MachineProfile
    said: list[str]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Ranks 0 and 2 on node a, rank 1 on node b; rank 3 on c runs another version."""
    from tests.conftest import make_small_profile

    folder = tmp_path_factory.mktemp("probe")
    make_small_profile("base").save(folder / "base.json")
    port = free_port()
    commands = []
    for rank, host in enumerate("abac"):
        version = "1" if host == "c" else "2"
        files = [str(folder / "base.json"), str(folder / "out.json")]
        command = [sys.executable, "-c", RANK, host, version, *files]
        commands.append((command, local_rank(rank, 4, port)))
    with started(*commands) as processes:
        said = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes[0] == 0, said[0]
    return Ended(codes, load_profile(folder / "out.json"), said)


def test_every_link_and_group_of_two_nodes_is_measured(two_nodes: Ended) -> None:
    profile = two_nodes.profile
    first = profile.network[0]
    assert (first.kind, first.locality, first.flows) == ("tcp", "rack", 1)
    assert profile.pairs is not None
    assert profile.pairs.hosts == ("a", "b")
    assert all(profile.pairs.bandwidth_bytes_per_s[i][1 - i] for i in range(2))
    reduced = {
        cost.hosts: cost
        for cost in profile.collectives
        if cost.op == "all_reduce" and cost.spans_nodes
    }
    # Node by node, whatever the order of ranks: a ring leaves each node once.
    assert set(reduced) == {("a", "a", "b"), ("a", "b")}
    everything = reduced["a", "a", "b"]
    assert (everything.group_size, everything.nodes, everything.backend) == (3, 2, "gloo")
    # How many more there are depends on how fast this machine is; two there always are.
    assert [size for size, _ in everything.points][:2] == [1 << 10, 16 << 10]
    assert everything.pair_ratio[0][0] == 64 << 10


def test_the_machines_own_numbers_stay_as_the_base_has_them(two_nodes: Ended) -> None:
    from tests.conftest import make_small_profile

    base, profile = make_small_profile("base"), two_nodes.profile
    assert profile.name == "pair"
    assert profile.kernels == base.kernels
    assert profile.updates == base.updates
    assert set(base.collectives) <= set(profile.collectives)


def test_unequal_versions_are_said_and_recorded(two_nodes: Ended) -> None:
    assert two_nodes.profile.software["torch on b"] == "2.1"
    assert "torch on b is 2.1, on rank 0 it is 2.0" in two_nodes.said[0]


def test_a_rank_of_another_estimator_is_refused_and_the_rest_goes_on(two_nodes: Ended) -> None:
    sentence = "rank 3 on node c runs estimator 1, rank 0 runs 2"
    assert sentence in two_nodes.said[0]
    assert any(sentence in missing for missing in two_nodes.profile.missing)
    # A failing code would have a launcher stop all the others.
    assert two_nodes.codes == [0, 0, 0, 0]
    assert sentence in two_nodes.said[3]


def test_the_only_other_rank_is_told_why_it_is_refused(tmp_path: Path) -> None:
    from tests.conftest import make_small_profile

    make_small_profile("base").save(tmp_path / "base.json")
    files = [str(tmp_path / "base.json"), str(tmp_path / "out.json")]
    port = free_port()
    commands = [
        ([sys.executable, "-c", RANK, host, version, *files], local_rank(rank, 2, port))
        for rank, (host, version) in enumerate((("a", "2"), ("b", "1")))
    ]
    with started(*commands) as ranks:
        _, said = zip(*(rank.communicate(timeout=120) for rank in ranks), strict=True)
    assert said[1].splitlines() == [
        "rank 1 on node b runs estimator 1, rank 0 runs 2; install the same on all nodes"
    ]
    # Of the network nothing was measured.
    assert "no two ranks are left" in said[0]
    assert not (tmp_path / "out.json").exists()


def test_a_rank_that_leaves_asks_the_store_nothing_more() -> None:
    class SlowStore:
        asked, is_asked = threading.Event(), False

        def clone(self) -> SlowStore:
            return self

        def post(self, _key: str, count: int) -> None:
            if count:
                self.is_asked = True
                self.asked.set()
                time.sleep(0.3)
                self.is_asked = False

        def read(self, _key: str) -> None:
            pass

    store: Any = SlowStore()
    with Heartbeat(store, 1):
        store.asked.wait()
    # Python aborts where it ends beside a thread that is in torch's store.
    assert not store.is_asked


def wait_for(stream: IO[str] | None, words: str) -> None:
    """Read what rank 0 reports until it says `words`."""
    assert stream is not None
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"never heard '{words}'")


@pytest.mark.skipif(
    cables.unavailable_reason() is not None, reason=str(cables.unavailable_reason())
)
def test_a_killed_rank_and_a_pulled_cable_end_a_probe_that_keeps_what_it_has(
    tmp_path: Path,
) -> None:
    from tests.conftest import make_small_profile

    make_small_profile("base").save(tmp_path / "base.json")
    out = tmp_path / "out.json"
    bed_of_four = TestbedDescription.uniform(nodes=4, devices=1, uplink="400 Mbit/s")
    with cables.testbed(bed_of_four) as bed:
        commands = []
        for placed in place(bed, bed_of_four.all_devices()):
            arguments = [placed.node, "2", str(tmp_path / "base.json"), str(out)]
            command = [*bed.entering(placed.node), sys.executable, "-c", RANK, *arguments]
            commands.append((command, placed.environment))
        with started(*commands) as ranks:
            wait_for(ranks[0].stdout, "all-reduce over everything")
            os.killpg(ranks[1].pid, signal.SIGKILL)
            cables.set_link_state(bed, "n2", up=False)
            lost_at = time.monotonic()
            _, said = ranks[0].communicate(timeout=60)
            assert ranks[0].returncode == 0, said
            assert ranks[3].wait(timeout=10) == 0
            # 5 s to know of all that are lost, 3 s for those that remain to leave.
            assert time.monotonic() - lost_at < 20
            # Out of reach of rank 0 for 20 s it ends by itself.
            assert ranks[2].wait(timeout=60) == 2
    profile = load_profile(out)
    for rank, host in ((1, "n1"), (2, "n2")):
        assert said.count(f"rank {rank} on node {host} stopped answering") == 1
        assert any(f"rank {rank} on node {host}" in missing for missing in profile.missing)
    (rest,) = (missing for missing in profile.missing if "a rank was lost" in missing)
    assert rest.startswith("all-reduce over everything, all-reduce over smaller groups")
    assert profile.network, "what was measured before the fault is kept"


def test_a_rank_that_comes_late_says_so_and_costs_the_others_nothing(tmp_path: Path) -> None:
    from tests.conftest import make_small_profile

    make_small_profile("base").save(tmp_path / "base.json")
    impatient = "from estimator.probe.cluster import cluster_probe\ncluster_probe.START_S = 20.0\n"
    signal_file = tmp_path / "go"
    # It has imported all that it needs before, so that the others are not over meanwhile.
    waits = (
        f"import time\nwhile not os.path.exists({str(signal_file)!r}): time.sleep(0.05)\nplace ="
    )
    scripts = [
        impatient + RANK,
        impatient + RANK,
        impatient + RANK.replace("\nplace =", f"\n{waits}"),
    ]
    port = free_port()
    files = [str(tmp_path / "base.json"), str(tmp_path / "out.json")]
    commands = [
        ([sys.executable, "-c", script, host, "2", *files], local_rank(rank, 3, port))
        for rank, (script, host) in enumerate(zip(scripts, "abc", strict=True))
    ]
    with started(*commands) as (first, _, late):
        wait_for(first.stdout, "all-reduce over everything")
        signal_file.touch()
        _, said = late.communicate(timeout=60)
        assert late.returncode == 0
        assert said.splitlines() == ["rank 2 did not start within 20 s"]
        assert first.poll() is None


def member(rank: int, host: str, **versions: str) -> Member:
    device = Device(kind="cpu", index=0, name="core", memory_bytes=1)
    return Member(
        rank=rank,
        host=host,
        device=device,
        machine="m",
        versions=versions,
    )


def test_versions_are_compared_with_rank_0s_node_by_node() -> None:
    world = World(
        members=(
            member(0, "a", torch="2.13", nccl="2.27"),
            member(1, "b", torch="2.12", nccl="2.27"),
            member(2, "c", torch="2.12"),
        )
    )
    assert unequal_versions(world) == {"torch on b, c": "2.12", "nccl on c": "none"}


def test_a_node_of_another_machine_is_named_with_what_to_do() -> None:
    other = replace(member(2, "c"), machine="n")
    world = World(members=(member(0, "a"), member(1, "b"), other, replace(other, host="d")))
    (sentence,) = other_machines(world)
    assert sentence.startswith("node c is another machine (n) than rank 0's (m); run 'estimator")


def facts_of(host: str, cores: list[int], local_rank: int | None = None) -> dict[str, Any]:
    return {
        "host": host,
        "address": f"10.0.0.{ord(host[0]) - 96}",
        "local_rank": local_rank,
        "versions": {"estimator": "2"},
        "cpu": {"model": "cpu", "threads": 2, "memory_bytes": 64, "numa_cores": {"0": cores}},
        "gpus": [],
        "failure": "",
    }


def test_ranks_of_one_host_share_its_cores_where_the_launcher_does_not() -> None:
    facts = {
        0: facts_of("a", [0, 1]),
        1: facts_of("b", [0]),
        2: facts_of("a", [0, 1]),
        3: facts_of("b", [1]),
        4: facts_of("c", [4, 5], local_rank=0),
    }
    members, refused = members_of(facts, ClusterRequest(), 5)
    # On b the launcher gave each rank a core of its own; on a they share both.
    cores = [member.device.cores for member in members]
    assert cores == [(0,), (0,), (1,), (1,), (4, 5)]
    assert refused == {}


def test_a_rank_that_does_not_come_leaves_its_cores_idle() -> None:
    facts = {rank: facts_of("a", [0, 1, 2], local_rank=rank) for rank in (0, 2)}
    members, refused = members_of(facts, ClusterRequest(), 3)
    assert [member.device.cores for member in members] == [(0,), (2,)]
    assert [*refused] == ["1"]


def test_ranks_have_the_gpus_of_their_numbers_and_no_more_than_there_are() -> None:
    gpu = {"kind": "cuda", "name": "gpu", "memory_bytes": 1, "cores": []}
    both = {"gpus": [{**gpu, "index": 0}, {**gpu, "index": 1}]}
    facts = {rank: {**facts_of("a", [0, 1]), **both} for rank in range(3)}
    members, refused = members_of(facts, ClusterRequest(), 3)
    assert [member.device.index for member in members] == [0, 1]
    assert members[1].machine.endswith("2 × gpu")
    assert "3 ranks were started on a node with 2 GPUs" in refused["2"]
    # Where the launcher shows each rank one of its own, that is its first.
    facts = {rank: {**facts[rank], "gpus": both["gpus"][:1]} for rank in range(2)}
    (first, second), _ = members_of(facts, ClusterRequest(), 2)
    assert (first.device.index, second.device.index) == (0, 0)
    (first, second), _ = members_of(facts, ClusterRequest(name="local-cpu"), 2)
    assert (first.device.kind, second.device.kind) == ("cpu", "cpu")


def test_more_ranks_on_a_node_than_the_base_has_devices_are_refused(
    small_profile: MachineProfile,
) -> None:
    facts = {rank: facts_of("a", [0, 1]) for rank in range(3)}
    with pytest.raises(ProbeError, match=r"more than 2 ranks were started on node a"):
        members_of(facts, ClusterRequest(base=small_profile), 3)


def test_a_rank_that_does_not_come_is_left_out() -> None:
    members, refused = members_of({0: facts_of("a", [0])}, ClusterRequest(), 2)
    assert [member.rank for member in members] == [0]
    assert refused == {"1": "rank 1 did not start within 55 s"}
    with pytest.raises(ProbeError, match="rank 0 did not start"):
        members_of({1: facts_of("a", [0])}, ClusterRequest(), 2)


def test_a_rank_is_lost_only_after_silence_that_was_listened_to() -> None:
    silence = Silence([1])
    assert silence.is_alive(1, 0, tick_s=0.1)
    # This process itself was stopped for a minute: that minute tells nothing of rank 1.
    assert silence.is_alive(1, 0, tick_s=60.0)
    quiet = [silence.is_alive(1, 0, tick_s=0.1) for _ in range(60)]
    assert quiet[0]
    assert not quiet[-1], "six seconds of silence"
    assert silence.is_alive(1, 1, tick_s=0.1), "and alive again with the next beat"


# The command, as `python -m estimator.probe` runs it, but with ten times as long as it measures.
COMMAND = """
from estimator.probe.__main__ import main
from estimator.probe.cluster import steps

steps.MEASURING_RATIO /= 10
main()
"""


def probe_of_two(folder: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    """The commands of two ranks on this machine, which write out.json."""
    from tests.conftest import make_small_profile

    make_small_profile("base").save(folder / "base.json")
    files = ["--base", str(folder / "base.json"), "--out", str(folder / "out.json")]
    command = [sys.executable, "-c", COMMAND, "--budget", "150", *files]
    port = free_port()
    return [(command, local_rank(rank, 2, port)) for rank in range(2)]


def test_an_interrupted_probe_keeps_what_it_has(tmp_path: Path) -> None:
    with started(*probe_of_two(tmp_path)) as (first, second):
        wait_for(first.stderr, "estimator: other collectives")
        # A launcher passes Ctrl-C on to all ranks, then ends them; the last to hear of it is rank
        # 0, when its collective has failed for want of the other already.
        for rank in (second, first):
            rank.send_signal(signal.SIGINT)
            rank.send_signal(signal.SIGTERM)
            if rank is second:
                rank.wait(timeout=60)
                time.sleep(0.5)
        _, said = first.communicate(timeout=60)
        assert first.returncode == 0, said
    profile = load_profile(tmp_path / "out.json")
    (cost,) = (cost for cost in profile.collectives if cost.hosts)
    assert (cost.op, cost.group_size) == ("all_reduce", 2)
    assert any("interrupted" in missing for missing in profile.missing)


def test_a_killed_rank_0_leaves_the_file_of_before(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")
    with started(*probe_of_two(tmp_path)) as (first, second):
        wait_for(first.stderr, "all-reduce over everything")
        first.kill()
        _, said = second.communicate(timeout=30)
        assert second.returncode == 2
    (line,) = said.splitlines()
    assert "rank 0" in line
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.json", "out.json"]


ALONE = {"RANK": "0", "WORLD_SIZE": "1", VARIABLE: "0123456789abcdef" * 2}


@pytest.mark.parametrize(
    ("words", "environment", "options"),
    [
        ("no launcher started this", {}, []),
        ("WORLD_SIZE: 'two' is no whole number", {"RANK": "0", "WORLD_SIZE": "two"}, []),
        ("export MASTER_ADDR", {"RANK": "0", "WORLD_SIZE": "2"}, []),
        ("No such file", ALONE, ["--cluster", "nowhere.toml"]),
        ("no machine profile is called 'nobody'", ALONE, ["--base", "nobody"]),
        ("cannot stand in an allocation", ALONE, ["--name", "../up"]),
        ("is a folder", ALONE, ["--out", "."]),
        ("ESTIMATOR_PROBE_SECRET is not set", {"RANK": "0", "WORLD_SIZE": "1"}, []),
        ("'0.5' is not from 1.00 s to 278 h; write a time that is", ALONE, ["--budget", "0.5"]),
        ("'soon' is not a duration; write a number and one of", ALONE, ["--budget", "soon"]),
        ("--pears", ALONE, ["--pears"]),
        ("go with one machine alone", ALONE, ["--devices", "2"]),
    ],
)
def test_the_command_line_refuses_in_one_sentence(
    words: str,
    environment: dict[str, str],
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**environment, "ESTIMATOR_HOME": str(tmp_path)})
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--together", *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_what_is_for_ranks_of_a_launcher_is_refused_of_one_machine_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--pairs", "all"])
    assert ended.value.code == 2
    assert "go with --together" in capsys.readouterr().err
