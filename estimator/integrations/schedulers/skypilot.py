"""Tell SkyPilot's optimizer how long a task takes: ``task.set_time_estimator(…)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estimator.api import estimate
from estimator.errors import UnknownMachineError
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import known_machines, load_profile
from estimator.machines.prices import PriceList


def time_estimator(
    graph: OpGraph, *, samples: float, nodes: int = 1, **options: Any
) -> Callable[[Any], int]:
    """A function of ``sky.Resources`` that gives the seconds of training on so many nodes.

    The machine is that of the resources' instance type, else the cheapest of their cloud with such
    accelerators, by the names of SkyPilot's catalogue. `options` go to `estimate`. The function
    raises UnknownMachineError for what has no profile.
    """

    def seconds(resources: Any) -> int:
        cloud = str(getattr(resources, "cloud", None) or "")
        machine, devices = machine_of(resources.instance_type, resources.accelerators, cloud)
        answer = estimate(graph, f"{nodes}x{devices}:{machine}", **options)
        return round(answer.duration_s(samples=samples))

    return seconds


def machine_of(
    instance_type: str | None, accelerators: dict[str, Any] | None, cloud: str = ""
) -> tuple[str, int]:
    """The machine type of an instance, and how many of its devices; raises UnknownMachineError.

    >>> machine_of("p4d.24xlarge", {"A100": 8}), machine_of(None, {"V100": 8})
    (('a100-p4d', 8), ('v100-p3', 8))
    """
    name, count = next(iter((accelerators or {}).items()), ("", 0))
    if instance_type:
        for machine in known_machines():
            profile = load_profile(machine)
            if profile.hardware.get("instance_type") == instance_type:
                return profile.name, int(count or len(profile.devices))
    sold = [
        price
        for price in PriceList.load().prices
        if price.accelerator.upper() == name.upper() != ""
        and price.devices >= count
        and cloud.lower() in ("", price.cloud)
        and (not instance_type or price.instance_type == instance_type)
    ]
    if not sold:
        raise UnknownMachineError(
            f"no machine profile is known of {instance_type or accelerators}; see 'estimator "
            "machines list', or probe one"
        )
    # SkyPilot too takes the cheapest, where the instance is left open.
    cheapest = min(sold, key=lambda price: price.usd_per_hour or float("inf"))
    return cheapest.machine, int(count)
