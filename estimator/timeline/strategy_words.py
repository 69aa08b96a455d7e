"""Say in words what ranks send and wait for under each data-parallel strategy."""

from __future__ import annotations

from estimator.timeline.sharding import REDUCE_OPS
from estimator.workload import Strategy


def communication_words(strategy: Strategy, ranks: int) -> str:
    """What a step that is bound by communication waits for.

    >>> communication_words(Strategy.parse("ddp"), 8)
    'reducing gradients of 8 ranks'
    """
    if strategy.kind == "ps":
        plural = "s" if strategy.servers > 1 else ""
        servers = f"{strategy.servers} parameter server{plural}"
        return f"sending gradients of {ranks} ranks to {servers} and parameters back"
    words = {
        "ddp": "reducing gradients",
        "zero1": "reducing gradients and broadcasting parameters",
        "zero2": "reducing gradients and gathering parameters",
        "fsdp": "gathering parameters and reducing gradients",
    }
    return f"{words[strategy.kind]} of {ranks} ranks"


def bucket_words(strategy: Strategy) -> str:
    """What is done to one bucket of gradients.

    >>> bucket_words(Strategy.parse("zero2"))
    'reduce-scatter'
    """
    return "push, pull" if strategy.kind == "ps" else REDUCE_OPS[strategy.kind].replace("_", "-")
