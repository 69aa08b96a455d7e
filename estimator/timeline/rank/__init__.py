"""What one rank's step is made of.

`program.StepProgram` compiles it: `lanes` (host, device, loader, FSDP's additions), buckets,
`updates`, `layer_collectives` of tensor, context and expert parallelism;
`program.RankTable` keeps programs by class of rank. `rules` is what a data-parallel strategy has to
answer.
"""
