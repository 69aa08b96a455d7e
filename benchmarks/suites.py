"""List the suites: what each asks, the modules that answer it, and what they can be given.

A part of a suite is a module of this folder whose ``run(options)`` finds its cases, each with an
``id`` (`results.py` says what else): a list of them, or a mapping of ``cases``, ``summary`` and
``report``, lines for people. The parts run one after the other, each in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module; one that is slow is left out of a quick run."""

    name: str
    is_slow: bool = False
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Parts that answer one question; `times` says whether figures depend on this machine."""

    question: str
    parts: tuple[Part, ...]
    times: bool = True
    needs: Literal["", "root", "gpu"] = ""

    @property
    def takes(self) -> frozenset[str]:
        """The options of other people's cases that any part knows."""
        return frozenset(name for part in self.parts for name in part.takes)


DATA = frozenset(("data",))
MODELS = frozenset(("models",))

SUITES: dict[str, Suite] = {
    "speed": Suite(
        question="what looks, estimates, tables, timelines, refits and start-up cost",
        parts=(Part(name="speed"),),
    ),
    "local": Suite(
        question="training steps on this machine, predicted first and then measured",
        parts=(Part(name="local_accuracy", takes=MODELS),),
    ),
    "testbed": Suite(
        question="clusters of network namespaces: steps, splits, strategies, orders, overlap",
        parts=(Part(name="testbed_accuracy"),),
        needs="root",
    ),
    "layouts": Suite(
        question="layouts: ranks that share a model here, and the choice among published ones",
        parts=(
            Part(name="layout_oracle"),
            Part(name="layout_accuracy"),
            Part(name="best_layout", takes=DATA),
        ),
    ),
    "published": Suite(
        question="steps that others measured and published, from datasheets alone",
        parts=(Part(name="published_accuracy", takes=DATA), Part(name="known_answers")),
        times=False,
    ),
    "calibration": Suite(
        question="what a few observed steps teach, beside Pollux, Optimus and linear scaling",
        parts=(
            Part(name="calibration_accuracy", takes=DATA),
            Part(name="calibration_pairs", is_slow=True, takes=DATA),
            Part(name="calibration_changes"),
        ),
        times=False,
    ),
    "collectives": Suite(
        question="published collectives, from half of their sizes, fewer devices, other systems",
        parts=(Part(name="collective_accuracy", takes=DATA),),
        times=False,
    ),
    "memory": Suite(
        question="peaks of live tensors, counted on this processor, and published peaks",
        parts=(Part(name="memory_accuracy", takes=MODELS), Part(name="memory_recipes")),
        times=False,
    ),
    "swap": Suite(
        question="plans of memory, run on this processor and beside published plans",
        parts=(
            Part(name="memory_plan_runs", takes=MODELS),
            Part(name="memory_plans", is_slow=True),
        ),
    ),
    "stalls": Suite(
        question="stalls put into real scripts, and steps with real data",
        parts=(Part(name="stall_accuracy"),),
    ),
    "probe": Suite(
        question="the probe against itself, links of known rate, and other work beside it",
        parts=(Part(name="probe_accuracy"), Part(name="busy_probe", is_slow=True)),
    ),
    "rent": Suite(
        question="what to rent within a time or a price, against brute force",
        parts=(Part(name="rent", takes=DATA),),
        times=False,
    ),
    "order": Suite(
        question="orders of ranks for made-up pair matrices, beside the best known",
        parts=(Part(name="rank_order_accuracy"),),
        times=False,
    ),
    "schedulers": Suite(
        question="what estimates are worth to schedulers: 512 jobs on 512 GPUs, replayed",
        parts=(
            Part(name="schedulers"),
            Part(name="schedulers_measured", is_slow=True, takes=DATA),
        ),
        times=False,
    ),
    "coverage": Suite(
        question="which models of timm and transformers can be traced",
        parts=(Part(name="traced_models"),),
        times=False,
    ),
    "llm": Suite(
        question="published steps of large language models, each asked with its own recipe",
        parts=(Part(name="llm", takes=DATA),),
        times=False,
    ),
    "gpu": Suite(
        question="training steps on this machine's GPU, predicted first and then measured",
        parts=(Part(name="gpu_accuracy"),),
        needs="gpu",
    ),
}
