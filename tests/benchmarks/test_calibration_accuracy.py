"""The calibration benchmark judges any table, and refuses what is none in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import calibration_accuracy
import pytest
from calibration import evaluation
from calibration.rivals import LinearScaling, OnesRegressor
from click.testing import CliRunner, Result

Command = Callable[..., Result]


@pytest.fixture
def command() -> Command:
    """Run the benchmark with words as on a command line."""
    return lambda *words: CliRunner().invoke(
        calibration_accuracy.main, [str(word) for word in words]
    )


@pytest.fixture(autouse=True)
def _two_quick_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"calibrated": LinearScaling, "ones": OnesRegressor}
    monkeypatch.setattr(evaluation, "methods_of", lambda protocol: methods)
    # In this process, where the methods are replaced.
    monkeypatch.setattr("os.cpu_count", lambda: 1)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Perfect linear scaling of a step of 0.1 s + 0.01 s a sample, and one bad row."""
    lines = ["model,gpu,gpus,nodes,local_batch,step_time_s"]
    lines += [
        f"m,T4,{gpus},1,{batch},{0.1 + 0.01 * batch}" for gpus in (1, 2, 4) for batch in (8, 16)
    ]
    path = tmp_path / "table.csv"
    path.write_text("\n".join([*lines, "m,T4,4,1,8,nan"]))
    return path


def test_a_table_is_printed_and_bad_rows_counted_on_stderr(command: Command, table: Path) -> None:
    answer = command("--data", table, "--protocol", "online", "--k", "1")
    assert answer.exit_code == 0
    assert answer.stderr.startswith("estimator: 1 row left out: its step time is not a positive")
    for words in ("T4, m", "calibrated", "ones", "mean over jobs"):
        assert words in answer.stdout


def test_json_holds_every_case_alone_on_stdout(command: Command, table: Path) -> None:
    words = ("--protocol", "online", "--k", "1", "--json")
    content = json.loads(command("--data", table, *words).stdout)
    assert (content["machine"], content["protocol"]) == ("T4", "online")
    # 4 rows on several devices, of which one is drawn, 8 times, for two methods.
    assert len(content["cases"]) == 3 * 8 * 2
    ours = [case for case in content["cases"] if case["method"] == "calibrated"]
    assert all(case["predicted_s"] == pytest.approx(case["measured_s"]) for case in ours)
    assert sum(content["refused"].values()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ()),
        ("some text\nwithout columns\n", ()),
        ("model,gpus,local_batch,step_time_s\nm,1,8,0\n", ()),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\n", ()),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\n", ("--protocol", "workers")),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\nm,1,16,2\n", ("--protocol", "few-shot")),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\nm,1,16,2\n", ("--k", "some")),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\n", ("--protocol", "cv", "--k", "1")),
        ("model,gpus,local_batch,step_time_s\nm,1,8,1\n", ("--data", "missing.csv")),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(
    command: Command, tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    answer = command("--data", path, *words)
    assert answer.exit_code in (1, 2)
    assert answer.stdout == ""
    assert answer.stderr.splitlines()[-1].startswith("Error: ")
