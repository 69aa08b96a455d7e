"""The command line prints for people, or JSON alone, and ends with the code it promises."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from estimator.cli.main import commands
from estimator.estimates.estimate import Estimate
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Interference, MachineProfile
from estimator.probe.devices.inventory import read_cpu
from estimator.validate.training import Validation
from tests.conftest import Command
from tests.integrations.test_perfetto import trace_flaws
from tests.synthetic import perceptron

pytestmark = pytest.mark.usefixtures("store")


def test_help_lists_the_commands_and_no_command_is_help(command: Command) -> None:
    answer = command("--help")
    assert answer.code == 0
    for name in ("probe", "machines", "estimate", "validate", "layouts", "rent"):
        assert f"\n  {name} " in answer.out
    assert command() == answer


def test_help_fits_a_screen_of_24_lines_and_cuts_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("--help").out.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "m", "--on", "1x1:t4"), "'estimator plan' is now 'estimator layouts MODEL --on"),
        (("check", "m", "--on", "1x1:t4"), "part of 'estimator estimate --verbose'"),
        (("profile", "list"), "'estimator machines list|show|"),
        (("stalls", "--run", "x.py", "--on", "1x1:local"), "'stalls run SCRIPT'"),
    ],
)
def test_names_of_the_release_before_say_what_to_write_now(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    assert said in command(*words).sentence


def _leaves(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from _leaves(each, *names, name)
        elif not each.hidden:
            yield (*names, name), each


# Of which commands differ in more than an example or a default.
SAID_BY_EACH = {
    "--budget": "what may be spent: time by a probe, money by what is rented",
    "--cluster": "for an order, only whose uplinks hops share",
    "--devices": "of one host: of a CPU its groups of cores, else ranks",
    "--json": "of a probe the profile, of what writes files those",
    "--name": "of this machine, or of one that is imported",
    "--observed": "a store, whose steps a page shows and whose gradient noise a replay takes",
}


def test_an_option_means_one_thing_in_every_command() -> None:
    meant: dict[str, dict[str, str]] = {}
    for names, leaf in _leaves(commands):
        for option in leaf.params:
            if isinstance(option, click.Option) and option.opts[-1] not in SAID_BY_EACH:
                words = re.split(r"such as|as in|; default", option.help or "", flags=re.I)[0]
                meant.setdefault(option.opts[-1], {})[" ".join(names)] = words.strip(" ,.")
    unlike = {option: said for option, said in meant.items() if len(set(said.values())) > 1}
    # Several batches are a question of a sweep alone; --out says where a file goes that is made.
    assert set(unlike) <= {"--batch", "--out"}, unlike


@pytest.mark.parametrize(("names", "leaf"), list(_leaves(commands)), ids=str)
def test_each_command_has_an_example_that_it_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    names: tuple[str, ...],
    leaf: click.Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    perceptron([64, 64], target="cuda").save(tmp_path / "gpt2.graph")
    for name in ("train.py", "a.json", "b.json", "nvbandwidth.json"):
        (tmp_path / name).write_text("")
    first, *words = shlex.split(leaf.epilog.removeprefix("Example: "))
    assert (first, *words[: len(names)]) == ("estimator", *names)
    assert leaf.epilog in command(*names, "--help").out.replace("\n  ", " ")
    leaf.make_context(" ".join(names), words[len(names) :])
    if names[0] in ("estimate", "sweep", "memory", "layouts", "rent", "machines") and not any(
        "json" in word for word in words
    ):
        assert command(*words).code in (0, 1)


def test_a_layout_shows_what_ranks_that_share_layers_exchange(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"0": "colwise", "2": "rowwise"}')
    asked = ("estimate", tiny, "--on", "1x2:local", "--layout", "tp=2", "--tp-plan", str(plan))
    content = command(*asked, "--json").content
    assert content["layout"] == "tp=2,dp=*"
    assert content["breakdown"]["layer_communication_s"] > 0
    # Both ranks work on the same 4 samples.
    assert content["global_batch"] == 4
    assert "layer communication" in command(*asked, "--verbose").out
    plan.write_text('{"nothing": "colwise"}')
    refused = command(*asked)
    assert refused.code == 2
    assert "names no module of the model" in refused.err


def test_estimate_as_json_is_base_units_on_stdout_alone(tiny: str, command: Command) -> None:
    answer = command("estimate", tiny, "--on", "1x2:local", "--batch", 6, "--json")
    assert answer.err == ""
    content = json.loads(answer.out)
    assert content["allocation"] == "1x2:local"
    # 6 samples on each of 2 ranks.
    assert content["global_batch"] == 12
    assert content["samples_per_s"] == pytest.approx(12 / content["step_time_s"])
    assert sum(content["breakdown"].values()) == pytest.approx(content["step_time_s"])
    assert content["low_s"] < content["step_time_s"] < content["high_s"]


def test_json_has_the_bottleneck_as_an_object_beside_its_sentence(
    tiny: str, command: Command
) -> None:
    alone = command("estimate", tiny, "--on", "1x1:local", "--json").content
    parts = alone["breakdown"]
    most = {
        "compute": parts["forward_s"] + parts["backward_s"],
        "host": parts["host_exposed_s"],
        "update": parts["update_s"],
    }
    part = max(most, key=lambda name: most[name])
    share_ratio = pytest.approx(most[part] / alone["step_time_s"])
    assert alone["bottleneck"] == {"part": part, "share_ratio": share_ratio, "link": None}
    assert alone["bottleneck_text"].endswith("of the step)")
    # Gradients over a slow network: what is sent takes most.
    words = (tiny, "--on", "2x1:h100-sxm", "--network", "1Mbit/s")
    spread = command("estimate", *words, "--json").content["bottleneck"]
    assert spread["part"] == "communication"
    assert "network" in spread["link"]
    heading, row = command("sweep", *words, "--csv").out.splitlines()
    assert "bottleneck_part,bottleneck_share_ratio,bottleneck_link,bottleneck_text" in heading
    assert "communication" in row


def test_a_step_is_divided_among_modules(tiny: str, command: Command) -> None:
    words = ("estimate", tiny, "--on", "1x1:local", "--by-module")
    content = command(*words, "--json").content
    rows = {row["module"]: row for row in content["modules"]}
    # The first layer needs no gradient of its input: 2 matmuls of 4 x 32 x 64; the other 3 of
    # 4 x 64 x 8.
    assert rows["0"]["flops"] == 2 * (2 * 4 * 32 * 64)
    assert rows["2"]["flops"] == 3 * (2 * 4 * 64 * 8)
    assert sum(row["time_s"] for row in rows.values()) == pytest.approx(content["step_time_s"])
    # Weights and biases with their gradients: such a small model peaks in its update.
    assert rows["0"]["memory_bytes"] == 2 * 4 * (32 * 64 + 64)
    twice = command(*words, "--accumulation", 2, "--json").content["modules"]
    assert {row["module"]: row["flops"] for row in twice}["0"] == 2 * rows["0"]["flops"]
    assert "memory at the peak" in command(*words).out


def test_a_global_batch_on_unlike_nodes_is_split_by_speed_and_the_gain_shown(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    node = 'machine = "local"\nswitch = "s"\nuplink = "1 Gbit/s"\n'
    path.write_text(f"[switches.s]\n[nodes.a]\n{node}[nodes.b]\n{node}slowdown = 3.0\n")
    words = (tiny, "--on", "a[0]+b[0]", "--cluster", path, "--global-batch", 20001)
    content = command("estimate", *words, "--json").content
    fast, slow = content["batches"]
    assert fast + slow == content["global_batch"] == 20001
    assert fast > slow
    assert content["batch_per_gpu"] is None
    assert content["balance_gain_ratio"] > 0
    out = command("estimate", *words).out
    assert f"{fast} + {slow} per device, 20001 in all" in out
    assert "faster than 10001 on every device" in out
    assert "multiply each rank's mean loss" in " ".join(out.split())


def test_a_host_that_has_drifted_counts_as_slow_as_it_is_and_is_told_of(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    rows = ["workload,allocation,batch_per_gpu,step_time_s,at"]
    for hour in range(36):
        host, step_s = (f"a{1 + hour % 3}", 0.2) if hour < 30 else ("a3", 0.24)
        rows.append(f"other,{host}[0],4,{step_s},2026-03-0{1 + hour // 24}T{hour % 24:02}:00")
    (tmp_path / "seen.csv").write_text("\n".join(rows))
    assert command("calibrate", "observe", tmp_path / "seen.csv").code == 0
    path = tmp_path / "cluster.toml"
    nodes = [f'[nodes.a{number}]\nmachine = "local"\n' for number in (1, 2, 3)]
    path.write_text("".join(nodes))
    words = ("--cluster", path, "--calibration", "-")
    drifted = command("estimate", tiny, "--on", "a3[0]", *words, "--json")
    assert "a3 is 20 % slower than expected since" in drifted.err
    assert "'slowdown = 1.2' for a3" in drifted.err
    assert command("estimate", tiny, "--on", "a1[0]", *words).err == ""
    path.write_text("".join(nodes) + "slowdown = 1.2\n")
    counted = command("estimate", tiny, "--on", "a3[0]", *words, "--json")
    assert counted.err == ""
    assert json.loads(counted.out)["drifts"] == []
    step_s, counted_s = (json.loads(each.out)["step_time_s"] for each in (drifted, counted))
    # A change is drawn a little to its prior, none.
    assert step_s == pytest.approx(counted_s, rel=1e-3)
    path.write_text("".join(nodes))
    healthy_s = command("estimate", tiny, "--on", "a1[0]", *words, "--json").content
    assert step_s == pytest.approx(1.2 * healthy_s["step_time_s"], rel=1e-3)
    for mode in ((), ("--batch", "4,8"), ("--strategies", "ddp")):
        swept = command("sweep", tiny, "--on", "a3[0]", *words, *mode, "--json")
        assert "'slowdown = 1.2' for a3" in swept.err, mode
        assert json.loads(swept.out)[0]["step_time_s"] == pytest.approx(step_s, rel=1e-6), mode


def test_strategies_are_listed_by_step_time_with_what_could_not_be_answered(
    tiny: str, command: Command
) -> None:
    run = command("sweep", tiny, "--on", "1x2:local", "--strategies", "ddp ps:1", "--json")
    assert run.code == 0
    rows = json.loads(run.out)
    assert [(row["allocation"], row["strategy"]) for row in rows] == [
        ("1x2:local", "ddp"),
        ("1x2:local", "ps:1"),
    ]
    # The machine was probed alone: nothing says how fast a server is reached.
    assert "no network" in rows[1]["refusal"]
    assert command("sweep", tiny, "--on", "1x2:local", "--strategies", "ddq").code == 2


def test_places_are_listed_with_what_is_exposed_by_each(tiny: str, command: Command) -> None:
    words = ("sweep", tiny, "--on", "2x4:t4-g4dn", "--strategies", "places")
    answer = command(*words)
    assert answer.code == 0
    heading = next(line for line in answer.out.splitlines() if line.startswith("allocation"))
    assert [each in heading for each in ("merged on", "updated on", "exposed")] == [True] * 3
    rows = command(*words, "--json").content
    assert {(row["merged_on"], row["updated_on"]) for row in rows} == {
        *(("device", "device"), ("host", "device"), ("host", "host")),
        *(("server", "device"), ("server", "server")),
    }
    assert all(row["communication_exposed_s"] >= 0 for row in rows)


def test_a_neighbour_slows_an_estimate(tmp_path: Path, command: Command) -> None:
    perceptron([2048, 2048, 2048], batch=8, target="cuda").save(tmp_path / "wide.graph")
    words = ("estimate", str(tmp_path / "wide.graph"), "--on", "2x2:t4-g4dn", "--json")
    alone, beside = (
        command(*words, *more).content["breakdown"]["communication_exposed_s"]
        for more in ((), ("--neighbour", "2x2:t4-g4dn=5Gbit/s"))
    )
    assert beside > alone
    refused = command(*words, "--neighbour", "2x4:t4-g4dn")
    assert refused.code == 2
    assert "write ALLOCATION=RATE" in refused.err


def test_nested_groups_are_estimated_and_swept(tiny: str, command: Command) -> None:
    options = ("--strategy", "fsdp:shard=8", "--accumulation", 2)
    run = command("estimate", tiny, "--on", "2x8:h100-sxm", *options)
    assert run.code == 0
    assert "1/8 of the network of 'h100-sxm'" in " ".join(run.out.split())
    assert "all-reduce over 2 ranks on 2 nodes was not measured" in " ".join(run.out.split())
    swept = " ".join(command("sweep", tiny, "--on", "1..2x4:h100-sxm", *options).out.split())
    assert "1 of 2 allocations, the first because 'fsdp:shard=8' shards over 8 ranks" in swept


def test_ranks_that_a_strategy_cannot_divide_are_refused_before_the_model_is_looked_at(
    command: Command,
) -> None:
    run = command(
        "estimate", "no/such/file.py:f", "--on", "1x2:local", "--strategy", "fsdp:shard=3"
    )
    assert run.code == 2
    assert "do not divide 2" in run.sentence


def test_the_trace_is_sound_and_has_a_process_for_every_rank(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    command("estimate", tiny, "--on", "1x2:local", "--trace", tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert trace_flaws(events) == []
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["ph"] == "X" for event in events) > 20


def test_a_model_too_large_for_the_devices_ends_with_code_1(
    store: Path, tiny: str, command: Command, small_profile: MachineProfile
) -> None:
    devices = tuple(replace(device, memory_bytes=1000) for device in small_profile.devices)
    replace(small_profile, devices=devices).save(store / "machines" / "local.json")
    answer = command("estimate", tiny, "--on", "1x1:local")
    assert answer.code == 1
    assert "does not fit" in answer.out
    assert answer.err == "estimator: exit code 1: mlp does not fit on 1x1:local\n"


def test_a_sweep_says_what_does_not_fit_beside_the_bottleneck_and_against_what_it_compares(
    tiny: str, command: Command
) -> None:
    words = (tiny, "--on", "1x1..2:h100-sxm", "--on", "1x2:t4")
    fits = command("sweep", *words).out
    assert " memory " not in fits
    assert "linear is the throughput per rank of 1x1:h100-sxm" in fits
    # 80 million samples of 32 + 64 + 64 + 8 numbers are 54 GB, half of them on each device.
    out = command("sweep", *words, "--global-batch", 80_000_000).out
    assert out.splitlines()[1].split()[:3] == ["allocation", "bottleneck", "memory"]
    (row,) = (line for line in out.splitlines() if line.startswith("1x2:t4"))
    assert "compute" in row
    assert "does not fit" in row
    one = command("estimate", tiny, "--on", "1x2:h100-sxm").out
    assert "of linear against 1x1:h100-sxm" in one


def test_an_estimate_as_json_says_how_much_of_it_nothing_measured_backs(
    tiny: str, command: Command
) -> None:
    content = command("estimate", tiny, "--on", "1x1:local", "--json").content
    shares = {"assumed": 0.0, "datasheet": 0.0}
    for row in content["provenance"]:
        if row["source"] in shares:
            shares[row["source"]] += row["share_ratio"]
    checked = {"unmeasured_ratio": pytest.approx(sum(shares.values()))}
    nothing: dict[str, list[str]] = {"disturbed_machines": [], "cut_machines": []}
    assert content["checked"] == checked | nothing | {"device_faults": []}


def test_profiles_are_listed_shown_and_compared_as_json(
    store: Path, command: Command, small_profile: MachineProfile
) -> None:
    device = small_profile.devices[0]
    twice = replace(device, memory_bytes=2 * device.memory_bytes)
    twin = replace(small_profile, name="twin", devices=(twice, *small_profile.devices[1:]))
    twin.save(store / "machines" / "twin.json")
    (store / "machines" / "torn.json").write_text("{")
    machines = {
        one["name"]: one for one in command("machines", "list", "--json").content["machines"]
    }
    assert machines["torn"]["damaged"]
    assert machines["twin"]["memory_bytes"] == twice.memory_bytes
    assert "h100-sxm" in machines
    shown = command("machines", "show", "twin", "--json").content
    assert shown == json.loads((store / "machines" / "twin.json").read_text())
    # One by its name, one by its file.
    words = ("compare", "local", store / "machines" / "twin.json", "--json")
    compared = command("machines", *words).content
    ratios = {(row["group"], row["name"]): row["ratio"] for row in compared["common"]}
    assert ratios.pop(("device", "memory")) == 2.0
    assert set(ratios.values()) == {1.0}
    assert compared["only_in_first"] == compared["only_in_second"] == []


def test_profiles_are_merged_by_name_or_file(store: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "both.json"
    answer = command("machines", "merge", "local", store / "machines" / "local.json", "--out", out)
    assert (answer.code, answer.err) == (0, "")
    assert json.loads(out.read_text())["name"] == "local"
    assert "no machine" in command("machines", "merge", "lokal", "--out", out).sentence


def test_profile_list_show_and_compare_name_the_machine(
    store: Path, command: Command, small_profile: MachineProfile
) -> None:
    replace(small_profile, name="twin").save(store / "machines" / "twin.json")
    (store / "machines" / "torn.json").write_text("{")
    listed = command("machines", "list").out
    assert "local" in listed
    assert "damaged" in listed
    shown = command("machines", "show", "local").out
    for word in ("one core", "matmul", "all-reduce, gloo", "adamw, loop", "10.0 GB/s"):
        assert word in shown
    points = ((float(1 << 20), 0.1), (float(1 << 27), 0.6), (float(1 << 28), 1.0))
    memory = replace(small_profile.memory, reuse_points=points)
    replace(small_profile, name="read", memory=memory).save(store / "machines" / "read.json")
    assert "half cold after 128 MiB" in " ".join(command("machines", "show", "read").out.split())
    compared = command("machines", "compare", "local", "twin").out
    assert "median difference 0.0 %" in compared
    collective = small_profile.collectives[0]
    late = replace(collective, latency_s=9 * collective.latency_s, bandwidth_bytes_per_s=1e8)
    odd = replace(small_profile, name="odd", collectives=(late,))
    odd.save(store / "machines" / "odd.json")
    compared = command("machines", "compare", "local", "twin", "odd").out
    # 9 and 10 times as long: 9.5 in the middle.
    assert "odd is odd: collective 9.50 times as slow as usual" in compared
    assert "group local twin odd" in " ".join(compared.split())
    assert "collective, 2 numbers 1.00 1.00 9.50" in " ".join(compared.split())
    rows = command("machines", "compare", "local", "twin", "odd", "--json").content
    assert [(r["machine"], r["group"]) for r in rows if r["is_odd"]] == [("odd", "collective")]


def test_the_schema_of_profile_files_is_printed_as_json_alone(
    store: Path, command: Command
) -> None:
    answer = command("machines", "schema")
    assert (answer.code, answer.err) == (0, "")
    schema = json.loads(answer.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    written = json.loads((store / "machines" / "local.json").read_text())
    assert set(schema["properties"]) == set(written)
    assert {"name", "devices", "provenance"} <= set(schema["required"])
    device = schema["$defs"]["Device"]["properties"]
    assert set(device) == set(written["devices"][0])
    assert "schema" in command("machines", "--help").out


def test_an_empty_store_says_how_to_fill_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path / "none"))
    assert "estimator probe" in command("machines", "list").out
    assert "estimator probe" in command("estimate", "x.py:f", "--on", "1x1:local").sentence


@pytest.fixture
def probe_of_a_moment(monkeypatch: pytest.MonkeyPatch, small_profile: MachineProfile) -> None:
    """Stand in for the measurements, which take a minute."""

    def probe_machine(*, name: str, report: Callable[[str, float], None], **_: Any) -> Any:
        report("kernels", 0.5)
        return replace(small_profile, name=name, missing=("links: interrupted",))

    monkeypatch.setattr("estimator.probe.machine.probe_machine", probe_machine)


@pytest.mark.usefixtures("probe_of_a_moment")
def test_probe_keeps_the_profile_under_its_name_and_says_what_is_missing(command: Command) -> None:
    answer = command("probe", "--name", "mine")
    assert answer.code == 0
    assert "links: interrupted" in answer.err
    assert load_profile("mine").name == "mine"


@pytest.mark.usefixtures("probe_of_a_moment")
def test_a_probe_cut_short_replaces_no_complete_profile(
    command: Command, monkeypatch: pytest.MonkeyPatch, small_profile: MachineProfile
) -> None:
    assert command("probe", "--name", "mine").code == 0
    kept = load_profile("mine")
    cut = replace(small_profile, name="mine", kernels_timed_ratio=0.056)
    monkeypatch.setattr("estimator.probe.machine.probe_machine", lambda **_: cut)
    answer = command("probe", "--name", "mine")
    # Nothing was wrong with the input: the machine may have been busy.
    assert answer.code == 1
    assert "only 5.6 % of the kernel calls were timed" in answer.err
    assert "give more --budget, or another --name" in answer.err
    assert load_profile("mine") == kept
    # Where there is none, or one cut as short, it is kept.
    for _ in range(2):
        assert command("probe", "--name", "other").code == 0
    assert load_profile("other").is_cut


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a virtual file system")
def test_a_probe_that_cannot_be_kept_is_not_started(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        "estimator.probe.machine.probe_machine", lambda **asked: started.append(asked)
    )
    # There root has all rights, and nobody makes a file.
    answer = command("probe", "--out", "/proc/nowhere/me.json")
    assert (answer.code, started) == (2, [])
    assert "/proc is no folder that can be written to; choose another place" in answer.sentence


@pytest.mark.usefixtures("probe_of_a_moment")
def test_probe_as_json_prints_the_profile_alone(command: Command, tmp_path: Path) -> None:
    answer = command("probe", "--out", tmp_path / "here" / "me.json", "--json")
    profile = MachineProfile.from_dict(json.loads(answer.out))
    assert profile == load_profile(tmp_path / "here" / "me.json")


@pytest.mark.parametrize(
    ("canary_s", "said"),
    [(2.4e-3, "now 2.4 × slower than when 'local' was"), (5e-4, "2.0 × faster"), (1.1e-3, "")],
)
def test_estimates_say_how_much_slower_this_machine_is_than_when_it_was_probed(
    store: Path,
    tiny: str,
    command: Command,
    small_profile: MachineProfile,
    monkeypatch: pytest.MonkeyPatch,
    canary_s: float,
    said: str,
) -> None:
    core = min(os.sched_getaffinity(0))
    here = [replace(device, cores=(core,)) for device in small_profile.devices]
    hardware = {"cpu": read_cpu().model}
    profile = replace(small_profile, devices=tuple(here), canary_s=1e-3, hardware=hardware)
    profile.save(store / "machines" / "local.json")
    pinned: list[set[int]] = []

    def timed(_backend: object) -> float:
        pinned.append(os.sched_getaffinity(0))
        return canary_s

    monkeypatch.setattr("estimator.probe.devices.jobs.canary_s", timed)
    usable = os.sched_getaffinity(0)
    answer = command("estimate", tiny, "--on", "1x1:local", "--json")
    assert said in answer.err
    assert bool(said) == ("this machine is now" in answer.err)
    assert json.loads(answer.out)["slowdown_ratios"] == {"local": pytest.approx(canary_s / 1e-3)}
    assert pinned == [{core}]
    assert os.sched_getaffinity(0) == usable
    replace(profile, hardware={"cpu": "another"}).save(store / "machines" / "local.json")
    assert "this machine is now" not in command("estimate", tiny, "--on", "1x1:local").err


def test_estimates_of_a_disturbed_probe_have_wider_intervals_and_say_so(
    store: Path, tiny: str, command: Command, small_profile: MachineProfile
) -> None:
    def estimated() -> Any:
        return command("estimate", tiny, "--on", "1x1:local", "--json").content

    def sigma(estimate: Any) -> float:
        # The interval holds 80 %: 1.2816 standard deviations of the logarithm either way.
        return math.log(estimate["high_s"] / estimate["step_time_s"]) / 1.2816

    quiet = estimated()
    interference = Interference(others_ratio=0.2)
    replace(small_profile, interference=interference).save(store / "machines" / "local.json")
    disturbed = estimated()
    # A fifth of the cores: times may be a quarter too long, which adds as an independent error.
    assert sigma(disturbed) == pytest.approx(math.hypot(sigma(quiet), math.log(1.25)), rel=1e-3)
    assert "other programs used 20 % of the cores" in " ".join(disturbed["assumptions"])
    assert not any("disturbed" in text for text in quiet["assumptions"])
    assert disturbed["checked"]["disturbed_machines"] == ["local"]
    verbose = command("estimate", tiny, "--on", "1x1:local", "--verbose").out
    assert re.search(r"disturbed when probed +local", verbose)
    assert "20 % of the cores" in command("machines", "show", "local").out


def test_estimates_of_a_probe_that_was_cut_short_say_so(
    store: Path, tiny: str, command: Command, small_profile: MachineProfile
) -> None:
    def assumed(**given: Any) -> str:
        profile = replace(small_profile, **given)
        profile.save(store / "machines" / "local.json")
        answer = command("estimate", tiny, "--on", "1x1:local", "--json")
        return " ".join(json.loads(answer.out)["assumptions"])

    for timed_ratio in (None, 0.1, 1.0):
        assert "cut short" not in assumed(kernels_timed_ratio=timed_ratio)
    shares = []
    # Where fewer operators were timed themselves, more are priced by others of their family.
    for target in ("aten.mm.default", "aten.none.default"):
        first, *others = small_profile.kernels
        kernels = (replace(first, target=target), *others)
        told = assumed(kernels_timed_ratio=0.04, kernels=kernels)
        assert "it timed 4.0 % of its kernel calls" in told
        found = re.search(r"operators that are ([\d.]+) % of the kernel time", told)
        shares.append(float(found[1]))
    assert 0 < shares[0] < shares[1] <= 100
    answer = command("estimate", tiny, "--on", "1x1:local", "--json")
    assert json.loads(answer.out)["checked"]["cut_machines"] == ["local"]
    assert "kernel calls timed" in command("machines", "show", "local").out


def test_validate_predicts_then_trains_and_prints_both(tiny: str, command: Command) -> None:
    words = ("--on", "1x2:local", "--repeats", 3, "--steps", 3, "--json")
    answer = command("validate", tiny, *words)
    (case,) = json.loads(answer.out)
    # The store's machine is made up, so only the form is checked here, not the accuracy.
    assert answer.code in (0, 1)
    assert case["predicted"]["allocation"] == "1x2:local"
    assert len(case["runs_s"]) == 3
    assert case["measured_s"] == sorted(case["runs_s"])[1]


def test_validate_says_which_prediction_missed(
    tiny: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(predictions: Sequence[Estimate], *_: Any, **__: Any) -> list[Validation]:
        near, far = predictions
        # A sixth away is forgiven wherever the interval ends.
        times_s = {near: 1.2 * near.step_time_s, far: 1.5 * far.high_s}
        return [Validation(predicted=each, runs_s=(times_s[each],) * 3) for each in predictions]

    monkeypatch.setattr("estimator.validate.training.validate", validate)
    answer = command("validate", tiny, "--on", "1x1:local", "--on", "1x2:local")
    assert answer.code == 1
    assert "what was measured on 1x2:local is outside the interval" in answer.err


def test_a_step_can_be_asked_for_as_compiled_and_says_so(tiny: str, command: Command) -> None:
    words = (tiny, "--on", "1x1:local")
    eager, compiled = (
        command("estimate", *words, *more, "--json").content
        for more in ((), ("--compile", "--channels-last"))
    )
    assert (eager["mode"], compiled["mode"]) == ("fp32", "fp32, compiled, channels last")
    assert any("torch.compile fuses" in text for text in compiled["assumptions"])
    assert "fp32, compiled" in command("estimate", *words, "--compile").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("estimate", "--cuda-graphs"), "has no CUDA graphs"),
        (("estimate", "--compile", "--measure"), "leave out measure or compiled"),
        (("estimate", "--grad-scaler"), "found precision fp32"),
        (
            ("estimate", "--grad-scaler", "--precision", "fp16"),
            "found precision fp16; leave it out",
        ),
        (("validate", "--compile"), "this command trains eagerly"),
    ],
)
def test_modes_that_cannot_be_are_refused(
    words: tuple[str, ...], said: str, tiny: str, command: Command
) -> None:
    assert said in command(words[0], tiny, "--on", "1x1:local", *words[1:]).sentence


CHANGED: dict[str, dict[str, Any]] = {
    "--optimizer sgd": {"optimizer": "sgd"},
    "--precision tf32": {"precision": "tf32"},
    "--compile": {"compiled": True},
    "--compile-blocks --clip-grad-norm": {"compiled": "blocks", "clip_grad_norm": True},
    "--compile --precision tf32 --optimizer lamb": {
        "compiled": True,
        "precision": "tf32",
        "optimizer": "lamb",
    },
}


@pytest.mark.parametrize("traced_as", [None, True])
@pytest.mark.parametrize("words", CHANGED)
def test_a_saved_graph_stands_for_its_model_under_other_options(
    tiny: str, command: Command, tmp_path: Path, words: str, traced_as: bool | None
) -> None:
    from estimator.api import trace_model, with_recipe
    from estimator.graph.models import load_model

    model, batch, loss, name = load_model(tiny)
    path = tmp_path / "net.graph"
    saved = trace_model(model, batch, loss, name=name, compiled=traced_as)
    saved.save(path)
    asked: dict[str, Any] = {"compiled": traced_as} | CHANGED[words]
    again = trace_model(model, batch, loss, name=name, **asked)
    assert with_recipe(saved, **CHANGED[words]) == again
    about = ("--on", "1x1:local", "--json")
    found = command("estimate", path, *about, *words.split()).content
    assert (found["optimizer"], found["mode"]) == (again.optimizer, again.mode)
    compiled = ["--compile"] if traced_as and "compile" not in words else []
    model_itself = command("estimate", tiny, *about, *words.split(), *compiled).out
    assert found["step_time_s"] == json.loads(model_itself)["step_time_s"]


def test_what_a_trace_depends_on_is_traced_again_by_the_command_that_is_named(
    tiny: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "net.graph"
    assert command("trace", tiny, "--target", "cpu", "--batch", 4, "-o", path).code == 0
    again = "trace its model again: estimator trace MODEL --target cpu --batch 4 --precision {}"
    for option, value, words in (
        ("--precision", "bf16-amp", "with --precision fp32"),
        ("--checkpoint", "full", "without --checkpoint"),
        ("--seq-len", "128", "without --seq-len"),
        ("--channels-last", "", "without --channels-last"),
    ):
        asked = (option, value) if value else (option,)
        said = command("estimate", path, "--on", "1x1:local", *asked).sentence
        assert f"was traced {words}, on which its operators depend" in said
        assert again.format(value if option == "--precision" else "fp32") in said
        assert " ".join(asked) in said.partition("estimator trace")[2]
        assert said.endswith(f"-o {path}")
        assert "None" not in said
        assert "False" not in said
    # What the sentence says is a command.
    said = command("estimate", path, "--on", "1x1:local", "--precision", "bf16-amp").sentence
    typed = said.partition("estimator trace MODEL ")[2].split()
    assert command("trace", tiny, *typed).code == 0
    assert command("estimate", path, "--on", "1x1:local", "--precision", "bf16-amp").code == 0


def test_a_recipe_has_a_frameworks_kernels_and_goes_with_no_other_compiler(
    tiny: str, command: Command
) -> None:
    about = ("--on", "1x1:h100-sxm", "--precision", "bf16", "--json")
    recipe = ("--recipe", "megatron:graphs=layers")
    answer = command("estimate", tiny, *about, *recipe).content
    assert answer["mode"] == "bf16, compiled, megatron:graphs=layers"
    assert (
        "leave out --compile," in command("estimate", tiny, *about, *recipe, "--compile").sentence
    )
    unknown = command("estimate", tiny, *about, "--recipe", "megatron:fp8=no").sentence
    assert "fp8: 'no' is unknown; choose one of current, delayed" in unknown


def test_a_sweep_fits_80_columns_without_wrapping(
    tiny: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estimator.cli.console.WIDTH_OF_FILES", 80)
    lines = command("sweep", tiny, "--on", "1x1..2:local").out.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("1x1:local"))
    # A wrapped cell would stand on a line between the two.
    assert lines[first + 1].startswith("1x2:local")
    assert max(map(len, lines)) <= 80


def test_batch_and_global_batch_together_say_how_much_is_accumulated(
    tiny: str, command: Command
) -> None:
    both = ("--on", "1x2:local", "--batch", 6, "--global-batch", 36)
    content = command("estimate", tiny, *both, "--json").content
    # 36 samples are 3 micro-batches of 6 on each of 2 ranks.
    assert content["accumulation_steps"] == 3
    assert (content["batch_per_gpu"], content["global_batch"]) == (6, 36)
    words = ("--on", "1x2:local", "--global-batch", 24, "--accumulation", 3, "--json")
    # 24 samples over 2 ranks and 3 micro-batches.
    assert command("estimate", tiny, *words).content["batch_per_gpu"] == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--batch", 5, "--global-batch", 36), "36 is no multiple of 10, which is 5 on each of 2"),
        (
            ("--batch", 6, "--global-batch", 36, "--accumulation", 2),
            "make 3 micro-batches, found --accumulation 2",
        ),
        (("--global-batch", 1), "global batch 1 leaves some without a sample of 2 ranks"),
        (("--network", "fast"), "'fast' is not a rate"),
        (
            ("--network", "0Gbit/s"),
            "'0Gbit/s' is no rate of a network; write one such as 100Gbit/s",
        ),
        (("--network", "1Gbit/s,carrier"), "'carrier' is no kind of network"),
    ],
)
def test_batches_that_do_not_add_up_are_refused_before_the_model_is_built(
    tmp_path: Path, command: Command, more: tuple[Any, ...], said: str
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('this file was read')")
    answer = command("estimate", f"{broken}:mlp", "--on", "1x2:local", *more)
    assert answer.code == 2
    assert said in answer.sentence


def test_a_saved_trace_answers_as_the_model_does(
    tmp_path: Path, tiny: str, command: Command
) -> None:
    saved = tmp_path / "mlp.graph"
    told = command("trace", tiny, "-o", saved, "--target", "cpu")
    assert (told.code, told.out) == (0, "")
    assert f"estimator estimate {saved} --on" in told.err
    on = ("--on", "1x2:local", "--json")
    answers = [command("estimate", model, *on).content for model in (tiny, saved)]
    assert answers[0] == answers[1]


def test_a_network_that_is_given_stands_in_for_the_one_a_machine_lacks(
    tmp_path: Path, tiny: str, command: Command
) -> None:
    saved = tmp_path / "mlp.graph"
    command("trace", tiny, "-o", saved)
    refused = command("estimate", saved, "--on", "2x1:a10")
    assert "--network RATE" in refused.sentence
    slow, fast = (
        command("estimate", saved, "--on", "2x1:a10", "--network", rate, "--json").content
        for rate in ("1 Mbit/s", "100Gbit/s,infiniband")
    )
    # The gradients of 32 · 64 + 64 + 64 · 8 + 8 parameters cross 1/8 MB/s once each way.
    assert slow["step_time_s"] > 4 * (32 * 64 + 64 + 64 * 8 + 8) / 125e3
    assert fast["step_time_s"] < 0.1 * slow["step_time_s"]
    several = command("estimate", saved, "--on", "1x1:a10+1x1:a40", "--network", "1Gbit/s")
    assert "nodes of one machine" in several.sentence


def test_a_sweep_over_batches_marks_the_largest_that_fits(
    tmp_path: Path, tiny: str, command: Command
) -> None:
    saved = tmp_path / "mlp.graph"
    command("trace", tiny, "-o", saved)
    asked = ("sweep", saved, "--on", "1x1:t4", "--batch", f"1..{1 << 28}")
    rows = command(*asked, "--json").content
    (largest,) = [row for row in rows if row["is_largest"]]
    batch = largest["batch_per_gpu"]
    for samples, fits in ((batch, True), (batch + 1, False)):
        answer = command("estimate", saved, "--on", "1x1:t4", "--batch", samples, "--json")
        assert (json.loads(answer.out)["fits"] == "yes") == fits
    assert "largest that fits" in command(*asked).out
    exact = command("sweep", saved, "--on", "1x1:t4", "--batch", "8,3", "--csv").out.splitlines()
    assert [line.split(",")[1] for line in exact] == ["batch_per_gpu", "3", "8"]
    assert command("sweep", saved, "--on", "1x1:t4", "--batch", "9..3").code == 2


def test_what_does_not_fit_says_what_would(tmp_path: Path, tiny: str, command: Command) -> None:
    saved = tmp_path / "mlp.graph"
    command("trace", tiny, "-o", saved)
    answer = command("estimate", saved, "--on", "1x1:t4", "--batch", 1 << 26)
    assert answer.code == 1
    assert "to fit" in answer.out
    assert "accumulated" in answer.out
    remedies = command("estimate", saved, "--on", "1x1:t4", "--batch", 1 << 26, "--json").content[
        "remedies"
    ]
    assert remedies[0]["peak_bytes"] < load_profile("t4").devices[0].memory_bytes


def test_a_matrix_of_some_of_a_machines_devices_is_imported_with_a_remark(
    tmp_path: Path, command: Command
) -> None:
    samples = Path(__file__).parent.parent / "probe" / "imports" / "samples"
    told = {}
    for name in ("topo_m_2x_phb.txt", "topo_m_8x_a100.txt"):
        out = tmp_path / f"{name}.json"
        answer = command("machines", "import", samples / name, "--into", "dgx-a100", "--out", out)
        assert answer.code == 0
        told[name] = answer.err
    assert "2 of the 8 devices of 'dgx-a100'" in told["topo_m_2x_phb.txt"]
    assert told["topo_m_8x_a100.txt"] == ""


def test_a_short_answer_leaves_out_what_only_verbose_tells(tiny: str, command: Command) -> None:
    asked = ("estimate", tiny, "--on", "1x2:local")
    answer = command(*asked, "--samples", "1e6")
    assert (answer.code, answer.err) == (0, "")
    for word in ("step time", "s (", "samples/s", "bottleneck", "peak memory", "duration"):
        assert word in answer.out
    assert "\x1b" not in answer.out, "a file wants plain text"
    short, long = answer.out, command(*asked, "--verbose").out
    for words in ("where the numbers come from", "that nothing measured backs"):
        assert words not in short
        assert words in long
    parts = command(*asked, "--json").content
    for part, seconds in parts["breakdown"].items():
        words = f"\n{part.removesuffix('_s').replace('_', ' ')} "
        share = seconds / parts["step_time_s"]
        assert (words in short.split("assumptions")[0]) == (share >= 0.01), part
        assert (words in long.split("where the numbers")[0]) == (share > 0), part
