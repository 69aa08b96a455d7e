"""Bad input gets one sentence that says what to do and exit code 2, and changes no file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

import estimator
from estimator.errors import (
    AllocationError,
    EstimatorError,
    GraphFileError,
    ModelError,
    ProfileError,
    StoreError,
    StrategyError,
    TopologyError,
    UnknownMachineError,
    WorkloadError,
)
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from tests.conftest import Command
from tests.synthetic import perceptron


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, except what Python writes beside imported files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(autouse=True)
def nothing_changes(tmp_path: Path, store: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test itself writes it writes through `given_file`, before asking."""
    before = contents(tmp_path)
    yield
    expected = before | getattr(request.node, "given_files", {})
    assert contents(tmp_path) == expected


@pytest.fixture
def given_file(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[str, str | bytes], Path]:
    """Write an input file."""
    request.node.given_files = {}

    def write(name: str, content: str | bytes) -> Path:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        request.node.given_files[name] = data
        return tmp_path / name

    return write


# Profiles


def test_a_profile_cut_off_anywhere_is_refused(
    store: Path, command: Command, given_file: Callable[..., Path]
) -> None:
    whole = (store / "machines" / "local.json").read_bytes()
    assert len(whole) > 50 * 150
    for size in range(0, len(whole) - 1, 50):
        path = given_file("cut.json", whole[:size])
        sentence = command("machines", "show", path).sentence
        assert "run 'estimator probe'" in sentence


NUMBERS = """
devices.0.memory_bytes devices.0.memory_bandwidth_bytes_per_s devices.0.peak_flops_per_s.float32
links.0.latency_s links.0.bandwidth_bytes_per_s collectives.0.latency_s
collectives.0.bandwidth_bytes_per_s collectives.0.points.0.1 collectives.0.group_size
overlaps.0.exposed_ratio kernels.0.points.0.warm_s contentions.0.points.0.1 host.forward_op_s
memory.first_touch_s_per_byte updates.0.per_parameter_s rank_jitter_ratio provenance.relative_error
"""


def with_value(content: Any, path: str, value: Any) -> Any:
    """A copy of JSON values with one of them replaced."""
    copied = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place = copied
    for step in parents:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    return copied


@pytest.mark.parametrize("path", NUMBERS.split())
def test_impossible_numbers_in_a_profile_are_refused(
    path: str, command: Command, given_file: Callable[..., Path], small_profile: MachineProfile
) -> None:
    for value in (-1.0, float("nan"), float("inf"), "fast", None, [], {}):
        if value is None and path.rsplit(".", 1)[-1] in (
            "memory_bandwidth_bytes_per_s", "rank_jitter_ratio", "relative_error",
        ):  # fmt: skip
            continue  # these may be unknown
        damaged = with_value(small_profile.to_dict(), path, value)
        file = given_file("damaged.json", json.dumps(damaged))
        # Each place is named, so that a person finds it.
        assert path.split(".")[0] in command("machines", "show", file).sentence


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{}", b"17", b'"local"', b"\xff\xfe\x00", b"{}{}", b"NaN",
     b'{"name": "x", "devices": []}', b"[" * 100_000, b'{"a":' * 100_000],
)  # fmt: skip
def test_what_is_no_profile_is_refused(
    content: bytes, command: Command, given_file: Callable[..., Path]
) -> None:
    assert command("machines", "show", given_file("odd.json", content)).sentence


@pytest.mark.parametrize(
    "name", ["h900", "Local", "lokal", "local ", "../local", "no/such.json", ""]
)
def test_an_unknown_machine_is_refused(name: str, command: Command) -> None:
    assert command("machines", "show", name).sentence
    assert command("machines", "compare", "local", name).sentence


@pytest.mark.parametrize("machine", ["h900", "lokal", "local.json"])
def test_an_allocation_of_an_unknown_machine_is_refused(machine: str, command: Command) -> None:
    assert machine in command("estimate", "hf:gpt2", "--on", f"1x1:{machine}").sentence


# Allocations and options

BAD_ALLOCATIONS = """
|1|x|1x|x1|1x1|1x1:|:local|x:local|1x:local|x1:local|0x1:local|1x0:local|0x0:local|-1x1:local
1x-1:local|1x1:local+|+1x1:local|1x1:local++1x1:local|+|1x1;local|1x1: local|1 x1:local|1x 1:local
1x1:lo cal|1x1:.local|1x1:-local|1x1:local,1x1:local|1*1:local|1X1:local|1x1x1:local|1.5x1:local
1x1.0:local|1e3x1:local|0x1F:local|onextwo:local|1x1:löcal|1x1:local!|1x1:local/|1x1:../local
a1|a1[|a1[]|a1]|[0]|a1[0|a1[0,]|a1[,0]|a1[0,,1]|a1[-1]|a1[0-3]|a1[0:3]|a1[x]|a1[0]x2|a1[0,0]|a1(0)
a1[0]+a1[0]|a1[1.5]|a1[ 0]|a1{0}|1x1:local[0]|999999999x999999999:local|1048577x1:local
1x3:local|1x99:local|2x1:local|1x1:local+1x1:local|a1[0]|99999999999999999999x1:local|²x1:local
1x1:local\x00|1x1:lo\ncal|\t|+ +|local|local:1x1|2x8|٣x1:local|a[²]
"""


@pytest.mark.parametrize(
    "text",
    [*(text.encode().decode("unicode_escape") if "\\" in text else text
       for line in BAD_ALLOCATIONS.strip().splitlines() for text in line.split("|")),
     f"a[{'9' * 5000}]"],
)  # fmt: skip
def test_an_allocation_that_cannot_be_is_refused(
    text: str, command: Command, given_file: Callable[..., Path]
) -> None:
    model = given_file("model.py", TINY)
    assert command("estimate", f"{model}:mlp", "--on", text).sentence


def test_there_are_at_least_sixty_bad_allocations() -> None:
    assert len(BAD_ALLOCATIONS.replace("\n", "|").split("|")) >= 60


@given(some.text(alphabet="12x:+[],a-. ²\n", max_size=16))
@example("1x1:a+a[0]")
def test_any_text_is_an_allocation_that_prints_back_or_is_refused(text: str) -> None:
    with contextlib.suppress(AllocationError):
        allocation = Allocation.parse(text)
        assert Allocation.parse(str(allocation)) == allocation


@pytest.mark.parametrize(
    "words",
    [
        ("estimat",),
        ("estimate",),
        ("estimate", "hf:gpt2"),
        ("estimate", "--on", "1x1:local"),
        ("estimate", "hf:gpt2", "hf:bert", "--on", "1x1:local"),
        ("estimate", "hf:gpt2", "--on"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--fast"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--batch", "0"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--batch", "-4"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--batch", "many"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--batch", "1.5"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--accumulation", "0"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--seq-len", "0"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--optimizer", "lion"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--precision", "int4"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--strategy", "magic"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--strategy", "ddp:bucket=0"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--samples", "0"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--samples", "5", "--tokens", "5"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--trace", "/dev/null/step.json"),
        ("estimate", "hf:gpt2", "--on", "1x1:local", "--trace", "."),
        ("trace", "hf:gpt2", "--out", "g.graph", "--loader", "prep=1ms"),
        ("trace", "hf:gpt2", "--out", "g.graph", "--global-batch", "8"),
        ("memory", "hf:gpt2", "--on", "1x1:local", "--loader", "prep=1ms"),
        ("stalls", "hf:gpt2", "--on", "1x2:local", "--steps", "9"),
        ("stalls", "--on", "1x2:local", "--run", __file__, "--batch", "9"),
        ("sweep", "hf:gpt2", "--on", "1x1:local", "--strategies", "ddp", "--strategy", "fsdp"),
        ("validate", "hf:gpt2", "--on", "1x1:local", "--layout", "tp=2"),
        ("validate", "hf:gpt2"),
        ("validate", "hf:gpt2", "--on", "1x1:local", "--repeats", "2"),
        ("validate", "hf:gpt2", "--on", "1x1:local", "--steps", "0"),
        ("memory", "hf:gpt2"),
        ("machines", "show"),
        ("machines", "compare", "local"),
        ("machines", "merge", "local"),
        ("probe", "--budget", "0"),
        ("probe", "--devices", "0"),
        ("probe", "--name", "../local"),
        ("probe", "--name", ""),
        ("probe", "--name", "two words"),
        ("probe", "--out", "."),
        ("probe", "--out", "/dev/null/machine.json"),
        ("probe", "now"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(
    words: tuple[str, ...], command: Command
) -> None:
    assert command(*words).sentence


# Models

TINY = """
import torch
from torch import nn

def mlp(batch=4):
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(batch, 8)

def asks(width):
    return mlp(width)

def returns_nothing():
    pass

def returns_four():
    return (*mlp(), None, None)

def has_no_parameters():
    return nn.ReLU(), torch.randn(4, 8)

def is_frozen():
    model, batch = mlp()
    return model.requires_grad_(False), batch

def has_a_batch_of_the_wrong_width():
    return mlp()[0], torch.randn(4, 9)

def has_a_batch_of_words():
    return mlp()[0], "four times eight"

def has_no_batch():
    return mlp()[0], None

def has_too_many_inputs():
    return mlp()[0], (torch.randn(4, 8), torch.randn(4, 8))

def has_an_unknown_input():
    return mlp()[0], {"pixels": torch.randn(4, 8)}

def has_a_loss_that_raises():
    return (*mlp(), lambda output, batch: output.nope)

def has_a_loss_of_many_numbers():
    return (*mlp(), lambda output, batch: output)

def has_a_loss_without_gradient():
    return (*mlp(), lambda output, batch: output.detach().mean())

class Raising(nn.Linear):
    def forward(self, x):
        raise ValueError("forward raises")

def has_a_forward_that_raises():
    return Raising(8, 8), torch.randn(4, 8)

"""

BAD_FUNCTIONS = [*re.findall(r"^def ((?!mlp)\w+)", TINY, flags=re.MULTILINE), ""]


@pytest.mark.parametrize("function", BAD_FUNCTIONS)
def test_a_model_function_that_is_wrong_is_refused(
    function: str, command: Command, given_file: Callable[..., Path]
) -> None:
    model = f"{given_file('model.py', TINY)}:{function}"
    assert command("estimate", model, "--on", "1x1:local").sentence


def test_torch_adds_no_words_of_its_own(given_file: Callable[..., Path]) -> None:
    model = f"{given_file('model.py', TINY)}:has_a_batch_of_the_wrong_width"
    words = ("-m", "estimator.cli.main", "estimate", model, "--on", "1x1:local")
    # In a process of its own, since importing torch sets up logging anew.
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert "[4, 9] X [8, 8]" in line


@pytest.mark.parametrize(
    ("name", "content"),
    [("torn.py", "def mlp(:\n"), ("raising.py", "1 / 0\n"), ("importing.py", "import nosuch\n"),
     ("exiting.py", "raise SystemExit(0)\n"), ("empty.py", ""), ("binary.py", b"\x00\xff\xfe")],
)  # fmt: skip
def test_a_model_file_that_cannot_be_imported_is_refused(
    name: str, content: str | bytes, command: Command, given_file: Callable[..., Path]
) -> None:
    model = f"{given_file(name, content)}:mlp"
    assert name in command("estimate", model, "--on", "1x1:local").sentence


@pytest.mark.parametrize(
    "model",
    ["", ":", "mlp", "nofile.py:mlp", "no.such.package:mlp", "json:nosuch", "json:dumps", "hf:",
     "hf:nosuchtype", "hf:gpt2:nosuchtask", "hf:gpt2,n_layer", "hf:gpt2,n_layer=many",
     "hf:gpt2,nosuch=1", "/dev/null", "/:mlp"],
)  # fmt: skip
def test_a_model_that_does_not_exist_is_refused(model: str, command: Command) -> None:
    assert command("estimate", model, "--on", "1x1:local").sentence


def test_options_that_contradict_a_saved_graph_are_refused(
    command: Command, given_file: Callable[..., Path]
) -> None:
    path = given_file("whole.graph", b"")
    perceptron([8, 8]).save(path)
    given_file("whole.graph", path.read_bytes())
    assert "--measure" in command("estimate", path, "--on", "1x1:local", "--measure").sentence
    assert "saved graph" in command("validate", path, "--on", "1x1:local").sentence


# Disks


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch, small_profile: MachineProfile) -> None:
    """A probe that has measured already."""
    monkeypatch.setattr("estimator.probe.machine.probe_machine", lambda **_: small_profile)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)


@pytest.mark.usefixtures("quick_probe", "full_disk")
def test_a_full_disk_keeps_the_old_profile(command: Command) -> None:
    assert "No space left" in command("probe").sentence
    assert load_profile("local").name == "local"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_half_written_trace(
    command: Command, given_file: Callable[..., Path], tmp_path: Path
) -> None:
    model = f"{given_file('model.py', TINY)}:mlp"
    words = ("--on", "1x1:local", "--trace", tmp_path / "step.json")
    assert "No space left" in command("estimate", model, *words).sentence


@pytest.mark.usefixtures("quick_probe")
@pytest.mark.parametrize("place", ["folder", "under_a_file"])
def test_a_place_that_cannot_be_written_is_refused_before_probing(
    place: str, command: Command, tmp_path: Path, given_file: Callable[..., Path]
) -> None:
    file = given_file("plain", "text")
    path = {"folder": tmp_path, "under_a_file": file / "machine.json"}[place]
    assert (
        str(file if place == "under_a_file" else path) in command("probe", "--out", path).sentence
    )


def test_a_trace_goes_through_what_is_no_file(
    command: Command, given_file: Callable[..., Path], tmp_path: Path
) -> None:
    model = f"{given_file('model.py', TINY)}:mlp"
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    for place in ("/dev/null", link):
        answer = command("estimate", model, "--on", "1x1:local", "--trace", place)
        assert (answer.code, answer.err) == (0, "")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert link.is_symlink()
    link.unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
@pytest.mark.usefixtures("quick_probe")
def test_a_folder_without_permission_is_refused(command: Command, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert command("probe", "--out", tmp_path / "machine.json").sentence
    finally:
        tmp_path.chmod(0o700)


def test_a_store_that_is_a_file_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, given_file: Callable[..., Path]
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(given_file("store-file", "text")))
    assert command("probe").sentence
    said = command("estimate", "hf:gpt2", "--on", "1x1:local").sentence
    assert "estimator probe" in said
    assert "no folder" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_one_sentence(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "estimator.cli.main", "machines", "show", "h100-sxm"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment,
        )  # fmt: skip
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "No space left" in found.stderr


def test_every_error_of_the_package_also_is_a_builtin_one() -> None:
    for kind in EstimatorError.__subclasses__():
        assert len(kind.__bases__) == 2, kind
        assert kind.__doc__


@pytest.mark.parametrize("wrong", ["hf:gpt2", 3])
def test_what_is_no_model_is_not_estimated(wrong: Any) -> None:
    with pytest.raises(WorkloadError, match=f"found '?{wrong}'?; names"):
        estimator.estimate(wrong, "1x1:h100-sxm")


def test_one_allocation_is_no_list_of_them() -> None:
    graph = perceptron([8, 8])
    said = r"found only '1x1:v100-p3'; write \['1x1:v100-p3'\]"
    with pytest.raises(AllocationError, match=said):
        estimator.estimate_many(graph, "1x1:v100-p3")
    with pytest.raises(AllocationError, match=said):
        next(estimator.estimate_chunks(graph, "1x1:v100-p3"))


def test_a_table_of_what_is_no_graph_is_refused() -> None:
    with pytest.raises(WorkloadError, match="found str; make one with trace_model"):
        estimator.estimate_many("hf:gpt2", ["1x1:v100-p3"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"calibration": "store.db"}, WorkloadError, "calibration is a Calibrator, found 'store"),
        ({"strategy": None}, StrategyError, "a strategy is text such as ddp .* found None"),
        ({"cluster": 5}, TopologyError, "cluster is a Cluster or the path of its file, found 5"),
        ({"profile": "t4"}, ProfileError, "profile is a MachineProfile, found 't4'; load_profile"),
        ({"loader": 3}, WorkloadError, "a loader is text such as .* found 3; write one"),
        ({"layout": 3}, StrategyError, "(a layout is|layouts are one) text .* found 3; write"),
        ({"layout": ""}, StrategyError, "a layout is text such as .* found ''; write one"),
        ({"accumulation_steps": "2"}, WorkloadError, "accumulation steps must be a whole number"),
    ],
)
def test_arguments_of_another_kind_get_errors_of_the_package(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    graph = perceptron([8, 8], target="cuda")
    with pytest.raises(error, match=said):
        estimator.estimate(graph, "1x1:t4", **options)
    with pytest.raises(error, match=said):
        estimator.estimate_many(graph, ["1x1:t4"], **options)


def test_what_is_loaded_and_traced_by_another_kind_is_refused() -> None:
    import torch

    with pytest.raises(UnknownMachineError, match="by name or path, found None"):
        estimator.load_profile(None)  # type: ignore[arg-type]
    with pytest.raises(GraphFileError, match="from a path, found 5"):
        estimator.OpGraph.load(5)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="a store is a path, found 5"):
        estimator.Calibrator(5)  # type: ignore[arg-type]
    with pytest.raises(AllocationError, match="come in a list, found None"):
        estimator.estimate_many(perceptron([8, 8]), None)  # type: ignore[arg-type]
    with pytest.raises(UnknownMachineError, match="names or profiles in a list, found 3"):
        estimator.prepare(perceptron([8, 8]), 3)  # type: ignore[arg-type]
    model, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(ModelError, match="dimension of the samples, found 'x'"):
        estimator.trace_model(model, batch, batch_dim="x")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"loss is a function of .* found 5"):
        estimator.trace_model(model, batch, loss=5)  # type: ignore[arg-type]


def test_training_on_gpus_that_are_not_here_is_refused_before_any_work(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    answer = command("validate", "hf:gpt2", "--on", "1x4:h100-sxm")
    assert "'1x4:h100-sxm' is to train on 4 of this machine's GPUs" in answer.sentence
