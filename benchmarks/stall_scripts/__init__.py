"""Training scripts that wait for what the benchmarks put in, or for real data."""
