"""Estimate the training throughput of any PyTorch model on any set of devices.

>>> import estimator as est
>>> str(est.Allocation.parse("2x8:h100-sxm"))
'2x8:h100-sxm'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estimator.advise.layouts.search import best_layouts
    from estimator.advise.rent.offers import rent
    from estimator.api import estimate, memory, prepare, scaling, stalls, sweep, trace_model
    from estimator.calibrate.calibrator import Calibrator
    from estimator.calibrate.watching import observe
    from estimator.errors import EstimatorError
    from estimator.estimates.estimate import Estimate
    from estimator.estimates.table import EstimateTable, estimate_chunks, estimate_many
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.integrations.swap.apply_plan import MemoryPlan, apply_plan
    from estimator.machines.catalogue import load_profile
    from estimator.machines.profile import MachineProfile
    from estimator.placement.allocation import Allocation
    from estimator.placement.columns import AllocationColumns, AllocationGrid
    from estimator.placement.topology import Cluster
    from estimator.timeline.plan import Breakdown
    from estimator.waits.loaders import measure_loader, watch_loader
    from estimator.workload.layouts import Layout
    from estimator.workload.loader import Loader
    from estimator.workload.recipe import Recipe
    from estimator.workload.strategies import Strategy

__version__ = "0.2.0"

# Public names load their module when first used, so that importing the package imports no torch.
_HOMES = {
    "Allocation": "estimator.placement.allocation",
    "AllocationColumns": "estimator.placement.columns",
    "AllocationGrid": "estimator.placement.columns",
    "Breakdown": "estimator.timeline.plan",
    "Calibrator": "estimator.calibrate.calibrator",
    "Cluster": "estimator.placement.topology",
    "Estimate": "estimator.estimates.estimate",
    "EstimateTable": "estimator.estimates.table",
    "EstimatorError": "estimator.errors",
    "Layout": "estimator.workload.layouts",
    "Loader": "estimator.workload.loader",
    "MachineProfile": "estimator.machines.profile",
    "OpGraph": "estimator.graph.ir.op_graph",
    "Recipe": "estimator.workload.recipe",
    "Strategy": "estimator.workload.strategies",
    "MemoryPlan": "estimator.integrations.swap.apply_plan",
    "apply_plan": "estimator.integrations.swap.apply_plan",
    "best_layouts": "estimator.advise.layouts.search",
    "estimate": "estimator.api",
    "estimate_chunks": "estimator.estimates.table",
    "estimate_many": "estimator.estimates.table",
    "load_profile": "estimator.machines.catalogue",
    "measure_loader": "estimator.waits.loaders",
    "memory": "estimator.api",
    "observe": "estimator.calibrate.watching",
    "prepare": "estimator.api",
    "rent": "estimator.advise.rent.offers",
    "scaling": "estimator.api",
    "stalls": "estimator.api",
    "sweep": "estimator.api",
    "trace_model": "estimator.api",
    "watch_loader": "estimator.waits.loaders",
}

__all__ = [
    "Allocation",
    "AllocationColumns",
    "AllocationGrid",
    "Breakdown",
    "Calibrator",
    "Cluster",
    "Estimate",
    "EstimateTable",
    "EstimatorError",
    "Layout",
    "Loader",
    "MachineProfile",
    "MemoryPlan",
    "OpGraph",
    "Recipe",
    "Strategy",
    "apply_plan",
    "best_layouts",
    "estimate",
    "estimate_chunks",
    "estimate_many",
    "load_profile",
    "measure_loader",
    "memory",
    "observe",
    "prepare",
    "rent",
    "scaling",
    "stalls",
    "sweep",
    "trace_model",
    "watch_loader",
]


def _html_of(answer: Estimate) -> str:
    from estimator.report.page import estimate_html

    return estimate_html(answer)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'estimator' has no attribute '{name}'")
    home = import_module(_HOMES[name])
    if name in ("estimate", "Estimate"):
        # What notebooks show is drawn by `report`, which estimates know nothing of.
        import_module(_HOMES["Estimate"]).Estimate._repr_html_ = _html_of
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
