"""The traced step as data: operators, values, storages, units that FSDP gathers, collectives.

`op_graph.OpGraph` is the whole, with its units; `ops` its parts; `columns` the same in arrays, of
which graphs are cut; `structure` what is in which memory; `collectives` those of a rank's graph.
"""
