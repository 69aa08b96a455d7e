"""Records of answers: what is asked, and that a comparison finds every kind of change."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import estimate_record
import pytest
from estimate_record import (
    GRAPHS,
    LOADERS,
    POLICIES,
    SCHEDULES,
    differences,
    main,
    plain,
    questions,
    read_record,
    recorded,
    report,
    write_record,
)

from estimator import Strategy
from estimator.workload.layouts import Layout
from estimator.workload.loader import Loader
from estimator.workload.strategies import NAMES

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


def found(two: Any, **more: float) -> list[tuple[str, bool]]:
    """The keys that differ from `ANSWER`, and whether only in wording."""
    options = {"tolerance": 1e-9} | more
    return [
        (each.key, each.is_wording)
        for each in differences({ASKED: ANSWER}, {ASKED: two}, tolerance=options["tolerance"])
    ]


def changed(**values: Any) -> dict[str, Any]:
    other = copy.deepcopy(ANSWER)
    other["out"] |= values
    return other


def test_equal_answers_have_no_difference() -> None:
    assert found(changed()) == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"step_time_s": 0.6}, "out.step_time_s"),
        ({"step_time_s": float("nan")}, "out.step_time_s"),
        ({"step_time_s": None}, "out.step_time_s"),
        ({"peak_memory_bytes": (1 << 30) + 1}, "out.peak_memory_bytes"),
        ({"fits": "no"}, "out.fits"),
        ({"curve_bytes": [1, 2, 4]}, "out.curve_bytes.2"),
        ({"curve_bytes": [1, 2]}, "out.curve_bytes.length"),
        ({"new": 1}, "out.new"),
        ({"assumptions": ["a ring over 17 ranks"]}, "out.assumptions.0"),
    ],
)
def test_every_kind_of_value_that_differs_is_named(values: dict[str, Any], key: str) -> None:
    assert found(changed(**values)) == [(key, False)]


def test_a_sentence_with_the_same_numbers_differs_only_in_its_wording() -> None:
    assert found(changed(assumptions=["16 ranks in a ring"])) == [("out.assumptions.0", True)]


def test_a_part_is_compared_against_the_largest_of_its_unit_beside_it() -> None:
    # 4e-10 s are 4e-7 of the part, but 8e-10 of the step of 0.5 s.
    assert found(changed(update_s=1e-3 + 4e-10)) == []
    assert found(changed(update_s=1e-3 + 4e-10), tolerance=1e-10) == [("out.update_s", False)]


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
    assert options["--policy"] == set(POLICIES)
    assert options["--loader"] == set(LOADERS)
    assert all(map(Loader.parse, LOADERS))
    layouts = [Layout.parse(text) for text in options["--layout"]]
    assert {str(each.schedule) for each in layouts} == set(SCHEDULES)
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


def test_numbers_are_kept_to_twelve_digits() -> None:
    draw = random.Random(0)
    for number in (draw.lognormvariate(0, 20) for _ in range(100)):
        assert plain({"a": [number]})["a"][0] == pytest.approx(number, rel=1e-11)
