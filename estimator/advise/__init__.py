"""Decisions made by comparing estimates: layouts, batches, rank order, strategies, what to rent."""
