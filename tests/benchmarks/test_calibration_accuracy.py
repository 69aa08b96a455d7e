"""The calibration benchmark judges any table, and refuses what is none in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibration_accuracy
import pytest
from calibration import evaluation
from calibration.rivals import LinearScaling, OnesRegressor
from options import Options

from estimator.errors import ObservationError


@pytest.fixture(autouse=True)
def _two_quick_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"calibrated": LinearScaling, "ones": OnesRegressor}
    monkeypatch.setattr(evaluation, "REGRESSORS", methods)
    # In this process, where the methods are replaced.
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def judged(folder: Path, content: str, *only: str) -> Any:
    (folder / "mine.csv").write_text(content)
    return calibration_accuracy.run(Options(data=folder, only=("mine", *only)))


def test_every_case_of_a_table_is_judged_and_bad_rows_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Perfect linear scaling of a step of 0.1 s + 0.01 s a sample, and one bad row.
    lines = ["model,gpu,gpus,nodes,local_batch,step_time_s"]
    lines += [
        f"m,T4,{gpus},1,{batch},{0.1 + 0.01 * batch}" for gpus in (1, 2, 4) for batch in (8, 16)
    ]
    found = judged(tmp_path, "\n".join([*lines, "m,T4,4,1,8,nan"]), "online", "1")
    assert "1 rows left out: its step time is not a positive" in capsys.readouterr().err
    # 4 rows on several devices, of which one is drawn, 8 times, for two methods.
    assert len(found["cases"]) == 3 * 8 * 2
    ours = [case for case in found["cases"] if case["method"] == "calibrated"]
    assert all(case["predicted_s"] == pytest.approx(case["measured_s"]) for case in ours)
    (table,) = found["report"]
    assert table.startswith("online: mean over jobs")
    assert [line.split()[:4] for line in table.splitlines()[2:3]] == [
        ["calibrated", "1", "0.0", "%"]
    ]


ONE = "model,gpus,local_batch,step_time_s\nm,1,8,1\n"


@pytest.mark.parametrize(
    ("content", "only"),
    [
        ("", ()),
        ("some text\nwithout columns\n", ()),
        (ONE.replace(",1\n", ",0\n"), ()),
        (ONE, ()),
        (f"{ONE}m,1,16,2\n", ("few-shot",)),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(
    tmp_path: Path, content: str, only: tuple[str, ...]
) -> None:
    with pytest.raises(ObservationError):
        judged(tmp_path, content, *only)
