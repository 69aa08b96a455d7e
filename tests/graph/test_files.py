"""Check that graphs survive saving, and that damaged files are refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.optim import AdamW

from estimator.advise.memory import memory_of
from estimator.api import estimate, trace_model
from estimator.calibrate.observed import ObservedWorkload
from estimator.errors import EstimatorError, GraphFileError, StoreError, WorkloadError
from estimator.graph.files import is_saved_graph, packed, unpacked
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.graph.trace.trace import trace_graph
from estimator.tensors import OpCall, TensorSpec
from tests.fuzz.hostile_values import altered_values
from tests.synthetic import in_blocks, perceptron


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return trace_graph(model, torch.randn(2, 4), name="small")


@pytest.fixture
def saved(graph: OpGraph, tmp_path: Path) -> Path:
    path = tmp_path / "small.graph"
    graph.save(path)
    return path


def rewrite(path: Path, change: Any) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


def altered(data: Any, name: str, change: Any) -> None:
    """Change the numbers of a column."""
    numbers = unpacked(data["columns"][name]).tolist()
    change(numbers)
    data["columns"][name] = [[1, numbers, 0]]


def test_a_loaded_graph_equals_the_saved_one(graph: OpGraph, tmp_path: Path) -> None:
    timing = OpTiming(seconds=1e-6, noise_ratio=0.1)
    timed = replace(graph, timings={graph.ops[0].call: timing}, timed_on="local")
    timed.save(tmp_path / "timed.graph")
    loaded = OpGraph.load(tmp_path / "timed.graph")
    # No operator is made before it is asked for.
    assert not isinstance(loaded.ops, tuple)
    assert loaded == timed


def test_equal_calls_come_back_as_one_object(saved: Path) -> None:
    ops = OpGraph.load(saved).ops
    unchanged = [op for op in ops if op.call == op.other_call]
    assert unchanged
    assert all(op.call is op.other_call for op in unchanged)


@given(
    head=some.lists(some.integers(0, 9), max_size=40),
    block=some.lists(some.tuples(some.integers(0, 99), some.integers(-9, 9)), max_size=20),
    times=some.integers(0, 40),
    tail=some.lists(some.integers(-1, 1), max_size=80),
)
def test_columns_come_back_as_they_were(
    head: list[int], block: list[tuple[int, int]], times: int, tail: list[int]
) -> None:
    blocks = [first + time * step for time in range(times) for first, step in block]
    column = np.array([*head, *blocks, *tail], dtype=np.intp)
    assert unpacked(packed(column)).tolist() == column.tolist()


def test_a_block_that_is_repeated_stands_in_a_file_once(tmp_path: Path) -> None:
    sizes = []
    for blocks in (20, 40):
        graph = in_blocks(perceptron([8] * blocks, batch=2))
        graph.save(tmp_path / "deep.graph")
        data = json.loads(gzip.decompress((tmp_path / "deep.graph").read_bytes()))
        assert OpGraph.load(tmp_path / "deep.graph") == graph
        sizes.append(len(json.dumps(data["columns"])))
    assert sizes[1] < 1.1 * sizes[0]


def test_equal_graphs_give_equal_files(graph: OpGraph, saved: Path, tmp_path: Path) -> None:
    graph.save(tmp_path / "again.graph")
    assert (tmp_path / "again.graph").read_bytes() == saved.read_bytes()


def test_a_saved_graph_is_told_from_other_paths(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build(): ...")
    assert is_saved_graph(saved)
    assert not is_saved_graph(tmp_path / "model.py")
    assert not is_saved_graph("hf:gpt2")


def test_a_file_cut_anywhere_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for length in range(0, len(content), 50):
        cut = tmp_path / "cut.graph"
        cut.write_bytes(content[:length])
        with pytest.raises(GraphFileError, match="trace the model"):
            OpGraph.load(cut)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(version=99),
        lambda data: data.update(format="profile"),
        lambda data: data.pop("columns"),
        lambda data: data.update(columns=7),
        lambda data: data.update(version=1),
        lambda data: data["columns"].pop("call_of"),
        lambda data: data["columns"].update(call_of=7),
        lambda data: data["columns"].update(call_of=[[10**6, [0], 0]]),
        lambda data: data["columns"].update(call_of=[[10**9, [0], 0]]),
        lambda data: data["columns"].update(call_of=[[2, [0], [0, 0]]]),
        lambda data: data["columns"].update(call_of=[[1, [0.5], 0]]),
        lambda data: data["columns"].update(call_of=[[1, [[0]], 0]]),
        lambda data: data["columns"]["call_of"].append([1, [0], 0]),
        lambda data: altered(data, "call_of", lambda at: at.__setitem__(0, 10**6)),
        lambda data: altered(data, "call_of", lambda at: at.__setitem__(0, -1)),
        lambda data: altered(data, "is_forward", lambda at: at.__setitem__(0, 2)),
        lambda data: altered(data, "read", lambda at: at.__setitem__(0, 6)),
        lambda data: altered(data, "touched", lambda at: at.append(0)),
        lambda data: altered(data, "base", lambda at: at.__setitem__(0, 10**6)),
        lambda data: data["stems"].__setitem__(slice(None), ["a" * 2**24] * len(data["stems"])),
        lambda data: data["call_pairs"][0].__setitem__(0, 10**6),
        lambda data: data["kinds"].__setitem__(0, "sideways"),
        lambda data: data["specs"][0].update(t=[-1]),
        lambda data: data["specs"][0].update(t="ab"),
        lambda data: data["specs"][0].update(s=[1, 1, 1, 1, 1]),
        lambda data: data.update(batch=-2),
        lambda data: data.update(target="abacus"),
        lambda data: data.update(name=None),
        lambda data: data.update(timings=[[0, -1.0, 0.0]], timed_on="local"),
        lambda data: data.update(timings=[[0, 1.0, 0.0]]),
    ],
)
def test_a_damaged_graph_is_refused_in_one_sentence(saved: Path, change: Any) -> None:
    rewrite(saved, change)
    with pytest.raises(GraphFileError) as caught:
        OpGraph.load(saved)
    assert "\n" not in str(caught.value)


def test_columns_of_no_use_are_not_unpacked(graph: OpGraph, saved: Path) -> None:
    # A few bytes each, eight MiB unpacked.
    rewrite(saved, lambda data: data["columns"].update(other=[[2**20, ["no number"], 0]]))
    assert OpGraph.load(saved) == graph


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.graph"
    path.write_bytes(gzip.compress(b"[" * 200_000))
    with pytest.raises(GraphFileError):
        OpGraph.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=r"no saved graph .*gone\.graph"):
        OpGraph.load(tmp_path / "gone.graph")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(graph: OpGraph, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="closed"):
        graph.save(closed / "small.graph")


def test_a_folder_that_is_a_file_is_named(graph: OpGraph, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        graph.save(tmp_path / "file" / "small.graph")


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call["arguments"].__setitem__(1, "none"),
        lambda call: call["arguments"].__setitem__(1, True),
        lambda call: call["keywords"].update(reduction="sum"),
        lambda call: call["outputs"][0].update(d="float16"),
    ],
    ids=["text", "flag", "keyword", "type"],
)
def test_what_is_no_number_is_the_same_at_both_batches(
    change: Any, tmp_path: Path, graph: OpGraph
) -> None:
    path = tmp_path / "altered.graph"
    spec = TensorSpec((2, 4))
    call = OpCall("aten.gelu.default", (spec, "tanh", 2), (("reduction", "mean"),), (spec,))
    op = replace(graph.ops[0], call=call, other_call=call, inputs=(0,), outputs=(1,))
    replace(graph, ops=(op,), parameters=(), timings={}).save(path)

    def alter(data: Any) -> None:
        data["calls"].append(json.loads(json.dumps(data["calls"][0])))
        change(data["calls"][1])
        data["call_pairs"] = [[0, 1]]

    rewrite(path, alter)
    with pytest.raises(GraphFileError, match="at the second batch"):
        OpGraph.load(path)


def test_a_batch_at_which_a_tensor_would_be_less_than_empty_is_refused(tmp_path: Path) -> None:
    # 8 elements at batch 2 and 4 at batch 4 are none at batch 6 and -4 at batch 8.
    shrinking = nn.Linear(4, 4)
    path = tmp_path / "shrinking.graph"
    trace_graph(shrinking, torch.randn(2, 4)).save(path)

    def alter(data: Any) -> None:
        first = len(data["specs"])
        data["specs"] += [{"t": [8], "d": "float32"}, {"t": [4], "d": "float32"}]
        data["spec_pairs"].append([first, first + 1])
        more = {"spec_of": len(data["spec_pairs"]) - 1, "base": -1, "kind": 4}
        for name, number in more.items():
            data["columns"][name].append([1, [number], 0])

    rewrite(path, alter)
    graph = OpGraph.load(path)
    assert graph.at(6).specs[-1].shape == (0,)
    with pytest.raises(WorkloadError, match=r"would be one of \(-4,\) at batch 8"):
        graph.at(8)


def test_views_of_each_other_are_refused(saved: Path) -> None:
    def ring(data: Any) -> None:
        altered(data, "base", lambda at: at.__setitem__(slice(3), [1, 2, 0]))

    rewrite(saved, ring)
    graph = OpGraph.load(saved)
    with pytest.raises(WorkloadError, match="views of each other"):
        estimate(replace(graph, target="cuda"), "1x1:t4-g4dn")


def test_a_graph_without_parameters_has_nothing_to_shard() -> None:
    job = {"tensor_bytes": [4096, 400], "ready_ratios": [0.3, 1.0], "flops_per_sample": 1e9}
    graph = replace(OpGraph.from_summary(name="job", target="cuda", **job), parameters=())
    answers = [estimate(graph, "1x4:t4-g4dn", strategy=each) for each in ("fsdp", "ddp")]
    assert [answer.breakdown.communication_exposed_s for answer in answers] == [0.0, 0.0]


# What was altered

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"batch_per_gpu": 5},
    {"strategy": "fsdp"},
    {"strategy": "zero1", "accumulation_steps": 2},
    {"layout": "pp=2,dp=*", "accumulation_steps": 4},
    *({"layout": f"{axis}=2,dp=*"} for axis in ("tp", "cp", "ep")),
)


@lru_cache(maxsize=1)
def graphs() -> dict[str, OpGraph]:
    """Graphs of each kind: of layers, of experts, compiled, divided, known by their step times."""
    from tests.graph import test_own_steps
    from tests.graph.compile import test_fusion
    from tests.graph.partition import test_split_context, test_split_experts
    from tests.graph.trace import test_checkpointing, test_parallelised_modules

    ids = torch.randint(0, 64, (2, 16))
    small = test_split_context.Model()
    known: dict[str, Any] = {"parameter_bytes": 4000, "tensors": 10, "flops_per_sample": 1e9}
    timed = {"machine": "t4-g4dn", "step_times": [[8, 0.4], [16, 0.7]]}
    return {
        "ddp": in_blocks(perceptron([64] * 4, batch=8, target="cuda")),
        "experts": replace(test_split_experts.GRAPH, target="cuda"),
        "compiled": trace_model(small, ids, compiled=True, target="cuda", precision="bf16-amp"),
        "tp": test_parallelised_modules.traced(2),
        "summary": OpGraph.from_summary(name="job", target="cuda", **known, **timed),
        "flops": OpGraph.from_summary(name="job", **known),
        "scaled": replace(test_fusion.pair("residual")[1], channels_last=True, grad_scaler=True),
        "float8": test_fusion.traced("rowwise"),
        "checkpointed": replace(test_checkpointing.traced("selective:2"), clip_grad_norm=True),
        "partly updated": test_own_steps.traced(lambda m: [AdamW(m.trunk.parameters())]),
    }


MODES = {
    "checkpointed": "fp32, gradients clipped, checkpoint selective:2",
    "float8": "bf16, compiled-blocks, float8 rowwise",
}


@pytest.mark.parametrize(
    "kind",
    [
        *("experts", "compiled", "tp", "summary", "flops", "scaled", "float8", "checkpointed"),
        "partly updated",
    ],
)
def test_a_graph_of_each_kind_comes_back_equal(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    graph = graphs()[kind]
    graph.save(tmp_path / "saved.graph")
    again = OpGraph.load(tmp_path / "saved.graph")
    assert again == graph
    assert again.mode == MODES.get(kind, graph.mode)


@lru_cache(maxsize=1)
def kinds() -> dict[str, dict[str, Any]]:
    """The fields of the files of these graphs."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, graph in graphs().items():
            graph.save(Path(folder) / kind)
            found[kind] = json.loads(gzip.decompress((Path(folder) / kind).read_bytes()))
    return found


@pytest.mark.parametrize("kind", ["ddp", "experts", "compiled", "tp", "summary"])
def test_an_altered_graph_is_refused_or_answers_what_it_is_asked(
    kind: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("altered") / "altered.graph"
    monkeypatch.setenv("ESTIMATOR_HOME", str(path.parent))
    examples = int(os.environ.get("ESTIMATOR_FUZZ", "200")) // 5

    @settings(max_examples=examples, deadline=None, database=None)
    @given(seed=some.integers(0, 2**32))
    def check(seed: int) -> None:
        chance = random.Random(seed)
        path.write_bytes(gzip.compress(altered_values(kinds()[kind], chance).encode(), 1))
        try:
            graph = OpGraph.load(path)
        except GraphFileError:
            return
        # Raise nothing else: of a graph without operators, say, nothing is observed.
        with contextlib.suppress(EstimatorError):
            ObservedWorkload.of(graph)
        for asked in (ASKED[0], chance.choice(ASKED[1:])):
            with contextlib.suppress(EstimatorError):
                answer = estimate(graph, "1x4:t4-g4dn", **asked)
                json.dumps(answer.to_dict())
                memory_of(answer).to_dict()

    check()
