"""Many estimates at once, as columns."""

from estimator.tables.table import COLUMNS, EstimateTable, estimate_chunks, estimate_many

__all__ = ["COLUMNS", "EstimateTable", "estimate_chunks", "estimate_many"]
