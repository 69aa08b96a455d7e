"""Look at a model once: run its training step on fake tensors and record every operator.

`trace.trace_graph` is the way in. `training_call` finds out how model, batch and loss are called,
`fake_tensors` and `functions` run them as the target device would, `fake_rules` and
`constant_propagation` give what fake tensors lack, `record` writes down and joins two batch sizes,
`parallel_modules` traces DTensor and FSDP2, `checkpointing` recomputes blocks.
"""
