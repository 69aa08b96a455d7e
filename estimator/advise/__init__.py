"""Decisions made by comparing estimates: batches, rank order, strategies, sweeps, scaling."""
