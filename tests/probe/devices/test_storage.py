"""Rates of reading, copying and decoding are those of a clock that the test moves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import ProbeError
from estimator.machines.profile import MachineProfile
from estimator.probe.devices import storage
from estimator.probe.findings import Findings
from tests.synthetic import Machine


def test_files_are_read_in_bytes_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(1000))
    now = iter((10.0, 10.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert storage.read_bytes_per_s(paths) == 3000 / 0.5


def test_reading_ends_with_its_time_after_a_file_for_each_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    path.write_bytes(bytes(1000))
    now = iter((10.0, 10.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert storage.read_bytes_per_s([path] * 5, readers=2, budget_s=-1.0) == 2000 / 0.5


@pytest.mark.parametrize(
    ("measure", "name", "count"),
    [
        (storage.copied, "copy_bytes_per_s", 64 * 2**20),
        (storage.tokens_made, "tokens_per_s", 1024 * 32),
        (storage.jpeg_decoded, "jpeg_pixels_per_s", 500 * 375),
    ],
)
def test_a_core_copies_decodes_and_makes_records(
    measure: Any, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_timed", lambda call, _: call() or 0.5)
    if name.startswith("jpeg"):
        pytest.importorskip("PIL")
    assert measure(0.1) == {name: count / 0.5}


def test_a_folder_in_memory_has_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "resident_ratio", lambda _: 1.0)
    with pytest.raises(ProbeError, match="set TMPDIR to a folder on the disk"):
        storage.files_read(0.0)


def test_what_was_found_is_in_the_profile_and_the_rest_is_missing() -> None:
    findings = Findings(at="2026-11-22")
    assert findings.input_cost() is None
    findings.take("input", {"copy_bytes_per_s": 8e9})
    findings.take("input", {"missing": ["input: no disk"]})
    cost = findings.input_cost()
    assert cost is not None
    assert (cost.copy_bytes_per_s, cost.disk_bytes_per_s) == (8e9, None)
    assert findings.missing == ["input: no disk"]
    plain = Machine().profile().to_dict() | {"input": {**_plain(cost)}}
    assert MachineProfile.from_dict(plain).input == cost


def _plain(cost: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(cost)
