"""Describe what a model does in one training step, knowing no machine.

In: a module and a batch, a saved graph or a summary. Out: an `ir.op_graph.OpGraph`.
`trace.trace.trace_graph` traces one, `files` saves and loads it, `summary` makes one of the few
numbers that a scheduler knows, `models` builds what a MODEL text names. `costs` counts FLOPs and
bytes, `compile` fuses, `memory` says what is held, `partition` divides a graph over ranks. Rooms
import in the order ir, costs, compile, memory, partition, trace, models.
"""
