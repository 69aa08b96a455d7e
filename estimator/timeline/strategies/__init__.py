"""How each data-parallel strategy communicates: one file a strategy, registered by its name."""

from estimator.timeline.rank.rules import rules_of
from estimator.timeline.strategies import ddp, fsdp, servers, zero

__all__ = ["ddp", "fsdp", "rules_of", "servers", "zero"]
