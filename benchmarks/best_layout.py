"""Judge the layout that the engine would choose among those measured of one model and batch.

The published rows of one source, model, number of GPUs and global batch are taken together,
wherever there are several, and the engine is asked for the fastest of them, micro-batches included.
The goal is a choice within 5 % of the best measured step in 90 of 100 groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from options import Options
from published.graphs import GRAPHS, GraphStore
from published.mapping import Question, verdicts
from published.methods import cold_cases

NEAR_RATIO, SHARE_ASKED = 0.05, 0.9


def run(options: Options) -> Iterator[dict[str, Any]]:
    """A group a figure, then the share of the groups whose choice is near the best."""
    sources = options.only or (["sailor_e2e"] if options.quick else ["vtrain"])
    asked = verdicts(options.data, GraphStore(GRAPHS), sources)
    cases = list(choices([each.question for each in asked if each.question is not None]))
    for case in cases:
        name = f"{case['model']}, {case['ranks']} GPUs, batch {case['global_batch']:g}"
        yield {**case, "id": f"{name}: {case['chosen']}", "value": case["regret_ratio"]}
    yield {"id": "chosen within 5 % of the best", "value": near_ratio(cases), "least": SHARE_ASKED}


def choices(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """For each group of several rows what the engine would choose, and how much slower that is."""
    groups: defaultdict[tuple[Any, ...], list[Question]] = defaultdict(list)
    for question in questions:
        step, batch = question.row.step, question.global_batch
        groups[step.source, step.model, step.gpu, step.ranks, batch].append(question)
    for (source, model, _, ranks, batch), members in groups.items():
        if len(members) > 1:
            chosen = chosen_of(list(cold_cases(members)))
            about = {"source": source, "model": model, "ranks": ranks, "global_batch": batch}
            yield {**about, "layouts": len(members), **chosen}


def chosen_of(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The case predicted fastest beside the one measured fastest; what has no answer is not chosen.

    >>> a = {"layout": "tp=2", "batch_per_gpu": 1, "predicted_s": 1.0, "measured_s": 1.1}
    >>> b = {"layout": None, "batch_per_gpu": 2, "predicted_s": 2.0, "measured_s": 1.0}
    >>> found = chosen_of([a, b])
    >>> found["chosen"], found["best"], round(found["regret_ratio"], 3), found["said_ratio"]
    ('tp=2 x 1', 'dp=* x 2', 0.1, 1.0)
    """
    answered = [case for case in cases if case["predicted_s"] is not None]
    best = min(cases, key=lambda case: case["measured_s"])
    slowest_s = max(case["measured_s"] for case in cases)
    chosen = min(answered, key=lambda case: case["predicted_s"]) if answered else None
    measured_s = chosen["measured_s"] if chosen else slowest_s
    said_s = best["predicted_s"]
    return {
        "chosen": _named(chosen) if chosen else "none",
        "best": _named(best),
        "regret_ratio": measured_s / best["measured_s"] - 1,
        "said_ratio": said_s / chosen["predicted_s"] - 1 if chosen and said_s else None,
    }


def _named(case: dict[str, Any]) -> str:
    return f"{case['layout'] or 'dp=*'} x {case['batch_per_gpu']:g}"


def near_ratio(cases: Sequence[dict[str, Any]]) -> float:
    """The share of the groups whose choice is near the best."""
    return sum(case["regret_ratio"] <= NEAR_RATIO for case in cases) / max(1, len(cases))
