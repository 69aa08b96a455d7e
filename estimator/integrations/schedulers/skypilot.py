"""Tell SkyPilot's optimizer how long a task takes: ``task.set_time_estimator(…)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estimator.api import estimate
from estimator.errors import UnknownMachineError
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import known_machines, load_profile


def time_estimator(
    graph: OpGraph, *, samples: float, nodes: int = 1, **asked: Any
) -> Callable[[Any], int]:
    """A function of ``sky.Resources`` that gives the seconds of training on so many nodes.

    The machine is that of the resources' instance type, else the first with such accelerators.
    `asked` goes to `estimate`. The function raises UnknownMachineError for what has no profile.
    """

    def seconds(resources: Any) -> int:
        machine, devices = machine_of(resources.instance_type, resources.accelerators)
        answer = estimate(graph, f"{nodes}x{devices}:{machine}", **asked)
        return round(answer.duration_s(samples=samples))

    return seconds


def machine_of(instance_type: str | None, accelerators: dict[str, Any] | None) -> tuple[str, int]:
    """The machine type of an instance, and how many of its devices; raises UnknownMachineError.

    >>> machine_of("p4d.24xlarge", {"A100": 8}), machine_of(None, {"T4": 2})
    (('a100-p4d', 8), ('t4-g4dn', 2))
    """
    wanted = next(iter((accelerators or {}).items()), None)
    profiles = [load_profile(name) for name in known_machines()]
    for profile in profiles:
        if instance_type and profile.hardware.get("instance_type") == instance_type:
            return profile.name, int(wanted[1]) if wanted else len(profile.devices)
    if wanted is not None:
        words = wanted[0].upper().replace("-", " ").split()
        # Of those that clouds rent first.
        for profile in sorted(profiles, key=lambda each: "instance_type" not in each.hardware):
            name = profile.devices[0].name.upper().split()
            if all(word in name for word in words) and len(profile.devices) >= wanted[1]:
                return profile.name, int(wanted[1])
    raise UnknownMachineError(
        f"no machine profile is known of {instance_type or accelerators}; see 'estimator "
        "machines list', or probe one"
    )
