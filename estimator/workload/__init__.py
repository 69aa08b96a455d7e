"""Say what is to be trained: strategy, batches, optimizer, precision, the loader that feeds it."""

from estimator.workload.strategies import (
    DDP,
    FSDP,
    MOST_ACCUMULATION,
    MOST_BATCH,
    MOST_GLOBAL_BATCH,
    ShardDtypes,
    Strategy,
    check_count,
)

__all__ = [
    "DDP",
    "FSDP",
    "MOST_ACCUMULATION",
    "MOST_BATCH",
    "MOST_GLOBAL_BATCH",
    "ShardDtypes",
    "Strategy",
    "check_count",
]
