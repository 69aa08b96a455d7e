"""Ask for calibrated estimates from many threads while the same calibrator keeps learning.

The bound: every answer is that of one of the states that were in force between
the question and its answer, and neither memory nor the time of a question grows.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from options import parser_of

from estimator import Calibrator, estimate
from tests.synthetic import perceptron

THREADS, ESTIMATES = 16, 10_000
ALLOCATIONS = ("1x1:dgx-a100", "1x2:dgx-a100", "1x8:dgx-a100", "2x8:dgx-a100", "4x4:dgx-a100")
GRAPH = replace(perceptron([1024] * 5, batch=64), target="cuda")


class Answer(NamedTuple):
    """A step time, how many fits had ended when it was asked for, and how many begun when given."""

    allocation: str
    step_time_s: float
    ended: int
    begun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What came of the questions: `wrong` answers are of no state that was in force."""

    threads: int
    estimates: int
    fits: int
    distinct: int
    wrong: int
    median_before_s: float
    median_after_s: float
    grown_bytes: int

    @property
    def is_sound(self) -> bool:
        return self.fits > 0 and self.distinct > len(ALLOCATIONS) and self.wrong == 0


class Learner:
    """A calibrator that is asked by many and taught by one."""

    def __init__(self, path: Path) -> None:
        self.calibrator = Calibrator(path)
        self.begun = self.ended = 0
        # The answers of each state, the first before any observation.
        self.states = [self._answers()]

    def _answers(self) -> dict[str, float]:
        return {text: self.ask(text) for text in ALLOCATIONS}

    def ask(self, allocation: str) -> float:
        """The calibrated step time."""
        return estimate(GRAPH, allocation, calibration=self.calibrator).step_time_s

    def learn(self) -> None:
        """Observe a slower step on some allocation, fit, and note what is answered now."""
        allocation = ALLOCATIONS[self.ended % len(ALLOCATIONS)]
        step_time_s = self.states[0][allocation] * (1.2 + 0.05 * (self.ended % 7))
        self.calibrator.observe(GRAPH, allocation, step_time_s=step_time_s, batch_per_gpu=64)
        self.begun += 1
        self.calibrator.fit()
        self.states.append(self._answers())
        self.ended += 1

    def is_right(self, answer: Answer) -> bool:
        """Whether a state in force between the question and the answer says the same."""
        states = self.states[answer.ended : answer.begun + 1]
        return any(state[answer.allocation] == answer.step_time_s for state in states)


def ask_beside_fits(path: Path, *, threads: int, estimates: int) -> Load:
    """Let `threads` ask `estimates` questions each while fits follow one another."""
    learner = Learner(path)

    def ask(first: int) -> list[Answer]:
        found = []
        for number in range(first, first + estimates):
            allocation, ended = ALLOCATIONS[number % len(ALLOCATIONS)], learner.ended
            step_time_s = learner.ask(allocation)
            found.append(Answer(allocation, step_time_s, ended, learner.begun))
        return found

    median_before_s, peak_bytes = _median_question_s(learner), _peak_bytes()
    with ThreadPoolExecutor(threads) as pool:
        asking = [pool.submit(ask, number) for number in range(threads)]
        while not all(each.done() for each in asking):
            learner.learn()
        found = [answer for each in asking for answer in each.result()]
    return Load(
        threads=threads,
        estimates=len(found),
        fits=learner.ended,
        distinct=len({(answer.allocation, answer.step_time_s) for answer in found}),
        wrong=sum(not learner.is_right(answer) for answer in found),
        median_before_s=median_before_s,
        median_after_s=_median_question_s(learner),
        grown_bytes=_peak_bytes() - peak_bytes,
    )


def _median_question_s(learner: Learner) -> float:
    """The processor time of one question, alone."""
    durations_s = []
    for number in range(2000):
        begun_s = time.process_time()
        learner.ask(ALLOCATIONS[number % len(ALLOCATIONS)])
        durations_s.append(time.process_time() - begun_s)
    return statistics.median(durations_s)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--estimates", type=int, default=ESTIMATES, help="of each thread")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = ask_beside_fits(
            Path(folder) / "observations.db", threads=chosen.threads, estimates=chosen.estimates
        )
    if chosen.json:
        print(json.dumps(asdict(load)))
    else:
        print(
            f"{load.threads} threads: {load.estimates} calibrated estimates beside {load.fits} "
            f"fits, {load.distinct} distinct answers, {load.wrong} of no state that was in force\n"
            f"a question takes {1e6 * load.median_before_s:.0f} µs before and "
            f"{1e6 * load.median_after_s:.0f} µs after; memory grew by "
            f"{load.grown_bytes / 2**20:.0f} MiB, the answers kept to be checked among them"
        )
    return 0 if load.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
