"""Records of estimates: what is asked, and that a comparison finds every kind of change."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from estimate_record import main
from recorded.answers import COLUMN_ROWS
from recorded.cases import Case, column_questions, ranks_of, scalar_cases, table_questions
from recorded.comparison import compare, difference, features, report, strategy_kind
from recorded.files import read_record, write_record
from recorded.graphs import SOURCES
from recorded.machines import MACHINES, write_clusters, write_machines
from recorded.perceptrons import perceptron, write_graph

from estimator import OpGraph, estimate, load_profile
from tests.synthetic import perceptron as perceptron_of_tests

DDP = "mlp|2x4:slow|ddp|1|8|-|-|scalar"
SERVERS = "mlp|1x1:slow+1x1:fast|ps:2,async|5|g40|racks|asked|table"
HOSTS = "gpt2|a1[0,1]+a2[3]|fsdp|2|3/1|racks|-|scalar"


def answer(**changes: Any) -> dict[str, Any]:
    """What a record holds of one estimate."""
    return {
        "step_time_s": 0.5,
        "breakdown.update_s": 1e-3,
        "peak_memory_bytes": 1 << 30,
        "mfu_ratio": "unknown",
        "fits": "yes",
        "bottleneck": "the optimizer's update",
        "provenance.shares": [0.75, 0.25],
        **changes,
    }


RECORD = {DDP: answer(), SERVERS: answer(), HOSTS: answer()}


def changed(case: str, **changes: Any) -> dict[str, dict[str, Any]]:
    return RECORD | {case: answer(**changes)}


def test_equal_records_have_no_difference() -> None:
    found = compare(RECORD, changed(DDP))
    assert found.is_equal
    assert found.compared == 3
    assert report(found).endswith("\n\nequal")


def test_a_changed_number_is_found_with_its_case_and_its_kind() -> None:
    # 0.5 → 0.6 is a sixth of the larger one.
    found = compare(RECORD, changed(SERVERS, step_time_s=0.6))
    assert not found.is_equal
    tally = found.columns["step_time_s"]
    assert (tally.compared, tally.differing, tally.case) == (3, 1, SERVERS)
    assert tally.largest == pytest.approx(1 / 6)
    assert {kind for kind, tally in found.kinds.items() if tally.differing} == {
        (feature, "ps async") for feature in features(SERVERS)
    }
    text = report(found)
    assert text.endswith("NOT EQUAL")
    assert "no case differs: 1 node" not in text
    assert "asked as scalar" in text.rpartition("no case differs: ")[2]


def test_a_difference_within_the_bound_is_none() -> None:
    other = changed(DDP, step_time_s=0.5 * (1 + 5e-10))
    assert compare(RECORD, other).is_equal
    assert not compare(RECORD, other, rel=1e-10).is_equal


def test_parts_are_compared_against_the_step() -> None:
    # 1e-13 s are 1e-10 of the part but 2e-13 of the step of 0.5 s.
    assert difference("breakdown.update_s", 1e-3, 1e-3 + 1e-13, step_s=0.5) == pytest.approx(
        2e-13, rel=1e-3
    )
    assert difference("breakdown.update_s", 0.0, 0.5, step_s=0.5) == 1.0
    assert not compare(RECORD, changed(DDP, **{"breakdown.update_s": 2e-3})).is_equal


@pytest.mark.parametrize(
    "changes",
    [
        {"fits": "no"},
        {"mfu_ratio": 0.4},
        {"step_time_s": math.inf},
        {"step_time_s": "unknown"},
        {"provenance.shares": [0.7, 0.3]},
        {"provenance.shares": [1.0]},
        {"peak_memory_bytes": (1 << 30) + 512},
    ],
)
def test_every_kind_of_value_can_differ(changes: dict[str, Any]) -> None:
    found = compare(RECORD, changed(HOSTS, **changes))
    assert [name for name, tally in found.columns.items() if tally.differing] == [*changes]
    assert not found.is_equal


def test_other_words_are_reported_but_are_no_other_answer() -> None:
    found = compare(RECORD, changed(DDP, bottleneck="gathering parameters"))
    assert found.is_equal
    assert f"bottleneck: 1 of 3 texts differ, such as {DDP}" in report(found)


def test_a_field_that_one_record_lacks_is_reported_and_skipped() -> None:
    found = compare(RECORD, changed(DDP, hfu_ratio=0.4, peak_memory_bytes=None))
    assert found.is_equal
    assert found.lacking == {("hfu_ratio", "A"): 1, ("peak_memory_bytes", "B"): 1}
    assert "hfu_ratio is not known to A in 1 cases" in report(found)


def test_a_refusal_by_one_is_a_difference_and_by_both_is_not() -> None:
    refused = {"refused": "StrategyError: no"}
    one, both = RECORD | {DDP: refused}, RECORD | {DDP: {"refused": "StrategyError: never"}}
    assert compare(one, both).is_equal
    found = compare(RECORD, one)
    assert found.refused == {"A": [], "B": [DDP]}
    assert not found.is_equal
    assert f"1 cases only refused by B, such as\n  {DDP}" in report(found)


def test_a_case_of_one_record_alone_is_a_difference() -> None:
    fewer = {name: values for name, values in RECORD.items() if name != HOSTS}
    found = compare(fewer, RECORD)
    assert found.only == {"A": [], "B": [HOSTS]}
    assert not found.is_equal
    assert not compare({}, {}).is_equal, "nothing was compared"


def test_the_command_compares_the_cases_and_columns_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "a.gz", tmp_path / "b.gz"
    write_record(one, {"commit": "a"}, RECORD)
    write_record(two, {"commit": "b"}, changed(SERVERS, step_time_s=0.6))
    asked = ["compare", str(one), str(two)]
    assert main(asked) == 1
    assert main([*asked, "--except", "*|ps:*"]) == 0
    assert main([*asked, "--only", "*|ps:*|*"]) == 1
    assert main([*asked, "--except-columns", "step_*"]) == 0
    assert main([*asked, "--columns", "fits"]) == 0
    assert main([*asked, "--rel", "0.2"]) == 0
    assert "commit b" in capsys.readouterr().out


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.gz"
    rows = RECORD | {DDP: {"refused": "no", "step_time_s": None}}
    write_record(path, {"commit": "c"}, rows)
    found = read_record(path)
    assert found.about["commit"] == "c"
    assert found.rows[SERVERS] == RECORD[SERVERS] | {"refused": None}
    assert found.rows[DDP]["refused"] == "no"


def test_the_kind_of_a_case_follows_from_its_name() -> None:
    assert strategy_kind(HOSTS) == "fsdp"
    assert {"hosts by name", "cluster racks", "batch per group", "accumulation"} <= {
        *features(HOSTS)
    }
    assert {"nodes of one machine", "machine slow", "no cluster"} <= {*features(DDP)}
    assert {"unlike machines", "machine fast", "batch global"} <= {*features(SERVERS)}
    assert "1 node" in features(DDP.replace("2x4", "1x4"))
    assert "nodes of one machine" in features(DDP.replace("2x4", "12x4"))


def test_twenty_thousand_estimates_of_every_kind_are_asked_for() -> None:
    cases: set[Case] = set()
    for source in SOURCES:
        cases.update(scalar_cases(source))
        for question in (*table_questions(source), *column_questions(source, rows=COLUMN_ROWS)):
            cases.update(question)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) >= 20_000
    assert [Case.named(name) for name in names[:100]] == [*cases][:100]
    kinds = Counter(strategy_kind(name) for name in names)
    assert set(kinds) == {"ddp", "zero1", "zero2", "fsdp", "ps", "ps async", "hsdp"}
    asked = Counter(feature for name in names for feature in features(name))
    assert min(asked.values()) >= 50, "a kind of case is hardly asked for"
    assert ranks_of("a1[0,1]+2x8:h100-sxm+b[3]") == 19


def test_files_of_machines_and_graphs_are_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_machines(tmp_path)
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    for machine in MACHINES:
        for name in (machine.name, f"{machine.name}-gpu"):
            assert load_profile(name).name == name
    widths = [32, 96, 256, 32]
    shape = perceptron("mlp", widths, target="cpu", batch=16)
    read = OpGraph.load(write_graph(json.loads(json.dumps(shape)), tmp_path / "mlp.graph"))
    built = perceptron_of_tests(widths)
    assert [op.call for op in read.ops] == [op.call for op in built.ops]
    assert [p.ready_after for p in read.parameters] == [p.ready_after for p in built.parameters]
    cluster = write_clusters(tmp_path)["racks"]
    assert estimate(read, "a5[1]+a1[0]", cluster=cluster).ranks == 2
