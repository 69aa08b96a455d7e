"""Measure one device and its host: what it is, memory, updates, contention, storage.

`inventory` reads what the machine is made of; `backend` is the one seam between CPU and CUDA;
`jobs` and `ranks` run measurements in pinned processes; `interference` watches other programs.
"""
