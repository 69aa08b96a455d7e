"""FSDP and HSDP for real: which collectives of which ranks a step consists of, in order."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from estimator.errors import StrategyError
from estimator.graph.trace.trace import trace_graph
from estimator.machines.profile import Device
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.devices.host import dtensor_costs
from estimator.probe.devices.ranks import run_on_devices
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.validate.training import shard_model
from estimator.workload.strategies import FSDP, Strategy

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
RANKS = 4
DEVICES = tuple(
    Device(
        kind="cpu",
        index=rank,
        name="core",
        memory_bytes=1 << 30,
        cores=(CORES[rank % len(CORES)],) if CORES else (),
    )
    for rank in range(RANKS)
)
MODEL = """
import torch
from torch import nn

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def embedded():
    return Embedded(), torch.zeros(2, dtype=torch.long)
"""
# Bytes of a block in fp32, and of the rest: an embedding and a head of 8 × 4 elements each.
BLOCK, REST = 4 * 16, 4 * 64
SHORT = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "scatter",
    "reduce_scatter_tensor": "scatter",
    "all_reduce": "reduce",
}


# How a model is sharded, how many micro-batches a step has, and whether each merges gradients.
VARIANTS = {
    "fsdp": ("fsdp", 1, True),
    "two micro-batches": ("fsdp", 2, True),
    "no gradient sync": ("fsdp", 2, False),
    "hsdp": ("fsdp:shard=2", 1, True),
    "no reshard": ("fsdp:no_reshard", 2, True),
    "dtypes": ("fsdp:param=bf16,reduce=fp32", 1, True),
}
Collectives = list[tuple[str, int, list[int]]]


def collectives_of_steps(
    _rank: int, world_size: int, arguments: Mapping[str, Any]
) -> dict[str, Collectives]:
    """(what, bytes, ranks) of the collectives in every variant's second step; all block."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    noted: Collectives = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            work = function(*args, **kwargs)
            assert work is None
            most = max(value.nbytes for value in given.values() if hasattr(value, "nbytes"))
            noted.append((SHORT[name], most, dist.get_process_group_ranks(given["group"])))
            return work

        return call

    for name in SHORT:
        if hasattr(dist, name):
            setattr(dist, name, noting(name, getattr(dist, name)))
    found = {}
    for variant, (text, accumulation_steps, merges_each) in VARIANTS.items():
        strategy = cast("FSDP", Strategy.parse(text))
        run = sharded_training(arguments["model"], world_size, strategy, accumulation_steps)
        run.merges_each = merges_each
        run.step()
        noted.clear()
        run.step()
        found[variant] = list(noted)
    return found


def sharded_training(model: str, world_size: int, strategy: FSDP, micro_batches: int) -> Any:
    import torch

    from estimator.validate import training

    arguments = {
        "model": model,
        "batch": None,
        "seq_len": None,
        "kind": "cpu",
        "phases": False,
        "optimizer": "sgd",
        "precision": "fp32",
        "strategy": "ddp",
        "accumulation_steps": micro_batches,
    }
    run = training.Training(arguments, world_size=1)
    shard_model(run.model, world_size, strategy, kind="cpu")
    run.optimizer = torch.optim.SGD(run.model.parameters())
    return run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What each rank did in a step of each variant, in rank order."""
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        # Ranks search modules where their caller does.
        patch.syspath_prepend(str(Path(__file__).parent))
        yield run_on_devices(
            DEVICES,
            "test_sharding:collectives_of_steps",
            {"model": f"{path}:embedded"},
            timeout_s=120.0,
            world=True,
        )


def gathers(ranks: list[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """The gatherings of a forward pass, then those before and between the backward blocks."""
    block, rest = ["gather", BLOCK, ranks], ["gather", REST, ranks]
    return [rest, block, block, block], [block, block], [block]


def scatters(ranks: list[int]) -> tuple[list[Any], list[Any]]:
    return ["scatter", BLOCK, ranks], ["scatter", REST, ranks]


def test_fsdp_gathers_blocks_twice_and_the_rest_once_and_scatters_each(found) -> None:
    everyone = list(range(RANKS))
    forward, ahead, between = gathers(everyone)
    block, rest = scatters(everyone)
    # Blocks 2 and, ahead of its need, 1 are gathered before block 2 computes; the rest's gradients
    # come last.
    backward = [*ahead, block, *between, block, block, rest]
    for each in found:
        assert each["fsdp"] == [*forward, *backward]
        assert each["two micro-batches"] == 2 * [*forward, *backward]


def test_without_gradient_sync_only_the_last_micro_batch_scatters(found) -> None:
    everyone = list(range(RANKS))
    forward, ahead, between = gathers(everyone)
    block, rest = scatters(everyone)
    first, last = [*ahead, *between], [*ahead, block, *between, block, block, rest]
    for each in found:
        assert each["no gradient sync"] == [*forward, *first, *forward, *last]


def test_hsdp_shards_over_successive_ranks_and_reduces_shards_between_groups(found) -> None:
    for rank, each in enumerate(found):
        group = [0, 1] if rank < 2 else [2, 3]
        forward, ahead, between = gathers(group)
        # Each of the two ranks of a group holds, and merges with the other group, a half.
        replicas = [rank % 2, rank % 2 + 2]
        block = [["scatter", BLOCK, group], ["reduce", BLOCK // 2, replicas]]
        rest = [["scatter", REST, group], ["reduce", REST // 2, replicas]]
        backward = [*ahead, *block, *between, *block, *block, *rest]
        assert each["hsdp"] == [*forward, *backward]


def test_blocks_that_are_not_resharded_are_gathered_once(found) -> None:
    everyone = list(range(RANKS))
    forward, *_ = gathers(everyone)
    block, rest = scatters(everyone)
    for each in found:
        assert each["no reshard"] == 2 * [*forward, block, block, block, rest]


def test_parameters_are_gathered_in_one_dtype_and_gradients_scattered_in_another(found) -> None:
    graph = trace_graph(
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))),
        torch.zeros(2, 4),
        precision="bf16",
    )
    strategy = Strategy.parse(VARIANTS["dtypes"][0])
    passes = ShardedPasses.of(graph, strategy.shard_dtypes(graph.precision))
    assert set(passes.gathered_bytes[1:]) == {BLOCK / 2}
    assert set(passes.reduced_bytes[1:]) == {BLOCK}
    for each in found:
        sizes = {
            what: {size for name, size, _ in each["dtypes"] if name == what}
            for what in ("gather", "scatter")
        }
        assert sizes == {"gather": {BLOCK / 2, REST / 2}, "scatter": {BLOCK, REST}}


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"4 ranks .* over 3 each"):
        shard_model(None, 4, FSDP(shard=3), kind="cpu")


class HostOfGpu(CpuBackend):
    """What a GPU's host does, with tensors of its own."""

    kind = "cuda"


@pytest.mark.parametrize("backend", [CpuBackend(), HostOfGpu()])
def test_dtensor_costs_the_host_more_than_plain_modules(backend: CpuBackend) -> None:
    # No kernel of a GPU's update evicts the host's code.
    own = () if backend.kind == "cuda" else ("update_tensor_s",)
    names = "forward_s", "backward_s", "exchange_s", *own

    def is_more() -> bool:
        found = dtensor_costs(backend)
        assert set(found) == {f"dtensor_{name}" for name in names}
        # Several Python dispatches for each: tens of microseconds at least on any machine.
        return all(seconds > 1e-5 for seconds in found.values())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Other programs may slow the plain ones down.
        assert any(is_more() for _ in range(5))
    finally:
        torch.set_num_threads(threads)
