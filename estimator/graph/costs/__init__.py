"""What each operator must compute and move at least: one formula per operator.

`@cost_of` in `registry` registers them; `matmuls`, `memory_bound` and `indexing` hold them by
family; `call_costs.op_cost` and `features_of` answer; `utilization` counts FLOPs as MFU does.
"""
