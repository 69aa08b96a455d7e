"""The benchmarks' command line, results and summaries, and what their modules import."""

from __future__ import annotations

import ast
import copy
import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import estimate_record
import published_data
import pytest
from estimate_record import (
    GRAPHS,
    differences,
    main,
    questions,
    read_record,
    recorded,
    report,
    write_record,
)
from probe_accuracy import link_halves
from published_data import DamagedTableError, FetchError, fetch
from results import Result, ResultError, compare, result_of, text_of
from suites import SUITES
from summary import Bound, format_rows, interval_score, is_beyond, noise_ratio, summarise

from estimator import Strategy
from estimator.replay.policies import BUILT_IN
from estimator.workload.layouts import Layout
from estimator.workload.loader import Loader
from estimator.workload.schedules import _ORDERS as SCHEDULES
from estimator.workload.strategies import NAMES
from tests.synthetic import Machine

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
            assert "def run(options: Options)" in text, part.name


def test_list_names_each_suite_on_a_line_of_its_own() -> None:
    listed = benchmarks("list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(SUITES)


def test_an_option_that_a_suite_does_not_take_is_refused(tmp_path: Path) -> None:
    refused = benchmarks("run", "order", "--data", str(tmp_path))
    assert refused.returncode == 2
    assert "order takes no --data" in refused.stderr


@pytest.mark.parametrize("suite", ["published", "calibration", "speed"])
def test_a_suite_without_a_case_of_a_name_is_no_result(suite: str, tmp_path: Path) -> None:
    words = ("--quick", "--only", "nowhere", "--out", str(tmp_path))
    refused = benchmarks("run", suite, *words)
    assert refused.returncode == 2
    assert f"{suite} has no such case" in refused.stderr
    assert not list(tmp_path.iterdir())


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


def test_a_damaged_table_is_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(published_data.DamagedTableError, match="check it out again"):
        published_data._put(
            path, b"a,b\n", hashlib.sha256(b"a,c\n").hexdigest(), "check it out again"
        )
    assert not path.exists()


def test_results_that_are_kept_are_of_the_schema() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        kept = Result.load(path)
        assert kept.suite == path.parent.name
        assert kept.suite in SUITES
        assert json.loads(path.read_text())["at"]


def make_case(predicted_s: float | None, measured_s: float | None, **others: Any) -> dict[str, Any]:
    fields = {"method": "probe", "ranks": 1, "model": "m", "source": "s", "global_batch": 8}
    return {**fields, "predicted_s": predicted_s, "measured_s": measured_s, **others}


def test_median_p90_and_worst_of_four_known_errors() -> None:
    cases = [make_case(value, 100.0) for value in (90.0, 120.0, 103.0, 100.0)]
    (row,) = summarise(cases)
    # Errors 0, 3, 10, 20 %: median 6.5 %, 90 % quantile 10 + 0.7 · 10 = 17 %.
    assert row.median_ratio == pytest.approx(0.065)
    assert row.p90_ratio == pytest.approx(0.17)
    assert row.worst_ratio == pytest.approx(0.20)
    # Signed: −10, +20, +3, 0 %: median 1.5 %.
    assert row.bias_ratio == pytest.approx(0.015)


def test_a_failed_case_counts_as_an_error_of_100_percent() -> None:
    cases = [make_case(1.0, 1.0), make_case(None, 1.0), make_case(1.0, None)]
    (row,) = summarise(cases, bounds={"probe": Bound(median_ratio=0.08, worst_ratio=0.25)})
    assert (row.cases, row.failed, row.worst_ratio, row.median_ratio) == (3, 2, 1.0, 1.0)
    assert row.beyond_bound == 2


def test_twice_the_noise_of_a_case_excuses_it_from_the_worst_bound() -> None:
    # Error 30 %, bound 25 %: excused at noise 16 % (2 · 16 = 32), not at noise 14 %.
    assert not is_beyond(make_case(1.3, 1.0, noise_ratio=0.16), 0.25)
    assert is_beyond(make_case(1.3, 1.0, noise_ratio=0.14), 0.25)


def test_groups_are_kept_apart_by_method_and_rank_count() -> None:
    cases = [make_case(1.1, 1.0, ranks=ranks, method=method) for ranks, method in
             ((1, "probe"), (2, "probe"), (1, "measured"), (1, "probe"))]  # fmt: skip
    rows = summarise(cases, bounds={"measured": Bound(median_ratio=0.05, worst_ratio=0.05)})
    assert [(*row.group.values(), row.cases) for row in rows] == [
        ("probe", 1, 2), ("probe", 2, 1), ("measured", 1, 1)]  # fmt: skip
    assert [row.beyond_bound for row in rows] == [None, None, 1]


def test_order_is_judged_on_samples_per_second_not_on_step_time() -> None:
    # 8 samples in 1 s against 16 in 1.5 s: the longer step is the faster training.
    cases = [make_case(1.0, 1.0), make_case(1.4, 1.5, global_batch=16)]
    (row,) = summarise(cases)
    assert (row.pairs, row.pairs_right_ratio, row.rank_correlation) == (1, 1.0, pytest.approx(1.0))


def test_pairs_closer_than_the_gap_or_of_unlike_models_are_not_judged() -> None:
    near = [make_case(1.0, 1.0), make_case(0.9, 1.05)]
    unlike = [make_case(1.0, 1.0), make_case(0.9, 2.0, model="other")]
    assert summarise(near)[0].pairs == 0
    assert summarise(unlike)[0].pairs == 0
    (row,) = summarise(near, pair_gap_ratio=0.04)
    assert (row.pairs, row.pairs_right_ratio) == (1, 0.0)


def test_rank_correlation_of_one_swapped_neighbour() -> None:
    # Rank differences 0, 1, 1, 0: Spearman = 1 − 6 · 2 / (4 · 15) = 0.8.
    cases = [make_case(p, m) for p, m in ((1.0, 1.0), (3.0, 2.0), (2.0, 3.0), (4.0, 4.0))]
    assert summarise(cases)[0].rank_correlation == pytest.approx(0.8)


def test_coverage_and_interval_score_of_one_hit_and_one_miss() -> None:
    cases = [
        make_case(10.0, 10.0, low_s=9.0, high_s=11.0),
        make_case(10.0, 12.0, low_s=9.0, high_s=11.0),
    ]
    (row,) = summarise(cases)
    # Scores 2 and 2 + (2 / 0.2) · 1 = 12, relative to 10 and 12: 0.2 and 1.0.
    assert interval_score(9.0, 11.0, 12.0) == pytest.approx(12.0)
    assert (row.coverage_ratio, row.interval_score_ratio) == (0.5, pytest.approx(0.6))


def test_noise_is_half_the_ten_to_ninety_percent_range_over_the_median() -> None:
    # 0, 1, …, 10 shifted by 95: the 10 % and 90 % quantiles are 96 and 104, the median 100.
    assert noise_ratio([95.0 + step for step in range(11)]) == pytest.approx(4 / 100)


def test_the_table_has_one_line_per_row_under_its_header() -> None:
    text = format_rows(summarise([make_case(1.1, 1.0), make_case(1.1, 1.0, ranks=2)]))
    assert [line.split()[:2] for line in text.splitlines()] == [
        ["method", "ranks"], ["probe", "1"], ["probe", "2"]]  # fmt: skip


def test_what_benchmarks_and_tools_import_of_the_package_is_there() -> None:
    """Also inside functions, which run only when somebody runs the suite."""
    missing = []
    for path in sorted((*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("estimator"):
                module = import_module(node.module or "")
                missing += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and find_spec(f"{node.module}.{alias.name}") is None
                ]
    assert missing == []


# Two files of one source, and what they come to in common columns: of a placement "12" one GPU of
# a first and two of a second node, 3 · 8 samples in 0.5 s; of a count 4 GPUs on 2 nodes, 16 in 1 s.
FILES = {
    "a/placements-x.csv": "local_bsz,step_time,sync_time,placement\n8,0.5,0.25,12\n",
    "a/scalability-x.csv": "local_bsz,step_time,sync_time,num_nodes,num_replicas\n"
    "4,1.0,0.1234567,2,4\n",
}
TABLE = (
    "gpu,model,nodes,gpus,placement,global_batch,local_batch,step_time_s,sync_time_s,"
    "throughput,notes,provenance\n"
    "T4,net,2,3,1+2,24,8,0.5,0.25,48,placements,a/placements-x.csv\n"
    "T4,net,2,4,,16,4,1,0.123457,16,scalability,a/scalability-x.csv\n"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a server of this machine serves, and a list of tables that names it."""
    folder = tmp_path / "served"
    (folder / "a").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    table = {
        "what": "steps",
        "source": "here",
        "license": "none stated",
        "rows": 2,
        "sha256": hashlib.sha256(TABLE.encode()).hexdigest(),
        "url": f"http://127.0.0.1:{server.server_port}/{{app}}/{{table}}-{{on}}.csv",
        "columns": TABLE.splitlines()[0].split(","),
        "cells": {"notes": "{table}", "provenance": "{app}/{table}-{on}.csv"},
        "kinds": {"a": {"model": "net"}, "x": {"gpu": "T4"}},
        "files": [
            {"app": "a", "table": "placements", "on": "x"},
            {"app": "a", "table": "scalability", "on": "x"},
        ],
    }
    spread = {name: table[name] for name in ("what", "source", "license", "rows", "sha256")}
    (tmp_path / "elsewhere.json").write_text(json.dumps({"steps": table, "logs": spread}))
    monkeypatch.setattr(published_data, "SHIPPED", tmp_path)
    yield folder
    server.shutdown()
    server.server_close()


def test_files_of_a_source_become_one_table_in_common_columns(source: Path, tmp_path: Path) -> None:
    assert fetch("steps", tmp_path / "out").read_text() == TABLE


@pytest.mark.parametrize(
    ("name", "text", "error", "says"),
    [
        ("placements", FILES["a/placements-x.csv"].replace("0.25", "0.26"), DamagedTableError,
         "is not written; steps at its source is not the table of our figures"),
        ("placements", "local_bsz\n8\n", FetchError, "is not the table of steps that it was"),
        ("scalability", None, FetchError, "scalability-x.csv cannot be read: HTTP Error 404"),
    ],
)  # fmt: skip
def test_a_source_that_changed_is_refused_and_what_was_there_stays(
    name: str, text: str | None, error: type[Exception], says: str, source: Path, tmp_path: Path
) -> None:
    kept = fetch("steps", tmp_path / "out")
    changed = source / "a" / f"{name}-x.csv"
    changed.unlink() if text is None else changed.write_text(text)
    with pytest.raises(error, match=says):
        fetch("steps", tmp_path / "out")
    assert kept.read_text() == TABLE
    assert list(kept.parent.iterdir()) == [kept]


def test_a_table_kept_elsewhere_is_fetched_plain_or_compressed(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    path = fetch("logs", tmp_path / "out", from_url=str(tmp_path / "mine.csv.gz"))
    assert path.read_text() == TABLE
    with pytest.raises(FetchError, match=r"spread over logs of here, .* say --from URL"):
        fetch("logs", tmp_path / "out")


def test_every_table_that_does_not_ship_says_its_source_licence_and_checksum() -> None:
    for name, table in published_data.elsewhere().items():
        assert not (published_data.SHIPPED / f"{name}.csv.gz").exists()
        assert len(table["sha256"]) == 64
        assert table["license"].startswith("none stated")
        for file in table.get("files", ()):
            assert table["url"].format_map(file).startswith("https://")


ASKED = "estimate gpt2.graph --on 1x2:t4-g4dn --json"
ANSWER: dict[str, Any] = {
    "code": 0,
    "out": {
        "step_time_s": 0.5,
        "update_s": 1e-3,
        "peak_memory_bytes": 1 << 30,
        "fits": "yes",
        "curve_bytes": [1, 2, 3],
        "assumptions": ["a ring over 16 ranks"],
    },
}


def changed(**values: Any) -> dict[str, Any]:
    other = copy.deepcopy(ANSWER)
    other["out"] |= values
    return other


@pytest.mark.parametrize(
    ("values", "tolerance", "differs"),
    [
        ({"step_time_s": 0.6}, 1e-9, [("out.step_time_s", False)]),
        ({"step_time_s": float("nan")}, 1e-9, [("out.step_time_s", False)]),
        ({"step_time_s": None}, 1e-9, [("out.step_time_s", False)]),
        ({"peak_memory_bytes": (1 << 30) + 1}, 1e-9, [("out.peak_memory_bytes", False)]),
        ({"fits": "no"}, 1e-9, [("out.fits", False)]),
        ({"curve_bytes": [1, 2, 4]}, 1e-9, [("out.curve_bytes.2", False)]),
        ({"curve_bytes": [1, 2]}, 1e-9, [("out.curve_bytes.length", False)]),
        ({"new": 1}, 1e-9, [("out.new", False)]),
        ({"assumptions": ["a ring over 17 ranks"]}, 1e-9, [("out.assumptions.0", False)]),
        ({}, 1e-9, []),
        # A sentence with the same numbers differs only in its wording.
        ({"assumptions": ["16 ranks in a ring"]}, 1e-9, [("out.assumptions.0", True)]),
        # 4e-10 s are 4e-7 of this part, but 8e-10 of the step of 0.5 s, the largest of its unit.
        ({"update_s": 1e-3 + 4e-10}, 1e-9, []),
        ({"update_s": 1e-3 + 4e-10}, 1e-10, [("out.update_s", False)]),
    ],
)
def test_every_kind_of_value_that_differs_is_named(
    values: dict[str, Any], tolerance: float, differs: list[tuple[str, bool]]
) -> None:
    found = differences({ASKED: ANSWER}, {ASKED: changed(**values)}, tolerance=tolerance)
    assert [(each.key, each.is_wording) for each in found] == differs


def test_a_question_of_one_record_alone_is_a_difference() -> None:
    (only,) = differences({}, {ASKED: ANSWER}, tolerance=1e-9)
    assert (only.question, only.one) == (ASKED, "absent")
    assert ASKED in report([only])


def test_equal_answers_are_equal_files_in_any_order(tmp_path: Path) -> None:
    one, two = tmp_path / "a.gz", tmp_path / "b.gz"
    write_record(one, {"x": {"a": 1, "b": 2.5}, "y": ANSWER})
    write_record(two, {"y": ANSWER, "x": {"b": 2.5, "a": 1}})
    assert one.read_bytes() == two.read_bytes()
    assert read_record(one) == {"x": {"a": 1, "b": 2.5}, "y": ANSWER}


def test_a_check_ends_with_1_where_an_answer_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.gz"
    write_record(path, {ASKED: ANSWER})
    for now, code in (
        (changed(), 0),
        (changed(assumptions=["16 ranks in a ring"]), 0),
        (changed(step_time_s=0.6), 1),
    ):
        monkeypatch.setattr(estimate_record, "recorded", lambda is_wanted, now=now: {ASKED: now})
        assert main(["--check", str(path)]) == code
    assert f"out.step_time_s: 1, such as {ASKED}" in capsys.readouterr().out
    assert main(["--check", str(path), "--tolerance", "0.2"]) == 0


def test_every_layout_schedule_loader_policy_and_strategy_is_asked_about() -> None:
    lines = questions()
    assert len(set(lines)) == len(lines) > 300
    told = [line.split() for line in lines]
    options = {
        name: {words[at + 1] for words in told for at, word in enumerate(words) if word == name}
        for name in ("--layout", "--strategy", "--loader", "--policy")
    }
    assert options["--policy"] == set(BUILT_IN)
    assert all(map(Loader.parse, options["--loader"]))
    layouts = [Layout.parse(text) for text in options["--layout"]]
    assert {each.schedule.name for each in layouts} == set(SCHEDULES)
    for axis in ("tp", "cp", "ep", "pp"):
        assert any(getattr(each, axis) > 1 for each in layouts)
    assert {Strategy.parse(text).name for text in options["--strategy"]} == set(NAMES)
    assert {words[1].removesuffix(".graph") for words in told if "graph" in words[1]} == {*GRAPHS}


def test_an_answer_is_the_same_in_any_process() -> None:
    asked = {
        "estimate gpt2-amp.graph --on a1[0,1]+b1[3] --cluster cluster.toml --strategy ddp --json",
        "machines show synthetic --json",
        "table gpt2-amp ddp",
    }
    answers = recorded(asked.__contains__)
    assert set(answers) == asked
    assert not [*differences(answers, recorded(asked.__contains__), tolerance=0.0)]
    assert answers["machines show synthetic --json"]["out"]["name"] == "synthetic"


def test_half_of_the_sizes_of_a_link_predict_the_others() -> None:
    points = tuple((size, 1e-3 + size * 1e-9) for size in (1e3, 1e4, 1e5, 1e6, 1e7))
    profile = Machine().profile()
    link = replace(profile.network[0], kind="loopback", points=points)
    ((name, errors),) = link_halves(replace(profile, links=(link,)))
    assert name == "link loopback, 1 at once"
    assert errors == pytest.approx([0.0, 0.0], abs=1e-3)
