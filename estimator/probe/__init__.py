"""Measure this machine: links, kernels, memory, host, collectives, updates, a graph's ops."""
