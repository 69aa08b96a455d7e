"""The probe's fixed grid of operator calls, by family, at sizes for CPUs and for GPUs (`cuda`).

`kernels` times every call, inputs in cache and in main memory. It contains no model code.
"""
