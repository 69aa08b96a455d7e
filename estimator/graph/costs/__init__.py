"""What each operator must compute and move at least: one formula per operator.

`@cost_of` in `registry` registers them; `matmuls` and `memory_bound` hold them by family;
`call_costs.op_cost` and `features_of` answer, and count FLOPs as MFU does.
"""
