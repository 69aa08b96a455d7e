"""Measure this machine, or several together; knows nothing of predicting.

`machine.probe_machine` fills a profile within a budget of seconds, from `devices` (kernels'
surroundings), `links`, and the `grid` of kernel calls; `cluster` does it on several nodes,
`imports` reads what other tools measured; `ops.measure_ops` times one graph's own operators.
"""
