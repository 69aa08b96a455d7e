"""Check that graphs survive saving, and that damaged files are refused."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from estimator.errors import GraphFileError, StoreError
from estimator.graph.files import is_saved_graph
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import OpTiming
from estimator.graph.trace import trace_graph


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


def test_a_loaded_graph_equals_the_saved_one(graph: OpGraph, tmp_path: Path) -> None:
    timing = OpTiming(seconds=1e-6, noise_ratio=0.1)
    timed = replace(graph, timings={graph.ops[0].call: timing}, timed_on="local")
    timed.save(tmp_path / "timed.graph")
    assert OpGraph.load(tmp_path / "timed.graph") == timed


def test_equal_calls_come_back_as_one_object(saved: Path) -> None:
    ops = OpGraph.load(saved).ops
    unchanged = [op for op in ops if op.call == op.other_call]
    assert unchanged
    assert all(op.call is op.other_call for op in unchanged)


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
        lambda data: data.pop("ops"),
        lambda data: data.update(ops=7),
        lambda data: data["ops"][0].__setitem__(1, 10**6),
        lambda data: data["ops"][0].__setitem__(1, -1),
        lambda data: data["ops"][0].__setitem__(3, "sideways"),
        lambda data: data["ops"][0].__setitem__(5, [0, 0, 0, 0, 0, 0]),
        lambda data: data["values"][0].__setitem__(3, 10**6),
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
