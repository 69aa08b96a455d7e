"""How each data-parallel strategy communicates, and what it holds: one file a strategy.

Each file registers its rules (`rank.rules`) for the strategy's class in `workload.strategies`.
"""

from importlib import import_module
from pkgutil import iter_modules

from estimator.timeline.rank.rules import rules_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["rules_of"]
