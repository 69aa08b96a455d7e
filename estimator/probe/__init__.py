"""Measure this machine: links, kernels, memory, host, collectives, updates, and a graph's own ops."""
