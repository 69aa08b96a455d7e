"""The probe's fixed grid of operator calls, by family, at the sizes that data/grid.json lists.

`kernels` times every call, inputs in cache and in main memory. It contains no model code.
"""
