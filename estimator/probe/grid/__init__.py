"""The probe's fixed grid of operator calls, by family, as data/grid.json writes it down.

`kernels` times every call, inputs in cache and in main memory. It contains no model code.
"""
