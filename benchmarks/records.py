"""Keep what a benchmark finds in a file that a later run continues from, and say how far it is."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from summary import noise_ratio

if TYPE_CHECKING:
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph

Record = dict[str, Any]


class Records:
    """What is known so far, one JSON object a line, appended as it is found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Record] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in filter(None, lines):
            try:
                self.found.append(json.loads(line))
            except json.JSONDecodeError:
                say("one record is torn (an earlier run was cut off); it is measured again")

    def add(self, record: Record) -> None:
        """Append a record, with the time."""
        self.found.append({"at": now(), **record})
        with self.path.open("a", encoding="utf-8") as stream:
            # The newline comes first too: a torn last line then spoils no other.
            stream.write("\n" + json.dumps(self.found[-1], allow_nan=False) + "\n")

    def of(self, kind: str, key: str | None = None, **fields: Any) -> list[Record]:
        """Every record of a kind whose fields have these values, in the order found."""
        wanted = {"kind": kind, **fields, **({} if key is None else {"key": key})}
        return [
            record
            for record in self.found
            if all(record.get(name) == value for name, value in wanted.items())
        ]

    def left(self, key: str, repeats: int) -> int:
        """How often a case is still to be measured: not at all once it has failed."""
        if self.of("failure", key):
            return 0
        return max(0, repeats - len(self.of("measurement", key)))


NOT_YET = "not measured yet"


def judged_case(records: Records, key: str, kept: Sequence[str], **fields: Any) -> Record:
    """A case's last prediction, as far as `kept`, and all its measurements; nulls for none.

    `fields` are those of its predictions, such as the method.
    """
    predictions = records.of("prediction", key, **fields)
    prediction = predictions[-1] if predictions else {}
    refused = [prediction] if prediction else records.of("refusal", key)
    reason = refused[-1].get("reason") if refused else None
    runs = records.of("measurement", key)
    found = measured_fields(runs, records.of("failure", key))
    if prediction.get("predicted_s") is None and (runs or reason):
        found |= {"status": "no_prediction", "reason": reason or NOT_YET}
    elif not runs:
        found["reason"] = found["reason"] or NOT_YET
    at, measured_at = prediction.get("at"), found["measured_at"]
    beforehand = measured_at is None or (at or "") < measured_at
    about = {"predicted_at": at, "predicted_beforehand": beforehand}
    return {**{name: prediction.get(name) for name in kept}, **found, **about}


def measured_fields(runs: Sequence[Record], failures: Sequence[Record]) -> Record:
    """What the measurements of a case tell of it: median, noise, all runs, when, or why none."""
    steps_s = [run["step_s"] for run in runs]
    return {
        "measured_s": statistics.median(steps_s) if steps_s else None,
        "noise_ratio": noise_ratio(steps_s) if steps_s else None,
        "runs_s": steps_s,
        "measured_at": runs[0]["at"] if runs else None,
        "status": "ok" if runs else "not_measured",
        "reason": failures[-1]["reason"] if failures else None,
    }


def times_of(answer: Estimate) -> Record:
    """The step of an estimate and its interval."""
    return {"predicted_s": answer.step_time_s, "low_s": answer.low_s, "high_s": answer.high_s}


def prediction_of(answer: Estimate) -> Record:
    """What is written down of an estimate before its case is measured."""
    return {
        **times_of(answer),
        "batch_per_gpu": answer.batch_per_gpu,
        "global_batch": answer.global_batch,
        "breakdown": asdict(answer.breakdown),
        "bottleneck": answer.bottleneck,
        "op_time_in_grid_ratio": answer.op_time_in_grid_ratio,
        "peak_memory_bytes": answer.peak_memory_bytes,
        "assumptions": list(answer.assumptions),
    }


def measure_in_turns(
    records: Records, runs: Mapping[str, Callable[[], Record]], repeats: int, label: str
) -> None:
    """Measure what is left of each key, one turn over all at a time; one failure is enough."""
    from estimator.errors import EstimatorError

    progress = Progress(label, sum(records.left(key, repeats) for key in runs))
    for turn in range(repeats, 0, -1):
        for key, run in runs.items():
            if records.left(key, repeats) < turn:
                continue
            try:
                found = run()
            except EstimatorError as error:
                records.add({"kind": "failure", "key": key, "reason": str(error)[:500]})
                progress.total -= turn - 1
                progress.advance(f"{key}: {error}")
                continue
            records.add({"kind": "measurement", "key": key, **found})
            progress.advance(key)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own, so that memory and imports are its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def kept_graph(path: Path, trace: Callable[[], OpGraph]) -> OpGraph:
    """The graph of a file, traced into it where it is not there or of an earlier version."""
    from estimator.errors import EstimatorError
    from estimator.graph.ir.op_graph import OpGraph

    if path.is_file():
        with suppress(EstimatorError):
            return OpGraph.load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace().save(path)
    return OpGraph.load(path)


def say(text: str) -> None:
    """Tell the person who waits, on stderr."""
    print(text, file=sys.stderr, flush=True)


def now() -> str:
    """The time in UTC, as texts that sort."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Progress:
    """Count finished pieces of work on stderr, with the time that the rest will take."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.begun = time.monotonic()

    def advance(self, text: str) -> None:
        """One piece more is done."""
        self.done += 1
        left_s = (time.monotonic() - self.begun) / self.done * (self.total - self.done)
        say(f"{self.label} {self.done}/{self.total}, {left_s / 60:.0f} min left: {text}")
