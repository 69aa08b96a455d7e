"""The accuracy run on testbeds: what becomes of a case that the engine refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import testbed_accuracy
from records import Records
from testbed.network import Testbed
from testbed_cases import beds, cases

from estimator.errors import StrategyError

BED = "shard200"


def refuse(*_: object, **__: object) -> None:
    raise StrategyError("no such strategy")


def never(*_: object, **__: object) -> None:
    pytest.fail("what is not predicted is not measured")


def test_a_case_that_is_refused_keeps_its_reason_and_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(
        cases=[case for case in cases() if case.bed == BED], work=tmp_path, repeats=1, steps=1
    )
    options.repredict = False
    records = Records(tmp_path / "records.jsonl")
    bench = testbed_accuracy.Bench(BED, options, records)
    bench.network_path.touch()
    monkeypatch.setattr(testbed_accuracy.Bench, "_estimate", refuse)
    monkeypatch.setattr(testbed_accuracy, "measure", never)
    bed = Testbed(description=beds()[BED], prefix="tb1x0-")
    bench.prepare(bed)
    bench.measure(bed)
    found = testbed_accuracy.assemble(options, records)
    assert found
    assert {case["status"] for case in found} == {"no_prediction"}
    assert {case["reason"] for case in found} == {"no such strategy"}
    assert "no such strategy" in capsys.readouterr().err
