"""Train models that torch's own parallelism divides, layers or stages, on a testbed's ranks."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from estimator.graph.partition.plan import Plan
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule

from .network import Testbed
from .processes import PACED, joined, run_ranks, timed_steps

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
    layout: str,
    plan: Plan | None = None,
    strategy: str = "ddp",
    flops_per_s: float | None = None,
    steps: int,
    micro_batches: int = 1,
    points: Sequence[str] = (),
) -> float:
    """Median seconds of a step of the slowest rank of a model of `layout_paces` or `paced`.

    The products of the former wait as on a device of `flops_per_s`; `points` are the blocks or
    layers at which the stages after the first begin. Raises TrainingError.
    """
    found = run_ranks(
        bed,
        allocation,
        f"{__name__}:train_rank",
        {
            "model": model,
            "layout": layout,
            "styles": plan.styles if plan else (),
            "sharded": strategy.startswith("fsdp"),
            "flops_per_s": flops_per_s,
            "steps": steps,
            "micro_batches": micro_batches,
            "points": list(points),
        },
        what=f"training {model} divided on the testbed",
        imported=(
            *(PACED, "layout_oracle"),
            *("torch.distributed.fsdp", "torch.distributed.pipelining"),
        ),
    )
    return max(statistics.median(times) for times in found)


def train_rank(rank: int, _count: int, arguments: Mapping[str, Any]) -> list[float]:
    """One rank, in its own process: its seconds of every step after the first two."""
    from layout_paces import MODELS

    from . import paced, paced_products

    warnings.filterwarnings("ignore")
    with joined(rank, arguments) as dist:
        if arguments["flops_per_s"] is not None:
            paced_products.install(arguments["flops_per_s"])
        built = (MODELS.get(arguments["model"]) or getattr(paced, arguments["model"]))()
        step = rank_step(dist.get_world_size(), built, arguments, paced.PacedUpdate)
        is_staged = Layout.parse(arguments["layout"]).pp > 1
        waits = restarting_at_waits() if is_staged else contextlib.nullcontext()
        with paced.pausing_at_collectives(), waits:
            return timed_steps(dist, step, warmup=2, steps=arguments["steps"])


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


def rank_step(
    ranks: int,
    built: tuple[Any, Any],
    arguments: Mapping[str, Any],
    update_of: Callable[[Any], Any],
) -> Callable[[], None]:
    """A step of a rank of a layout, its update, that of `update_of(model)`, included."""
    is_staged = Layout.parse(arguments["layout"]).pp > 1
    return (_staged_step if is_staged else _step)(ranks, *built, arguments, update_of)


def _step(
    ranks: int,
    model: Any,
    batch: Any,
    arguments: Mapping[str, Any],
    update_of: Callable[[Any], Any],
) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    layout = Layout.parse(arguments["layout"])
    shape = (ranks // (layout.cp * layout.tp), layout.cp, layout.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    if layout.tp > 1:
        _divide(model, mesh["tp"], arguments["styles"], layout)
    if layout.cp > 1:
        from . import ring

        ring.install(mesh.get_group("cp"), is_ring=layout.ring)
        batch = batch.chunk(layout.cp, dim=1)[0].contiguous()
    if layout.ep > 1:
        _send_to_experts(model, mesh)
    data = mesh["dp", "cp"]._flatten("data") if layout.cp > 1 else mesh["dp"]
    trained = _replicated(model, data, sharded=arguments["sharded"])
    update = update_of(model)

    def step() -> None:
        update.zero_grad()
        found = trained(**batch).loss if isinstance(batch, dict) else trained(batch)
        found.backward()
        for parameter in model.parameters():
            # Gradients of what is whole are summed when they are used.
            if isinstance(parameter.grad, DTensor):
                parameter.grad.redistribute(placements=parameter.placements)
        update.step()

    return step


def _staged_step(
    ranks: int,
    model: Any,
    batch: Any,
    arguments: Mapping[str, Any],
    update_of: Callable[[Any], Any],
) -> Callable[[], None]:
    """A step of a rank with stages of a model, which tp ranks divide and dp ranks repeat."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining.stage import PipelineStage

    layout = Layout.parse(arguments["layout"])
    is_decoder = hasattr(model, "blocks") and hasattr(model, "words")
    shape = (layout.pp, ranks // (layout.pp * layout.tp), layout.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    if layout.tp > 1:
        _divide(model, mesh["tp"], arguments["styles"], layout)
    begins = [int(point.rpartition(".")[2]) for point in arguments["points"]]
    if is_decoder:
        parts = staged(model, begins)
        passed = torch.zeros(*batch.shape, model.norm.weight.shape[0])
    else:
        parts = [model[begin:end] for begin, end in pairwise([0, *begins, len(model)])]
        passed = batch.clone()
    held = layout.schedule.stages_of(mesh.get_local_rank("pp"), layout.pp)
    stages = []
    for number in held:
        given = passed.clone().requires_grad_() if number else batch
        part = _replicated(parts[number], mesh["dp"], sharded=False, staged=True)
        where = {"device": torch.device("cpu"), "group": mesh.get_group("pp")}
        stages.append(PipelineStage(part, number, len(parts), input_args=(given,), **where))
    return step_of(
        layout.schedule,
        stages,
        batch,
        arguments["micro_batches"],
        loss=token_loss if is_decoder else lambda output, _target: output[:, 0].sum(),
        targets=batch if is_decoder else torch.zeros(len(batch)),
        update=update_of(torch.nn.ModuleList(parts[number] for number in held)),
    )


def token_loss(logits: Any, ids: Any) -> Any:
    """Cross-entropy of each token."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1), ids.flatten())


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


def staged(model: Any, begins: Sequence[int]) -> list[Any]:
    """A `layout_models.Decoder` in stages; those after the first begin at these blocks."""
    from torch import nn

    cuts = [0, *begins, len(model.blocks)]
    parts = [nn.Sequential(*model.blocks[begin:end]) for begin, end in pairwise(cuts)]
    parts[0] = nn.Sequential(model.words, *parts[0])
    parts[-1] = nn.Sequential(*parts[-1], model.norm, model.head)
    return parts


def _divide(model: Any, mesh: Any, styles: Any, layout: Layout) -> None:
    """By ``parallelize_module``."""
    from layout_oracle import torch_styles
    from torch.distributed.tensor.parallel import parallelize_module

    plan = Plan(tuple((name, style) for name, style in styles), sequence=layout.sequence)
    parallelize_module(model, mesh, torch_styles(plan, model))


def _send_to_experts(model: Any, mesh: Any) -> None:
    """By transformers' all-to-all; every rank has experts of its own."""
    from layout_oracle import expert_plan
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    of = model.model, mesh["dp"], mesh["tp"], expert_plan(model), "all_to_all"
    apply_expert_parallelism(*of)
    own = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)


def _replicated(model: Any, mesh: Any, *, sharded: bool, staged: bool = False) -> Any:
    """The model under FSDP2 or DDP over the ranks with tokens of their own, if there are any.

    DDP rebuilds its buckets in the first forward pass after a backward one, and fails where several
    backward passes came before, as in GPipe; it does not where it looks for unused parameters.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    from torch.nn.parallel import DistributedDataParallel

    if mesh.size() == 1:
        return model
    if sharded:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if not hasattr(model, "_ddp_params_and_buffers_to_ignore"):
        _pre_dp_module_transform(model)
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        find_unused_parameters=staged,
    )
