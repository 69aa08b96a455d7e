"""Tables of others become observations; what cannot be used is refused row by row."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from estimator.calibrate.observation_files import read_observations
from estimator.calibrate.store import Observation, ObservationStore, ObservedWorkload
from estimator.errors import EstimatorError, ObservationError
from tests.budgets import examples
from tests.conftest import Command

GOOD = {
    "model": "bert",
    "gpu": "RTX 2080 Ti",
    "gpus": "3",
    "nodes": "2",
    "placement": "1+2",
    "local_batch": "8",
    "step_time_s": "0.5",
}


def table(folder: Path, *rows: dict[str, str]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(row.get(name, "") for name in names) for row in rows)]
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def only(folder: Path, **cells: str) -> Observation:
    """The observation of a good row with other cells."""
    (found,) = read_observations(table(folder, GOOD | cells)).observations
    return found


def refusal(folder: Path, **cells: str) -> str:
    """Why a row is refused that stands before a good one."""
    found = read_observations(table(folder, GOOD | cells, GOOD))
    assert len(found.observations) == 1
    ((line, reason),) = found.refused
    assert line == 2
    return reason


def test_standard_columns_become_an_observation(tmp_path: Path) -> None:
    found = only(
        tmp_path, precision="fp32", seq_len="384", grad_accum="2", source="a paper", at="2026-01-02"
    )
    assert found.workload == "bert, fp32, sequence 384"
    assert found.allocation == "1x1:rtx-2080-ti+1x2:rtx-2080-ti"
    assert (found.ranks, found.nodes, found.most_on_node) == (3, 2, 2)
    assert (found.batch_per_gpu, found.accumulation_steps, found.step_time_s) == (8, 2, 0.5)
    assert (found.source, found.at) == ("a paper", datetime(2026, 1, 2, tzinfo=UTC))


def test_our_own_columns_become_an_observation(tmp_path: Path) -> None:
    own = {
        "workload": "mine",
        "allocation": "a1[0]+a2[0]",
        "batch_per_gpu": "4",
        "accumulation_steps": "3",
        "step_time_s": "0.5",
        "strategy": "zero1",
        "steps": "50",
        "parameter_bytes": "400",
    }
    found = read_observations(table(tmp_path, own))
    (one,) = found.observations
    assert (one.workload, one.allocation, one.batch_per_gpu) == ("mine", "a1[0]+a2[0]", 4)
    assert (one.accumulation_steps, one.strategy, one.steps) == (3, "zero1", 50)
    summary = ObservedWorkload(name="mine", parameter_bytes=400)
    assert found.summaries == (summary,)


@pytest.mark.parametrize(
    ("cells", "allocation"),
    [
        ({"placement": "2+2+1", "nodes": "3", "gpus": "5"}, "2x2:t4+1x1:t4"),
        ({"placement": "", "nodes": "2", "gpus": "8"}, "2x4:t4"),
        ({"placement": "packed", "nodes": "2", "gpus": "5"}, "1x3:t4+1x2:t4"),
        # Tables written through floats; spread evenly, the first nodes have one more.
        ({"placement": "", "nodes": "3.0", "gpus": "7.0"}, "1x3:t4+2x2:t4"),
        ({"placement": "", "nodes": "", "gpus": "1"}, "1x1:t4"),
        ({"placement": "", "nodes": "", "gpus": "12", "gpus_per_node": "4"}, "3x4:t4"),
        ({"placement": "4+4", "nodes": "", "gpus": ""}, "2x4:t4"),
    ],
)
def test_the_allocation_follows_from_the_placement(
    tmp_path: Path, cells: dict[str, str], allocation: str
) -> None:
    assert only(tmp_path, gpu="T4", **cells).allocation == allocation


@pytest.mark.parametrize(
    ("cells", "step_time_s"),
    [
        ({"throughput": "60", "throughput_unit": "samples/s", "global_batch": "24"}, 0.4),
        ({"throughput": "2.5", "throughput_unit": "steps/s"}, 0.4),
        (
            {"throughput": "960", "throughput_unit": "tokens/s", "global_batch": "24"}
            | {"seq_len": "16"},
            0.4,
        ),
    ],
)
def test_a_throughput_stands_in_for_a_step_time(
    tmp_path: Path, cells: dict[str, str], step_time_s: float
) -> None:
    assert only(tmp_path, step_time_s="", **cells).step_time_s == pytest.approx(step_time_s)


def test_a_global_batch_is_divided_among_ranks_and_micro_batches(tmp_path: Path) -> None:
    found = only(tmp_path, local_batch="", global_batch="48", grad_accum="2")
    assert found.batch_per_gpu == 48 // (3 * 2)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"step_time_s": "nan"}, "step time is not a positive number"),
        ({"step_time_s": "0"}, "step time is not a positive number"),
        ({"step_time_s": "-1"}, "step time is not a positive number"),
        ({"step_time_s": "inf"}, "step time is not a positive number"),
        ({"step_time_s": "fast"}, "step_time_s is no number"),
        ({"step_time_s": ""}, "neither step time nor throughput"),
        ({"step_time_s": "", "throughput": "nan"}, "throughput is not a positive number"),
        ({"step_time_s": "", "throughput": "5", "throughput_unit": "tokens/s"}, "'tokens/s' gives"),
        ({"local_batch": "2.5"}, "2.5 samples per device are not a whole number"),
        ({"local_batch": ""}, "no batch size"),
        ({"local_batch": "-8"}, "batch size is not a positive number"),
        ({"local_batch": "", "global_batch": "16"}, "5.33333 samples per device"),
        ({"gpu": "", "gpus": ""}, "names no devices"),
        ({"gpus": "2.5"}, "gpus is not a whole number"),
        ({"gpus": "many"}, "gpus is no number"),
        ({"placement": "", "nodes": ""}, "on how many nodes"),
        ({"placement": "", "gpus": ""}, "how many GPUs"),
        ({"placement": "", "nodes": "4"}, "more nodes than GPUs"),
        ({"placement": "2+2"}, "placement contradicts"),
        ({"model": ""}, "names no workload"),
        ({"parallelism": "tp2/pp2"}, "not data parallel alone"),
        ({"parallelism": "magic"}, "not known to be data parallel"),
        ({"notes": "suspect=clock"}, "notes call it suspect"),
        ({"notes": "step time DERIVED from tokens/s"}, "notes call it derived"),
        ({"at": "0001-01-01T00:00:00+10:00"}, "is before 1970"),
        ({"at": "2120-01-01"}, "more than a day ahead"),
        ({"grad_accum": "10000000"}, "accumulation_steps must be 1 to 1e+06"),
        ({"at": "yesterday"}, "at cannot be read, found 'yesterday'"),
        ({"steps": "many"}, "steps cannot be read, found 'many'"),
        ({"allocation": "x" * 40}, "is not an allocation"),
    ],
)
def test_a_row_is_refused_with_its_reason(
    tmp_path: Path, cells: dict[str, str], reason: str
) -> None:
    assert reason in refusal(tmp_path, **cells)


def test_reading_a_table_twice_keeps_it_once_and_its_repeats_apart(tmp_path: Path) -> None:
    path = table(tmp_path, GOOD, GOOD, GOOD | {"step_time_s": "0.6"})
    store = ObservationStore(tmp_path / "observations.db")
    assert store.add_many(read_observations(path).observations) == 3
    os.utime(path, (0, 0))
    assert store.add_many(read_observations(path).observations) == 0


def test_json_lines_are_read_and_refused_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    good = json.dumps({**GOOD, "step_time_s": 0.5, "local_batch": 8, "notes": None})
    path.write_text(f'{good}\n\n[1]\n{{"model":\n{good}\n{json.dumps(GOOD | {"gpus": [3]})}\n')
    found = read_observations(path)
    assert [one.step_time_s for one in found.observations] == [0.5, 0.5]
    assert [line for line, _ in found.refused] == [3, 4, 6]


def fails(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ObservationError, match=r".{30}") as error:
        read_observations(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("table.csv", b"", "holds no row"),
        ("table.csv", b"model,gpu\n", "holds no row"),
        ("table.csv", b"model,model\nbert,bert\n", "has two columns 'model'"),
        ("table.csv", b"model\nbert,5\n", "1 rows refused, the first in line 2"),
        ("table.csv", b"\xff\xfe\x00", "no UTF-8 text"),
        ("table.csv", b"model\n" + b"x" * 200_000, "is no table"),
        ("table.jsonl", b"[" * 5000, "it is not JSON"),
        ("table.txt", b"model\nbert\n", "no table that can be read"),
    ],
)
def test_a_file_that_holds_nothing_usable_is_refused(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    assert reason in fails(tmp_path / name, content)


CELLS = ["", "0", "1", "-1", "nan", "inf", "1e300", "9" * 400, "2.5", "1+1", "0+0", "a1[0]", '"']
CELLS += ["null", "[]", "\\ud800", "0001-01-01T00:00+10:00", "\x00", "1x1:t4", "99999x99999:t4"]
NAMES = ["model", "gpu", "gpus", "nodes", "placement", "local_batch", "step_time_s", "allocation"]
NAMES += ["at", "steps", "parameter_bytes", "throughput", "parallelism", "seq_len"]


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=some.lists(
        some.dictionaries(some.sampled_from(NAMES), some.sampled_from(CELLS)), max_size=3
    ),
    suffix=some.sampled_from([".csv", ".jsonl"]),
    noise=some.binary(max_size=5),
)
def test_whatever_a_table_holds_only_errors_of_the_package_are_raised(
    tmp_path: Path, rows: list[dict[str, str]], suffix: str, noise: bytes
) -> None:
    if suffix == ".csv":
        text = "\n".join(",".join(cells.get(name, "") for name in NAMES) for cells in rows)
        content = f"{','.join(NAMES)}\n{text}\n"
    else:
        content = "\n".join(json.dumps(cells).replace("\\\\u", "\\u") for cells in rows)
    path = tmp_path / f"table{suffix}"
    path.write_bytes(content.encode() + noise)
    with contextlib.suppress(EstimatorError):
        found = read_observations(path)
        ObservationStore(tmp_path / "any.db").add_many(
            found.observations, summaries=found.summaries
        )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="No such file"):
        read_observations(tmp_path / "none.csv")


# The command


def test_the_columns_that_help_names_are_read(
    tmp_path: Path, store: Path, command: Command
) -> None:
    told = command("calibrate", "observe", "--help").out.split("Columns, in")[1].split("Options")[0]
    values = {
        "workload": "bert",
        "allocation": "2x8:h100-sxm",
        "batch_per_gpu": "4",
        "step_time_s": "0.25",
        "accumulation_steps": "3",
        "strategy": "zero1",
        "steps": "20",
        "at": "2026-01-02 03:04:05+00:00",
        "source": "cluster",
    }
    assert [name for name in values if f" {name} " not in told.replace("\n", " ")] == []
    path = table(tmp_path, values)
    assert command("calibrate", "observe", path).code == 0
    (kept,) = ObservationStore(store / "observations.db").observations()
    assert {name: str(getattr(kept, name)) for name in values} == values


def test_the_command_keeps_tables_and_says_what_it_refused(
    tmp_path: Path, store: Path, command: Command
) -> None:
    rows = (GOOD, GOOD, GOOD | {"step_time_s": "500"}, GOOD | {"step_time_s": "0"})
    path = table(tmp_path, *rows)
    answer = command("calibrate", "observe", path)
    assert answer.code == 0
    assert answer.out == f"{path}: 3 new observations, 0 known before, 1 rows refused\n"
    assert "line 5: its step time is not a positive number" in answer.err
    assert "doubted, counts little: bert" in answer.err
    assert len(ObservationStore(store / "observations.db")) == 3


def test_the_command_as_json_goes_where_it_is_told(
    tmp_path: Path, store: Path, command: Command
) -> None:
    path, place = table(tmp_path, GOOD), tmp_path / "mine.db"
    answer = command("calibrate", "observe", path, "--store", place, "--json")
    found = json.loads(answer.out)
    assert found["store"] == str(place)
    assert found["files"] == [{"file": str(path), "observations": 1, "new": 1, "refused": []}]


def test_one_bad_file_keeps_the_command_from_writing_any(
    tmp_path: Path, store: Path, command: Command
) -> None:
    good = table(tmp_path, GOOD)
    answer = command("calibrate", "observe", good, tmp_path / "none.csv")
    assert "No such file" in answer.sentence
    assert not (store / "observations.db").exists()
