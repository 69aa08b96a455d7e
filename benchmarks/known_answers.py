"""Ask the engine what is known: published steps, each in the recipe that it was measured with.

Of the rows of `known_rows` a half (drawn by a committed seed) is asked in whole runs only, so that
nothing is tuned to it; beside them stand those whose ranks share a model. The goal is a median
error of at most 8 %, 25 % at worst, and to be right of every row on whether it fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from known_rows import KnownRow, known_layout_rows, known_rows, unseen
from options import Options
from published.graphs import GRAPHS, GraphStore
from published.machines import variant
from published.rows import NotMapped
from records import now, say, times_of
from summary import summarise

import estimator as est
from estimator.errors import EstimatorError


def run(options: Options) -> Mapping[str, Any]:
    """Every row, and whether a row that ran is said to fit; in a quick run a few that are seen."""
    graphs = GraphStore(GRAPHS)
    rows = known_rows()
    hidden = unseen(rows)
    asked = [(row, "unseen" if row.id in hidden else "seen") for row in rows]
    asked += [(row, "layouts") for row in known_layout_rows()]
    if options.quick and not options.only:
        options = replace(options, only=("ResNet-50",))
    cases = [
        case_of(row, graphs, half)
        for row, half in asked
        if options.takes(row.id) and not (options.quick and half == "unseen")
    ]
    halves = [
        *summarise(_ran(cases), by=("half", "method")),
        *summarise(_ran(cases), by=("method",)),
    ]
    return {"cases": [*cases, *memory_figures(cases)], "summary": halves}


def case_of(row: KnownRow, graphs: GraphStore, half: str) -> dict[str, Any]:
    """What the engine says of a row beside what is known, in the form of all benchmarks."""
    say(row.id)
    answer, reason, times = None, "", dict.fromkeys(("predicted_s", "low_s", "high_s"))
    try:
        graph = graphs.graph(row.spec, row.precision, row.optimizer)
        answer = est.estimate(
            replace(graph, grad_scaler=row.scales_loss, clip_grad_norm=row.clips_gradients),
            row.allocation,
            batch_per_gpu=row.batch_per_gpu,
            accumulation_steps=row.accumulation_steps,
            strategy=row.strategy,
            layout=row.layout,
            profile=variant(row.machine, row.setting),
        )
        evaluations_s = row.evaluations_per_step * answer.breakdown.forward_s
        times = {name: each + evaluations_s for name, each in times_of(answer).items()}
    except (EstimatorError, NotMapped) as error:
        reason = str(error)
    return {
        "id": row.id,
        "source": row.source,
        "model": row.spec.name,
        "allocation": row.allocation,
        "method": "cold",
        "half": half,
        **times,
        "measured_s": row.step_time_s,
        "noise_ratio": None,
        "global_batch": row.gpus * row.batch_per_gpu * row.accumulation_steps,
        "fits": answer.fits if answer else None,
        "known_to_fit": row.step_time_s is not None,
        "predicted_at": now(),
        "status": "ok" if answer else "no_prediction",
        "reason": reason,
        "remark": row.remark,
    }


def is_right_of_memory(case: dict[str, Any]) -> bool:
    """Whether a row that ran is not refused, and one that did not is."""
    return bool((case["fits"] != "no") == case["known_to_fit"])


def _ran(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in cases if case["known_to_fit"]]


def memory_figures(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many rows of each half are wrongly said to fit, or not to."""
    wrong = dict.fromkeys((case["half"] for case in cases), 0)
    for case in cases:
        wrong[case["half"]] += not is_right_of_memory(case)
    return [
        {"id": f"{half}: wrong of whether it fits", "value": count, "bound": 0}
        for half, count in wrong.items()
    ]
