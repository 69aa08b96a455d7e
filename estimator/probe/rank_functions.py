"""List the functions that rank 0 can have other ranks run: nothing else is ever called for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from estimator.errors import ProbeError
from estimator.probe import messages
from estimator.probe.network import time_flows, time_pairs
from estimator.probe.overlap import time_rank
from estimator.probe.shapes import time_shape

FunctionName = Literal[
    "time_canary", "time_pairs", "time_flows", "time_shape", "time_overlap", "probe_own_machine"
]
# Longer than the period in which Linux rations CPU time, 0.1 s by default.
_CANARY_TURNS, _CANARY_TURN_S = 3, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFunction:
    """What is called, the schemas of its arguments, and of each report or of the result.

    In a process group it is called with ``(rank, world_size, arguments)``; one that runs `alone`,
    in the rank's own process, with ``(arguments, is_called_off)``.
    """

    call: Callable[..., Any]
    arguments: type[BaseModel]
    answer: TypeAdapter[Any]
    alone: bool = False


def time_canary(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> None:
    """Report how long this rank's device takes for the probe's fixed matmul.

    On average and not in the middle: a node whose CPU time is rationed computes at full speed most
    of the time, and not at all in between.
    """
    import torch

    from estimator.probe.backend import open_backend
    from estimator.probe.canary import canary_s
    from estimator.probe.ranks import report

    on_cuda = arguments["kind"] == "cuda"
    backend = open_backend(arguments["kind"], torch.cuda.current_device() if on_cuda else 0)
    means_s = []
    for _ in range(_CANARY_TURNS):
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + _CANARY_TURN_S:
            canary_s(backend)
            count += 1
        means_s.append((time.perf_counter() - began) / count)
    # Other programs only ever add to it.
    report(min(means_s))


def probe_own_machine(
    arguments: Mapping[str, Any], is_called_off: Callable[[], bool]
) -> dict[str, Any]:
    """The profile of the machine this is called on, as JSON values; called off, what there is."""
    from estimator.probe.machine import probe_machine

    def poll(_part: str, _ratio: float) -> None:
        if is_called_off():
            raise KeyboardInterrupt

    return probe_machine(
        name=arguments["name"],
        devices=arguments["devices"],
        budget_s=arguments["budget_s"],
        kind=arguments["kind"],
        report=poll,
        # Ranks that wait for each other are busy themselves.
        patience_s=0.0,
    ).to_dict()


FUNCTIONS: Mapping[FunctionName, RankFunction] = {
    "time_canary": RankFunction(
        call=time_canary,
        arguments=messages.CanaryArguments,
        answer=TypeAdapter(messages.Positive),
    ),
    "time_pairs": RankFunction(
        call=time_pairs,
        arguments=messages.PairsArguments,
        answer=TypeAdapter(messages.PairReport),
    ),
    "time_flows": RankFunction(
        call=time_flows,
        arguments=messages.FlowsArguments,
        answer=TypeAdapter(messages.FlowReport),
    ),
    "time_shape": RankFunction(
        call=time_shape,
        arguments=messages.ShapeArguments,
        answer=TypeAdapter(messages.ShapeReport),
    ),
    "time_overlap": RankFunction(
        call=time_rank,
        arguments=messages.OverlapArguments,
        answer=TypeAdapter(messages.OverlapReport),
    ),
    "probe_own_machine": RankFunction(
        call=probe_own_machine,
        arguments=messages.MachineArguments,
        answer=TypeAdapter(dict[str, Any]),
        alone=True,
    ),
}


def function_named(name: str) -> RankFunction:
    """The listed function of that name; raises ProbeError where there is none."""
    for known, function in FUNCTIONS.items():
        if known == name:
            return function
    raise ProbeError(
        f"rank 0 asks for '{name[:100]}', which is none of the probe's functions; install the same "
        "version on all nodes"
    )
