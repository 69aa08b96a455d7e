"""The command that says what to rent: a table, JSON, a picture, one sentence for wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.advise.layouts.search import LayoutRanking, LayoutRow, best_layouts
from estimator.cli.console import print_sections
from estimator.graph.ir.op_graph import OpGraph
from estimator.report.plans import layouts_sections
from tests.synthetic import perceptron

Run = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.graph"
    replace(perceptron([2048, 2048, 2048]), target="cuda").save(path)
    return path


def test_rent_prints_the_cheapest_and_the_fastest(model: Path, command: Run) -> None:
    found = command("rent", model, "--machines", "t4-g4dn,a100-p4d", "--samples", "1e9")
    assert found.code == 0
    assert "cheapest" in found.out
    assert "on-demand prices" in found.out


def test_rent_prints_base_units_as_json_and_draws(
    model: Path, tmp_path: Path, command: Run
) -> None:
    picture = tmp_path / "rent.svg"
    found = command(
        *("rent", model, "--machines", "t4-g4dn,a100-p4d", "--samples", "1e12", "--json"),
        *("--max-nodes", 2, "--spot", "--revoked-every", "t4-g4dn=20min,a100-p4d=30min"),
        *("--picture", picture),
    )
    chosen = json.loads(found.out)
    assert chosen["cheapest"] in chosen["front"]
    assert chosen["cheapest"]["interval_s"] > 0
    assert len(chosen["offers"]) == 4 + 5
    assert picture.read_text().startswith("<?xml")


def test_instances_go_by_the_hour_of_the_day(model: Path, tmp_path: Path, command: Run) -> None:
    rates = tmp_path / "rates.csv"
    lines = [f"{hour},{2.0 if 8 <= hour < 18 else 0.0}" for hour in range(24)]
    rates.write_text("\n".join(["hour,per_hour", *lines]))
    about = ("--machines", "t4-g4dn", "--samples", "1e9", "--json", "--spot", "--max-nodes", 1)
    by_hour = (*about, "--revocations", rates, "--lifetime", "24h", "--start-hour")
    usd = {}
    for hour in (9, 18):
        found = json.loads(command("rent", model, *by_hour, hour).out)
        usd[hour] = found["cheapest"]["duration_s"]
    never = json.loads(command("rent", model, *about).out)["cheapest"]["duration_s"]
    assert never < usd[18] < usd[9]
    assert found["assumptions"] == [
        "training starts at 18:00",
        "a restart begins on new instances, all at once",
    ]


def test_own_prices_decide(model: Path, tmp_path: Path, command: Run) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("Machine,AcceleratorCount,Price\nt4-g4dn,4,1000\na100-p4d,8,0.01\n")
    about = ("--machines", "t4-g4dn,a100-p4d", "--samples", "1e9", "--json", "--prices", prices)
    found = json.loads(command("rent", model, *about).out)
    assert found["cheapest"]["allocation"].endswith("a100-p4d")


def test_nothing_in_time_is_told_by_the_exit_code(model: Path, command: Run) -> None:
    about = ("--machines", "t4-g4dn", "--samples", "1e12", "--deadline", "1min")
    found = command("rent", model, *about)
    assert found.code == 1
    assert "nothing keeps the deadline and the budget" in found.out
    assert "nothing keeps the deadline and the budget" in found.err


@pytest.mark.parametrize("deadline", ["14d", "2w", "336h", "20160min"])
def test_a_deadline_is_typed_in_days_or_weeks(model: Path, command: Run, deadline: str) -> None:
    about = ("rent", model, "--machines", "t4-g4dn", "--max-nodes", 1, "--json", "--samples")
    rates = [each["samples_per_s"] for each in json.loads(command(*about, 1).out)["offers"]]
    # 14 days of 86,400 s.
    for days, code in ((13.99, 0), (14.01, 1)):
        samples = days * 86400 * max(rates)
        assert command(*about, samples, "--deadline", deadline).code == code


def test_machines_on_which_nothing_fits_are_named_and_told_by_the_exit_code(
    tmp_path: Path, command: Run
) -> None:
    path = tmp_path / "large.graph"
    # 8 GiB of weights, 32 with gradients and AdamW's state: of 40 GB, eight devices can divide it.
    replace(perceptron([1 << 16, 1 << 15], batch=64), target="cuda").save(path)
    about = ("rent", path, "--samples", "1e9", "--max-nodes", 1, "--machines")
    both = command(*about, "t4-g4dn,a100-p4d")
    assert both.code == 0
    (line,) = [line for line in both.out.splitlines() if "t4-g4dn: not even 1x4:t4-g4dn" in line]
    assert "needs" in line
    assert "1x1:a100-p4d: needs" in both.out
    none = command(*about, "t4-g4dn")
    assert none.code == 1
    assert none.err.endswith("exit code 1: the model fits on none of these machines\n")
    assert "no allocation can train perceptron" in none.out
    assert "t4-g4dn: not even 1x4:t4-g4dn" in none.out
    as_json = command(*about, "t4-g4dn", "--json", "--picture", tmp_path / "rent.svg")
    assert as_json.code == 1
    assert "rent.svg is not drawn" in as_json.err
    found = json.loads(as_json.out)
    assert (found["cheapest"], found["offers"]) == (None, [])
    assert set(found["left_out"]) == {"1x1:t4-g4dn", "1x2:t4-g4dn", "1x4:t4-g4dn"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machines", "dgx-a100"), "no price of 'dgx-a100' is known"),
        (("--machines", "k80-p2", "--spot"), "no spot price of 'k80-p2' is known"),
        (("--machines", "t4-g4dn", "--revoked-every", "1h"), "give --spot"),
        (
            ("--machines", "t4-g4dn", "--lifetime", "1d"),
            "--lifetime is of spot instances; give --sp",
        ),
        (("--machines", "t4-g4dn", "--spot", "--revocations", "1,2"), "one for each of 24 hours"),
        (
            ("--machines", "t4-g4dn", "--spot", "--revocations", "0", "--revoked-every", "1h"),
            "--revoked-every and --revocations say the same; give one of them",
        ),
        (("--machines", "t4-g4dn", "--spot", "--start-hour", "8"), "--start-hour is of machines"),
        (
            ("--machines", "t4-g4dn", "--spot", "--revoked-every", "t4-g4dm=1h"),
            "do not both name t4-g4dm, t4-g4dn",
        ),
        (
            ("--machines", "t4-g4dn", "--spot", "--revoked-every", "t4-g4dn=1h,t4-g4dn=2h"),
            "'t4-g4dn' stands twice; write it once",
        ),
        (("--machines", "t4-g4dn", "--network", "10Gbit/s"), "No such option '--network'"),
        (("--machines", "t4-g4dn", "--restart", "5min"), "--restart is of machines that are rev"),
        (
            ("--machines", "t4-g4dn", "--global-batch", "8", "--batch", "7"),
            "--batch is what ranks take where no --global-batch is given; leave it out",
        ),
        (("--machines", "t4-g4dn", "--strategy", "fsdp"), "No such option '--strategy'"),
        (("--machines", "t4-g4dn", "--deadline", "soon"), "is not a duration"),
        (("--machines", ","), "--machines names none"),
        (("--machines", "t4-g4dn", "--layout", "tp=2"), "No such option '--layout'"),
        (("--machines", "t4-g4dn", "--on", "1x4:t4-g4dn"), "No such option '--on'"),
        ((), "Missing option '--machines'"),
        (("--machines", "t4-g4dn", "--tokens", "1e9"), "give samples or tokens"),
    ],
)
def test_wrong_input_is_one_sentence(
    model: Path, command: Run, words: tuple[str, ...], said: str
) -> None:
    found = command("rent", model, "--samples", "1e9", *words)
    assert said in found.sentence


def test_a_batch_beside_layouts_that_choose_it_is_refused(model: Path, command: Run) -> None:
    words = ("--on", "1x4:t4-g4dn", "--global-batch", 64, "--batch", 7)
    said = "No such option '--batch'"
    assert said in command("layouts", model, *words).sentence


def test_layouts_of_an_allocation_are_ranked(model: Path, command: Run) -> None:
    found = command("layouts", model, "--on", "1x4:t4-g4dn", "--global-batch", 64)
    assert found.code == 0
    assert "Training" in found.out
    assert "with a global batch of 64" in found.out
    assert "dp=4" in found.out
    assert "were worked out" in found.out
    layouts = command("layouts", model, "--on", "1x4:t4-g4dn", "--global-batch", 64, "--json").out
    names = [row["layout"] for row in json.loads(layouts)["layouts"]]
    lines = found.out.splitlines()
    # Each whole, on one line; the best is named first.
    assert lines[0].split() == ["best", names[0]]
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names)


def test_layouts_checkpoints_and_strategies_are_never_cut_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = replace(perceptron([64, 64, 64]), target="cuda")
    answer = est.estimate(graph, "1x1:t4-g4dn", batch_per_gpu=4)
    row = LayoutRow(
        layout="tp=8,pp=16,schedule=interleaved:4,sp,vocab,dp=128",
        strategy="distributed-optimizer",
        checkpoint="selective:op",
        batch_per_gpu=1,
        micro_batches=128,
        answer=answer,
        why="communication +12 %",
    )
    ranking = LayoutRanking(rows=(row,), candidates=1, worked_out=1, too_large=0, refusals=())
    about = {"model": "net", "allocation": "128x8:m"}
    print_sections(layouts_sections(ranking, **about, global_batch=2048))
    printed = capsys.readouterr().out
    for text in (row.layout, "distributed-optimizer, selective:op"):
        assert any(text in line for line in printed.splitlines())


def test_layouts_as_json_are_those_of_python(model: Path, command: Run) -> None:
    about = ("--on", "1x4:t4-g4dn", "--global-batch", 64, "--strategies", "ddp fsdp", "--json")
    found = json.loads(command("layouts", model, *about).out)
    ranking = best_layouts(
        OpGraph.load(model), "1x4:t4-g4dn", global_batch=64, strategies=("ddp", "fsdp")
    )
    assert found["layouts"] == [row.to_dict() for row in ranking.rows]
    assert found["allocation"] == "1x4:t4-g4dn"
    assert found["layouts"][0]["why"] is None


def test_layouts_need_a_global_batch(model: Path, command: Run) -> None:
    found = command("layouts", model, "--on", "1x4:t4-g4dn")
    assert "give --global-batch" in found.sentence


def test_offers_that_share_a_global_batch_say_their_layout(model: Path, command: Run) -> None:
    about = ("--machines", "t4-g4dn", "--samples", "1e9", "--global-batch", 256)
    found = json.loads(command("rent", model, *about, "--json").out)
    assert {each["global_batch"] for each in found["offers"]} == {256}
    (four,) = (each for each in found["offers"] if each["allocation"] == "1x4:t4-g4dn")
    best = best_layouts(OpGraph.load(model), "1x4:t4-g4dn", global_batch=256, most=1).rows[0]
    assert four["step_time_s"] <= best.answer.step_time_s * (1 + 1e-9)


def test_mixed_machines_are_offered_and_cost_both(model: Path, command: Run) -> None:
    about = ("--machines", "t4-g4dn,a100-p4d", "--samples", "1e9", "--max-nodes", 2, "--mixed")
    found = json.loads(command("rent", model, *about, "--json").out)
    offered = {each["allocation"]: each for each in found["offers"]}
    both = offered["1x4:t4-g4dn+1x8:a100-p4d"]
    per_hour = [offered[name]["usd_per_hour"] for name in ("1x4:t4-g4dn", "1x8:a100-p4d")]
    assert both["usd_per_hour"] == pytest.approx(sum(per_hour))
