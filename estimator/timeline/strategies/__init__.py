"""How each data-parallel strategy communicates: one file a strategy, registered by its name."""

from estimator.timeline.strategies import ddp, fsdp, servers, zero
from estimator.timeline.strategies.registry import rules_of

__all__ = ["ddp", "fsdp", "rules_of", "servers", "zero"]
