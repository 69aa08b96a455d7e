"""Train models that torch's own parallelism divides on an allocation of a testbed."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

from estimator.graph.partition.plan import Plan
from estimator.workload.layouts import Layout

from . import pipelines
from .launch import place
from .network import Testbed
from .processes import join_node, run_ranks

PACE_MODULE = f"{__package__}.paced"


def step_seconds(
    bed: Testbed,
    model: str,
    allocation: str,
    *,
    layout: str,
    plan: Plan | None,
    strategy: str,
    flops_per_s: float,
    steps: int,
    micro_batches: int = 1,
    points: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> float:
    """Median seconds of a step of the slowest rank of a model of `layout_paces`.

    Its products wait as on a device of `flops_per_s`; `points` are the blocks at which the stages
    after the first begin. Raises TrainingError.
    """
    found = run_ranks(
        bed,
        place(bed, allocation),
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
        timeout_s=timeout_s,
        imported=(
            *(PACE_MODULE, __name__, pipelines.__name__),
            *("layout_oracle", "torch.distributed.fsdp", "torch.distributed.pipelining"),
        ),
    )
    return max(statistics.median(times) for times in found)


def train_rank(rank: int, count: int, arguments: Mapping[str, Any]) -> list[float]:
    """One rank, in its own process: its seconds of every step after the first two."""
    import torch
    import torch.distributed as torch_distributed

    from . import paced, paced_products

    dist: Any = torch_distributed
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    join_node(rank, arguments)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments["timeout_s"]))
    paced_products.install(arguments["flops_per_s"])
    is_staged = Layout.parse(arguments["layout"]).pp > 1
    step = _staged_step(count, arguments) if is_staged else _step(count, arguments)
    times = []
    waits = pipelines.restarting_at_waits() if is_staged else contextlib.nullcontext()
    with paced.pausing_at_collectives(), waits:
        for number in range(arguments["steps"] + 2):
            dist.barrier()
            began = time.perf_counter()
            step()
            if number > 1:
                times.append(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return times


def _step(ranks: int, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """A step of a rank, its update included."""
    from layout_paces import MODELS
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from . import paced

    layout = Layout.parse(arguments["layout"])
    model, batch = MODELS[arguments["model"]]()
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
    update = paced.PacedUpdate(model)

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


def _staged_step(ranks: int, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """A step of a rank with stages of a decoder, which tp ranks divide and dp ranks repeat."""
    import torch
    from layout_paces import MODELS
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining.stage import PipelineStage

    from . import paced

    layout = Layout.parse(arguments["layout"])
    model, batch = MODELS[arguments["model"]]()
    shape = (layout.pp, ranks // (layout.pp * layout.tp), layout.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    if layout.tp > 1:
        _divide(model, mesh["tp"], arguments["styles"], layout)
    parts = staged(model, [int(point.rpartition(".")[2]) for point in arguments["points"]])
    held = layout.schedule.stages_of(mesh.get_local_rank("pp"), layout.pp)
    width = model.norm.weight.shape[0]
    stages = []
    for number in held:
        given = torch.zeros(*batch.shape, width, requires_grad=True) if number else batch
        part = _replicated(parts[number], mesh["dp"], sharded=False, staged=True)
        where = {"device": torch.device("cpu"), "group": mesh.get_group("pp")}
        stages.append(PipelineStage(part, number, len(parts), input_args=(given,), **where))
    return pipelines.step_of(
        layout.schedule,
        stages,
        batch,
        arguments["micro_batches"],
        loss=lambda logits, ids: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.flatten()
        ),
        targets=batch,
        update=paced.PacedUpdate(torch.nn.ModuleList(parts[number] for number in held)),
    )


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
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    layers = range(model.config.num_hidden_layers)
    plan = {
        pattern.replace("*", str(layer)): style
        for layer in layers
        for pattern, style in model.config.base_model_ep_plan.items()
    }
    apply_expert_parallelism(model.model, mesh["dp"], mesh["tp"], plan, "all_to_all")
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
