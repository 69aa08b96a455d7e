"""Probe beside other work: the profile agrees with that of the quiet machine, or is refused.

Each case probes while a process of ours keeps one core busy for some of the time, and compares the
profile with one probed alone: the median difference over all entries, and the step times of four
models. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from options import Options
from probe_accuracy import judged
from records import say

import estimator as est
from estimator.errors import ProbeError
from estimator.graph.models import load_model
from estimator.machines.comparison import compare_profiles, median_difference_ratio
from estimator.machines.profile import MachineProfile
from estimator.probe.machine import probe_machine

BOUND_RATIO, BUDGET_S = 0.10, 60.0
MODELS = (
    "examples/demo_models.py:gpt2",
    "examples/demo_models.py:resnet18",
    "hf:bert,num_hidden_layers=4",
    "hf:vit,num_hidden_layers=4",
)
TURN_S = 0.1

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hog:
    """Work of others: one core for a share of the time, and for how many seconds."""

    share: float
    lasts_s: float = 600.0

    def __str__(self) -> str:
        until = "" if self.lasts_s >= 600 else f", {self.lasts_s:.0f} s"
        return f"{100 * self.share:.0f} % of a core{until}"


CASES = {
    # Nobody works beside it: how far two quiet profiles are apart.
    "none": Hog(0.0),
    "all": Hog(1.0),
    "ends": Hog(1.0, lasts_s=10.0),
    "two-fifths": Hog(0.4),
    "a-fifth": Hog(0.2),
}


def run(options: Options) -> Iterator[Row]:
    """Probe alone, then beside each kind of work."""
    graphs = {text: traced(text) for text in MODELS}
    quiet = probe_machine(budget_s=BUDGET_S, strict=True, say=say)
    say(f"alone: {quiet.interference}")
    for name, hog in CASES.items():
        if options.takes(name):
            found = probed_beside(hog, quiet, BUDGET_S)
            if isinstance(found, MachineProfile):
                yield from compared(str(hog), quiet, found, graphs)
            else:
                yield found


def traced(text: str) -> est.OpGraph:
    """The graph of a model for cores."""
    model, batch, loss, name = load_model(text, batch=4, weights=False)
    return est.trace_model(model, batch, loss=loss, target="cpu", name=name)


def probed_beside(hog: Hog, quiet: MachineProfile, budget_s: float) -> MachineProfile | Row:
    """The profile probed beside that work, or the row that says why it was refused."""
    began = time.monotonic()
    with running(hog):
        try:
            found = probe_machine(budget_s=budget_s, strict=True, earlier=quiet, say=say)
        except ProbeError as error:
            return judged(str(hog), "refused", 0.0, BOUND_RATIO, note=str(error))
    say(f"{hog}: {found.interference}; {time.monotonic() - began:.0f} s in all")
    return found


def compared(
    beside: str, quiet: MachineProfile, found: MachineProfile, graphs: Mapping[str, est.OpGraph]
) -> list[Row]:
    """How far it is off: over all entries, and in the steps of models."""
    now_s, then_s = found.canary_s or math.nan, quiet.canary_s or math.nan
    note = f"{found.interference}; canary {1e3 * now_s:.2f} ms, was {1e3 * then_s:.2f}; "
    note += f"{len(found.missing)} parts missing, were {len(quiet.missing)}"
    entries = [row for row in compare_profiles(quiet, found) if row.unit != "bytes"]
    total = f"all {len(entries)} entries"
    rows = [judged(beside, total, median_difference_ratio(entries), BOUND_RATIO, note=note)]
    for graph in graphs.values():
        before, after = (
            est.estimate(graph, "1x1:local", profile=profile) for profile in (quiet, found)
        )
        off_ratio = after.step_time_s / before.step_time_s - 1
        width = f"{100 * off_ratio:+.1f} %, interval a factor of "
        width += f"{after.high_s / after.step_time_s:.2f}, was "
        width += f"{before.high_s / before.step_time_s:.2f}"
        name = f"step of {graph.name}"
        rows.append(judged(beside, name, abs(off_ratio), BOUND_RATIO, note=width))
    return rows


@contextlib.contextmanager
def running(hog: Hog) -> Iterator[None]:
    """A process that works as others do, gone afterwards."""
    code = (
        "import time\n"
        f"end = time.monotonic() + {hog.lasts_s}\n"
        "while (now := time.monotonic()) < end:\n"
        f"    while time.monotonic() < now + {hog.share * TURN_S}: pass\n"
        f"    time.sleep({(1 - hog.share) * TURN_S})\n"
    )
    # Left behind by a shell that ends: what descends from this process would count as the probe's.
    started = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(started.stdout), signal.SIGKILL)
