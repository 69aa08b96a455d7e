"""What a loader is measured to cost; sleeps and counted bytes stand for work, so that load is none.

A busy machine can only make a sleep longer: bounds are on one side where it could matter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import profiler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import estimator
from estimator.errors import ModelError
from estimator.waits.hooks import ScriptEndsError, Watched, copied, covered


class Files(Dataset[Any]):
    """Samples of 400 bytes, read from files of 5000, that sleep 3 ms."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sample"
        self.path.write_bytes(bytes(5000))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.path.read_bytes()
        time.sleep(0.003)
        return torch.rand(98), torch.tensor(random.random())


class Stream(IterableDataset[Any]):
    """Ten samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(10):
            time.sleep(0.002)
            yield torch.ones(25, 2)


def test_bytes_seconds_and_workers_of_a_loader_are_measured(tmp_path: Path) -> None:
    loader = DataLoader(Files(tmp_path), batch_size=8, num_workers=1, prefetch_factor=3)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    found = estimator.measure_loader(loader, batches=3)
    # 98 + 1 numbers of 4 bytes; a file is read whole, and little else.
    assert found.sample_bytes == 396.0
    assert found.stored_bytes == pytest.approx(5000, abs=200)
    assert found.prep_s >= 0.003
    assert found.cpu_ratio < 0.9
    assert (found.workers, found.source) == (1, "measured")
    assert found.take_s > 0
    # Random numbers are as they would have been.
    assert torch.equal(torch.rand(1), expected)


def test_a_stream_without_a_length_is_measured() -> None:
    found = estimator.measure_loader(DataLoader(Stream(), batch_size=4))
    assert (found.sample_bytes, found.workers) == (200.0, 0)
    assert found.prep_s >= 0.002


def test_a_loader_without_samples_is_refused() -> None:
    with pytest.raises(ModelError, match="gave no batch of tensors"):
        estimator.measure_loader(DataLoader([], batch_size=2))  # type: ignore[arg-type]


def test_what_is_watched_is_as_given_where_nothing_watches() -> None:
    watched = estimator.watch_loader([1, 2, 3])
    assert (list(watched), len(watched)) == ([1, 2, 3], 3)
    with pytest.raises(TypeError, match="has no length"):
        len(estimator.watch_loader(iter([1])))


def test_copies_of_batches_share_no_memory() -> None:
    batch = {"x": torch.ones(2), "more": (torch.zeros(1), [torch.ones(3)]), "name": "a"}
    twin = copied(batch)
    twin["x"] += 1
    twin["more"][1][0] += 1
    assert batch["x"].tolist() == [1, 1]
    assert batch["more"][1][0].tolist() == [1, 1, 1]  # type: ignore[index]
    assert twin["name"] == "a"


def test_hooks_take_less_than_a_hundredth_of_a_step_of_50_ms() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    watched = Watched(steps=10**9, warmup=1, is_synthetic=False, out=1)
    batches = [torch.ones(8, 4)] * 1000
    begun_s = time.process_time()
    for _ in watched.batches(batches, iter(batches)):
        watched.stepped(optimizer)
    hooked_s = time.process_time() - begun_s
    assert hooked_s / 1000 < 0.01 * 0.050
    assert len(watched.record.ended_s) == watched.record.batches == 1000


class Profiler:
    """Kernels of 2 s each second step, one of them inside another, and a span of the host's."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def events(self) -> list[Any]:
        spans = [("CUDA", 0, 2e6), ("CUDA", 1e6, 2e6), ("CUDA", 4e6, 6e6), ("CPU", 0, 9e6)]
        return [
            SimpleNamespace(
                device_type=SimpleNamespace(name=kind),
                time_range=SimpleNamespace(start=start, end=end),
            )
            for kind, start, end in spans
        ]


def test_what_an_accelerator_worked_is_taken_between_the_warm_up_and_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Profiler()
    monkeypatch.setattr(profiler, "profile", lambda **_: found)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    watched = Watched(steps=6, warmup=2, is_synthetic=False, out=1, is_profiled=True)
    for step in range(5):
        watched.stepped(optimizer)
        assert found.calls == (["start"] if step > 0 else [])
    with pytest.raises(ScriptEndsError):
        watched.stepped(optimizer)
    assert found.calls == ["start", "stop"]
    # 4 s in the 4 steps after the warm-up.
    assert watched.record.busy_s == pytest.approx(1.0)


def test_an_accelerator_works_where_any_of_its_spans_is() -> None:
    # 0 to 4 in two that overlap, one inside them, and 6 to 7.
    assert covered([(6.0, 7.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0)]) == 5.0
    assert covered([]) == 0.0
