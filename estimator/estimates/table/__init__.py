"""Estimate many allocations at once: vectorised over rows, one array a column."""

from estimator.estimates.table.table import COLUMNS, EstimateTable, estimate_chunks, estimate_many

__all__ = ["COLUMNS", "EstimateTable", "estimate_chunks", "estimate_many"]
