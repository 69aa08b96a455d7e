"""Have SkyPilot's optimizer choose instances by how long training takes on them.

``python examples/skypilot_task.py`` needs skypilot, and a cloud that ``sky check`` found. By time
the fastest instance is taken, by cost the one whose price times time is least.
"""

from __future__ import annotations

from typing import Any

from demo_models import resnet18

import estimator as est
from estimator.integrations.schedulers.launchers import time_estimator

# Instance types with the accelerators that SkyPilot's catalogue lists for them.
INSTANCES = {"g4dn.12xlarge": "T4:4", "p3.8xlarge": "V100:4", "p4d.24xlarge": "A100:8"}


def choose(graph: est.OpGraph, *, samples: float, nodes: int, target: str) -> Any:
    """The resources that SkyPilot takes for a training; `target` is TIME or COST."""
    import sky

    with sky.Dag() as dag:
        task = sky.Task(run="torchrun train.py", num_nodes=nodes)
        task.set_resources(
            {
                sky.Resources(infra="aws/us-east-1", instance_type=name, accelerators=count)
                for name, count in INSTANCES.items()
            }
        )
        task.set_time_estimator(time_estimator(graph, samples=samples, nodes=nodes))
    sky.Optimizer.optimize(dag, minimize=sky.OptimizeTarget[target], quiet=True)
    return task.best_resources


if __name__ == "__main__":
    traced = est.trace_model(*resnet18(64), target="cuda")
    for wanted in ("TIME", "COST"):
        print(wanted, choose(traced, samples=1e8, nodes=2, target=wanted))
