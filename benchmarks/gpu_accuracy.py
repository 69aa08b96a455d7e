"""Predict training steps on one GPU, write the predictions down, then measure them.

``python benchmarks/gpu_accuracy.py --profile FILE --seconds N`` traces the models of
`zoo.gpu` for CUDA, predicts every case from the profile alone, then, case after case in order
of information and as long as the time lasts, times the case's operators, predicts again, and trains
for real. Everything found is appended to a file in --work, from which a second run continues.
``--target cpu`` runs three tiny cases through the same code where there is no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from gpu.cases import Case, gpu_cases, tiny_cases
from gpu.predictions import predict_all, predict_with_timings, trace_missing
from gpu.report import BOUNDS, UNREACHED, assemble, figures
from gpu.steps import release, run_for_real
from options import add_work, parser_of, print_found
from records import Record, Records, say
from summary import summarise

from estimator.errors import EstimatorError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

CASE_LIMIT_S, COMPILED_LIMIT_S = 60.0, 150.0
# What a case must have left to be begun.
LEAST_S, LEAST_COMPILED_S = 15.0, 60.0


class DeviceProcess:
    """One process that holds the device, started again after it died, hung or broke its context."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """The function's result there; raises what it raised, TimeoutError after `limit_s`."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context)
        try:
            future = self._pool.submit(function, *arguments)
            return future.result(timeout=limit_s)
        except (TimeoutError, BrokenProcessPool, RuntimeError) as error:
            # After an error of the device every later call of that process fails too.
            if isinstance(error, (TimeoutError, BrokenProcessPool)) or "CUDA" in str(error):
                self.close()
            raise

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._pool is None:
            return
        for process in multiprocessing.active_children():
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None


def predict_timed(case: Case, folder: Path, profile: MachineProfile) -> Record:
    """`predict_with_timings` with the memory given back; runs in the device's process."""
    import torch

    torch.set_num_threads(1)
    try:
        return predict_with_timings(case, folder, profile)
    finally:
        release(profile.kind)


def train_for_real(case: Case, device: str) -> Record:
    """`run_for_real`; runs in the device's process."""
    import torch

    torch.set_num_threads(1)
    return run_for_real(case, device)


def measure_all(
    cases: Sequence[Case], work: Path, profile: MachineProfile, records: Records, end: float
) -> None:
    """Time operators, predict, train, each case as it comes, until the time is over."""
    device = DeviceProcess()
    try:
        for number, case in enumerate(cases, start=1):
            compiled = case.execution != "eager"
            if records.of("measurement", case.key) or records.of("failure", case.key):
                continue
            if end - time.monotonic() < (LEAST_COMPILED_S if compiled else LEAST_S):
                say(f"the time is over before {case.key}, {len(cases) - number + 1} cases left")
                return
            begun = time.monotonic()
            if not compiled:
                _predict_measured(device, case, work, profile, records)
            limit_s = min(COMPILED_LIMIT_S if compiled else CASE_LIMIT_S, end - time.monotonic())
            _train(device, case, profile, records, max(limit_s, 1.0))
            say(f"{number}/{len(cases)} {case.key}: {time.monotonic() - begun:.1f} s")
    finally:
        device.close()


# What a case may fail with: the engine, torch (memory among it), the process.
FAILURES = (
    *(EstimatorError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(ImportError, OSError, AssertionError, NotImplementedError, TimeoutError),
)


def _predict_measured(
    device: DeviceProcess, case: Case, work: Path, profile: MachineProfile, records: Records
) -> None:
    if records.of("prediction", case.key, method="measured"):
        return
    found: Record = {"predicted_s": None}
    try:
        arguments = (case, work / "graphs", profile)
        found |= device.call(predict_timed, *arguments, limit_s=CASE_LIMIT_S)
    except FAILURES as error:
        found["reason"] = _words(error)
        say(f"{case.key}: {found['reason']}")
    records.add({"kind": "prediction", "key": case.key, "method": "measured", **found})


def _train(
    device: DeviceProcess, case: Case, profile: MachineProfile, records: Records, limit_s: float
) -> None:
    try:
        found = device.call(train_for_real, case, profile.kind, limit_s=limit_s)
    except FAILURES as error:
        records.add({"kind": "failure", "key": case.key, "reason": _words(error)})
        say(f"{case.key}: {_words(error)}")
        return
    records.add({"kind": "measurement", "key": case.key, **found})


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = parser_of(__doc__)
    add_work(parser, "gpu_accuracy")
    add = parser.add_argument
    add("--profile", required=True, help="the profile of this machine: a name or a file")
    add("--target", choices=("cuda", "cpu"), default="cuda", help="cpu: three tiny cases")
    add("--seconds", type=float, default=720.0, help="time for all of it, tracing included")
    add("--only", help="names of models, joined by commas")
    add("--trace-only", action="store_true", help="trace the models, and stop")
    add("--predict-only", action="store_true", help="write predictions down, measure nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace, predict, write down, measure, report."""
    options = parse_options(arguments)
    end = time.monotonic() + options.seconds
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "records.jsonl")
    cases = tiny_cases() if options.target == "cpu" else gpu_cases()
    if options.only:
        cases = [case for case in cases if case.workload in options.only.split(",")]
    trace_missing(cases, options.work / "graphs", options.target, records)
    if options.trace_only:
        return
    profile = load_profile(options.profile)
    predict_all(cases, options.work / "graphs", profile, records)
    if not options.predict_only:
        measure_all(cases, options.work, profile, records, end)
    found = assemble(cases, profile, records)
    reached = all(case["status"] != "not_measured" or _failed(case) for case in found)
    print_found(
        options,
        machine=profile.devices[0].name,
        cases=[*found, *figures(found)],
        bounds=BOUNDS,
        summary=summarise(found, by=("method",), bounds=BOUNDS),
    )
    # 1: what was asked for is not all there yet; a further run continues.
    sys.exit(0 if reached or options.predict_only else 1)


def _failed(case: Record) -> bool:
    return bool(case["reason"] != UNREACHED)


if __name__ == "__main__":
    main()
