"""Strategies: parsing and printing are inverse, and the defaults are PyTorch's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from estimator.errors import StrategyError
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision
from estimator.workload.strategies import (
    DDP,
    SAVING_MEMORY,
    SEARCHED,
    SEARCHED_WITH_LAYOUTS,
    ParameterServers,
    Strategy,
)

MIB = 1024 * 1024
strategies = some.builds(
    DDP,
    bucket_cap_bytes=some.integers(1, 1 << 40),
    first_bucket_bytes=some.none() | some.integers(1, 1 << 40),
    gradient_as_bucket_view=some.booleans(),
    bucketed=some.booleans(),
)


@given(strategies)
def test_parsing_undoes_printing(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


servers_of_jobs = some.builds(
    ParameterServers,
    servers=some.integers(1, 1000),
    server_bytes_per_s=some.none() | some.integers(1, 10**12),
    part_bytes=some.none() | some.integers(1 << 16, 10**9),
    **{name: some.booleans() for name in ("asynchronous", "on_workers", "local", "sums_only")},
)


@given(servers_of_jobs)
def test_parsing_undoes_printing_of_servers(strategy: ParameterServers) -> None:
    assert Strategy.parse(str(strategy)) == strategy


def test_servers_are_somewhere_and_have_parts_of_a_size() -> None:
    assert Strategy.parse("ps:beside").merged_on == "host"
    assert Strategy.parse("ps:2,beside,sum").merged_on == "server and host"
    assert Strategy.parse("ps:2,beside,sum").updated_on == "device"
    assert Strategy.parse("ps:2").updated_on == "server"
    assert Strategy.parse("fsdp:offload").updated_on == "host"
    with pytest.raises(StrategyError, match="at least 1 server"):
        Strategy.parse("ps:local")
    with pytest.raises(StrategyError, match="parts of 65536"):
        Strategy.parse("ps:1,part=1KB")


def test_the_link_of_servers_is_read_as_a_rate() -> None:
    assert Strategy.parse("ps:2,link=10Gbit/s").server_bytes_per_s == 1.25e9
    for text in ("ddp:link=10Gbit/s", "ps:1,link=fast", "ps:1,link=0 GB/s"):
        with pytest.raises(StrategyError):
            Strategy.parse(text)


def test_dtypes_of_shards_are_read_and_fit_what_the_model_computes_in() -> None:
    recipe = Strategy.parse("fsdp:shard=8,param=bf16,reduce=fp32")
    assert Strategy.parse(str(recipe)) == recipe
    # Shards and reductions of 4 bytes, parameters of 2.
    assert recipe.shard_dtypes("bf16") == (2, 2.0)
    # Without `param` shards are what the model has, and so are reductions.
    assert Strategy.parse("fsdp").shard_dtypes("bf16") == (1, 1.0)
    assert Strategy.parse("fsdp:reduce=bf16").shard_dtypes("bf16-amp") == (1, 0.5)
    assert Strategy.parse("fsdp:param=fp16").shard_dtypes("fp16") == (2, 1.0)
    for text in ("fsdp:param=int8", "fsdp:reduce=", "ddp:param=bf16"):
        with pytest.raises(StrategyError):
            Strategy.parse(text)
    with pytest.raises(StrategyError, match="--precision bf16"):
        recipe.shard_dtypes("bf16-amp")


def test_the_first_bucket_is_1_mib_by_default_and_the_cap_under_an_explicit_cap() -> None:
    # torch/nn/parallel/distributed.py: an explicit bucket_cap_mb applies to the first bucket too.
    assert DDP().bucket_cap_bytes == 25 * MIB
    assert DDP().first_cap_bytes == MIB
    assert Strategy.parse("ddp:bucket=5MiB").first_cap_bytes == 5 * MIB
    assert Strategy.parse("ddp:bucket=5MiB,first=2MiB").first_cap_bytes == 2 * MIB


@pytest.mark.parametrize(
    "text",
    ["", "fsdp9", "DDP", "ddp:bucket", "ddp:bucket=", "ddp:bucket=-1MiB", "ddp:bucket=0",
     "ddp:first=x", "ddp:views", "ddp:view=1", "ddp:bucket=5MiB;view", "ddp,view",
     "ddp:bucket=1MiB,bucket=2MiB", "ddp:view,view", "ps:2,3", "fsdp:shard=٣"],
)  # fmt: skip
def test_what_is_no_strategy_is_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        Strategy.parse(text)


def test_unknown_optimizers_and_precisions_are_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="adamw"):
        check_optimizer("lion")
    with pytest.raises(StrategyError, match="bf16-amp"):
        check_precision("int4")


def test_an_optimizer_goes_by_its_name_in_torch_or_by_itself() -> None:
    from torch import nn, optim

    parameters = list(nn.Linear(2, 2).parameters())
    assert check_optimizer("AdamW") == check_optimizer(optim.AdamW(parameters)) == "adamw"
    assert check_optimizer(optim.SGD(parameters, lr=0.1)) == "sgd"
    assert check_optimizer(optim.SGD(parameters, lr=0.1, momentum=0.9)) == "sgd-momentum"
    for unknown in (optim.Adagrad(parameters), "Lion", None, ["adam"]):
        with pytest.raises(StrategyError, match="is unknown; choose one of sgd"):
            check_optimizer(unknown)


def test_a_strategy_that_is_not_known_is_refused_and_not_given_the_memory_of_another() -> None:
    with pytest.raises(StrategyError, match="'gossip' is unknown; write one of ddp, zero1"):
        Strategy.parse("gossip")
    with pytest.raises(StrategyError, match="a strategy is one of its classes"):
        Strategy()


def test_strategies_that_are_tried_unasked_follow_from_their_facts() -> None:
    assert SEARCHED == ("ddp", "zero1", "zero2", "fsdp")
    assert SEARCHED_WITH_LAYOUTS == ("ddp", "zero1", "distributed-optimizer", "zero2", "fsdp")
    # Every rank of DDP holds all of the optimizer's state.
    assert SAVING_MEMORY == ("zero1", "zero2", "fsdp")
