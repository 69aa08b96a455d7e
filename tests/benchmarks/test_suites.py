"""The benchmarks' command line: suites, one schema of results, tables that ship."""

import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import published_data
import pytest
from results import Result, ResultError, compare, result_of, text_of
from suites import SUITES

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def result(predicted_s: float, suite: str = "published") -> Result:
    case = {"id": "a", "method": "cold", "predicted_s": predicted_s, "measured_s": 1.0}
    answers = [("steps", {"cases": [case], "report": ["one row"]})]
    return result_of(suite, answers, machine="here", quick=False, canary={"before_s": 0.1})


def test_every_suite_is_made_of_modules_that_are_there() -> None:
    for suite in SUITES.values():
        for part in suite.parts:
            module = ROOT / "benchmarks" / f"{part.name}.py"
            text = module.read_text(encoding="utf-8")
            # What has no command line of its own is asked by the runner.
            assert ("def run(options: Options)" in text) == (part.words is None), part.name


def test_list_names_each_suite_on_a_line_of_its_own() -> None:
    listed = benchmarks("list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(SUITES)


def test_an_option_that_a_suite_does_not_take_is_refused(tmp_path: Path) -> None:
    refused = benchmarks("run", "order", "--data", str(tmp_path))
    assert refused.returncode == 2
    assert "order takes no --data" in refused.stderr


def test_a_result_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = result(0.9)
    path = saved.save(tmp_path)
    assert path == tmp_path / "published" / "here.json"
    read = Result.load(path)
    assert read.cases == [{"part": "steps", **saved.cases[0]}]
    assert read.summary[0]["median_ratio"] == pytest.approx(0.1)
    assert "one row" in text_of(read)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"cases": []}')
    with pytest.raises(ResultError, match="is no result of a suite"):
        Result.load(tmp_path / "x.json")


def test_compare_says_what_changed_and_how_far_both_are_off() -> None:
    text = compare(result(0.9), result(1.2))
    assert "steps/a" in text
    assert "+33.3 %" in text
    assert "10.0 %  20.0 %" in text
    assert "1 of 1 cases differ" in text


def test_results_of_two_suites_are_not_compared() -> None:
    with pytest.raises(ResultError, match="one is of published, the other of order"):
        compare(result(0.9), result(0.9, "order"))


def test_every_shipped_table_has_the_checksum_and_rows_that_are_said() -> None:
    with (published_data.SHIPPED / "tables.csv").open(encoding="utf-8") as stream:
        tables = list(csv.DictReader(stream))
    files = {path.name for path in published_data.SHIPPED.glob("*.gz")}
    assert files == {f"{table['table']}.csv.gz" for table in tables}
    for table in tables:
        content = gzip.decompress(
            (published_data.SHIPPED / f"{table['table']}.csv.gz").read_bytes()
        )
        assert hashlib.sha256(content).hexdigest() == table["sha256"], table["table"]
        assert len(list(csv.reader(content.decode().splitlines()))) == int(table["rows"]) + 1
        assert "not stated" not in table["license"]


def test_a_damaged_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_data, "SHIPPED", tmp_path)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a,b\n"))
    with pytest.raises(published_data.DamagedTableError, match="check it out again"):
        published_data._unpack("x", hashlib.sha256(b"a,c\n").hexdigest(), tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()


def test_results_that_are_kept_are_of_the_schema() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        kept = Result.load(path)
        assert kept.suite == path.parent.name
        assert kept.suite in SUITES
        assert json.loads(path.read_text())["at"]
