"""Predict how best to split a global batch over unlike nodes, then measure that split and others.

``python benchmarks/balance_accuracy.py`` (as root) probes the testbeds of `testbed_cases` whose
nodes compute at unlike speeds, writes down the best split of each case by `advise.balance` and what
the splits around it and the even one would take, then trains with all of them, taking turns, in
fresh processes (TARGETS A18). What is found is kept in --work, where a second run continues.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from records import Progress, Record, Records, now
from summary import format_table, noise_ratio
from testbed.measure import measure
from testbed.network import Testbed
from testbed.paced import paced_graph
from testbed_accuracy import MODELS, REPEATS, Bench
from testbed_cases import Case
from testbed_runs import MACHINE, add_options, open_work

from estimator.advise.balance import balance
from estimator.engine import estimate_graph
from estimator.errors import EstimatorError
from estimator.graph.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster
from estimator.units import format_split

# TARGETS A18: the step at the predicted best split, and its gain over the even one.
BOUND_RATIO = 0.1
Split = tuple[int, ...]


def _case(bed: str, model: str, allocation: str, even_batch: int) -> Case:
    strategy = "ddp" if bed == "mixed_pair" else "ddp:view"
    return Case(bed=bed, model=model, allocation=allocation, strategy=strategy, batch=even_batch)


# The batch of a case is that of the even split.
CASES = (
    _case("mixed", "few_big", "n0[0]+n2[0]", 8),
    _case("mixed", "many_small", "n0[0]+n3[0]", 12),
    _case("mixed", "few_big", "n0[0]+n2[0]+n3[0]", 8),
    _case("mixed", "many_small", "n0[0,1]+n3[0,1]", 10),
    _case("mixed", "big_first", "n0[0]+n1[0]+n2[0]+n3[0]", 7),
    _case("mixed_thin", "few_big", "n0[0]+n1[0]", 8),
    _case("mixed_wide", "many_small", "n0[0]+n1[0]", 20),
    _case("mixed_wide", "few_big", "n0[0,1,2]+n2[0]", 7),
    _case("mixed_pair", "gpt2", "n0[0]+n1[0]", 6),
)


def splits_around(best: Split, even: Split, ranks: Split) -> list[Split]:
    """Splits of the same global batch: `even`, `best`, and some that are close to `best`.

    From the best one, samples move between the groups that it takes most from and gives most to.
    """
    change = [after - before for after, before in zip(best, even, strict=True)]
    giver, taker = change.index(min(change)), change.index(max(change))
    shared = math.gcd(ranks[giver], ranks[taker])
    found = [even, best]
    for moves in (-1, 1, -2, 2, -3, 3):
        split = list(best)
        # As many samples as leave the one arrive at the other, however many ranks they have.
        split[giver] -= moves * ranks[taker] // shared
        split[taker] += moves * ranks[giver] // shared
        if min(split) >= 1 and giver != taker and tuple(split) not in found:
            found.append(tuple(split))
    return found


class BalanceBench(Bench):
    """One testbed: each case predicted and trained with several splits of its global batch."""

    def _graph(self, case: Case) -> OpGraph:
        if case.is_paced and case.model not in self.graphs:
            batches = range(1, 1 + max(other.batch * other.ranks for other in CASES if other.batch))
            self.graphs[case.model] = paced_graph(case.model, other_batches=batches)
        return super()._graph(case)

    def _predict(self, case: Case) -> None:
        graph, machine = self._graph(case), self.machine(case)
        asked: dict[str, Any] = {
            "strategy": case.strategy,
            "cluster": Cluster.load(self.cluster_path),
            "profile": machine,
        }
        global_batch = (case.batch or 1) * case.ranks
        found = balance(graph, case.allocation, global_batch=global_batch, **asked)
        best, even = found.answer.batches or (), found.even.batches or ()
        ranks = tuple(group.ranks for group in Allocation.parse(case.allocation).groups)
        answers = [
            estimate_graph(graph, case.allocation, batch_per_gpu=split, **asked)
            for split in splits_around(best, even, ranks)
        ]
        splits = [
            {
                "batches": answer.batches,
                "predicted_s": answer.step_time_s,
                "low_s": answer.low_s,
                "high_s": answer.high_s,
            }
            for answer in answers
        ]
        record = {"kind": "prediction", "key": case.key, "best": best, "even": even}
        self.records.add({**record, "global_batch": global_batch, "splits": splits})

    def _runs(self, case: Case) -> int:
        known = self.records.of("prediction", case.key)
        splits = known[-1]["splits"] if known else []
        return min((len(self._measured(case, split)) for split in splits), default=0)

    def _measured(self, case: Case, split: Record) -> list[Record]:
        return self.records.of("measurement", split_key(case, split["batches"]))

    def _measure(self, bed: Testbed) -> None:
        planned = [
            (case, split)
            for case in self.cases
            for split in self.records.of("prediction", case.key)[-1]["splits"]
        ]
        missing = (max(0, self.options.repeats - len(self._measured(*each))) for each in planned)
        progress = Progress(f"{self.name}: trained", sum(missing))
        for done in range(self.options.repeats):
            for case, split in planned:
                key = split_key(case, split["batches"])
                if len(self._measured(case, split)) > done or self.records.of("failure", key):
                    continue
                try:
                    step_s = self._train_split(bed, case, split["batches"])
                except EstimatorError as error:
                    self.records.add({"kind": "failure", "key": key, "reason": str(error)[:500]})
                    progress.advance(f"{key}: {error}")
                    continue
                self.records.add({"kind": "measurement", "key": key, "step_s": step_s})
                progress.advance(f"{key} {1e3 * step_s:.1f} ms")

    def _train_split(self, bed: Testbed, case: Case, split: Sequence[int]) -> float:
        groups = Allocation.parse(case.allocation).groups
        return measure(
            bed,
            f"paced:{case.model}" if case.is_paced else f"{MODELS}:{case.model}",
            case.allocation,
            batch=[
                batch for group, batch in zip(groups, split, strict=True) for _ in group.devices
            ],
            strategy=case.strategy,
            optimizer="sgd" if case.is_paced else "adamw",
            steps=self.options.steps,
        ).step_s


def split_key(case: Case, split: Sequence[int]) -> str:
    """The name of one split of a case among the records."""
    return f"{case.key} {format_split(split)}"


def assemble(cases: Sequence[Case], records: Records) -> list[Record]:
    """Every split of every case, as DESIGN has accuracy cases, predicted best and even marked."""
    found = []
    for case in cases:
        predictions = records.of("prediction", case.key)
        prediction = predictions[-1] if predictions else {"splits": []}
        for split in prediction["splits"]:
            key = split_key(case, split["batches"])
            runs = records.of("measurement", key)
            failures = records.of("failure", key)
            steps_s = [run["step_s"] for run in runs]
            found.append(
                {
                    "id": key,
                    "case": case.key,
                    "source": "testbed",
                    "model": case.model,
                    "machine": MACHINE,
                    "allocation": case.allocation,
                    "ranks": case.ranks,
                    "nodes": case.nodes,
                    "strategy": case.strategy,
                    "precision": "fp32",
                    "method": "paced" if case.is_paced else "computing",
                    "k": 0,
                    "draw": 0,
                    "batch_per_gpu": None,
                    "global_batch": prediction["global_batch"],
                    **split,
                    "is_best": split["batches"] == prediction["best"],
                    "is_even": split["batches"] == prediction["even"],
                    "measured_s": statistics.median(steps_s) if steps_s else None,
                    "noise_ratio": noise_ratio(steps_s) if steps_s else None,
                    "runs_s": steps_s,
                    "predicted_at": prediction["at"],
                    "measured_at": runs[0]["at"] if runs else None,
                    "status": "ok" if steps_s else "not_measured",
                    "reason": failures[-1]["reason"] if failures else None,
                }
            )
    return found


def balances(found: Sequence[Record]) -> Iterator[Record]:
    """For every case that was measured whole: its best split and gain, predicted and measured."""
    for key in dict.fromkeys(split["case"] for split in found):
        splits = [split for split in found if split["case"] == key]
        if any(split["measured_s"] is None for split in splits):
            continue
        best = next(split for split in splits if split["is_best"])
        even = next(split for split in splits if split["is_even"])
        fastest = min(splits, key=lambda split: float(split["measured_s"]))
        gain_ratio = even["measured_s"] / best["measured_s"] - 1
        predicted_gain_ratio = even["predicted_s"] / best["predicted_s"] - 1
        error_ratio = best["predicted_s"] / best["measured_s"] - 1
        gain_error_ratio = predicted_gain_ratio / gain_ratio - 1 if gain_ratio else 0.0
        lost_ratio = best["measured_s"] / fastest["measured_s"] - 1
        yield {
            "id": key,
            "even": even["batches"],
            "predicted_best": best["batches"],
            "measured_best": fastest["batches"],
            "predicted_s": best["predicted_s"],
            "measured_s": best["measured_s"],
            "error_ratio": error_ratio,
            "predicted_gain_ratio": predicted_gain_ratio,
            "gain_ratio": gain_ratio,
            "gain_error_ratio": gain_error_ratio,
            "lost_ratio": lost_ratio,
            "noise_ratio": max(best["noise_ratio"], even["noise_ratio"]),
            "is_within": max(abs(error_ratio), abs(gain_error_ratio), lost_ratio) <= BOUND_RATIO,
        }


def report(found: Sequence[Record]) -> Iterator[str]:
    """The tables for people: cases first, then all their splits."""
    heading = ["case, even split", "best split: predicted", "measured", "lost"]
    heading += ["step there: predicted", "measured", "error"]
    lines = [[*heading, "gain: predicted", "measured", "error", "noise", "within"]]
    rows = list(balances(found))
    for row in rows:
        lines.append(
            [
                f"{row['id']}: {format_split(row['even'])}",
                format_split(row["predicted_best"]),
                format_split(row["measured_best"]),
                _percent(row["lost_ratio"], ""),
                f"{1e3 * row['predicted_s']:.1f} ms",
                f"{1e3 * row['measured_s']:.1f} ms",
                _percent(row["error_ratio"]),
                _percent(row["predicted_gain_ratio"]),
                _percent(row["gain_ratio"]),
                _percent(row["gain_error_ratio"]),
                _percent(row["noise_ratio"], ""),
                "yes" if row["is_within"] else "no",
            ]
        )
    yield format_table(lines)
    within = sum(row["is_within"] for row in rows)
    cases = len({split["case"] for split in found})
    yield f"{within} of {cases} with step and gain within 10 %, and at most 10 % lost"
    yield ""
    yield format_table(
        [["split", "predicted", "measured", "error", "noise", ""], *map(_split_line, found)]
    )


def _split_line(split: Record) -> list[str]:
    mark = "predicted best" if split["is_best"] else "even" if split["is_even"] else ""
    predicted = f"{1e3 * split['predicted_s']:.1f} ms"
    if split["measured_s"] is None:
        return [split["id"], predicted, "-", "-", "-", split["reason"] or mark]
    return [
        split["id"],
        predicted,
        f"{1e3 * split['measured_s']:.1f} ms",
        _percent(split["predicted_s"] / split["measured_s"] - 1),
        _percent(split["noise_ratio"], ""),
        mark,
    ]


def _percent(ratio: float, sign: str = "+") -> str:
    return f"{100 * ratio:{sign}.1f} %"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "balance_accuracy")
    add = parser.add_argument
    add("--cases", nargs="+", default=[""], help="only cases whose names hold one of these texts")
    add("--repeats", type=int, default=REPEATS, help="fresh launches of each split")
    add("--steps", type=int, default=15, help="timed steps in each launch")
    add("--predict-only", action="store_true", help="write predictions down, measure nothing")
    options = parser.parse_args(arguments)
    options.cases = [case for case in CASES if any(text in case.key for text in options.cases)]
    if not options.cases:
        parser.error("no case has such a name; they are " + ", ".join(case.key for case in CASES))
    options.repredict = False
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, write down, measure, report."""
    options = parse_options(arguments)
    records = open_work(options)
    for name in dict.fromkeys(case.bed for case in options.cases):
        BalanceBench(name, options, records).run()
    found = assemble(options.cases, records)
    if options.json:
        machine = load_profile(options.profile).devices[0].name
        answer = {"machine": machine, "at": now(), "cases": found, "balances": [*balances(found)]}
        print(json.dumps(answer, allow_nan=False))
    else:
        print("\n".join(report(found)))


if __name__ == "__main__":
    main()
