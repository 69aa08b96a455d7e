"""The traced step as data: operators, values, storages, units that FSDP gathers, collectives.

`op_graph.OpGraph` is the whole, with its units; `ops` its parts; `structure` who makes and
reads what, in which memory; `collectives` those that a rank's own graph has.
"""
