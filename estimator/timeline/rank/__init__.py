"""What one rank's step is made of.

`program.StepProgram` compiles it: `lanes` (host, device, FSDP's additions), buckets, `updates`,
`layer_collectives` of tensor, context and expert parallelism; `program.RankTable` keeps programs by
class of rank. `inputs` adds a loader; `rules` is what a data-parallel strategy has to answer.
"""
