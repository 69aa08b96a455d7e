"""List the suites: what each asks, the scripts that answer it, and what they can be given.

A part of a suite is a script of this folder that prints one JSON object with ``--json`` (see
`options.print_found`): ``cases``, each with an ``id`` (`results.py` says what else), and if it
likes ``report``, lines for people. ``python -m benchmarks run SUITE`` runs the parts one after
the other, each in a process of its own, and keeps what they print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One script with its words; `quick` stands for `words` in a run of minutes.

    A part without `quick` words is left out of a quick run where `is_slow`. ``{data}`` and
    ``{work}`` in words stand for the folder of tables and one to work in. What a script that does
    not `prints_json` says to people is kept as the report.
    """

    script: str
    words: Words = ()
    quick: Words | None = None
    is_slow: bool = False
    takes: frozenset[str] = frozenset()
    prints_json: bool = True

    def __post_init__(self) -> None:
        if any("{data}" in word for word in self.words):
            object.__setattr__(self, "takes", self.takes | {"data"})

    @property
    def name(self) -> str:
        """What cases of this part carry."""
        return self.script.removesuffix(".py")


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
FEW_SOURCES = ("--only", "torchtitan", "sailor_e2e", "fms")

SUITES: dict[str, Suite] = {
    "speed": Suite(
        question="what looks, estimates, tables, timelines, refits and start-up cost",
        parts=(Part(script="speed.py", quick=("--parts", "one", "start-up", "--repeats", "2")),),
    ),
    "local": Suite(
        question="training steps on this machine, predicted first and then measured",
        parts=(Part(script="local_accuracy.py", quick=("--quick",), takes=MODELS),),
    ),
    "testbed": Suite(
        question="clusters of network namespaces: steps, splits, strategies, orders, overlap",
        parts=tuple(
            Part(script="testbed_accuracy.py", words=words, is_slow=bool(words))
            for words in ((), ("splits",), ("strategies",), ("orders",), ("overlap",))
        ),
        needs="root",
    ),
    "layouts": Suite(
        question="layouts: ranks that share a model here, and the choice among published ones",
        parts=(
            Part(script="layout_accuracy.py", is_slow=True),
            Part(script="layout_accuracy.py", words=("--pipeline",), is_slow=True),
            Part(script="best_layout.py", quick=("--only", "sailor_e2e"), takes=DATA),
        ),
    ),
    "published": Suite(
        question="steps that others measured and published, from datasheets alone",
        parts=(
            Part(script="published_accuracy.py", quick=FEW_SOURCES, takes=DATA),
            Part(script="known_answers.py", words=("--all",), quick=("--only", "ResNet-50")),
        ),
        times=False,
    ),
    "calibration": Suite(
        question="what a few observed steps teach, beside Pollux, Optimus and linear scaling",
        parts=(
            Part(
                script="calibration_accuracy.py",
                words=("--data", "{data}/pollux_t4.csv"),
                quick=("--data", "{data}/gavel.csv", "--k", "3"),
            ),
            Part(
                script="calibration_pairs.py",
                words=("{data}/gavel.csv", "{data}/pollux_t4.csv", "{data}/dlperf.csv"),
                is_slow=True,
                prints_json=False,
            ),
            Part(script="calibration_changes.py", quick=("--seeds", "1"), prints_json=False),
        ),
        times=False,
    ),
    "collectives": Suite(
        question="published collectives, from half of their sizes, fewer devices, other systems",
        parts=(Part(script="collective_accuracy.py", takes=DATA),),
        times=False,
    ),
    "memory": Suite(
        question="peaks of live tensors, counted on this processor, and published peaks",
        parts=(
            Part(script="memory_accuracy.py", quick=("--only", "gpt2", "resnet")),
            Part(script="memory_recipes.py", words=("--published-only",)),
        ),
        times=False,
    ),
    "swap": Suite(
        question="plans of memory, run on this processor and beside those of other planners",
        parts=(
            Part(script="memory_plan_runs.py", quick=("--only", "resnet")),
            Part(script="memory_plans.py", words=("--graphs", "{work}"), is_slow=True),
        ),
    ),
    "stalls": Suite(
        question="stalls put into real scripts, and those that were measured on clouds",
        parts=(
            Part(script="stall_headlines.py"),
            Part(script="stall_accuracy.py", is_slow=True),
        ),
    ),
    "probe": Suite(
        question="the probe against itself, links of known rate, and other work beside it",
        parts=(
            Part(script="probe_accuracy.py", quick=("--parts", "links")),
            Part(script="busy_probe.py", is_slow=True),
        ),
    ),
    "rent": Suite(
        question="what to rent within a time or a price, against brute force",
        parts=(Part(script="rent.py", words=("--data", "{data}"), prints_json=False),),
        times=False,
    ),
    "order": Suite(
        question="orders of ranks for made-up pair matrices, beside the best known",
        parts=(Part(script="rank_order_accuracy.py", quick=("--seeds", "1")),),
        times=False,
    ),
    "schedulers": Suite(
        question="what estimates are worth to schedulers: 512 jobs on 512 GPUs, replayed",
        parts=(
            Part(script="schedulers.py", quick=("--seeds", "0"), prints_json=False),
            Part(
                script="schedulers_measured.py",
                words=("--data", "{data}", "--graphs", "{work}", "--tables", "pollux_t4"),
                is_slow=True,
                prints_json=False,
            ),
        ),
        times=False,
    ),
    "coverage": Suite(
        question="which models of timm and transformers can be traced",
        parts=(
            Part(
                script="traced_models.py",
                words=("--results", "{work}/coverage.jsonl"),
                quick=("--suite", "transformers", "--sample", "8", "--results", "{work}/few.jsonl"),
            ),
        ),
        times=False,
    ),
    "llm": Suite(
        question="published steps of large language models, each asked with its own recipe",
        parts=(
            Part(
                script="llm.py",
                words=("--data", "{data}", "--cache", "{work}/llm"),
                quick=("--only", "Llama-3-8B"),
            ),
        ),
        times=False,
    ),
    "gpu": Suite(
        question="training steps on this machine's GPU, predicted first and then measured",
        parts=(Part(script="gpu_accuracy.py", is_slow=True),),
        needs="gpu",
    ),
}
