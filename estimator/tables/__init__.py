"""Estimate many allocations at once: vectorised over rows, one array a column."""

from estimator.tables.chunks import estimate_chunks
from estimator.tables.table import COLUMNS, EstimateTable, estimate_many

__all__ = ["COLUMNS", "EstimateTable", "estimate_chunks", "estimate_many"]
