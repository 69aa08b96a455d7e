"""Set operators timed in a replay beside the same operators in real steps, second by second.

``python benchmarks/paired_steps.py MODEL`` lets four processes on one core take turns: a training
step, the same step in another process, a step with a clock around every operator, a replay as
`estimator.probe.ops` makes it. What the first two differ by is the machine's doing; a replay that
differs from its step by no more has nothing wrong with it that a better replay could mend.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from op_report import clock_operators, make_step
from records import say
from summary import format_table, percent

from estimator.machines.catalogue import load_profile

KINDS = ("step", "control", "clocked", "replay")
WARM_UPS = 2
SETTLED_S = 300.0

Round = Mapping[str, Mapping[str, float]]


def take_turns(connection: Connection, kind: str, model: str, cores: Sequence[int]) -> None:
    """One process: each time it is asked, run once to have its own caches, then once for real."""
    import torch

    from estimator.probe.devices.backend import keep_memory_resident

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    keep_memory_resident()
    run = replayed(model) if kind == "replay" else stepped(model, clocked=kind == "clocked")
    for _ in range(WARM_UPS):
        run()
    connection.send({})
    while connection.recv():
        run()
        connection.send(run())


def stepped(model: str, *, clocked: bool) -> Callable[[], dict[str, float]]:
    """A training step: its seconds by phase, of its operators alone if clocked."""
    step = make_step(model, None)

    def run() -> dict[str, float]:
        if not clocked:
            names = ("forward", "backward", "update")
            return dict(zip(names, step(lambda _: None), strict=True))
        found: dict[str, float] = {}
        seen, _ = clock_operators(step, steps=1)
        for (phase, _, _), (seconds,) in seen.items():
            found[phase] = found.get(phase, 0.0) + sum(seconds)
        return found

    return run


def replayed(model: str) -> Callable[[], dict[str, float]]:
    """A pass of the replay: seconds of its operators by phase."""
    import torch

    from estimator.api import trace_model
    from estimator.graph.models.model_text import load_model
    from estimator.probe.devices.backend import CpuBackend
    from estimator.probe.grid.kernels import prepare
    from estimator.probe.ops import TimedStep, distinct_calls, replay_plan, update_plan

    module, batch, loss, _ = load_model(model)
    bound = trace_model(module, batch, loss=loss).at()
    plan = replay_plan(bound)
    plan["update"] = update_plan(bound.graph, len(distinct_calls(bound)))
    backend = CpuBackend()
    prepare(backend, lambda _: None, budget_s=3.0)
    step = TimedStep(backend, plan, math.inf)
    phases = [op.phase for op in bound.graph.ops]

    def run() -> dict[str, float]:
        with torch.enable_grad():
            step.run()
        found = {"forward": 0.0, "backward": 0.0, "update": step.update.samples[-1]}
        for phase, samples in zip(phases, step.samples, strict=True):
            found[phase] += samples[-1]
        return found

    return run


def rounds_of(model: str, count: int, cores: Sequence[int]) -> list[Round]:
    """So many rounds of all processes, one after the other."""
    context = multiprocessing.get_context("spawn")
    ends = {}
    for kind in KINDS:
        ends[kind], end = context.Pipe()
        context.Process(target=take_turns, args=(end, kind, model, cores), daemon=True).start()
        if not ends[kind].poll(SETTLED_S):
            raise SystemExit(f"the {kind} of {model} took no step within {SETTLED_S:.0f} s")
        ends[kind].recv()
    found = []
    for number in range(count):
        one = {}
        for kind, end in ends.items():
            end.send(True)
            one[kind] = end.recv()
        found.append(one)
        say(f"round {number + 1}/{count}: {1e3 * sum(one['step'].values()):.0f} ms a step")
    for end in ends.values():
        end.send(False)
    return found


def apart(rounds: Sequence[Round], one: str, other: str) -> tuple[float, float]:
    """(median, median without sign) of how much longer `one` takes than `other` in a round.

    >>> apart([{"a": {"forward": 3.0}, "b": {"forward": 2.0}}], "a", "b")
    (0.5, 0.5)
    """
    ratios = [sum(each[one].values()) / sum(each[other].values()) - 1 for each in rounds]
    return statistics.median(ratios), statistics.median(map(abs, ratios))


def describe(rounds: Sequence[Round]) -> str:
    """Milliseconds by phase, then how far the pairs are apart."""
    lines = [["ms", *rounds[0]["step"]]]
    for kind in KINDS:
        phases = rounds[0]["step"]
        middle = [statistics.median(each[kind][phase] for each in rounds) for phase in phases]
        lines.append([kind, *(f"{1e3 * seconds:.1f}" for seconds in middle)])
    pairs = [["", "median", "median without sign"]]
    for one, other in (("control", "step"), ("replay", "clocked"), ("replay", "step")):
        signed, unsigned = apart(rounds, one, other)
        pairs.append([f"{one} beside {other}", percent(signed, "+"), percent(unsigned)])
    return f"{format_table(lines)}\n\n{format_table(pairs)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Take turns, then print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="MODEL text, such as benchmarks/local_models.py:gpt2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", default="local", help="name or path of this machine's profile")
    options = parser.parse_args(arguments)
    cores = load_profile(options.profile).devices[0].cores
    print(describe(rounds_of(options.model, options.rounds, cores)))


if __name__ == "__main__":
    main()
