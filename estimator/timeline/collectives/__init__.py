"""What one collective takes over any group of devices.

`costs.CollectiveCosts` is the way in: measured points, carried over by the formulas of
`algorithms` (rings, NCCL's choice); `overlap` says how compute and collectives slow each other.
"""
