"""Divide the graph of one device over ranks.

`layout.split_by_layout` joins tensor, sequence and vocabulary parallelism (`plan`, `rules`,
`partitioner`), context parallelism (`context`) and expert parallelism (`experts`); `stages` cuts a
graph into the stages of a pipeline.
"""
