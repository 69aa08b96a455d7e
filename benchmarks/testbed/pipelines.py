"""Run torch's pipeline schedules on an allocation of a testbed, and time their steps."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from estimator.workload.schedules import Schedule

from .launch import place
from .network import Testbed
from .processes import join_node, run_ranks

PACE_MODULE = f"{__package__}.paced"
# A wait for what is there already is over within tens of microseconds.
_BLOCKED_S = 5e-4
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def step_seconds(
    bed: Testbed,
    model: str,
    allocation: str,
    *,
    schedule: Schedule,
    micro_batches: int,
    layers: Sequence[int],
    steps: int = 5,
    timeout_s: float = 300.0,
) -> float:
    """Median seconds of a step of the slowest rank of a paced model cut into stages.

    `layers` are how many layers each stage has, in the order of the model; a micro-batch is the
    model's batch. Raises TrainingError.
    """
    found = run_ranks(
        bed,
        place(bed, allocation),
        f"{__name__}:train_rank",
        {
            "model": model,
            "schedule": str(schedule),
            "micro_batches": micro_batches,
            "layers": list(layers),
            "steps": steps,
        },
        what=f"training {model} in stages on the testbed",
        timeout_s=timeout_s,
        imported=(PACE_MODULE, __name__),
    )
    return max(statistics.median(times) for times in found)


def train_rank(rank: int, count: int, arguments: Mapping[str, Any]) -> list[float]:
    """One rank: its seconds of every step that counts."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    torch.set_num_threads(1)
    join_node(rank, arguments)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments["timeout_s"]))
    step = _pipeline(rank, count, arguments)
    times = []
    with restarting_at_waits():
        for number in range(arguments["steps"] + 1):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number:
                times.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return times


@contextlib.contextmanager
def restarting_at_waits() -> Iterator[None]:
    """Meanwhile the next piece of work begins when what was sent or is received has come.

    What a thread does besides stays hidden behind its work where nothing kept it waiting.
    """
    import torch.distributed as torch_distributed

    from . import paced

    work: Any = torch_distributed.Work
    original = work.wait

    def wait(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = original(*args, **kwargs)
        if time.perf_counter() - began > _BLOCKED_S:
            paced.pace.restart()
        return found

    work.wait = wait
    try:
        yield
    finally:
        work.wait = original


def _pipeline(rank: int, ranks: int, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """A step of this rank's stages, its update included."""
    import torch
    from torch.distributed.pipelining.stage import PipelineStage

    from . import paced

    model, inputs = getattr(paced, arguments["model"])()
    schedule, micro_batches = Schedule.parse(arguments["schedule"]), arguments["micro_batches"]
    cuts = [0]
    for count in arguments["layers"]:
        cuts.append(cuts[-1] + count)
    held = schedule.stages_of(rank, ranks)
    stages = []
    for number in held:
        part = model[cuts[number] : cuts[number + 1]]
        given = inputs if number == 0 else inputs.clone().requires_grad_()
        device = torch.device("cpu")
        stages.append(PipelineStage(part, number, len(cuts) - 1, device, input_args=(given,)))
    held_layers = torch.nn.ModuleList(model[cuts[n] : cuts[n + 1]] for n in held)
    return step_of(
        schedule,
        stages,
        inputs,
        micro_batches,
        loss=_loss,
        targets=torch.zeros(len(inputs)),
        update=paced.PacedUpdate(held_layers),
    )


def step_of(
    schedule: Schedule,
    stages: Sequence[Any],
    inputs: Any,
    micro_batches: int,
    *,
    loss: Callable[[Any, Any], Any],
    targets: Any,
    update: Any,
) -> Callable[[], None]:
    """A step of a rank's stages by torch's schedule; `inputs`, `targets` are a micro-batch's."""
    import torch
    from torch.distributed import pipelining

    kind = getattr(pipelining, CLASSES[schedule.name])
    one = schedule.name in ("gpipe", "1f1b")
    made = kind(stages[0] if one else stages, micro_batches, loss_fn=loss, scale_grads=False)
    batch, wanted = (torch.cat([each] * micro_batches) for each in (inputs, targets))
    first, last = (any(getattr(s, f"is_{end}") for s in stages) for end in ("first", "last"))

    def step() -> None:
        update.zero_grad()
        made.step(*([batch] if first else []), **({"target": wanted} if last else {}))
        update.step()

    return step


def _loss(output: Any, _target: Any) -> Any:
    return output[:, 0].sum()
