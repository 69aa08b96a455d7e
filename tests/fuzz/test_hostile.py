"""Bombs, numbers that escape, damage at any depth and unruly model code each get one sentence."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import estimator
from estimator.advise.scaling import expand_pattern
from estimator.errors import (
    AllocationError,
    EstimatorError,
    GraphFileError,
    ImportedFileError,
    ModelError,
    ProfileError,
    TopologyError,
    TraceError,
    WorkloadError,
)
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.trace.trace import trace_graph
from estimator.machines.profile import MachineProfile
from estimator.placement.topology import Cluster, expand_hosts
from estimator.probe.imports.files import read_imports, recognise
from estimator.replay.job_files import TracedJob, jobs_of_trace
from estimator.replay.nodes import Nodes
from tests.budgets import examples
from tests.conftest import Command
from tests.fuzz.harmless_inputs import whole_profile
from tests.fuzz.hostile_values import damaged_values
from tests.synthetic import perceptron

pytestmark = pytest.mark.usefixtures("store")
AT = "2026-01-01T00:00:00Z"


def test_a_sample_of_hostile_inputs_breaks_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "outcomes"
    # In a process of its own: inputs share what it holds, and there is a bound on that.
    words = [
        sys.executable,
        "-m",
        "tests.fuzz.command_lines",
        "--inputs",
        str(examples(345)),
        "--seed",
        "13",
    ]
    run = subprocess.run([*words, "--kept", str(kept)], text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    # Some of them are harmless: the commands do work here.
    codes = {json.loads(line)["code"] for line in kept.read_text().splitlines()}
    assert codes >= {0, 2}


# Damage at any depth


@settings(max_examples=examples(100), deadline=None)
@given(seed=some.integers(0, 2**32))
def test_a_profile_damaged_at_any_depth_is_read_or_refused(seed: int) -> None:
    text = damaged_values(whole_profile().to_dict(), random.Random(seed))
    try:
        values = json.loads(text)
    except ValueError:
        return  # a number of 5,000 digits: refused before
    # Raises nothing else.
    with contextlib.suppress(ProfileError):
        MachineProfile.from_dict(values)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"target": 7, "arguments": [], "outputs": []},
        {"target": "aten.mm.default", "arguments": 5, "outputs": []},
        {"target": "aten.mm.default", "arguments": [], "outputs": [3]},
        {"target": "aten.mm.default", "arguments": [{"t": [-1], "d": "float32"}], "outputs": []},
        {"target": "aten.mm.default", "arguments": [{"t": [2**62] * 2, "d": "float32"}],
         "outputs": []},
        {"target": "aten.mm.default", "arguments": [{"d": "float32"}], "outputs": []},
        {"target": "aten.mm.default", "arguments": [{"f": "fast"}], "outputs": []},
    ],
)  # fmt: skip
def test_a_probed_call_that_is_none_is_refused_at_load(call: Any) -> None:
    values = whole_profile().to_dict()
    values["kernels"][0]["points"][0]["call"] = call
    with pytest.raises(
        ProfileError, match=r"kernels\.0\.points\.0\.call: is no call of an operator: "
    ):
        MachineProfile.from_dict(json.loads(json.dumps(values)))


def test_a_probed_call_with_arguments_of_another_operator_is_refused_when_used() -> None:
    values = json.loads(json.dumps(whole_profile().to_dict()))
    values["kernels"][0]["points"][0]["call"]["arguments"] = [1, "two"]
    profile = MachineProfile.from_dict(values)
    with pytest.raises(ProfileError, match="arguments that it cannot have"):
        estimator.estimate(perceptron([64] * 3), "1x1:local", profile=profile)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"updates": ["sgd"]}, "updates.0: must be a table of names and values"),
        ({"links": "fast"}, "links: must be a list"),
        ({"name": 3}, "name: must be a text"),
    ],
)
def test_what_a_profile_should_hold_is_said_in_words_of_the_file(
    change: dict[str, Any], said: str
) -> None:
    values = json.loads(json.dumps(whole_profile().to_dict())) | change
    with pytest.raises(ProfileError, match=re.escape(said)):
        MachineProfile.from_dict(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calls": 3}, "a value is of another kind than it should be"),
        ({"call_pairs": [[]]}, "a list is longer or shorter than it should be"),
        ({"calls": [{}]}, "it lacks 'target'"),
    ],
)
def test_how_a_graph_is_damaged_is_said_in_words_of_the_file(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.graph"
    perceptron([64] * 3, batch=8).save(path)
    values = json.loads(gzip.decompress(path.read_bytes())) | change
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(GraphFileError, match=re.escape(f"is damaged ({said}")):
        OpGraph.load(path)


@settings(max_examples=examples(50), deadline=None)
@given(seed=some.integers(0, 2**32))
def test_a_graph_damaged_at_any_depth_is_estimated_or_refused(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("graphs") / "broken.graph"
    perceptron([64] * 3, batch=8).save(path)
    values = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(gzip.compress(damaged_values(values, random.Random(seed)).encode()))
    with contextlib.suppress(EstimatorError):
        estimator.estimate(OpGraph.load(path), "1x2:local", profile=whole_profile()).to_dict()


def test_a_saved_value_with_other_dimensions_at_the_second_batch_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "broken.graph"
    perceptron([64] * 3, batch=8).save(path)
    values = json.loads(gzip.decompress(path.read_bytes()))
    values["spec_pairs"][0][1] = len(values["specs"])
    values["specs"].append({"t": [16, 64, 1], "d": "float32"})
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(GraphFileError, match="other dimensions at the second batch"):
        OpGraph.load(path)


# Bombs


@pytest.mark.parametrize("filling", [b" ", b"[", b"[],", b'"', '"é"'.encode()])
def test_a_graph_that_unpacks_to_too_much_is_refused(filling: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bomb.graph"
    path.write_bytes(gzip.compress(filling * (80 << 20 if len(filling) == 1 else 8 << 20), 1))
    with pytest.raises(GraphFileError, match=r"unpacks to more|more than 5000000 values|not ASCII"):
        OpGraph.load(path)


@pytest.mark.parametrize(
    "pattern", ["a[1-9999999]", "a[1-1000000,1-1000000]", "a[1-2000]b[1-2000]", "a[²]",
                "a[1-99999999]"]
)  # fmt: skip
def test_a_host_list_is_counted_before_it_is_listed(pattern: str) -> None:
    with pytest.raises(TopologyError, match=r"host list|names more nodes|no node name"):
        next(iter(expand_hosts(pattern)))


def test_a_long_chain_of_switches_is_refused() -> None:
    chain = {f"s{number}": {"parent": f"s{number + 1}"} for number in range(3000)}
    values = {"switches": {**chain, "s3000": {}}, "nodes": {"a": {"machine": "local"}}}
    with pytest.raises(TopologyError, match="more than 32 levels"):
        Cluster.from_dict(values)


def test_yaml_with_aliases_is_refused() -> None:
    text = "- topology: a\n  x: &a [1, 2]\n  tree: {switches: [*a, *a]}\n"
    with pytest.raises(ImportedFileError, match="aliases"):
        recognise(text, at=AT)


def test_a_report_of_a_hundred_million_ranks_is_refused() -> None:
    report = {
        "args": ["all_reduce_perf"],
        "config": {"nthreads": 1, "ngpus": 10**8,
                   "devices": [{"hostname": "a", "device": 0, "device_info": "H100"}]},
        "results": [{"size": 8, "out_of_place": {"time": 1.0}}],
        "out_of_bounds": {"count": 0},
    }  # fmt: skip
    with pytest.raises(ImportedFileError, match="number of ranks"):
        recognise(json.dumps(report), at=AT)


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])
def test_what_is_no_regular_file_is_read_by_no_command(
    place: str, tmp_path: Path, command: Command
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = str(pipe) if place == "pipe" else place
    graph = tmp_path / "net.graph"
    perceptron([64] * 3, batch=8).save(graph)
    for words in (
        ("machines", "show", path),
        ("machines", "merge", path, "--out", tmp_path / "o.json"),
        ("machines", "import", path, "--name", "new"),
        ("estimate", path, "--on", "1x1:local"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--cluster", path),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--calibration", path),
        ("calibrate", "show", "--store", path),
        ("calibrate", "observe", path),
        ("estimate", graph, "--on", "1x2:local", "--layout", "tp=2", "--tp-plan", path),
        ("rent", graph, "--machines", "t4-g4dn", "--samples", 9, "--prices", path),
        ("report", graph, "--on", "1x2:local", "--out", tmp_path / "o.html", "--prices", path),
        ("replay", path, "--on", "1x2:local", "--policy", "fifo", "--model", graph),
        ("slurm", graph, "--on", "1x2:local", "--samples", 9, "--sinfo", path),
    ):
        assert command(*words).sentence
    link = tmp_path / "table.jsonl"
    link.symlink_to(path)
    assert "no regular file" in command("calibrate", "observe", link).sentence


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 200_000,
        " \n\t" * 100_000,
        "".join(f"{number}: a line\n" for number in range(20_000)),
        "# nThread 1\n# Rank 0 Pid 1 on a device 0 [0] " + " " * 100_000 + "\x00",
    ],
)
def test_an_output_of_no_tool_is_read_in_time_that_grows_with_it(text: str) -> None:
    begun_s = time.process_time()
    with pytest.raises(ImportedFileError):
        recognise(text, at=AT)
    # Each took more than 10 s, or would have taken minutes.
    assert time.process_time() - begun_s < 5


def test_a_trace_with_a_name_twice_is_refused_before_its_jobs_are_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("estimator.replay.job_files.job_of_run_time", asked.append)
    rows = [TracedJob(name="a", arrival_s=0.0, devices=1, run_s=9.0)] * 2
    with pytest.raises(WorkloadError, match="job 'a' is listed twice"):
        jobs_of_trace(rows, [perceptron([64] * 3)], Nodes.parse("1x2:t4"), seed=0)
    assert asked == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "[]", "\x00"])
def test_a_plan_of_layers_that_is_damaged_is_one_sentence(
    text: str, tmp_path: Path, command: Command
) -> None:
    graph, plan = tmp_path / "net.graph", tmp_path / "plan.json"
    perceptron([64] * 3, batch=8).save(graph)
    plan.write_text(text)
    words = ("--on", "1x2:local", "--layout", "tp=2", "--tp-plan", plan)
    assert "plan" in command("estimate", graph, *words).sentence


# Header and row of what grows as it is read.
LARGE = {
    "trace.csv": ("name,time,application,num_replicas\n", "a,1,b,1\n"),
    "prices.csv": ("Machine,Price,AcceleratorCount\n", "t4-g4dn,1,1\n"),
    "steps.jsonl": ("", '{"workload":"a","gpus":1}\n'),
}


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "trace.csv", "--on", "1x2:local", "--policy", "fifo", "--model", "m"),
        ("rent", "m", "--machines", "t4-g4dn", "--samples", "9", "--prices", "prices.csv"),
        ("calibrate", "observe", "steps.jsonl", "--store", "out.db"),
    ],
)
def test_a_file_of_60_mb_is_refused_within_a_gib(words: tuple[str, ...], tmp_path: Path) -> None:
    (name,) = set(words) & set(LARGE)
    header, row = LARGE[name]
    (tmp_path / name).write_text(header + row * (60 * 10**6 // len(row)))
    # Not what getrusage() says: a child begins with the peak of the process that it is forked from.
    code = "import atexit, re, sys; from pathlib import Path; from estimator.cli.main import main; "
    code += (
        "peak = lambda: re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]; "
    )
    code += "atexit.register(lambda: print(peak())); main(sys.argv[1:])"
    run = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert "00 rows)" in run.stderr
    assert int(run.stdout) << 10 < 1 << 30


# Numbers that escape


@pytest.mark.parametrize("text", ["9" * 5000, "1.." + "9" * 5000, "8..1"])
def test_a_pattern_that_counts_beyond_measure_is_refused(text: str) -> None:
    with pytest.raises(AllocationError, match=r"counts from .*; write a range such as") as refused:
        next(expand_pattern(f"{text}x1:local"))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("option", ["--samples", "--tokens", "--batch", "--accumulation"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "9" * 5000, "²"])
def test_options_take_numbers_within_bounds(option: str, number: str, command: Command) -> None:
    sentence = command("estimate", "hf:gpt2", "--on", "1x1:local", option, number).sentence
    assert "range" not in sentence
    assert len(sentence) < 300


def test_what_no_check_meets_is_a_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OverflowError("too large"), MemoryError(), RecursionError("too deep")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("estimator.machines.catalogue.load_profile", fail)
        assert type(error).__name__ in command("machines", "show", "local").sentence


@pytest.mark.parametrize("batch", [float("nan"), 2.5, True, 0, -1, 10**30, "8"])
def test_a_batch_is_a_whole_number_within_bounds(batch: Any) -> None:
    graph = perceptron([64] * 3)
    for asked in ({"batch_per_gpu": batch}, {"accumulation_steps": batch}, {"global_batch": batch}):
        with pytest.raises(WorkloadError):
            estimator.estimate(graph, "1x1:local", profile=whole_profile(), **asked)


# Importers


@pytest.mark.parametrize(
    "text",
    [
        "<system/>",
        "<gpu/>",
        '<system><cpu numaid="0"><pci><gpu sm="80"/></pci></cpu></system>',
        "<system>" * 3000 + "</system>" * 3000,
        "<system>" * 3000 + '<gpu dev="0"/>' + "</system>" * 3000,
        '<!DOCTYPE a [<!ENTITY b "c">]><system/>',
        '{"nvbandwidth": {"GPU Device list": null, "testcases": []}}',
        '{"nvbandwidth": {"testcases": [{"name": [], "status": "Passed"}]}}',
        '{"nvbandwidth": {"testcases": [{"name": "host_to_device_memcpy_ce", "status": "Passed",'
        ' "bandwidth_matrix": [[1e300]]}]}}',
        '{"results": null, "args": [], "config": []}',
        "- topology: 2026-99-99\n  tree: {switches: 2026-99-99}\n",
        "- topology: a\n  tree: {switches: [{switch: {}, nodes: 1}]}\n",
        "- topology: a\n  tree: {switches: [{switch: s, nodes: [1, 2]}]}\n",
        "- topology: !!python/object/apply:os.system [ls]\n",
        "- topology: a\n  x: " + "[" * 500 + "]" * 500,
    ],
)
def test_an_importer_takes_what_no_tool_writes_for_damage(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ImportedFileError) as refused:
        read_imports([path], machine="local")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "text",
    ['transport = ["tcp"]', '[nodes.a]\nmachine = ["local"]', "[[nodes]]", 'nodes = "a"',
     "[nodes.a]\nmachine = 'x'\nuplink = [1]", "a = 1979-99-99", f"a = {'9' * 5000}",
     "a = " + "[" * 5000],
)  # fmt: skip
def test_a_cluster_file_with_a_list_for_a_word_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(TopologyError) as refused:
        Cluster.load(path)
    assert "Errno" not in str(refused.value)
    assert str(refused.value).isprintable()


# Terminal escapes


@pytest.mark.parametrize("odd", ["\x1b[31m", "\x7f", "\u202e", "\n"])
@pytest.mark.parametrize("escaped", [False, True])
def test_escapes_stand_in_no_profile(odd: str, escaped: bool, tmp_path: Path) -> None:
    values = json.loads(json.dumps(whole_profile().to_dict()))
    values["devices"][0]["name"] = f"{odd}red"
    with pytest.raises(ProfileError, match="unprintable") as refused:
        MachineProfile.from_dict(values)
    assert str(refused.value).isprintable()
    (tmp_path / "odd.json").write_text(json.dumps(values, ensure_ascii=escaped), encoding="utf-8")
    with pytest.raises(ProfileError, match="unprintable"):
        estimator.load_profile(tmp_path / "odd.json")


def test_escapes_of_an_argument_are_spelt_out_and_cut(command: Command) -> None:
    sentence = command("machines", "show", "\x1b[31mred" + "x" * 5000).sentence
    assert sentence.isprintable()
    assert len(sentence) < 500


# Model code


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def test_what_model_code_prints_is_on_stderr(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "loud.py"
    path.write_text(
        "import sys, torch\nprint('loaded')\n"
        "def loud():\n    print('called'); sys.stdout.close()\n"
        "    return torch.nn.Linear(8, 4), torch.randn(4, 8)\n"
    )
    answer = command("estimate", f"{path}:loud", "--on", "1x1:local", "--json")
    assert json.loads(answer.out)["ranks"] == 1
    assert answer.err.splitlines() == ["loaded", "called"]


@pytest.mark.parametrize(
    "raising",
    ["class B(BaseException): pass\n", "class B(Exception):\n  def __str__(s): raise s\n"]
)  # fmt: skip
def test_whatever_model_code_raises_is_a_sentence(
    raising: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "raising.py"
    path.write_text(f"{raising}def model(): raise B\n")
    assert "raised (B" in command("estimate", f"{path}:model", "--on", "1x1:local").sentence


def test_a_batch_that_no_step_can_take_is_refused() -> None:
    round_about: list[Any] = [torch.randn(4, 8)]
    round_about.append(round_about)
    for batch, said in (
        (torch.randn(0, 8), "no sample"),
        (round_about, "holds itself"),
        (torch.randn(4, 8).to_sparse(), "sparse"),
    ):
        with pytest.raises(ModelError, match=said):
            trace_graph(mlp(), batch)


def test_a_branch_on_the_values_of_a_batch_is_an_assumption() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    graph = trace_graph(Branching(8, 4), torch.randn(4, 8))
    assert any("values of its batch" in line for line in graph.assumptions)
    plain = trace_graph(nn.Linear(8, 4), torch.randn(4, 8))
    assert not any("values of its batch" in line for line in plain.assumptions)


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_a_model_kept_in_half_is_in_half(dtype: torch.dtype, mode: str) -> None:
    graph = trace_graph(nn.Linear(8, 4, dtype=dtype), torch.randn(4, 8, dtype=dtype))
    assert graph.precision == mode


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_model_of_another_type_is_another_workload(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        with pytest.raises((ModelError, TraceError)):
            trace_graph(nn.Linear(8, 4, dtype=dtype), torch.randn(4, 8, dtype=dtype))
        graph = trace_graph(
            nn.Linear(8, 4, dtype=dtype),
            torch.randn(4, 8, dtype=dtype),
            loss=lambda output, _: output.abs().mean(),
        )
        # 4 samples of 8 into 4 numbers, and 8 real operations for each complex product and sum.
        from estimator.graph.costs.call_costs import op_cost

        flops = [op_cost(op.call) for op in graph.ops if "mm" in op.call.target]
        assert flops[0].flops == 4 * 8 * 4 * 8
    else:
        graph = trace_graph(nn.Linear(8, 4, dtype=dtype), torch.randn(4, 8, dtype=dtype))
    kind = str(dtype).removeprefix("torch.")
    assert kind in graph.workload
    assert any(kind in line for line in graph.assumptions)


@pytest.mark.parametrize(
    "model", ["hf:gpt2,n_layer=-1", "hf:gpt2,n_layer=1000000", "hf:gpt2,vocab_size=99999999999"]
)
def test_a_size_that_no_model_has_is_refused(model: str, command: Command) -> None:
    assert "a model has 0 to" in command("estimate", model, "--on", "1x1:local").sentence


# The rest


def test_a_dangling_link_is_listed_as_damaged(store: Path, command: Command) -> None:
    (store / "machines" / "gone.json").symlink_to("nowhere.json")
    answer = command("machines", "list")
    assert (answer.code, answer.err) == (0, "")
    assert "gone" in answer.out


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_odd_sizes_of_a_terminal_are_passed_over(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("²", "9" * 5000, "-1", "wide", "0"):
        monkeypatch.setenv(name, size)
        assert command("machines", "list").code == 0


def test_closed_stdout_is_one_sentence() -> None:
    words = f"{sys.executable} -m estimator.cli.main machines list >&-"
    found = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert "stdout is closed" in line
