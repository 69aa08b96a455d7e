"""Say what is to be trained: strategy, batches, optimizer, precision, the loader that feeds it."""

from estimator.workload.strategies import (
    DEFAULT_BUCKET_CAP_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    MOST_ACCUMULATION,
    MOST_BATCH,
    MOST_GLOBAL_BATCH,
    Parallelism,
    ShardDtypes,
    Strategy,
    StrategyKind,
    check_count,
)

__all__ = [
    "DEFAULT_BUCKET_CAP_BYTES",
    "DEFAULT_FIRST_BUCKET_BYTES",
    "MOST_ACCUMULATION",
    "MOST_BATCH",
    "MOST_GLOBAL_BATCH",
    "Parallelism",
    "ShardDtypes",
    "Strategy",
    "StrategyKind",
    "check_count",
]
