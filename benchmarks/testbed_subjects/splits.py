"""The best split of a global batch over unlike nodes, beside the even one and its neighbours.

`balance` finds the split; it and those around it are then trained, taking turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from records import Record, Records, measured_fields, times_of
from testbed.paced import paced_graph
from testbed_cases import SPLITS, Case
from testbed_runs import MACHINE, ModelBench, Trial

from estimator.estimates.balance import balance
from estimator.estimates.request import EstimateRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.placement.allocation import Allocation
from estimator.units import format_split

# Of the step at the predicted best split, and of its gain over the even one.
BOUND_RATIO = 0.1
Split = tuple[int, ...]


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


class SplitBench(ModelBench):
    """One testbed: each case predicted and trained with several splits of its global batch."""

    def traced(self, case: Case) -> OpGraph:
        if not case.is_paced:
            return super().traced(case)
        most = max(other.batch * other.ranks for other in SPLITS if other.batch)
        return paced_graph(case.model, other_batches=range(1, 1 + most))

    def predict(self, case: Case) -> Record:
        global_batch = (case.batch or 1) * case.ranks
        asked = self.asked(case) | {"global_batch": global_batch}
        found = balance(EstimateRequest.of(self.graph(case), case.allocation, **asked))
        best, even = found.answer.batches or (), found.even.batches or ()
        ranks = tuple(group.ranks for group in Allocation.parse(case.allocation).groups)
        answers = (
            self.estimate(case, case.allocation, batch_per_gpu=split)
            for split in splits_around(best, even, ranks)
        )
        splits = [{"batches": answer.batches, **times_of(answer)} for answer in answers]
        return {"best": best, "even": even, "global_batch": global_batch, "splits": splits}

    def trials(self, case: Case, prediction: Record) -> Iterator[Trial]:
        groups = Allocation.parse(case.allocation).groups
        for split in prediction["splits"]:
            batches = zip(groups, split["batches"], strict=True)
            of_ranks = [batch for group, batch in batches for _ in group.devices]
            yield Trial(
                key=split_key(case, split["batches"]),
                run=partial(self.train, case=case, batch=of_ranks),
            )


def split_key(case: Case, split: Sequence[int]) -> str:
    """The name of one split of a case among the records."""
    return f"{case.key} {format_split(split)}"


def assemble(cases: Sequence[Case], records: Records) -> list[Record]:
    """Every split of every case, as DESIGN has accuracy cases, predicted best and even marked."""
    found = []
    for case in cases:
        for prediction in records.of("prediction", case.key)[-1:]:
            for split in prediction["splits"]:
                key = split_key(case, split["batches"])
                found.append(
                    {
                        **case.fields(MACHINE),
                        "id": key,
                        "case": case.key,
                        "batch_per_gpu": None,
                        "global_batch": prediction["global_batch"],
                        **split,
                        "is_best": split["batches"] == prediction["best"],
                        "is_even": split["batches"] == prediction["even"],
                        **measured_fields(
                            records.of("measurement", key), records.of("failure", key)
                        ),
                        "predicted_at": prediction["at"],
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


def figures(cases: Sequence[Record]) -> Iterator[Record]:
    """How far step and gain of the predicted best split are off, and what it loses."""
    for row in balances(cases):
        errors = (abs(row["error_ratio"]), abs(row["gain_error_ratio"]), row["lost_ratio"])
        name = f"{row['id']}: {format_split(row['predicted_best'])} instead of "
        name += format_split(row["even"])
        yield {**row, "id": name, "value": max(errors), "bound": BOUND_RATIO}
