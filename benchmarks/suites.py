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

    A part without `quick` words is left out of a quick run where `is_slow`.
    """

    script: str
    words: Words = ()
    quick: Words | None = None
    is_slow: bool = False
    takes: frozenset[str] = frozenset()

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
    "published": Suite(
        question="steps that others measured and published, from datasheets alone",
        parts=(
            Part(script="published_accuracy.py", quick=FEW_SOURCES, takes=DATA),
            Part(script="known_answers.py", words=("--all",), quick=("--only", "mpt-1b")),
        ),
        times=False,
    ),
    "collectives": Suite(
        question="published collectives, from half of their sizes, fewer devices, other systems",
        parts=(Part(script="collective_accuracy.py", takes=DATA),),
        times=False,
    ),
    "layouts": Suite(
        question="layouts: ranks that share a model here, and the choice among published ones",
        parts=(
            Part(script="layout_accuracy.py", is_slow=True),
            Part(script="best_layout.py", quick=("--only", "sailor_e2e"), takes=DATA),
        ),
    ),
    "local": Suite(
        question="training steps on this machine, predicted first and then measured",
        parts=(Part(script="local_accuracy.py", quick=("--quick",), takes=MODELS),),
    ),
    "order": Suite(
        question="orders of ranks for made-up pair matrices, beside the best known",
        parts=(Part(script="rank_order_accuracy.py", quick=("--seeds", "1")),),
        times=False,
    ),
    "gpu": Suite(
        question="training steps on this machine's GPU, predicted first and then measured",
        parts=(Part(script="gpu_accuracy.py", is_slow=True),),
        needs="gpu",
    ),
    "stalls": Suite(
        question="stalls put into real scripts, and those that were measured on clouds",
        parts=(
            Part(script="stall_headlines.py"),
            Part(script="stall_accuracy.py", is_slow=True),
        ),
    ),
    "testbed": Suite(
        question="clusters of network namespaces: steps, splits, strategies, orders, overlap",
        parts=(Part(script="testbed_accuracy.py"),),
        needs="root",
    ),
}
